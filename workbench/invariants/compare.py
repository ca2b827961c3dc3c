"""How far two trajectories are apart, by field: largest and mean residual, relative and absolute, and the first step that
differs.

A relative residual is ``|a - b| / max(|b|, rms of b over the run)``: values of a field that passes through zero are measured by
the field's usual size. Of a final parameter both norm and projection are divided by the norm.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from workbench.invariants.trajectory import Trajectory

_GRADIENTS = ("grad_norms", "parameters")


@dataclass(frozen=True)
class Tolerance:
    """What rounding may do.

    A mean of rewards or logits is a small sum of numbers of both signs, and a reward a small difference of two log-probabilities
    of some 100 nats: rounding that is 1e-7 of those is 1e-5 of such a mean. A parameter's gradient, too, may nearly vanish.

    Args:
        largest: allowed relative residual at any step.
        mean: allowed mean over the steps.
        cancelling: both, for what is the rest of numbers that cancel.
        counted: allowed residual of shares of tokens or rows, which jump when rounding tips one of them.
    """

    largest: float = 1e-5
    mean: float = 1e-6
    cancelling: tuple[float, float] = (3e-5, 5e-6)
    counted: float = 1e-5

    def of(self, name: str) -> tuple[float, float]:
        """Largest and mean for one field."""
        if is_share(name):
            return self.counted, self.counted
        return self.cancelling if _is_rest(name) else (self.largest, self.mean)


# On another processor sums run in another order, and ten steps let that grow; `invariant_refs/README.md` says what was measured.
OTHER_HARDWARE = Tolerance(largest=1e-3, mean=1e-3, cancelling=(1e-3, 1e-3), counted=5e-2)


def is_share(name: str) -> bool:
    """Whether a metric counts tokens or rows."""
    return "accurac" in name or "clip_ratio/" in name or name.endswith("clip_ratio")


def _is_rest(name: str) -> bool:
    return (
        name.startswith(("rewards/", "logits/", "gradient of ")) or name.endswith("_reward") or name in ("margin", "kl", "delta")
    )


@dataclass(frozen=True)
class Residual:
    """How far one field is off.

    Args:
        field: its name; ``gradient of <parameter>`` and ``parameter <parameter>`` for parts of the model.
        largest: largest relative residual.
        mean: mean relative residual.
        largest_absolute: largest absolute residual.
        mean_absolute: mean absolute residual.
        step: first step at which it exceeds its tolerance, else that of the largest; None for a field without steps.
        values: ours and the reference's there.
        exceeds: whether it is beyond its tolerance.
        allowed: the bound that matters: of the largest residual, or of the mean where that one is exceeded alone.
    """

    field: str
    largest: float
    mean: float
    largest_absolute: float
    mean_absolute: float
    step: int | None
    values: tuple[object, object]
    exceeds: bool
    allowed: float


@dataclass
class Comparison:
    """All residuals of two trajectories; ``problems`` are differences in kind (a metric or a step that only one has)."""

    residuals: list[Residual]
    problems: list[str]

    @property
    def failed(self) -> list[Residual]:
        """Fields beyond their tolerance, the earliest step first, the run's own numbers before those of its parts."""
        failed = [r for r in self.residuals if r.exceeds]
        return sorted(failed, key=lambda r: (r.step is None, r.step or 0, " of " in r.field, _ORDER.get(r.field, 9), -r.largest))

    @property
    def same(self) -> bool:
        """Whether the trajectories are the same to rounding."""
        return not self.failed and not self.problems

    @property
    def largest(self) -> float:
        """The largest relative residual of all."""
        return max((r.largest for r in self.residuals), default=0.0)

    def message(self, what: str) -> str:
        """One paragraph: the first difference with step, field and size, then the others and the parameter most off."""
        failed = self.failed
        if not failed:
            return f"{what}: {'; '.join(self.problems)}"
        first = failed[0]
        lines = [f"{what}: {_told(first)}", *self.problems]
        rest = [r for r in failed[1:] if " of " not in r.field and not r.field.startswith("parameter ")]
        if rest:
            lines.append("also: " + ", ".join(f"{r.field} ({_size(r)}{_from(r)})" for r in rest[:8]))
        if worst := self.worst_parameter(first.step):
            lines.append(f"largest offending parameter: {worst}")
        return "\n  ".join(lines)

    def worst_parameter(self, step: int | None) -> str | None:
        """The parameter whose gradient differs most among those that differ first; without gradients, whose final value does."""
        gradients = [r for r in self.failed if r.field.startswith("gradient of ")]
        if gradients:
            begin = min(r.step for r in gradients)
            worst = max((r for r in gradients if r.step == begin), key=lambda r: r.largest)
            return f"{worst.field.removeprefix('gradient of ')} (gradient, from step {begin} on, {_size(worst)})"
        finals = [r for r in self.failed if r.field.startswith("parameter ")]
        if not finals:
            return None
        worst = max(finals, key=lambda r: r.largest)
        return f"{worst.field.removeprefix('parameter ')} (at the end, {_size(worst)})"


class Mismatch(AssertionError):
    """Two trajectories that should be the same are not."""

    def __init__(self, message: str, comparison: Comparison) -> None:
        super().__init__(message)
        self.comparison = comparison


_ORDER = {"rows": 0, "completions": 1, "num_tokens": 2, "loss": 3, "grad_norm": 4, "lr": 5}


def compare(
    ours: Trajectory, reference: Trajectory, tolerance: Tolerance = Tolerance(), fields: Collection[str] | None = None
) -> Comparison:
    """Compares field by field.

    Args:
        ours: a run.
        reference: what it should be.
        tolerance: what rounding may do.
        fields: see `workbench.invariants.members.Member`.
    """
    problems: list[str] = []
    residuals: list[Residual] = []
    wanted = _Wanted(fields)
    if wanted("rows") and reference.rows is not None and ours.rows is not None:
        residuals.append(_same("rows", ours.rows, reference.rows, reference.first))
    if wanted("completions") and reference.completions is not None and ours.completions is not None:
        residuals.append(_same("completions", ours.completions, reference.completions, reference.first))
    names = [n for n in sorted({*ours.steps, *reference.steps}) if wanted(n)]
    if ours.steps and ours.num_steps != reference.num_steps:
        problems.append(f"{ours.num_steps} steps instead of {reference.num_steps}")
    for name in names if ours.steps else []:
        a, b = ours.steps.get(name), reference.steps.get(name)
        if a is None or b is None:
            problems.append(f"{name} is {'missing' if a is None else 'new'}")
            continue
        if name == "rewards/accuracies":
            a, b = _without_ties(a, b, reference.steps.get("rewards/margins"))
        residuals.append(_series(name, a, b, reference.first, tolerance))
    if wanted("grad_norms") and ours.grad_norms and reference.grad_norms:
        problems += _missing("gradient of", ours.grad_norms, reference.grad_norms)
        for name in ours.grad_norms.keys() & reference.grad_norms.keys():
            pair = ours.grad_norms[name], reference.grad_norms[name]
            residuals.append(_series(f"gradient of {name}", *pair, reference.first, tolerance))
    if wanted("parameters") and ours.parameters:
        problems += _missing("parameter", ours.parameters, reference.parameters)
        residuals += _finals(ours.parameters, reference.parameters, tolerance)
    if fields is not None and "hashes" in fields:
        problems += [
            f"the final {group} parameters are not the same bits"
            for group in reference.hashes
            if ours.hashes.get(group) != reference.hashes[group]
        ]
    return Comparison(residuals, problems)


class _Wanted:
    """Whether a field is asked for."""

    def __init__(self, fields: Collection[str] | None) -> None:
        self.fields = fields

    def __call__(self, name: str) -> bool:
        own = ("loss", "grad_norm", "lr", "num_tokens", "grad_norms", "rows", "completions", "parameters")
        return self.fields is None or name in self.fields or (name not in own and "metrics" in self.fields)


def _missing(what: str, ours: Iterable[str], theirs: Iterable[str]) -> list[str]:
    ours, theirs = set(ours), set(theirs)
    return [f"{what} {name} is missing" for name in sorted(theirs - ours)] + [
        f"{what} {name} is new" for name in sorted(ours - theirs)
    ]


def _without_ties(ours: list, theirs: list, margins: list | None) -> tuple[list, list]:
    """Where policy and reference are one model, the sign of a reward's margin is that of a rounding error."""
    if margins is None:
        return ours, theirs
    tied = [margin == 0 for margin in margins]
    ours, theirs = ([None if tie else v for v, tie in zip(values, tied, strict=False)] for values in (ours, theirs))
    return ours, theirs


def _series(name: str, ours: list, theirs: list, first: int, tolerance: Tolerance) -> Residual:
    count = min(len(ours), len(theirs))
    a, b = (np.array([np.nan if v is None else v for v in values[:count]], dtype=np.float64) for values in (ours, theirs))
    both_missing = np.isnan(a) & np.isnan(b)
    absolute = np.where(both_missing | (a == b), 0.0, np.abs(a - b))
    absolute = np.where(np.isnan(absolute), np.inf, absolute)
    usual = np.sqrt(np.nanmean(b**2)) if (~np.isnan(b)).any() else 0.0
    scale = np.fmax(np.abs(b), usual)
    relative = np.divide(absolute, scale, out=np.where(absolute > 0, np.inf, 0.0), where=scale > 0)
    largest, mean = tolerance.of(name)
    over = relative > largest
    over_mean = bool(count) and relative.mean() > mean
    at = int(over.argmax()) if over.any() else int(relative.argmax()) if count else 0
    values = (ours[at], theirs[at]) if count else (None, None)
    bounds = (largest if over.any() or not over_mean else mean,)
    if not count:
        return Residual(name, 0.0, 0.0, 0.0, 0.0, None, values, False, largest)
    sizes = (float(relative.max()), float(relative.mean()), float(absolute.max()), float(absolute.mean()))
    return Residual(name, *sizes, first + at, values, bool(over.any() or over_mean), *bounds)


def _same(name: str, ours: list, theirs: list, first: int) -> Residual:
    """Of what has no size: the share of steps that differ."""
    pairs = list(zip(ours, theirs, strict=False))
    differ = [a != b for a, b in pairs]
    at = differ.index(True) if any(differ) else 0
    share = sum(differ) / max(len(differ), 1)
    values = pairs[at] if pairs else (None, None)
    return Residual(name, float(any(differ)), share, float(any(differ)), share, first + at, values, any(differ), 0.0)


def _finals(ours: dict[str, list[float]], theirs: dict[str, list[float]], tolerance: Tolerance) -> list[Residual]:
    residuals = []
    for name in ours.keys() & theirs.keys():
        (norm, projection), (ref_norm, ref_projection) = ours[name], theirs[name]
        absolute = (abs(norm - ref_norm), abs(projection - ref_projection))
        # A product with n random signs is about as large as the norm, and so is its rounding.
        relative = [a / ref_norm if ref_norm else float("inf") if a else 0.0 for a in absolute]
        worse = int(relative[1] > relative[0])
        largest, mean = max(relative), sum(relative) / 2
        values = (ours[name][worse], theirs[name][worse])
        residuals.append(
            Residual(
                f"parameter {name}",
                largest,
                mean,
                max(absolute),
                sum(absolute) / 2,
                None,
                values,
                largest > tolerance.largest,
                tolerance.largest,
            )
        )
    return residuals


def _size(residual: Residual) -> str:
    return f"{residual.largest:.1e} relative"


def _from(residual: Residual) -> str:
    return "" if residual.step is None else f", step {residual.step}"


def _told(residual: Residual) -> str:
    ours, theirs = residual.values
    where = "at the end" if residual.step is None else f"first at step {residual.step}"
    sizes = (
        f"largest residual {residual.largest:.1e} relative and {residual.largest_absolute:.1e} absolute, "
        f"mean {residual.mean:.1e} and {residual.mean_absolute:.1e}, allowed {residual.allowed:.0e}"
    )
    return f"{residual.field} differs {where}: {_number(ours)} instead of {_number(theirs)} ({sizes})"


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
