"""``resume=``: which checkpoint a run continues, in which folder, with which overrides.

A run continues in its own folder. From the command line it takes the overrides it was started with; what is typed now
wins.
"""

import os
import pathlib
from collections.abc import Sequence

import yaml
from omegaconf import DictConfig

from workbench.cli import rundir, trust
from workbench.cli.flags import quote
from workbench.errors import UserError

OVERRIDES_FILE = "overrides.yaml"
CHECKPOINTS = "checkpoints"
BY_NAME = ("last", "best", "auto")
_NAMING = ("name", "experiment", "method", "model")


def key_of(override: str) -> str:
    """``+a.b=1`` -> ``a.b``."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def value_of(overrides: Sequence[str], key: str) -> str | None:
    """The last value given to ``key``, without quotes."""
    values = [o.partition("=")[2] for o in overrides if key_of(o) == key]
    value = values[-1].strip("\"'") if values else None
    return None if value in (None, "", "null") else value


def replay(overrides: Sequence[str]) -> list[str]:
    """Puts the overrides of the run to be resumed before those typed now, which win; without resume= nothing changes."""
    overrides = list(overrides)
    wanted = value_of(overrides, "resume")
    if wanted is None:
        return overrides
    folder = run_folder(wanted, overrides)
    if folder is None:
        return overrides
    return merge(saved_overrides(folder, overrides), [*overrides, f"paths.run_dir={quote(str(folder))}"])


def merge(saved: Sequence[str], typed: Sequence[str]) -> list[str]:
    """``saved`` without the keys that are typed again, then ``typed``."""
    keys = {key_of(o) for o in typed}
    return [*(o for o in saved if key_of(o) not in keys), *typed]


def saved_overrides(folder: pathlib.Path, typed: Sequence[str] = ()) -> list[str]:
    """The overrides that a run was started with.

    Raises:
        UserError: the file is damaged, or it comes from elsewhere and names code with a key that is not ``typed`` again.
    """
    file = folder / OVERRIDES_FILE
    if not file.is_file():
        return []
    try:
        text = file.read_text()
        read = yaml.safe_load(text) or []
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({' '.join(str(error).split())}): mend or remove it.") from error
    if not isinstance(read, list) or not all((isinstance(o, str) and "=" in o) or str(o).startswith("~") for o in read):
        raise UserError(f"{file} must hold a list of overrides (key=value): mend or remove it.")
    if not trust.is_signed(text):
        again = {key_of(o) for o in typed}
        trust.check([o for o in read if key_of(o) not in again], file)
    return read


def save_overrides(folder: pathlib.Path, overrides: Sequence[str]) -> None:
    """Writes what `saved_overrides` reads; where a run continues is not part of what it is."""
    kept = [o for o in overrides if key_of(o) not in ("resume", "paths.run_dir") and not key_of(o).startswith("hydra.")]
    rundir.write(folder / OVERRIDES_FILE, trust.signed(yaml.safe_dump(kept)))


def run_folder(wanted: str, overrides: Sequence[str] = ()) -> pathlib.Path | None:
    """The folder of the run that ``resume=<wanted>`` continues; None where ``auto`` finds nothing to continue."""
    if rundir.is_child():
        return pathlib.Path(os.environ[rundir.VARIABLE])
    if wanted in BY_NAME or wanted.isdecimal():
        given = value_of(overrides, "paths.run_dir")
        return pathlib.Path(given).absolute() if given else _newest_run(wanted, overrides)
    path = pathlib.Path(wanted).expanduser().absolute()
    if not path.exists():
        allowed = f"{', '.join(BY_NAME)}, a step number, a run folder or a checkpoint"
        raise UserError(f"resume={wanted}: no such file or folder. Allowed: {allowed}.")
    if path.is_dir() and not is_checkpoint(path):
        return path.parent if path.name == CHECKPOINTS else path
    return path.parent.parent if path.parent.name == CHECKPOINTS else path.parent


def _newest_run(wanted: str, overrides: Sequence[str]) -> pathlib.Path | None:
    root = pathlib.Path(value_of(overrides, "paths.root") or "runs")
    folder = root
    if any(key_of(o) in _NAMING for o in overrides):
        from workbench.cli.config import load

        folder = root / load([o for o in overrides if key_of(o) != "resume"]).cfg.name
    newest: dict[pathlib.Path, float] = {}
    for checkpoint in folder.rglob(f"{CHECKPOINTS}/*.ckpt"):
        if is_checkpoint(checkpoint):
            run = checkpoint.parent.parent
            newest[run] = max(newest.get(run, 0.0), checkpoint.stat().st_mtime)
    if newest:
        return max(newest, key=newest.get).absolute()
    if wanted == "auto":
        return None
    raise UserError(f"resume={wanted}: no run with a checkpoint in {folder}; give the path of one.")


def is_checkpoint(path: pathlib.Path) -> bool:
    """A finished checkpoint: a file of one, or a folder of one (sharded)."""
    return path.suffix == ".ckpt" and not path.name.startswith(".")


def folder_to_continue(cfg: DictConfig) -> pathlib.Path | None:
    """The folder of the run that ``cfg.resume`` names, or None for a new run."""
    if cfg.resume is None:
        return None
    overrides = [f"paths.root={cfg.paths.root}"] + ([f"paths.run_dir={cfg.paths.run_dir}"] if cfg.paths.run_dir else [])
    return run_folder(str(cfg.resume), overrides)


def find_checkpoint(cfg: DictConfig, folder: pathlib.Path) -> str | None:
    """Path of the checkpoint to continue from, or None for a new run; the same on all processes of a run."""
    if cfg.resume is None:
        return None
    if rundir.is_child():
        return os.environ.get(rundir.CHECKPOINT_VARIABLE)
    from workbench.callbacks.checkpoint import resolve_checkpoint

    found = resolve_checkpoint(cfg.resume, folder)
    return None if found is None else str(found)
