"""The folder of a run: one for all its processes, named once.

The process that starts a run names the folder and publishes it in the environment while it trains; processes that
Lightning starts inherit it. Under torchrun the first process publishes it in the store that torchrun keeps for all. A
time is never read twice, so that no two processes can name two folders.
"""

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator, MutableMapping

from omegaconf import DictConfig

from workbench.errors import UserError, file_errors

VARIABLE = "WORKBENCH_RUN_DIR"
CHECKPOINT_VARIABLE = "WORKBENCH_RESUME"
_STORE_KEY = "workbench/run_dir"


def is_child(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether another process of this run was there first."""
    return VARIABLE in environment and environment.get("LOCAL_RANK", "0") != "0"


def is_first(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether this process is the run's first: the one that prints and writes."""
    for variable in ("RANK", "SLURM_PROCID"):
        if variable in environment and _several(environment):
            return environment[variable] == "0"
    return environment.get("LOCAL_RANK", "0") == "0" and environment.get("NODE_RANK", "0") == "0"


def _several(environment: MutableMapping[str, str]) -> bool:
    return int(environment.get("WORLD_SIZE", environment.get("SLURM_NTASKS", "1"))) > 1


def stamp() -> str:
    """Date and time, with characters that need no quoting anywhere."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def run_dir(cfg: DictConfig, environment: MutableMapping[str, str] = os.environ) -> pathlib.Path:
    """Folder of this run, the same on all its processes, made unless it is there."""
    if is_child(environment):
        return pathlib.Path(environment[VARIABLE])
    if cfg.paths.run_dir is not None:
        folder = pathlib.Path(cfg.paths.run_dir)
    else:
        folder = _named(pathlib.Path(cfg.paths.root) / cfg.name, environment)
    with file_errors(f"make the run's folder {folder} (paths.run_dir)"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder.absolute()


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file that is whole or, where the disk is full, what it was before."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with file_errors(f"write {path}"):
            temporary.write_text(text)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sweep_dir(cfg: DictConfig) -> pathlib.Path:
    """Folder of a sweep."""
    if cfg.paths.sweep_dir is not None:
        return pathlib.Path(cfg.paths.sweep_dir).absolute()
    return _fresh(pathlib.Path(cfg.paths.root) / cfg.name, f"sweep_{stamp()}").absolute()


def _named(parent: pathlib.Path, environment: MutableMapping[str, str]) -> pathlib.Path:
    if "SLURM_JOB_ID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        return parent / f"slurm_{environment['SLURM_JOB_ID']}_{environment.get('SLURM_STEP_ID', '0')}"
    if "TORCHELASTIC_RUN_ID" in environment and int(environment.get("WORLD_SIZE", "1")) > 1:
        return pathlib.Path(_agree(environment, parent))
    if environment.get("NODE_RANK", "0") != "0":
        raise UserError("a run on several nodes needs one folder for all: give paths.run_dir=... on each node.")
    return _fresh(parent, stamp())


def _fresh(parent: pathlib.Path, name: str) -> pathlib.Path:
    """A folder that did not exist: two runs started within a second get two."""
    with file_errors(f"make a folder in {parent} (paths.root)"):
        parent.mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"_{i}" for i in range(2, 1000))):
            folder = parent / f"{name}{suffix}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    raise UserError(f"{parent} holds a thousand runs of this second: give paths.run_dir.")


def _agree(environment: MutableMapping[str, str], parent: pathlib.Path) -> str:
    """The first process's choice, through the store of torchrun's agent (a restart is a new run of the same folder)."""
    from torch.distributed import TCPStore

    store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
    if environment["RANK"] == "0" and not store.check([_STORE_KEY]):
        store.set(_STORE_KEY, str(_fresh(parent, stamp()).absolute()))
    return store.get(_STORE_KEY).decode()


@contextlib.contextmanager
def published(folder: pathlib.Path, checkpoint: str | None = None) -> Iterator[None]:
    """Puts the folder (and the checkpoint to resume from) in the environment for processes started meanwhile."""
    values = {VARIABLE: str(folder)} | ({CHECKPOINT_VARIABLE: str(checkpoint)} if checkpoint else {})
    before = {key: os.environ.get(key) for key in (VARIABLE, CHECKPOINT_VARIABLE)}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
