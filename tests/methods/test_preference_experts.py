"""Mixtures of experts under preference methods: the balance of experts joins the loss with its weight, once."""

import pytest
from support import run_method

from workbench.methods.dpo import DPO
from workbench.methods.kto import KTO
from workbench.methods.orpo import ORPO
from workbench.models.load import ModelSpec
from workbench.tiny.tasks import make_rows

KINDS = {DPO: "preference", KTO: "unpaired_preference", ORPO: "preference"}


def first(kind, **method):
    data = {"train": make_rows("sums", KINDS[kind], size=8), "batch_size": 8}
    model = ModelSpec("tiny:mixtral", init_kwargs={"size": "pico"})
    return run_method(kind, data, {"model": model, **method}, {"max_steps": 1})[0][0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_balance_joins_the_loss(kind, caplog):
    plain, weighted = first(kind), first(kind, router_aux_loss_coef=0.5)
    assert "aux_loss" not in " ".join(plain)
    assert weighted["train/loss"] == pytest.approx(plain["train/loss"] + 0.5 * weighted["train/aux_loss"], rel=1e-5)
    assert weighted["train/aux_loss"] > 0.5
    assert weighted["train/grad_norm"] != pytest.approx(plain["train/grad_norm"], rel=1e-4)
    assert "the balance of experts is a mean over micro-batches" in caplog.text
