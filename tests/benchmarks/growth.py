"""How a step's time and memory grow: ``python -m tests.benchmarks.growth [--trl-python ...] [--points length=256,512 ...]``.

Optimizer steps of four layers of width 256, fp32, two threads, along the axes of `cases.GROWTH`: of workbench, of TRL (where
``--trl-python`` names an interpreter that has ``trl==1.16.0``) and of plain padded PyTorch. Each side of each point is a process
of its own, which takes one step to warm up before those that are timed; memory is the whole process's peak. A point that may not
fit into the machine's memory is left out of the sides that form all logits, with a note.

Writes ``growth.json`` (the figures), ``growth.md`` (the table) and ``growth.png`` (the curves) into the folder.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.against_trl import measure
from tests.benchmarks.cases import GROWTH, GROWTH_MODEL, MODEL

LABELS = {"ours": "workbench", "trl": "TRL", "plain": "padded PyTorch"}
COPIES = 6  # of the logits, in a textbook step: themselves, their log-softmax, gradients of both, what casts and shifts copy
BASE = 2.0  # GiB of a process with its libraries and the activations of a short row
Point = dict[str, Any]


def needs(axis: str, size: int, side: str) -> float:
    """About how many GiB a side takes."""
    vocabulary = size if axis == "vocabulary" else MODEL["vocab_size"]
    weights = 4 * vocabulary * GROWTH_MODEL["hidden_size"]  # with their gradients and what AdamW keeps
    tokens = {"length": size, "group": size * (256 + 64), "vocabulary": 1024}[axis]
    logits = 0 if side == "ours" else COPIES * tokens * vocabulary
    return BASE + 4 * (weights + logits) / 2**30


def available() -> float:
    """GiB of memory that nothing uses."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / 2**20


def point(axis: str, size: int, sides: Sequence[str], units: int, python: str, threads: int) -> Point:
    """Median seconds of a step and peak GiB of every side, and why some are left out."""
    found: Point = {"axis": axis, "size": size, "seconds": {}, "memory": {}, "notes": []}
    fitting, free = [], available()
    for side in sides:  # all of them stand in memory together
        if (size_of_it := needs(axis, size, side)) > free:
            found["notes"].append(f"{LABELS[side]} is left out: about {size_of_it:.1f} GiB, and {free:.1f} are there")
            continue
        fitting.append(side)
        free -= size_of_it
    try:
        measured = measure(f"growth-{axis}-{size}", units, python, threads, tuple(fitting)) if fitting else {}
    except SystemExit as error:
        found["notes"].append(str(error))
        return found
    found["seconds"] = {side: statistics.median(run.seconds) for side, run in measured.items()}
    found["memory"] = {side: run.peak / 2**30 for side, run in measured.items()}
    return found


def table(points: Sequence[Point], sides: Sequence[str]) -> str:
    """Markdown, a table for each axis."""
    others = [side for side in sides if side != "ours"]
    heads = [f"{LABELS[side]}, s" for side in sides]
    heads += [f"{LABELS[side]} time / ours" for side in others]
    heads += [f"{LABELS[side]}, GiB" for side in sides]
    blocks = []
    for axis in dict.fromkeys(p["axis"] for p in points):
        lines = [f"### {GROWTH[axis][0]}", "", "| size | " + " | ".join(heads) + " |", "| --- " * (len(heads) + 1) + "|"]
        notes = []
        for p in (p for p in points if p["axis"] == axis):
            ours = p["seconds"].get("ours")
            cells = [_cell(p["seconds"].get(side)) for side in sides]
            cells += [_cell(p["seconds"][side] / ours if ours and side in p["seconds"] else None) for side in others]
            cells += [_cell(p["memory"].get(side)) for side in sides]
            lines.append(f"| {p['size']:,} | " + " | ".join(cells) + " |")
            notes += [f"- {p['size']:,}: {note}." for note in p["notes"]]
        blocks.append("\n".join([*lines, "", *notes] if notes else lines))
    return "\n\n".join(blocks) + "\n"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def picture(points: Sequence[Point], sides: Sequence[str], file: Path) -> None:
    """Time above memory, a column for each axis."""
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(p["axis"] for p in points))
    figure = Figure(figsize=(4.5 * len(axes), 6.5), layout="constrained")
    panels = figure.subplots(2, len(axes), squeeze=False)
    for column, axis in enumerate(axes):
        for row, (name, unit) in enumerate((("seconds", "seconds a step"), ("memory", "peak GiB of the process"))):
            panel = panels[row][column]
            for side in sides:
                curve = [(p["size"], p[name][side]) for p in points if p["axis"] == axis and side in p[name]]
                panel.plot(*zip(*curve, strict=True) if curve else ([], []), marker="o", label=LABELS[side])
            panel.set(yscale="log", xlabel=GROWTH[axis][0], ylabel=unit)
            panel.set_xscale("log", base=2)
            panel.grid(visible=True, which="major", alpha=0.3)
    panels[0][0].legend()
    figure.savefig(file, dpi=110)


def chosen(asked: Sequence[str]) -> list[tuple[str, int]]:
    """Points of ``axis=size,size ...``; all of them without any."""
    if not asked:
        return [(axis, size) for axis, (_, sizes) in GROWTH.items() for size in sizes]
    return [(axis, int(size)) for axis, _, sizes in (text.partition("=") for text in asked) for size in sizes.split(",")]


def main() -> None:
    """Measures all points; what is there is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    parser.add_argument("--points", nargs="*", default=[], help="length=256,512 group=2 vocabulary=8192; all without it")
    parser.add_argument("--units", type=int, default=1, help="timed steps of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-python", help="an interpreter that has trl==1.16.0; TRL is left out without it")
    arguments = parser.parse_args()
    sides = [side for side in LABELS if side != "trl" or arguments.trl_python]
    points: list[Point] = []
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for axis, size in chosen(arguments.points):
        points.append(point(axis, size, sides, arguments.units, arguments.trl_python or "", arguments.threads))
        print(json.dumps(points[-1]), flush=True)
        (arguments.folder / "growth.json").write_text(json.dumps({"sides": sides, "points": points}, indent=1) + "\n")
        (arguments.folder / "growth.md").write_text(table(points, sides))
        picture(points, sides, arguments.folder / "growth.png")


if __name__ == "__main__":
    main()
