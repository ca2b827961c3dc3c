"""``resume=``: which checkpoint a run continues, in which folder, with which overrides.

A run continues in its own folder. From the command line it takes the overrides it was started with; what is typed now wins.
"""

import os
import pathlib
import re
from collections.abc import Sequence

import yaml
from omegaconf import DictConfig

from workbench.cli import rundir
from workbench.errors import UserError

OVERRIDES_FILE = "overrides.yaml"
CHECKPOINTS = "checkpoints"
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
    return merge(saved_overrides(folder), [*overrides, f'paths.run_dir="{folder}"'])


def merge(saved: Sequence[str], typed: Sequence[str]) -> list[str]:
    """``saved`` without the keys that are typed again, then ``typed``."""
    keys = {key_of(o) for o in typed}
    return [*(o for o in saved if key_of(o) not in keys), *typed]


def saved_overrides(folder: pathlib.Path) -> list[str]:
    """The overrides that a run was started with."""
    file = folder / OVERRIDES_FILE
    return list(yaml.safe_load(file.read_text()) or []) if file.is_file() else []


def save_overrides(folder: pathlib.Path, overrides: Sequence[str]) -> None:
    """Writes what `saved_overrides` reads; where a run continues is not part of what it is."""
    kept = [o for o in overrides if key_of(o) not in ("resume", "paths.run_dir") and not key_of(o).startswith("hydra.")]
    (folder / OVERRIDES_FILE).write_text(yaml.safe_dump(kept))


def run_folder(wanted: str, overrides: Sequence[str] = ()) -> pathlib.Path:
    """The folder of the run that ``resume=<wanted>`` continues."""
    if rundir.is_child():
        return pathlib.Path(os.environ[rundir.VARIABLE])
    if wanted == "last" or wanted.isdecimal():
        given = value_of(overrides, "paths.run_dir")
        return pathlib.Path(given).absolute() if given else _newest_run(wanted, overrides)
    path = pathlib.Path(wanted).expanduser().absolute()
    if not path.exists():
        raise UserError(f"resume={wanted}: no such file or folder. Allowed: last, a step number, a run folder or a checkpoint.")
    if path.is_dir() and not is_checkpoint(path):
        return path.parent if path.name == CHECKPOINTS else path
    return path.parent.parent if path.parent.name == CHECKPOINTS else path.parent


def _newest_run(wanted: str, overrides: Sequence[str]) -> pathlib.Path:
    root = pathlib.Path(value_of(overrides, "paths.root") or "runs")
    folder = root
    if any(key_of(o) in _NAMING for o in overrides):
        from workbench.cli.config import load

        folder = root / load([o for o in overrides if key_of(o) != "resume"]).cfg.name
    runs = {c.parent.parent for c in folder.rglob(f"{CHECKPOINTS}/*") if is_checkpoint(c)}
    if not runs:
        raise UserError(f"resume={wanted}: no run with a checkpoint in {folder}; give the path of one.")
    return max(runs, key=lambda run: max(c.stat().st_mtime for c in checkpoints(run))).absolute()


def is_checkpoint(path: pathlib.Path) -> bool:
    """A finished checkpoint: a file of one, or a folder of one (sharded)."""
    return path.suffix == ".ckpt" and not path.name.startswith(".")


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints of a run, oldest first."""
    found = [c for c in (folder / CHECKPOINTS).glob("*") if is_checkpoint(c)]
    return sorted(found, key=lambda c: (c.stat().st_mtime, c.name))


def step_of(checkpoint: pathlib.Path) -> int | None:
    """The optimizer step in a checkpoint's name."""
    found = re.search(r"step[_-]?0*(\d+)", checkpoint.stem)
    return int(found.group(1)) if found else None


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
        return os.environ[rundir.CHECKPOINT_VARIABLE]
    wanted = str(cfg.resume)
    path = pathlib.Path(wanted).expanduser()
    if is_checkpoint(path) and path.exists():
        return str(path.absolute())
    found = checkpoints(folder)
    if not found:
        raise UserError(f"resume={wanted}: {folder} holds no checkpoint.")
    if wanted.isdecimal():
        return str(_of_step(int(wanted), found, folder))
    return str(found[-1])


def _of_step(step: int, found: Sequence[pathlib.Path], folder: pathlib.Path) -> pathlib.Path:
    matching = [c for c in found if step_of(c) == step]
    if not matching:
        steps = sorted({s for s in map(step_of, found) if s is not None})
        raise UserError(f"resume={step}: {folder} has no checkpoint of step {step}. It has: {', '.join(map(str, steps))}.")
    return matching[-1]
