"""What is shown: a picture of two curves, and the table of classes and members."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.invariants.compare import Comparison
from workbench.invariants.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = 4


def picture(comparison: Comparison, ours: Trajectory, reference: Trajectory, title: str) -> "Figure":
    """Of each field that differs (the first few): both curves, and below them the size of their difference."""
    from matplotlib.figure import Figure

    names = [r.field for r in comparison.failed if _curve(ours, r.field) and _curve(reference, r.field)][:_PANELS] or ["loss"]
    figure = Figure(figsize=(4.5 * len(names), 5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, len(names), squeeze=False, sharex="col")
    for column, name in enumerate(names):
        a, b = (_points(run, name) for run in (ours, reference))
        top, below = axes[0][column], axes[1][column]
        top.plot(*b, color="0.6", linewidth=4, label="reference")
        top.plot(*a, color="C3", linewidth=1.5, label="this run")
        top.set_title(name)
        difference = [abs(x - y) for x, y in zip(a[1], b[1], strict=False)]
        below.plot(a[0][: len(difference)], difference, color="C3", marker="o", markersize=3)
        if len({size for size in difference if size}) > 1:
            below.set_yscale("log")
        below.set(xlabel="step", ylabel="|difference|")
        for failed in (r for r in comparison.failed if r.field == name and r.step is not None):
            below.axvline(failed.step, color="0.5", linestyle=":")
    axes[0][0].legend()
    return figure


def save_picture(comparison: Comparison, ours: Trajectory, reference: Trajectory, title: str, folder: Path) -> Path:
    """Writes `picture` as ``<folder>/<title>.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{title.replace(' ', '_').replace('/', '-')}.png"
    picture(comparison, ours, reference, title).savefig(path, dpi=110)
    return path


def _curve(run: Trajectory, field: str) -> list | None:
    if field.startswith("gradient of "):
        return run.grad_norms.get(field.removeprefix("gradient of "))
    return run.steps.get(field)


def _points(run: Trajectory, field: str) -> tuple[list[int], list[float]]:
    values = _curve(run, field) or []
    steps = [run.first + i for i, value in enumerate(values) if value is not None]
    return steps, [value for value in values if value is not None]


def table(cells: Mapping[str, Mapping[str, str]], rows: Sequence[str]) -> str:
    """Members down, classes across: what each cell says. Reasons become numbers, spelled out below.

    Args:
        cells: by class and member, ``pass``, ``FAIL``, or why there is no such member.
        rows: the members in order.
    """
    classes = list(cells)
    notes: dict[str, int] = {}
    lines = []
    for row in rows:
        words = []
        for name in classes:
            cell = cells[name].get(row, "")
            words.append(cell if cell in ("pass", "FAIL", "") else f"[{notes.setdefault(cell, len(notes) + 1)}]")
        lines.append((row, words))
    widths = [max(len(name), 5) for name in classes]
    first = max(map(len, rows))
    header = " " * first + "  " + "  ".join(n.ljust(w) for n, w in zip(classes, widths, strict=True))
    body = [f"{row:<{first}}  " + "  ".join(c.ljust(w) for c, w in zip(words, widths, strict=True)) for row, words in lines]
    below = [f"[{number}] {reason}" for reason, number in notes.items()]
    return "\n".join(line.rstrip() for line in [header, *body, "", *below]).rstrip()
