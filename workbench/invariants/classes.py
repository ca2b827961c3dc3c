"""Equivalence classes: a canonical configuration each, and the executions of it that must follow the same trajectory.

`conf/invariant/<class>.yaml` holds the configuration and says which members the class cannot have; `members` has the rest. In
a canonical configuration every setting binds: gradients are longer than the clip threshold, rows have unequal lengths, weights
decay, the rate changes with every step, betas and epsilon are not the defaults, an epoch ends within the run, on a shorter step.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from workbench.cli.config_files import config_dir
from workbench.errors import UserError, nearest
from workbench.invariants.compare import Tolerance
from workbench.invariants.members import MEMBERS, Member

COMMON = "common"
ONLINE_ROWS = "prompts"  # of classes whose methods write completions


@dataclass(frozen=True)
class InvariantClass:
    """One equivalence class.

    Args:
        name: of the file, and of the reference.
        about: the file's first line.
        config: overrides of ``workbench train`` that make the canonical run.
        absent: why a member is not one of this class.
        tolerance: of its members.
        rows: function of `workbench.invariants.rows` that makes its rows.
    """

    name: str
    about: str
    config: tuple[str, ...]
    absent: dict[str, str] = field(default_factory=dict)
    tolerance: Tolerance = field(default_factory=Tolerance)
    rows: str = ""

    @property
    def members(self) -> dict[str, Member]:
        """Its members by name."""
        return {name: member for name, member in MEMBERS.items() if name not in self.absent}

    def reason(self, member: str) -> str | None:
        """Why ``member`` is not one of this class; None if it is."""
        return self.absent.get(member)


def class_names() -> list[str]:
    """The classes there are."""
    return sorted(file.stem for file in _folder().glob("*.yaml") if file.stem != COMMON)


@cache
def load_class(name: str) -> InvariantClass:
    """The class of a file in ``conf/invariant``.

    Raises:
        UserError: there is no such class, or it names a member that does not exist.
    """
    if name not in class_names():
        raise UserError(f"{name!r} is no invariant class.{nearest(name, class_names())} Classes: {', '.join(class_names())}.")
    file, common = _folder() / f"{name}.yaml", _read(_folder() / f"{COMMON}.yaml")
    own = _read(file)
    absent = {**_reasons(common), **_reasons(own)}
    if "only" in own:  # a class that differs from another in its loss alone
        absent |= {m: own["because"] for m in MEMBERS if m not in own["only"] and m not in absent}
    if own["rows"] != ONLINE_ROWS:
        absent = {m: "it writes no completions" for m, member in MEMBERS.items() if member.online} | absent
    for member, which in MEMBERS.items():
        if which.shown_by and name not in which.shown_by:
            absent.setdefault(member, f"it does not depend on the loss: shown by {', '.join(which.shown_by)}")
    for member in absent:
        if member not in MEMBERS:
            raise UserError(f"{file}: {member!r} is no member.{nearest(member, MEMBERS)}")
    rows = [f"data.train=workbench.invariants.rows:{own['rows']}"]
    about = file.read_text().splitlines()[0].lstrip("# ")
    tolerance = Tolerance(**own.get("tolerance", {}))
    return InvariantClass(name, about, (*common["config"], *rows, *own["config"]), absent, tolerance, own["rows"])


def _folder() -> Path:
    return config_dir() / "invariant"


def _read(file: Path) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(file))


def _reasons(values: dict[str, Any]) -> dict[str, str]:
    return {member: reason for entry in values.get("absent", []) for member, reason in entry.items()}
