"""Reference files: the trajectory of a class's canonical run, with all that its numbers depend on."""

import datetime
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from workbench.cli.config_files import config_dir
from workbench.errors import UserError
from workbench.invariants import environment, execute
from workbench.invariants.classes import InvariantClass
from workbench.invariants.trajectory import Trajectory

FOLDER = "invariant_refs"


@dataclass(frozen=True)
class Reference:
    """A recorded run: ``environment`` is that of the machine, ``config`` the resolved configuration."""

    name: str
    recorded: str
    environment: dict[str, Any]
    config: dict[str, Any]
    trajectory: Trajectory


def references() -> Path:
    """The folder of reference files: beside the configuration, in a checkout or in the installed package."""
    return config_dir().parent / FOLDER


def path_of(cls: str, device: str = "cpu") -> Path:
    """The file of a class."""
    return references() / environment.folder_of(device) / f"{cls}.json"


def read(path: Path) -> Reference:
    """A reference file.

    Raises:
        UserError: it is missing or no reference file.
    """
    try:
        values = json.loads(path.read_text())
        trajectory = Trajectory.from_dict(values["trajectory"])
        return Reference(values["class"], values["recorded"], values["environment"], values["config"], trajectory)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; record it with: workbench invariants record {path.stem}") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no reference file of a class ({type(error).__name__}: {error}).") from None


def write(cls: InvariantClass, trajectory: Trajectory, path: Path, device: str = "cpu") -> None:
    """Writes a reference file; the same but for the date if nothing has changed."""
    cfg = OmegaConf.to_container(execute.composed(cls.config), resolve=True)
    values = {
        "class": cls.name,
        "recorded": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": cfg["seed"],
        "environment": environment.describe(device),
        "config": {key: value for key, value in cfg.items() if key not in ("paths", "name")},
        "trajectory": trajectory.to_dict(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_dumps(values) + "\n")


def refuse_dirty_tree() -> None:
    """A reference belongs to a commit.

    Raises:
        UserError: there are changes that are not committed (other than to references), or there is no repository.
    """
    root = config_dir().parent
    command = ["git", "-C", str(root), "status", "--porcelain", "--", ".", f":(exclude){FOLDER}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError("recording needs git, to know that the numbers are those of a commit; install git.") from None
    if done.returncode:
        raise UserError(f"recording needs a git checkout, to know that the numbers are those of a commit; {root} is none.")
    if changed := [line[3:] for line in done.stdout.splitlines()]:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(f"the tree is dirty ({', '.join(changed[:3])}{more}): commit or put aside what changed, then record.")


def _dumps(value: Any, indent: int = 0) -> str:
    """JSON with a line per entry of a mapping, and lists of numbers on one line."""
    if isinstance(value, dict) and value:
        inner = " " * (indent + 1)
        lines = [f"{inner}{json.dumps(key)}: {_dumps(entry, indent + 1)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
    return json.dumps(value)
