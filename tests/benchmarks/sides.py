"""One side of the benchmark against TRL: ``python -m tests.benchmarks.sides ours|trl|plain <case> <folder> <steps> <fd>``.

A side trains and stops before each unit until a line arrives at its standard input. It answers over ``fd``, a line of JSON each:
``seconds`` of a unit, then its ``losses`` and its ``peak`` memory in bytes.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import cases
from tests.benchmarks.cases import Case

LEARNING_RATE = 1e-5


class Gate:
    """Waits before each unit and times it."""

    def __init__(self, case: Case, fd: int) -> None:
        self.case = case
        self.out = os.fdopen(fd, "w", buffering=1)
        self.step = 0
        self.started = 0.0

    def before(self) -> None:
        """Before an optimizer step."""
        if self.step % self.case.steps == 0:
            sys.stdin.readline()
            self.started = time.perf_counter()

    def after(self) -> None:
        """After it."""
        self.step += 1
        if self.step % self.case.steps == 0:
            self.say(seconds=time.perf_counter() - self.started)

    def end(self, losses: Sequence[float]) -> None:
        """After the last one."""
        self.say(losses=list(losses), peak=_peak())

    def say(self, **values: Any) -> None:
        """Answers."""
        print(json.dumps(values), file=self.out)


def _peak() -> int:
    """The most memory that this process has held, in bytes. (``ru_maxrss`` starts at what the parent has held.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024  # from kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _tokens(dataset: Any) -> float:
    """Tokens of all rows of a ``datasets.Dataset``."""
    column = dataset.with_format("arrow")[:]["input_ids"]
    return float(sum(len(chunk.flatten()) for chunk in column.chunks))


def ours(case: Case, folder: Path, steps: int, gate: Gate) -> None:
    """workbench, as ``workbench train`` runs it."""
    import lightning as L

    import workbench

    losses: list[float] = []

    class Stops(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            gate.before()

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            losses.append(trainer.callback_metrics["train/loss"].item())
            gate.after()

        def on_train_end(self, *args: Any) -> None:
            gate.end(losses)

    objects: dict[str, Any] = {"callbacks": [Stops()]}
    if case.script is not None:
        from workbench.rollouts.scripted import ScriptedEngine

        objects["engine"] = ScriptedEngine(lambda prompt, key: case.script(prompt, key[4]))
    overrides = [
        f"method={case.method}",
        "model=hf",
        f"model.name={folder / 'model'}",
        "data=file",
        f"data.train={folder / 'rows.jsonl'}",
        "data.max_length=null",
        "data.shuffle=false",
        f"data.batch_size={case.batch}",
        "optim=adamw",
        f"optim.lr={LEARNING_RATE}",
        "optim.weight_decay=0",
        "scheduler=constant",
        "trainer=cpu",
        "trainer.max_epochs=1",
        "callbacks=none",
        "logger=none",
        "save_model=false",
        f"paths.run_dir={folder / 'run'}",
        f"paths.cache_dir={folder / 'cache'}",
        *case.ours,
    ]
    if case.prepares:
        _prepares(workbench.compose(*overrides), gate)
    else:
        workbench.train(*overrides, **objects)


def _prepares(cfg: Any, gate: Gate) -> None:
    """Times the set-up of the data of one run, and ends it."""
    from workbench import run

    parts = run.build(cfg)
    prepare = parts.data.setup

    def timed(stage: str) -> None:
        gate.before()
        prepare(stage)
        gate.after()
        gate.end([_tokens(parts.data._train)])
        raise SystemExit

    parts.data.setup = timed
    parts.trainer.fit(parts.method, datamodule=parts.data)


def trl(case: Case, folder: Path, steps: int, gate: Gate) -> None:
    """TRL's trainer of the method, with its own defaults but for what both sides share."""
    import trl as library
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    names = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}
    name = names[case.method]

    class Stops(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            gate.before()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            gate.after()

    options = {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": case.batch,
        "max_steps": (steps + cases.WARM_UP) * case.steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    options |= {"shuffle_dataset": False} if case.method in ("grpo",) else {"max_length": None}
    config = getattr(library, f"{name}Config")(**(options | case.theirs))
    extra: dict[str, Any] = {"reward_funcs": cases.reward} if case.method == "grpo" else {}
    if case.prepares:
        gate.before()
    trainer = getattr(library, f"{name}Trainer")(
        model=str(folder / "model"),
        args=config,
        train_dataset=Dataset.from_json(str(folder / "rows.jsonl"), cache_dir=str(folder / "trl-cache")),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Stops()],
        **extra,
    )
    if case.prepares:
        gate.after()
        gate.end([_tokens(trainer.train_dataset)])
        return
    if case.script is not None:

        def replay(prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
            return [case.script(prompt, i % case.group) for i, prompt in enumerate(prompt_ids)], None

        trainer._generate_single_turn = replay
    trainer.train()
    gate.end([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def plain(case: Case, folder: Path, steps: int, gate: Gate) -> None:
    """The textbook step: a padded batch, its logits, their log-softmax, the loss."""
    from tests.benchmarks import plain as textbook

    losses = []
    for step in textbook.steps(case, folder, LEARNING_RATE):
        gate.before()
        losses.append(step())
        gate.after()
    gate.end(losses)


if __name__ == "__main__":
    side, name, folder, steps, fd = sys.argv[1:]
    case = cases.find(name)
    {"ours": ours, "trl": trl, "plain": plain}[side](case, Path(folder), int(steps), Gate(case, int(fd)))
