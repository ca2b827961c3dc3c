"""What several tests share: a run on the parity fixture, and how far two trajectories are apart."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from workbench.data.module import DataModule
from workbench.methods.base import Method
from workbench.methods.optim import adamw
from workbench.methods.sft import SFT

ROOT = Path(__file__).parent.parent
MODEL = str(ROOT / "tests/parity/model")
DATA = ROOT / "tests/parity/data"
REFERENCES = ROOT / "invariant_refs/trl-1.16.0"

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Recorder(L.Callback):
    """Keeps every optimizer step's metrics."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.closes_step:
            self.steps.append({**module.step_metrics, "step": trainer.global_step})


class SaveAt(L.Callback):
    """Writes ``<folder>/<step>.ckpt`` after the given steps."""

    def __init__(self, folder: Path, steps: Sequence[int]) -> None:
        self.folder, self.at = folder, steps

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.closes_step and trainer.global_step in self.at:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def run_sft(
    data: dict[str, Any] | None = None,
    method: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    *,
    checkpoint: Path | str | None = None,
    callbacks: Sequence[L.Callback] = (),
    lr: float = 1e-3,
) -> tuple[list[dict[str, float]], SFT, L.Trainer]:
    """Runs SFT on a bare ``L.Trainer`` and returns its steps, the method and the trainer."""
    data = {"train": str(DATA / "messages.jsonl"), **(data or {})}
    return run_method(SFT, data, method, trainer, checkpoint=checkpoint, callbacks=callbacks, lr=lr)


def run_method(
    kind: type[Method],
    data: dict[str, Any],
    method: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    *,
    checkpoint: Path | str | None = None,
    callbacks: Sequence[L.Callback] = (),
    lr: float = 1e-3,
) -> tuple[list[dict[str, float]], Any, L.Trainer]:
    """The same for any method; ``data`` names the rows (``train``)."""
    module = kind(**{"model": MODEL, "optim": functools.partial(adamw, lr=lr), **(method or {})})
    rows = {"batch_size": 8, "shuffle": False, "max_length": 256, **data}
    recorder = Recorder()
    settings = {**QUIET, "devices": 1, "max_steps": 10, "gradient_clip_val": 1.0, **(trainer or {})}
    fit = L.Trainer(**settings, callbacks=[recorder, *callbacks])
    fit.fit(module, DataModule(**rows), ckpt_path=checkpoint, weights_only=True)
    return recorder.steps, module, fit


def deviation(ours: list[dict[str, float]], theirs: list[dict[str, float]], name: str) -> float:
    """Largest relative difference of a metric over steps."""
    assert len(ours) == len(theirs), (len(ours), len(theirs))
    return max(abs(a[name] - b[name]) / max(abs(b[name]), 1e-12) for a, b in zip(ours, theirs, strict=True))


def assert_same_trajectory(ours: list[dict[str, float]], theirs: list[dict[str, float]], tolerance: float = 1e-5) -> None:
    """Loss, gradient norm, rate, counts and, where a method logs it, entropy of every step agree."""
    entropy = ["train/entropy"] if any("train/entropy" in step for step in (*ours, *theirs)) else []
    for name in ("train/loss", "train/grad_norm", "train/lr", *entropy, "train/num_tokens", "step"):
        assert deviation(ours, theirs, name) <= tolerance, name


def reference(case: str) -> dict[str, Any]:
    """A recorded parity case."""
    return json.loads((REFERENCES / f"{case}.json").read_text())
