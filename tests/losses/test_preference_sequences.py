"""Sums over sequences: hand numbers, masks, order, precision; LD-DPO's and WPO's weights."""

import math

import pytest
import torch

from workbench.losses.sequences import ld_weights, sequence_lengths, sequence_means, sequence_sums, wpo_weights

SEGMENT = torch.tensor([0, 0, 1, 1, 1, 3])
VALUES = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def test_by_hand():
    weights = torch.tensor([1.0, 0.5, 1.0, 0.0, 1.0, 1.0])
    assert sequence_sums(VALUES, weights, SEGMENT, 5).tolist() == [2.0, 8.0, 0.0, 6.0, 0.0]
    assert sequence_lengths(weights, SEGMENT, 5).tolist() == [1.5, 2.0, 0.0, 1.0, 0.0]
    assert sequence_means(VALUES, weights, SEGMENT, 5).tolist() == pytest.approx([4 / 3, 4.0, 0.0, 6.0, 0.0])


@pytest.mark.parametrize("function", [sequence_sums, sequence_means])
def test_masking_equals_deletion(function):
    weights = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    kept = weights.bool()
    assert torch.equal(function(VALUES, weights, SEGMENT, 4), function(VALUES[kept], weights[kept], SEGMENT[kept], 4))


@pytest.mark.parametrize("function", [sequence_sums, sequence_means])
def test_nan_in_masked_slots(function):
    values = torch.tensor([1.0, math.nan, 3.0, math.inf, 5.0, 6.0], requires_grad=True)
    weights = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    out = function(values, weights, SEGMENT, 4)
    out.sum().backward()
    clean = function(torch.where(weights == 0, 7.0, values.detach()), weights, SEGMENT, 4)
    assert torch.equal(out, clean)
    assert torch.isfinite(values.grad).all()
    assert values.grad[weights == 0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("function", [sequence_sums, sequence_means])
def test_gradient(function):
    values = VALUES.double().requires_grad_()
    weights = torch.tensor([1.0, 0.5, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: function(v, weights, SEGMENT, 4), values)


def test_sequences_are_independent_of_their_neighbours():
    weights = torch.ones(6)
    alone = sequence_sums(VALUES[2:5], weights[2:5], SEGMENT[2:5] - 1, 1)
    assert torch.equal(sequence_sums(VALUES, weights, SEGMENT, 4)[1:2], alone)


def test_a_small_difference_of_large_sums_keeps_its_digits():
    """2,000 tokens at about -7 nats that differ by 1e-3 in one of them: fp32 sums would be off by 1e-3 themselves."""
    logps = -7 - torch.rand(2000, generator=torch.Generator().manual_seed(0))
    ref = logps.clone()
    ref[1000] += 2**-10
    weights, segment = torch.ones(2000), torch.zeros(2000, dtype=torch.long)
    difference = sequence_sums(logps, weights, segment, 1) - sequence_sums(ref, weights, segment, 1)
    assert difference.item() == pytest.approx(-(2**-10), rel=1e-6)
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(1))
    shuffled = sequence_sums(logps[order], weights, segment, 1)
    assert shuffled.item() == pytest.approx(sequence_sums(logps, weights, segment, 1).item(), rel=1e-14)


def test_half_precision_is_summed_in_full():
    # 300 values of 1 in bf16 would stall at 256.
    ones = torch.ones(300, dtype=torch.bfloat16)
    assert sequence_sums(ones, torch.ones(300), torch.zeros(300, dtype=torch.long), 1).item() == 300.0


# -- LD-DPO ---------------------------------------------------------------------------------------------------------

# Segments: prompt 0 (2 trained tokens, no partner), chosen 1 (2 trained of 3), rejected 2 (4).
LD_SEGMENT = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])
LD_WEIGHTS = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.5, 1.0, 1.0])
PARTNER = torch.tensor([0, 2, 1])


def test_ld_scales_the_tail_of_the_longer_completion():
    expected = [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.5, 0.25, 0.25]
    assert ld_weights(LD_WEIGHTS, LD_SEGMENT, PARTNER, alpha=0.25).tolist() == expected


def test_ld_alpha_one_changes_nothing():
    assert torch.equal(ld_weights(LD_WEIGHTS, LD_SEGMENT, PARTNER, alpha=1.0), LD_WEIGHTS)


def test_ld_alpha_zero_cuts_to_the_shared_length():
    logps = torch.linspace(-3, -1, 9)
    cut = sequence_sums(logps, ld_weights(LD_WEIGHTS, LD_SEGMENT, PARTNER, alpha=0.0), LD_SEGMENT, 3)
    shared = sequence_sums(logps[:7], LD_WEIGHTS[:7], LD_SEGMENT[:7], 3)
    assert torch.equal(cut, shared)


def test_ld_masking_equals_deletion():
    """An untrained token inside a completion takes no place."""
    kept = LD_WEIGHTS != 0
    scaled = ld_weights(LD_WEIGHTS, LD_SEGMENT, PARTNER, alpha=0.25)
    assert torch.equal(scaled[kept], ld_weights(LD_WEIGHTS[kept], LD_SEGMENT[kept], PARTNER, alpha=0.25))


def test_ld_swapped_pair():
    swapped = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2])
    weights = torch.tensor([1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.0, 1.0])
    expected = [1.0, 1.0, 1.0, 0.5, 0.25, 0.25, 1.0, 0.0, 1.0]
    assert ld_weights(weights, swapped, PARTNER, alpha=0.25).tolist() == expected


def test_ld_against_an_empty_completion():
    segment, partner = torch.tensor([0, 0]), torch.tensor([1, 0])
    assert ld_weights(torch.ones(2), segment, partner, alpha=0.5).tolist() == [0.5, 0.5]


# -- WPO ------------------------------------------------------------------------------------------------------------


def test_wpo_by_hand():
    # p = (0.5, 0.25, 0.25): sum p^2 = 0.375; tokens 0.5 and 0.25 of one sequence, mean log = (log 4/3 + log 2/3) / 2.
    logps = torch.log(torch.tensor([0.5, 0.25]))
    collisions = torch.full((2,), math.log(0.375))
    weights = wpo_weights(logps, collisions, torch.ones(2), torch.tensor([0, 0]), 1)
    assert weights.item() == pytest.approx(math.sqrt(8 / 9))


def test_wpo_is_one_for_a_uniform_policy_and_without_tokens():
    logps = torch.full((3,), -math.log(7))
    weights = wpo_weights(logps, logps, torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0, 0, 1]), 3)
    assert weights.tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_wpo_does_not_depend_on_length_and_carries_no_gradient():
    logps = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5])).requires_grad_()
    collisions = torch.full((4,), math.log(0.375))
    weights = wpo_weights(logps, collisions, torch.ones(4), torch.tensor([0, 1, 1, 1]), 2)
    assert weights.tolist() == pytest.approx([4 / 3, 4 / 3])
    assert not weights.requires_grad


def test_wpo_ignores_nan_in_masked_slots():
    logps = torch.tensor([-1.0, math.nan])
    weights = wpo_weights(logps, torch.tensor([-1.5, math.nan]), torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), 1)
    assert weights.item() == pytest.approx(math.exp(0.5))
