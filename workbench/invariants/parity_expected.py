"""Where a record and this project differ for a known reason. Each entry is argued in ``invariant_refs/README.md``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from workbench.invariants.parity_cases import Case


@dataclass(frozen=True)
class Expected:
    """A deviation that is known.

    Args:
        kinds: of the trainers.
        fields: pattern of the fields' names.
        reason: why, in a line.
        within: largest relative deviation that the reason explains; None: the two numbers are not of the same thing.
        options: values of options that make it so.
        extras: keys of the case that make it so.
    """

    kinds: tuple[str, ...]
    fields: str
    reason: str
    within: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    extras: tuple[str, ...] = ()


EXPECTED: tuple[Expected, ...] = ()


def expected(case: Case, name: str) -> Expected | None:
    """The entry for a field of a case, if there is one."""
    for entry in EXPECTED:
        fits = case.kind in entry.kinds and fnmatchcase(name, entry.fields)
        fits = fits and all(case.options.get(option) == value for option, value in entry.options.items())
        if fits and all(key in case.extras for key in entry.extras):
            return entry
    return None
