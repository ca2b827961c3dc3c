"""Time from a command to its first optimizer step: ``python -m tests.benchmarks.startup [--trl-python ...]``.

Both command lines train the same nano model on the same eight texts for one step, in turn; the step's time is read from when the
trainer reports it. ``import workbench`` and the help pages are timed beside TRL's.
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

from tests.benchmarks.cases import CASES, SMALL, Case, write

ROOT = Path(__file__).parents[2]


def seconds(command: list[str], until: str | None = None) -> float:
    """Seconds until a line of the output holds ``until``, or until the command ends."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment)
    lines, found = [], None
    for line in process.stdout:
        lines.append(line)
        if until and until in line and found is None:
            found = time.perf_counter() - start
    if process.wait() or (until and found is None):
        raise SystemExit(f"{' '.join(command)} failed:\n{''.join(lines[-20:])}")
    return found or time.perf_counter() - start


def commands(folder: Path, trl_python: str) -> dict[str, tuple[list[str], list[str], str | None]]:
    """What is timed: our command, TRL's, and the text that ends the clock."""
    trl = str(Path(trl_python).parent / "trl")
    ours = [sys.executable, "-m", "workbench"]
    train = [
        *ours,
        "train",
        "model=hf",
        f"model.name={folder / 'model'}",
        "data=file",
        f"data.train={folder / 'texts' / 'rows.jsonl'}",
        "trainer.max_steps=1",
        "trainer=cpu",
        "save_model=false",
        f"paths.run_dir={folder / 'run'}",
        f"paths.cache_dir={folder / 'cache'}",
        "callbacks.progress.style=lines",
        "callbacks.progress.log_seconds=0",
    ]
    theirs = [
        *[trl, "sft", "--model_name_or_path", str(folder / "model"), "--dataset_name", str(folder / "texts")],
        *["--output_dir", str(folder / "trl"), "--max_steps", "1", "--logging_steps", "1", "--report_to", "none"],
        *["--use_cpu", "true", "--bf16", "false", "--save_strategy", "no"],
    ]
    imports = [[sys.executable, "-c", "import workbench"], [trl_python, "-c", "import trl"]]
    return {
        "import": (*imports, None),
        "--help": ([*ours, "--help"], [trl, "--help"], None),
        "sft --help": ([*ours, "train", "--help"], [trl, "sft", "--help"], None),
        "first optimizer step": (train, theirs, "loss"),
    }


def main() -> None:
    """Prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that has trl==1.16.0")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="startup-"))
    (folder / "texts").mkdir()
    write(Case("", "sft", CASES["sft_mixed"].rows, 8, (None, None, None), model=SMALL), folder, 1)
    lines = (folder / "rows.jsonl").read_text().splitlines()[:8]
    (folder / "texts" / "rows.jsonl").write_text("\n".join(json.dumps(json.loads(line)) for line in lines) + "\n")
    print("| | ours, s | TRL, s |\n| --- | --- | --- |")
    for name, (ours, theirs, until) in commands(folder, arguments.trl_python).items():
        pairs = [(seconds(ours, until), seconds(theirs, until)) for _ in range(arguments.repeats + 1)][1:]
        print(
            f"| {name} | " + " | ".join(f"{statistics.median(side):.2f}" for side in zip(*pairs, strict=True)) + " |", flush=True
        )


if __name__ == "__main__":
    main()
