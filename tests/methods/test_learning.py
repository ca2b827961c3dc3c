"""Each preference method improves a half-trained model of the embedded world: it answers more unseen sums than SFT left it with.

All start from one model: SFT on `sums`, stopped at the first look at which it answers half of 256 unseen sums. Then come 50 steps
of 64 rows.
"""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from support import QUIET

from workbench.callbacks.exact_match import exact_match
from workbench.data.module import DataModule
from workbench.methods.base import Method
from workbench.methods.bco import BCO
from workbench.methods.cpo import CPO
from workbench.methods.dpo import DPO
from workbench.methods.kto import KTO
from workbench.methods.optim import adamw, schedule
from workbench.methods.orpo import ORPO
from workbench.methods.sft import SFT
from workbench.methods.tpo import TPO
from workbench.models.load import ModelSpec

UNSEEN, BATCH, STEPS = 256, 64, 50
SIMPO = {"loss": "simpo", "cpo_alpha": 0.0, "beta": 2.5, "simpo_gamma": 1.375}


class StopAtHalf(L.Callback):
    """Looks every 20 steps, and stops where the model answers half of the unseen sums."""

    accuracy = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, module: Method, *_: Any) -> None:
        if trainer.global_step >= 200 and trainer.global_step % 20 == 0:
            self.accuracy = exact_match(module, trainer.datamodule, UNSEEN)
            trainer.should_stop = self.accuracy >= 0.5


def sums(steps: int, seed: int) -> DataModule:
    """Rows for so many steps; the unseen sums are the same for every seed."""
    train = {"path": "tiny:sums", "kwargs": {"size": steps * BATCH, "seed": seed}}
    unseen = {"path": "tiny:sums", "kwargs": {"size": UNSEEN, "seed": 0}}
    return DataModule(train, eval=unseen, batch_size=BATCH, seed=seed)


def fit(method: Method, data: DataModule, steps: int, *callbacks: L.Callback) -> L.Trainer:
    trainer = L.Trainer(**QUIET, devices=1, max_steps=steps, gradient_clip_val=1.0, limit_val_batches=0, callbacks=[*callbacks])
    trainer.fit(method, data)
    return trainer


def half_trained(folder: Path, seed: int = 0) -> float:
    """Saves a model that SFT has taught half of the sums; returns the share."""
    recipe = {"optim": functools.partial(adamw, lr=2e-3), "scheduler": functools.partial(schedule, warmup_steps=20)}
    method, stop = SFT(ModelSpec("tiny", init_seed=seed), **recipe), StopAtHalf()
    fit(method, sums(500, seed), 500, stop)
    method.save_pretrained(folder)
    return stop.accuracy


def improved(kind: type[Method], start: Path, seed: int = 0, lr: float = 1e-4, **options: Any) -> tuple[float, dict[str, float]]:
    """The share of unseen sums right after training from ``start``, and the last step's metrics."""
    recipe = {"optim": functools.partial(adamw, lr=lr), "scheduler": functools.partial(schedule, warmup_steps=5)}
    method, data = kind(str(start), **recipe, **options), sums(STEPS, seed + 1)
    fit(method, data, STEPS)
    return exact_match(method, data, UNSEEN), method.step_metrics


METHODS = {
    "dpo": (DPO, {"beta": 0.5}),
    "kto": (KTO, {"beta": 0.5}),
    "bco": (BCO, {"beta": 0.5}),
    "simpo": (CPO, SIMPO),
    "cpo": (CPO, {"lr": 2e-4}),
    "orpo": (ORPO, {"lr": 2e-4}),
    "tpo": (TPO, {"lr": 2e-4}),
}

# By how much the share of right answers rises at least, over the half-trained model's 0.57. Measured with this seed: dpo 0.15,
# kto 0.11, bco 0.13, simpo 0.20, cpo 0.31, orpo 0.32, tpo 0.32; the bounds leave room for other processors.
GAINS = {"dpo": 0.06, "kto": 0.04, "bco": 0.04, "simpo": 0.08, "cpo": 0.15, "orpo": 0.15, "tpo": 0.15}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The half-trained model's folder, and the share of unseen sums that it answers."""
    folder = tmp_path_factory.mktemp("half")
    return folder, half_trained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_fifty_steps_raise_the_share_of_right_answers(start, name):
    folder, before = start
    assert 0.5 <= before < 0.7
    kind, options = METHODS[name]
    after, metrics = improved(kind, folder, **options)
    assert after >= before + GAINS[name]
    assert metrics["train/rewards/margins"] > 0
