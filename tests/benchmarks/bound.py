"""What bounds a case of the benchmark: ``python -m tests.benchmarks.bound [case...]``.

Each side of `tests.benchmarks.against_trl` counts the floating-point operations of its products in one unit, and the share of its
time that they take. With them goes the rate at which this machine multiplies matrices: operations by that rate are what no
implementation of the same products can be faster than.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks import cases, sides
from tests.benchmarks.against_trl import ROOT, SIDES
from tests.benchmarks.cases import CASES

UNITS = 3  # one each: timed, counted, profiled
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")


def _added_product(total: Any, a: Any, b: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    """Operations of ``total += a b``, by their shapes."""
    return 2 * a[0] * a[1] * b[1]


class Counts(sides.Gate):
    """Takes a warm-up and three units without waiting: the first is timed, the second counted, the third profiled."""

    def __init__(self, case: cases.Case) -> None:
        self.case, self.out, self.step = case, sys.stdout, 0
        self.found: dict[str, float] = {}
        self.watch: Any = None

    def before(self) -> None:
        """Before an optimizer step."""
        import torch
        from torch.profiler import ProfilerActivity, profile
        from torch.utils.flop_counter import FlopCounterMode

        unit = self.step // self.case.steps
        if self.step % self.case.steps == 0:
            if unit == 2:
                self.watch = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _added_product})
            elif unit == 3:
                self.watch = profile(activities=[ProfilerActivity.CPU])
            if self.watch is not None:
                self.watch.__enter__()
            self.started = time.perf_counter()

    def after(self) -> None:
        """After it."""
        self.step += 1
        if self.step % self.case.steps:
            return
        unit = self.step // self.case.steps - 1
        if unit == 1:
            self.found["seconds"] = time.perf_counter() - self.started
        if self.watch is None:
            return
        self.watch.__exit__(None, None, None)
        if unit == 2:
            self.found["operations"] = float(self.watch.get_total_flops())
        elif unit == 3:
            times = {e.key.removeprefix("aten::").rstrip("_"): e.self_cpu_time_total / 1e6 for e in self.watch.key_averages()}
            self.found["products"] = sum(times.get(name, 0.0) for name in PRODUCTS)
            self.found["attention"] = sum(t for name, t in times.items() if "scaled_dot_product_flash" in name)
            self.found["profiled"] = sum(times.values())
        self.watch = None

    def end(self, losses: Any) -> None:
        """After the last one."""
        print("FOUND " + json.dumps(self.found), flush=True)


def rate(threads: int) -> float:
    """Operations per second of a large product of fp32 matrices, the best of ten."""
    import torch

    torch.set_num_threads(threads)
    a, b = torch.randn(4096, 4096), torch.randn(4096, 4096)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return 2 * 4096**3 / min(seconds)


def count(side: str, name: str, folder: Path, python: str, threads: int) -> dict[str, float]:
    """What one side finds, in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, "-m", "tests.benchmarks.bound", "--side", side, name, "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            return json.loads(line.removeprefix("FOUND "))
    raise SystemExit(f"{side} of {name} ended early: {done.stderr[-2000:]}")


def main() -> None:
    """Counts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", choices=[*CASES, []], help="cases that train; all of them without one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has trl==1.16.0")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        (name,) = arguments.case
        run = {"ours": sides.ours, "trl": sides.trl, "plain": sides.plain}[arguments.side]
        run(CASES[name], arguments.folder, UNITS, Counts(CASES[name]))
        return
    peak = statistics.median(rate(arguments.threads) for _ in range(3))
    print(f"{peak / 1e9:.0f} GFLOP/s in a product of 4096 x 4096 fp32 matrices with {arguments.threads} threads\n")
    head = ["case", "side", "s", "GFLOP", "at that rate, s", "in products", "in attention"]
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head), flush=True)
    for name in arguments.case or [n for n, case in CASES.items() if not case.prepares]:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        cases.write(CASES[name], folder, UNITS)
        for side in SIDES:
            if side == "plain" and CASES[name].goals[1] is None:
                continue
            python = arguments.trl_python if side == "trl" else sys.executable
            found = count(side, name, folder, python, arguments.threads)
            cells = [CASES[name].title, side, f"{found['seconds']:.2f}", f"{found['operations'] / 1e9:.0f}"]
            cells += [f"{found['operations'] / peak:.2f}"]
            cells += [f"{found[part] / found['profiled']:.0%}" for part in ("products", "attention")]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
