"""Checkpoints are whole or absent, and a bad one is one clear line."""

import os
import subprocess
import sys

import pytest
import torch

from workbench.errors import UserError
from workbench.strategies.checkpoint_io import AtomicCheckpointIO, is_intact, read_checkpoint


def _state(seed: int, size: int = 1000) -> dict:
    return {"state_dict": {"w": torch.randn(size, generator=torch.Generator().manual_seed(seed))}, "global_step": seed}


def _write(folder, step: int, size: int = 1000):
    path = folder / f"step-{step:06d}.ckpt"
    AtomicCheckpointIO().save_checkpoint(_state(step, size), path)
    return path


def _one_line(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_round_trip_leaves_no_other_file(tmp_path):
    path = _write(tmp_path / "new" / "folder", 3)
    assert os.listdir(path.parent) == ["step-000003.ckpt"]
    loaded = AtomicCheckpointIO().load_checkpoint(path)
    assert torch.equal(loaded["state_dict"]["w"], _state(3)["state_dict"]["w"]) and loaded["global_step"] == 3


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    (tmp_path / ".step-000001.ckpt.tmp").write_bytes(b"half")
    _write(tmp_path, 2)
    assert os.listdir(tmp_path) == ["step-000002.ckpt"]


# SIGXFSZ ignored and RLIMIT_FSIZE set: write() fails with a real OSError after the limit, as on a full disk.
_FULL = """
import resource, signal, sys
from pathlib import Path
import torch
from workbench.errors import UserError
from workbench.strategies.checkpoint_io import AtomicCheckpointIO
folder = Path(sys.argv[1])
AtomicCheckpointIO().save_checkpoint({"w": torch.zeros(100)}, folder / "step-000001.ckpt")
AtomicCheckpointIO().save_checkpoint({"w": torch.zeros(100)}, folder / "last.ckpt")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
for name in ("step-000002.ckpt", "last.ckpt"):
    try:
        AtomicCheckpointIO().save_checkpoint({"w": torch.ones(100_000)}, folder / name)
    except UserError as error:
        print(error)
"""


def test_a_failed_write_names_the_bytes_and_keeps_the_previous_file(tmp_path):
    command = [sys.executable, "-c", _FULL, str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 2, lines
    assert "step-000002.ckpt" in lines[0] and "about 400,000 bytes" in lines[0] and "are free" in lines[0]
    assert "the previous ones are intact (last.ckpt, step-000001.ckpt)" in lines[0]
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step-000001.ckpt"]
    assert torch.equal(read_checkpoint(tmp_path / "last.ckpt")["w"], torch.zeros(100))


def test_a_really_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    if os.name != "posix" or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        _write(disk, 1)
        with pytest.raises(UserError, match="No space left on device; it needs about 400,000 bytes") as error:
            _write(disk, 2, size=100_000)
        assert "step-000001.ckpt" in _one_line(error)
        assert os.listdir(disk) == ["step-000001.ckpt"]
        assert read_checkpoint(disk / "step-000001.ckpt")["global_step"] == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_without_permission(tmp_path):
    (tmp_path / "step-000001.ckpt").mkdir()  # a folder in the way: the rename fails after the write
    with pytest.raises(UserError, match="cannot write checkpoint") as error:
        _write(tmp_path, 1)
    _one_line(error)
    assert os.listdir(tmp_path) == ["step-000001.ckpt"]


@pytest.mark.parametrize("keep", [0, 100, -1, -500, -4000])
def test_a_cut_file_names_the_intact_ones(tmp_path, keep):
    good, bad = _write(tmp_path, 1), _write(tmp_path, 2)
    bad.write_bytes(bad.read_bytes()[:keep])
    assert is_intact(good) and not is_intact(bad)
    with pytest.raises(UserError, match=r"step-000002.ckpt is damaged or cut short\. Intact .*: step-000001") as error:
        AtomicCheckpointIO().load_checkpoint(bad)
    _one_line(error)


def test_one_flipped_bit_in_a_tensor_is_noticed(tmp_path):
    path = _write(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[data.index(_state(1)["state_dict"]["w"].numpy().tobytes()) + 10] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"damaged or cut short\. There is no other one"):
        read_checkpoint(path)


def test_objects_are_never_loaded(tmp_path):
    path = tmp_path / "step-000001.ckpt"
    torch.save({"layer": torch.nn.Linear(2, 2)}, path)
    with pytest.raises(UserError, match="holds objects other than tensors") as error:
        AtomicCheckpointIO().load_checkpoint(path, weights_only=False)
    _one_line(error)


def test_a_missing_file_lists_those_present(tmp_path):
    _write(tmp_path, 1)
    with pytest.raises(UserError, match=r"does not exist\. Intact in the same folder: step-000001.ckpt"):
        read_checkpoint(tmp_path / "step-000009.ckpt")
