"""Checkpoint files that are either whole or absent."""

import contextlib
import logging
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from torch.utils._pytree import tree_leaves

from workbench.errors import FULL, UserError, file_errors

log = logging.getLogger(__name__)

_OF_A_RUN = {"state_dict", "global_step"}  # what every checkpoint of a trainer holds


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary name in the same folder, syncs it to disk and renames it; reads with ``weights_only``.

    A reader therefore sees the previous checkpoint or the new one, never half of one, also after a power cut or on a
    full disk.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: dict[str, Any] | None = None
    ) -> None:
        """Writes ``checkpoint`` to ``path``; `UserError` if it cannot be written, with nothing changed on disk."""
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        with file_errors(f"make the folder of checkpoints {path.parent}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            _write_synced(checkpoint, temporary)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(_write_error(checkpoint, path, error)) from error
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | torch.device | str | None = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Reads ``path``. Only tensors and plain values are accepted, whatever ``weights_only`` says."""
        if weights_only is False:
            log.debug("weights_only=False is ignored: checkpoints hold tensors and plain values only")
        checkpoint = read_checkpoint(path, map_location)
        if not isinstance(checkpoint, dict) or not checkpoint.keys() >= _OF_A_RUN:
            raise UserError(f"checkpoint {path} is whole, but not of a training run (it lacks {', '.join(sorted(_OF_A_RUN))}).")
        return checkpoint


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """A checkpoint's contents; `UserError` where it is missing, damaged or holds other objects than tensors."""
    if not _is_local_file_protocol(path):
        return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only=True)
    path = Path(path)
    if not path.is_file():
        raise UserError(f"checkpoint {path} does not exist.{_others(path)}")
    if not is_intact(path) or _has_bad_checksum(path):
        raise UserError(f"checkpoint {path} is damaged or cut short.{_others(path)}")
    with unsafe_refused(path):
        return torch.load(path, map_location=map_location, weights_only=True)


@contextlib.contextmanager
def unsafe_refused(path: str | Path) -> Iterator[None]:
    """One line where ``torch.load`` meets what it loads from trusted files alone."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"checkpoint {path} holds objects other than tensors and plain values and is not loaded, since that could "
            "run code; save such objects' state_dict instead."
        ) from error


def is_intact(path: str | Path) -> bool:
    """False for a file that was cut short: a whole checkpoint is a zip file, whose directory comes last."""
    return zipfile.is_zipfile(path)


def _has_bad_checksum(path: Path) -> bool:
    """True where a stored checksum differs, which torch itself does not look at (about a second per GB)."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is not None
    except zipfile.BadZipFile:
        return True


class _Recorder:
    """A file that remembers the first error of writing, which torch's writer hides behind one of its own."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self.file.flush()


def _write_synced(checkpoint: dict[str, Any], path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        recorder = _Recorder(file)
        try:
            torch.save(checkpoint, recorder)
        except Exception as error:
            raise recorder.error or error from error
        if recorder.error is not None:
            raise recorder.error
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where the system lets a folder be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        log.debug("cannot sync folder %s", folder)
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Temporary files of a process that was killed while writing; a run has one writer."""
    for leftover in folder.glob(".*.ckpt.tmp"):
        log.info("removing the unfinished checkpoint %s", leftover)
        leftover.unlink(missing_ok=True)


def _write_error(checkpoint: dict[str, Any], path: Path, error: OSError) -> str:
    kept = f"; the previous ones are intact ({', '.join(_names(path.parent))})" if _names(path.parent) else ""
    if error.errno not in FULL:
        return f"cannot write checkpoint {path}: {error.strerror}{kept}."
    needed = sum(t.numel() * t.element_size() for t in tree_leaves(checkpoint) if isinstance(t, torch.Tensor))
    free = shutil.disk_usage(path.parent).free
    return (
        f"cannot write checkpoint {path}: {error.strerror}; it needs about {needed:,} bytes, {free:,} are free{kept}. "
        "Free some space or keep fewer checkpoints, then resume."
    )


def _others(path: Path) -> str:
    intact = [name for name in _names(path.parent) if name != path.name and is_intact(path.parent / name)]
    return f" Intact in the same folder: {', '.join(intact)}." if intact else " There is no other one in its folder."


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("*.ckpt")) if folder.is_dir() else []
