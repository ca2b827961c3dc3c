"""SFT of a mixture of experts: the auxiliary loss is added once per step, with its weight, and named as an exception."""

import logging

import pytest
from support import run_sft

DATA = {"train": {"path": "tiny:sums", "kwargs": {"size": 32}}, "batch_size": 8}
MODEL = {"model": "tiny:qwen3_moe"}


def run(data=None, **method):
    return run_sft({**DATA, **(data or {})}, {**MODEL, **method}, {"max_steps": 2})[0]


def test_the_coefficient_scales_what_is_added():
    plain = run()
    first = {c: run(router_aux_loss_coef=c)[0] for c in (0.0, 0.1, 1.0)}
    assert first[0.0]["train/loss"] == pytest.approx(plain[0]["train/loss"], rel=1e-6)
    for coefficient, step in first.items():
        added = step["train/loss"] - plain[0]["train/loss"]
        assert added == pytest.approx(coefficient * step["train/aux_loss"], rel=1e-4, abs=1e-6)
    assert first[1.0]["train/grad_norm"] != pytest.approx(first[0.0]["train/grad_norm"], rel=1e-4)


def test_it_is_the_mean_over_micro_batches_and_not_their_sum():
    one, four = (run({"micro_batch_size": m}, router_aux_loss_coef=1.0)[0] for m in (8, 2))
    assert four["train/aux_loss"] == pytest.approx(one["train/aux_loss"], rel=0.3)
    assert four["train/loss"] == pytest.approx(one["train/loss"], rel=0.1)


def test_without_it_experts_do_not_break_the_promise():
    one, four = (run({"micro_batch_size": m}) for m in (8, 2))
    assert [s["train/loss"] for s in four] == pytest.approx([s["train/loss"] for s in one], rel=1e-5)


def test_the_exception_is_named_at_the_start(caplog):
    with caplog.at_level(logging.WARNING):
        run(router_aux_loss_coef=0.1)
    assert "depend on data.micro_batch_size" in caplog.text
