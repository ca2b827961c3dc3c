"""How a step's time and memory grow with length, group size and vocabulary: ``python -m tests.benchmarks.growth [folder]``.

One forward and backward pass of four layers of width 256, fp32, two threads; beside it the textbook one (padded rows, all
logits). Each point of each side is a process of its own, so that memory is its own: the peak above what the process held before
its first pass. Writes ``growth.md`` and ``growth.png`` into the folder.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
AXES = {
    "length": ("tokens of one row, all trained", [256, 512, 1024, 2048, 4096, 8192]),
    "group": ("completions of 64 tokens for one prompt of 256", [2, 4, 8, 16, 32]),
    "vocabulary": ("tokens in the vocabulary, 1024 trained", [8192, 32_768, 65_536, 131_072, 262_144]),
}
REPEATS = 5


def passes(side: str, axis: str, size: int) -> Callable[[], None]:
    """A forward and backward pass."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.benchmarks.plain import _logps
    from workbench.data.batch import MicroBatch, Role
    from workbench.losses.reduce import Normalisers
    from workbench.models.policy import Policy

    vocabulary = size if axis == "vocabulary" else 32_000
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=vocabulary,
            max_position_embeddings=8192,
        )
    )
    prompt = 256 if axis == "group" else 0
    lengths = [64] * size if axis == "group" else [size if axis == "length" else 1024]
    ids = torch.randint(vocabulary, (prompt + sum(lengths),)).tolist()
    if side == "plain":
        completions = [ids[prompt + 64 * i :][:n] for i, n in enumerate(lengths)]

        def loss() -> torch.Tensor:
            logps, trained = _logps(model, [(ids[:prompt], completion) for completion in completions])
            return -(logps * trained).sum()

    else:
        segments = [prompt, *lengths] if prompt else lengths
        row: dict[str, Any] = {
            "input_ids": ids,
            "weights": [0.0] * prompt + [1.0] * sum(lengths),
            "lengths": segments,
            "parents": [-1, *[0] * len(lengths)] if prompt else [-1],
            "roles": [int(Role.PROMPT)] * bool(prompt) + [int(Role.COMPLETION)] * len(lengths),
        }
        batch = MicroBatch.from_rows([row], [0], Normalisers(1.0, 1.0, 1.0, 1.0))
        policy = Policy(model, layout="shared").train()

        def loss() -> torch.Tensor:
            return -policy(batch).logps.sum()

    def step() -> None:
        loss().backward()
        model.zero_grad()

    return step


def point(side: str, axis: str, size: int) -> dict[str, float]:
    """Median seconds of a pass, and its peak memory in GiB."""
    step = passes(side, axis, size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": statistics.median(seconds[1:]), "memory": (peak - before) / 2**20}


def measure(side: str, axis: str, size: int) -> dict[str, float]:
    """`point` in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.growth", "--point", side, axis, str(size)]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main(folder: Path) -> None:
    """Measures all points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplots(2, len(AXES))
    lines = ["| axis | size | ours, s | textbook, s | ratio | ours, GiB | textbook, GiB |", "|" + " --- |" * 7]
    for column, (axis, (title, sizes)) in enumerate(AXES.items()):
        found = {side: [measure(side, axis, size) for size in sizes] for side in ("ours", "plain")}
        for size, a, b in zip(sizes, found["ours"], found["plain"], strict=True):
            cells = [axis, size, f"{a['seconds']:.3f}", f"{b['seconds']:.3f}", f"{b['seconds'] / a['seconds']:.2f}"]
            lines.append("| " + " | ".join(map(str, [*cells, f"{a['memory']:.2f}", f"{b['memory']:.2f}"])) + " |")
            print(lines[-1], flush=True)
        for row, (name, unit) in enumerate((("seconds", "seconds"), ("memory", "GiB above the model"))):
            for side, label in (("ours", "workbench"), ("plain", "textbook")):
                axes[row][column].plot(sizes, [p[name] for p in found[side]], marker="o", label=label)
            axes[row][column].set(xscale="log", yscale="log", xlabel=title if row else None, ylabel=unit if column == 0 else None)
    axes[0][0].legend()
    figure.savefig(folder / "growth.png", dpi=100)
    (folder / "growth.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--point"]:
        print(json.dumps(point(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    else:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
