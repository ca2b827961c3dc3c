"""One folder for all processes of a run."""

import os
import pathlib
import subprocess
import sys
import time

import pytest
from omegaconf import OmegaConf

from workbench.cli import resume, rundir
from workbench.errors import UserError


@pytest.fixture
def cfg(tmp_path):
    return OmegaConf.create({"name": "x", "resume": None, "paths": {"root": str(tmp_path), "run_dir": None, "sweep_dir": None}})


def test_two_runs_of_one_second_get_two_folders(cfg, monkeypatch):
    monkeypatch.setattr(rundir, "stamp", lambda: "now")
    assert [rundir.run_dir(cfg, {}).name for _ in range(3)] == ["now", "now_2", "now_3"]


def test_a_child_takes_the_folder_of_its_parent_and_reads_no_clock(cfg, monkeypatch, tmp_path):
    with rundir.published(tmp_path / "parent", "some.ckpt"):
        assert rundir.run_dir(cfg, {**os.environ, "LOCAL_RANK": "1"}) == tmp_path / "parent"
        assert os.environ[rundir.CHECKPOINT_VARIABLE] == "some.ckpt"
        monkeypatch.setattr(rundir, "stamp", lambda: "own")
        assert rundir.run_dir(cfg, {**os.environ, "LOCAL_RANK": "0"}).name == "own"  # the parent's next run
    assert rundir.VARIABLE not in os.environ
    assert rundir.CHECKPOINT_VARIABLE not in os.environ


def test_slurm_tasks_name_the_same_folder(cfg):
    environment = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_NTASKS": "2"}
    folders = {rundir.run_dir(cfg, {**environment, "SLURM_PROCID": str(rank)}) for rank in range(2)}
    assert [f.name for f in folders] == ["slurm_12_3"]


def test_another_node_must_be_told_the_folder(cfg):
    with pytest.raises(UserError, match=r"paths\.run_dir"):
        rundir.run_dir(cfg, {"NODE_RANK": "1"})


def test_first_process():
    assert rundir.is_first({})
    assert not rundir.is_first({"LOCAL_RANK": "1"})
    assert not rundir.is_first({"LOCAL_RANK": "0", "NODE_RANK": "1"})
    assert not rundir.is_first({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"})
    assert rundir.is_first({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"})


@pytest.mark.distributed
def test_torchrun_processes_agree_through_its_store(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, pathlib, sys\nfrom omegaconf import OmegaConf\nfrom workbench.cli import rundir\n"
        f"cfg = OmegaConf.create({{'name': 'x', 'paths': {{'root': {str(tmp_path)!r}, 'run_dir': None}}}})\n"
        f"pathlib.Path({str(tmp_path)!r}, 'rank' + os.environ['RANK']).write_text(str(rundir.run_dir(cfg)))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(rundir.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment)
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank1").read_text()
    assert len(list((tmp_path / "x").iterdir())) == 1


def _run_with_checkpoints(folder, *steps, overrides=()):
    (folder / "checkpoints").mkdir(parents=True)
    for step in steps:
        (folder / "checkpoints" / f"step-{step:06d}.ckpt").write_text("x")
    resume.save_overrides(folder, list(overrides))
    return folder


def test_resume_replays_the_overrides_of_the_run_and_what_is_typed_wins(tmp_path):
    run = _run_with_checkpoints(tmp_path / "a" / "1", 5, overrides=["experiment=e", "optim.lr=1", "resume=x", "paths.run_dir=y"])
    replayed = resume.replay([f"resume={run}", "optim.lr=2"])
    assert replayed == ["experiment=e", f"resume={run}", "optim.lr=2", f'paths.run_dir="{run}"']


@pytest.mark.parametrize("given", ["", "checkpoints", "checkpoints/step-000005.ckpt"])
def test_resume_knows_the_run_from_any_of_its_paths(tmp_path, given):
    run = _run_with_checkpoints(tmp_path / "a" / "1", 5)
    assert resume.run_folder(str(run / given)) == run


def test_resume_last_takes_the_newest_run_or_the_newest_of_a_name(tmp_path):
    old = _run_with_checkpoints(tmp_path / "sft_tiny" / "old", 3)
    new = _run_with_checkpoints(tmp_path / "other" / "new", 5)
    past = time.time() - 100
    os.utime(old / "checkpoints" / "step-000003.ckpt", (past, past))
    root = f"paths.root={tmp_path}"
    assert resume.run_folder("last", [root]) == new
    assert resume.run_folder("last", [root, "name=sft_tiny"]) == old
    assert resume.run_folder("3", [root, "model=tiny"]) == old
    assert resume.run_folder("7", [root, f"paths.run_dir={old}"]) == old


def test_resume_without_a_run(tmp_path):
    with pytest.raises(UserError, match="no run with a checkpoint"):
        resume.run_folder("last", [f"paths.root={tmp_path}"])
    with pytest.raises(UserError, match=r"no such file or folder\. Allowed: last"):
        resume.run_folder("runs/not_there")
    assert resume.run_folder("auto", [f"paths.root={tmp_path}"]) is None
    assert resume.replay(["resume=auto", f"paths.root={tmp_path}"]) == ["resume=auto", f"paths.root={tmp_path}"]


def test_an_unfinished_checkpoint_is_none(tmp_path):
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "a" / "checkpoints" / ".step-000001.ckpt.tmp").write_text("x")
    with pytest.raises(UserError, match="no run with a checkpoint"):
        resume.run_folder("last", [f"paths.root={tmp_path}"])
