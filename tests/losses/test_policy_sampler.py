import math

import pytest
import torch

from workbench.errors import UserError
from workbench.losses.sampler import importance_correction, off_policy_mask

F64 = torch.float64
SEGMENT = torch.tensor([0, 0, 0, 1, 1, 2])
WEIGHTS = torch.tensor([1, 1, 0, 1, 1, 0], dtype=F64)
OLD = torch.tensor([-1.0, -2.0, math.nan, -1.0, -3.0, -1.0], dtype=F64)
DIFFERENCE = torch.tensor([math.log(2.0), math.log(1.25), 0.0, math.log(0.5), math.log(0.8), 9.0], dtype=F64)
SAMPLER = OLD - DIFFERENCE


def ratios(mode, low=None, high=None, sampler=SAMPLER):
    return importance_correction(OLD, sampler, WEIGHTS, SEGMENT, 3, mode, low, high)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [1.5, 1.25, 1, 0.6, 0.8, 1]),
        ("token_mask", [0, 1.25, 1, 0, 0.8, 1]),
        ("sequence_truncate", [1.5, 1.5, 1, 0.6, 0.6, 1]),  # 2.5 and 0.4
        ("sequence_mask", [0, 0, 1, 0, 0, 1]),
    ],
)
def test_ratios_by_hand(mode, expected):
    assert ratios(mode, 0.6, 1.5).ratio.tolist() == pytest.approx(expected)


def test_a_sequence_has_the_product_of_its_tokens():
    assert ratios("sequence_mask", None, 3.0).ratio.tolist() == pytest.approx([2.5, 2.5, 1, 0.4, 0.4, 1])
    assert ratios("sequence_mask", 0.5, None).ratio.tolist() == pytest.approx([2.5, 2.5, 1, 0, 0, 1])


def test_bounds_themselves_are_inside():
    both = torch.tensor([math.log(2.0), math.log(0.5)], dtype=F64)
    one, segment = torch.ones(2, dtype=F64), torch.arange(2)
    found = importance_correction(both, torch.zeros(2, dtype=F64), one, segment, 2, "token_mask", 0.5 - 1e-12, 2.0 + 1e-12)
    assert found.ratio.tolist() == pytest.approx([2.0, 0.5])


@pytest.mark.parametrize("mode", ["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"])
def test_a_token_without_a_log_probability_has_ratio_one(mode):
    """And the others keep theirs."""
    sampler = SAMPLER.clone()
    sampler[0] = math.nan
    found = ratios(mode, 0.1, 10.0, sampler)
    token = mode.startswith("token")
    assert found.ratio.tolist() == pytest.approx([1, 1.25, 1, 0.5, 0.8, 1] if token else [1.25, 1.25, 1, 0.4, 0.4, 1])
    assert found.difference_weights.tolist() == [0, 1, 0, 1, 1, 0]


def test_equal_probabilities_change_nothing():
    found = importance_correction(OLD, OLD, WEIGHTS, SEGMENT, 3)
    assert found.ratio.tolist() == [1] * 6


def test_it_has_no_gradient():
    old = OLD.clone().requires_grad_()
    assert not importance_correction(old, SAMPLER, WEIGHTS, SEGMENT, 3).ratio.requires_grad


def test_what_metrics_are_made_of():
    found = ratios("sequence_mask", None, 2.0)
    kept = found.ratios[found.ratio_weights != 0]
    assert kept.tolist() == pytest.approx([0, 0.4])  # min, mean and max are those after the bound
    differences = found.logp_difference[found.difference_weights != 0]
    assert differences.tolist() == pytest.approx([math.log(2), math.log(1.25), math.log(2), math.log(1.25)])
    token = ratios("token_truncate", None, 1.5)
    assert token.ratios[token.ratio_weights != 0].tolist() == pytest.approx([1.5, 1.25, 0.5, 0.8])


def test_an_unknown_mode_is_named():
    with pytest.raises(UserError, match="importance_sampling_mode"):
        ratios("row_mask")


def test_off_policy_sequences_with_a_negative_advantage_are_left_out():
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, math.nan, -1.0], dtype=F64)
    logps = torch.tensor([-2.0, -1.2, -2.0, -1.2, -1.1, -1.1, -9.0, -1.3], dtype=F64)  # drifts 0.6, 0.6, 0.1, 0.3
    segment, weights = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), torch.ones(8, dtype=F64)
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0], dtype=F64)

    def kept(threshold):
        return off_policy_mask(behaviour, logps, advantages, weights, segment, threshold).tolist()

    assert kept(0.5) == [False, False, True, True, True, True, True, True]
    assert kept(0.2) == [False, False, True, True, True, True, False, False]
    assert kept(0.7) == [True] * 8


def test_drift_is_the_mean_over_the_trained_tokens():
    behaviour, logps = torch.zeros(2, dtype=F64), torch.tensor([-0.4, -9.0], dtype=F64)
    weights, segment = torch.tensor([1.0, 0.0], dtype=F64), torch.zeros(2, dtype=torch.long)
    assert off_policy_mask(behaviour, logps, torch.tensor([-1.0]), weights, segment, 0.5).all()
