"""How far our own steps are from a record's, field by field."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from workbench.invariants.parity_cases import BESIDE, Case
from workbench.invariants.parity_run import Steps

# A field matches where |ours - theirs| <= relative * |theirs| + absolute at every step.
TOLERANCES: dict[str, tuple[float, float]] = {"loss": (1e-5, 1e-6), "grad_norm": (1e-4, 0.0)}
METRICS = (1e-4, 1e-6)

Verdict = Literal["matches", "expected", "deviates"]


@dataclass(frozen=True)
class Field:
    """How far one field of a case is from the record.

    Args:
        name: of the field.
        deviation: largest ``|ours - theirs| / |theirs|`` over the steps (values below 1e-6 count as that); infinite where we
            have no value.
        used: largest ``|ours - theirs|`` as a share of what the tolerance allows.
        first_over: first step that is over tolerance.
        verdict: whether it matches, deviates, or deviates as expected.
        reason: what else there is to say.
    """

    name: str
    deviation: float
    used: float
    first_over: int | None
    verdict: Verdict
    reason: str = ""

    def because(self, reason: str) -> "Field":
        """The same, as expected."""
        return replace(self, verdict="expected", reason=reason)


@dataclass(frozen=True)
class Comparison:
    """A case, replayed: its fields, and the number of recorded steps compared."""

    case: Case
    steps: int
    fields: list[Field]

    @property
    def deviating(self) -> list[Field]:
        """Fields that deviate, and not as expected."""
        return [f for f in self.fields if f.verdict == "deviates"]

    @property
    def matches(self) -> bool:
        """Whether there is none of them."""
        return not self.deviating

    def field(self, name: str) -> Field:
        """One of them by name."""
        return next(f for f in self.fields if f.name == name)

    def explained(self, reasons: Mapping[str, str]) -> "Comparison":
        """The same, with deviations that have a reason as expected."""
        deviating = {f.name for f in self.deviating}
        fields = [f.because(reasons[f.name]) if f.name in reasons and f.name in deviating else f for f in self.fields]
        return replace(self, fields=fields)


def compare(case: Case, ours: Steps, steps: int | None = None) -> Comparison:
    """How far our steps are from the record's.

    A record that logs every n-th step holds means over the n steps up to it, of the gradient norm the last value.

    Args:
        case: the record.
        ours: our steps from the first one on.
        steps: compare no further than this step.
    """
    theirs = [step for step in case.steps if steps is None or step["step"] <= steps]
    names = dict.fromkeys(name for step in theirs for name in step if name not in BESIDE)
    starts = [0, *(int(step["step"]) for step in theirs)]
    logged = [ours[start : int(step["step"])] for start, step in zip(starts, theirs, strict=False)]
    return Comparison(case, len(theirs), [_field(name, theirs, logged) for name in names])


def _field(name: str, theirs: Sequence[Mapping[str, Any]], ours: Sequence[Steps]) -> Field:
    relative, absolute = TOLERANCES.get(name, METRICS)
    deviation, used, first_over = 0.0, 0.0, None
    missing, no_number = False, 0
    for step, window in zip(theirs, ours, strict=True):
        if not is_number(step.get(name)):
            no_number += name in step
            continue
        value = _logged(name, window)
        missing = missing or value is None
        apart = abs(value - step[name]) if is_number(value) else math.inf
        allowed = relative * abs(step[name]) + absolute
        share = apart / allowed if allowed else math.inf if apart else 0.0
        deviation, used = max(deviation, apart / max(abs(step[name]), 1e-6)), max(used, share)
        if share > 1 and first_over is None:
            first_over = int(step["step"])
    notes = ["not logged here"] * missing + [f"the record has no number at {no_number} steps"] * bool(no_number)
    return Field(name, deviation, used, first_over, "matches" if used <= 1 else "deviates", ", ".join(notes))


def is_number(value: float | None) -> bool:
    """Whether there is a finite value."""
    return value is not None and math.isfinite(value)


def _logged(name: str, window: Steps) -> float | None:
    values = [step[name] for step in window if name in step]
    if not values:
        return None
    return values[-1] if name == "grad_norm" else sum(values) / len(values)


def spread(case: Case, runs: Iterable[Steps], name: str) -> float:
    """How far runs of ours are apart in a field at most, as a share of what the tolerance allows around the record."""
    relative, absolute = TOLERANCES.get(name, METRICS)
    starts = [0, *(int(step["step"]) for step in case.steps)]
    widest = 0.0
    for start, step in zip(starts, case.steps, strict=False):
        values = [_logged(name, steps[start : int(step["step"])]) for steps in runs]
        if is_number(step.get(name)) and all(is_number(value) for value in values):
            allowed = relative * abs(step[name]) + absolute
            widest = max(widest, (max(values) - min(values)) / allowed if allowed else 0.0)
    return widest
