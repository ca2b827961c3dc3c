"""workbench beside TRL and plain PyTorch: ``python -m tests.benchmarks.against_trl [case...]``.

Needs ``trl==1.16.0``, in this environment or in one given by ``--trl-python``. Each side is a process of its own with two
threads, on the same model and the same rows, in fp32. They alternate, unit by unit, so that what else the machine does meets
all of them; the median of the ratios of neighbouring units counts. Losses are compared step by step.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import cases
from tests.benchmarks.cases import CASES, Case

SIDES = ("ours", "trl", "plain")
ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4  # relative difference of losses that rounding explains


@dataclass
class Side:
    """A process that takes a step when it is told to."""

    process: subprocess.Popen
    answers: Any
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0

    @classmethod
    def start(cls, side: str, name: str, folder: Path, steps: int, python: str, threads: int) -> "Side":
        """Starts it; what it prints goes into ``<folder>/<side>.log``."""
        here, there = os.pipe()
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with (folder / f"{side}.log").open("w") as log:
            process = subprocess.Popen(
                [python, "-m", "tests.benchmarks.sides", side, name, str(folder), str(steps), str(there)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=[there],
                cwd=ROOT,
                env=environment,
            )
        os.close(there)
        return cls(process, os.fdopen(here))

    def unit(self, count: bool) -> None:
        """One timed unit."""
        print("go", file=self.process.stdin, flush=True)
        seconds = self.read()["seconds"]
        if count:
            self.seconds.append(seconds)

    def read(self) -> dict[str, Any]:
        """The next answer."""
        line = self.answers.readline()
        if not line:
            raise RuntimeError(f"a side ended early with exit status {self.process.wait()}; its log is kept")
        return json.loads(line)

    def finish(self) -> None:
        """Its losses and its peak memory."""
        answer = self.read()
        self.losses, self.peak = answer["losses"], answer["peak"]
        self.process.stdin.close()
        self.process.wait()


def measure(name: str, units: int, python: str, threads: int, sides: tuple[str, ...] = SIDES) -> dict[str, Side]:
    """Runs the sides of a case."""
    case = cases.find(name)
    sides = tuple(s for s in sides if s != "plain" or not (case.prepares or (case.method == "grpo" and case.script is None)))
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    cases.write(case, folder, units)
    running = {s: Side.start(s, name, folder, units, python if s == "trl" else sys.executable, threads) for s in sides}
    try:
        for unit in [0] if case.prepares else range(-cases.WARM_UP, units):
            for side in running.values():
                side.unit(unit >= 0)
        for side in running.values():
            side.finish()
    except RuntimeError as error:
        raise SystemExit(f"{name}: {error} in {folder}") from None
    finally:
        for side in running.values():
            side.process.kill()
    return running


def ratios(theirs: Side, ours: Side) -> list[float]:
    """Their time divided by ours, unit by unit."""
    return [a / b for a, b in zip(theirs.seconds, ours.seconds, strict=True)]


def difference(a: Side, b: Side) -> float:
    """Largest difference of losses, relative to the size of a loss of about one."""
    return float(np.max(np.abs(np.subtract(a.losses, b.losses)) / np.maximum(1.0, np.abs(b.losses))))


def report(case: Case, sides: dict[str, Side]) -> list[str]:
    """A line of the table."""
    ours = sides["ours"]
    cells = [case.title, f"{statistics.median(ours.seconds):.2f}"]
    for other, goal in (("trl", case.goals[0]), ("plain", case.goals[1])):
        if other not in sides:
            cells.append("-")
            continue
        found = ratios(sides[other], ours)
        cells.append(f"**{statistics.median(found):.2f}** ({min(found):.2f}-{max(found):.2f}), goal {goal}")
    memory = f"{ours.peak / 2**30:.2f}"
    if "trl" in sides:
        ratio = sides["trl"].peak / ours.peak
        memory = f"**{ratio:.2f}** ({sides['trl'].peak / 2**30:.2f} / {memory} GiB), goal {case.goals[2]}"
    losses = [f"{difference(sides[s], ours):.0e}" for s in sides if s != "ours"] if case.same_loss else ["sampled"]
    return [*cells, memory, ", ".join(losses)]


HEADINGS = ["case", "ours, s", "TRL time / ours", "padded PyTorch / ours", "TRL peak / ours", "losses differ by (TRL, PyTorch)"]


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", choices=[*CASES, []], help=f"any of {', '.join(CASES)}; all without one")
    parser.add_argument("--units", type=int, default=5, help="timed units of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has trl==1.16.0")
    parser.add_argument("--sides", default=",".join(SIDES), help="which sides to run")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, {arguments.threads} threads, fp32", flush=True)
    print("| " + " | ".join(HEADINGS) + " |\n|" + " --- |" * len(HEADINGS), flush=True)
    wrong = []
    for name in arguments.case or CASES:
        sides = measure(name, arguments.units, arguments.trl_python, arguments.threads, tuple(arguments.sides.split(",")))
        print("| " + " | ".join(report(CASES[name], sides)) + " |", flush=True)
        if CASES[name].same_loss:
            wrong += [f"{name}: {s}" for s in sides if s != "ours" and not difference(sides[s], sides["ours"]) <= TOLERANCE]
    if wrong:
        raise SystemExit(f"losses differ: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
