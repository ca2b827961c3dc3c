import math

import pytest
import torch

from workbench.errors import UserError
from workbench.losses.entropy import EntropyController, entropy_threshold, top_entropy_mask


def test_the_tokens_with_the_highest_entropy():
    entropy = torch.tensor([0.1, 0.9, 0.5, math.nan, 0.3, 0.7])
    weights = torch.tensor([1.0, 1, 1, 0, 1, 1])
    assert top_entropy_mask(entropy, weights, 0.4).tolist() == [False, True, False, False, False, True]
    assert top_entropy_mask(entropy, weights, 1.0).tolist() == [True, True, True, False, True, True]
    assert top_entropy_mask(entropy, weights, 0.01).sum() == 1


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.7])
def test_the_share_is_exact(share):
    assert top_entropy_mask(torch.arange(30.0), torch.ones(30), share).sum() == round(30 * share)


def test_a_threshold_over_the_step_does_not_depend_on_micro_batches():
    entropy, weights = torch.arange(20.0), torch.ones(20)
    threshold = entropy_threshold(entropy, weights, 0.2)
    parts = [top_entropy_mask(entropy[cut], weights[cut], 0.2, threshold) for cut in (slice(17), slice(17, None))]
    assert torch.equal(torch.cat(parts), top_entropy_mask(entropy, weights, 0.2))
    assert torch.cat(parts).sum() == 4


def test_nothing_is_among_no_tokens():
    assert not top_entropy_mask(torch.ones(3), torch.zeros(3), 0.5).any()


@pytest.mark.parametrize("quantile", [0.0, -0.1, 1.1, math.nan])
def test_a_quantile_out_of_range_is_refused(quantile):
    with pytest.raises(UserError, match="top_entropy_quantile"):
        entropy_threshold(torch.ones(3), torch.ones(3), quantile)


def test_an_adaptive_weight_follows_its_target_within_bounds():
    controller = EntropyController(0.01, True, target=2.0, delta=0.005, min=0.0, max=0.02)
    seen = []
    for entropy in (1.0, 2.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0):
        seen.append((controller.applied(entropy), controller.coef))
        controller.update(entropy)
    assert [applied for applied, _ in seen] == pytest.approx([0.01, 0.015, 0.02, 0, 0, 0, 0, 0])
    assert [coef for _, coef in seen] == pytest.approx([0.01, 0.015, 0.02, 0.02, 0.015, 0.01, 0.005, 0.0])
    assert controller.coef == 0.0


def test_a_constant_weight_always_acts_and_never_moves():
    controller = EntropyController(0.05, target=2.0)
    for entropy in (0.1, 9.0):
        assert controller.applied(entropy) == 0.05
        controller.update(entropy)
    assert controller.coef == 0.05 and controller.active
    assert not EntropyController().active and EntropyController(adaptive=True).active


def test_a_checkpoint_brings_back_the_adaptive_weight():
    first = EntropyController(0.01, True, target=2.0)
    first.update(1.0)
    second = EntropyController(0.01, True, target=2.0)
    second.load_state_dict(first.state_dict())
    assert second.coef == first.coef == pytest.approx(0.015)
    constant = EntropyController(0.3)
    constant.load_state_dict(first.state_dict())
    assert constant.coef == 0.3
