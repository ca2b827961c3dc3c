"""Every division: hand numbers, both scopes, NaN behind a zero weight, an empty step."""

import math

import pytest
import torch

from workbench.losses.reduce import Normalisers, masked_sum, reduce


def norm(**kwargs):
    defaults = {
        "tokens": 10.0,
        "sequences": 4.0,
        "unmasked": 3.0,
        "micro_batches": 2.0,
        "num_micro": 2,
        "world_size": 1,
        "scale": 2.0,
    }
    return Normalisers(**{**defaults, **kwargs})


def test_step_scope_divides_once_by_the_step():
    # Two micro-batches of 2 and 8 tokens with losses 1.0 and 3.0: the step's mean is 2.6, not 2.0.
    n = norm()
    parts = [reduce(torch.full((k,), v), torch.ones(k), n, per="tokens") for k, v in ((2, 1.0), (8, 3.0))]
    assert sum(p.item() for p in parts) / n.scale == pytest.approx(2.6)


def test_micro_batch_scope_averages_the_means():
    n = norm()
    parts = [reduce(torch.full((k,), v), torch.ones(k), n, per="tokens", scope="micro_batch") for k, v in ((2, 1.0), (8, 3.0))]
    assert sum(p.item() for p in parts) / n.scale == pytest.approx(2.0)


def test_micro_batch_scope_leaves_empty_micro_batches_out():
    n = norm(micro_batches=1.0)
    full = reduce(torch.tensor([1.0, 3.0]), torch.ones(2), n, per="tokens", scope="micro_batch")
    empty = reduce(torch.tensor([5.0]), torch.zeros(1), n, per="tokens", scope="micro_batch")
    assert (full.item() + empty.item()) / n.scale == pytest.approx(2.0)


@pytest.mark.parametrize(("per", "expected"), [("tokens", 0.6), ("sequences", 1.5), ("unmasked", 2.0)])
def test_each_normaliser(per, expected):
    assert reduce(torch.tensor([2.0, 4.0]), torch.ones(2), norm(scale=1.0), per=per).item() == pytest.approx(expected)


def test_constant_normaliser_must_be_there():
    assert reduce(torch.ones(2), torch.ones(2), norm(constant=4.0, scale=1.0), per="constant").item() == pytest.approx(0.5)
    with pytest.raises(ValueError, match="no normaliser 'constant'"):
        reduce(torch.ones(2), torch.ones(2), norm(), per="constant")


def test_weights_scale_and_mask_even_nan():
    values = torch.tensor([2.0, math.nan, 4.0], requires_grad=True)
    weights = torch.tensor([0.5, 0.0, 1.0])
    total = masked_sum(values, weights)
    assert total.item() == 5.0
    total.backward()
    assert values.grad.tolist() == [0.5, 0.0, 1.0]


def test_empty_step_is_zero_and_keeps_the_graph():
    values = torch.tensor([3.0], requires_grad=True)
    loss = reduce(values, torch.zeros(1), norm(tokens=0.0), per="tokens")
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad.tolist() == [0.0]


def test_world_and_micro_batches_are_undone():
    # 2 ranks x 2 micro-batches: DDP averages over ranks, Lightning over micro-batches.
    n = norm(world_size=2, scale=4.0, tokens=4.0)
    losses = [[1.0, 2.0], [3.0, 4.0]]
    per_rank = [sum(reduce(torch.tensor([v]), torch.ones(1), n, per="tokens").item() / 2 for v in rank) for rank in losses]
    assert sum(per_rank) / 2 == pytest.approx(2.5)


def test_normaliser_is_not_guessed_in_bf16():
    # 300 values of 1 in bf16 would stall at 256 if summed in bf16.
    values = torch.ones(300, dtype=torch.bfloat16)
    assert masked_sum(values, torch.ones(300)).item() == 300.0
