"""Reward models: Bradley-Terry with margin and centring, step labels."""

import math

import pytest
import torch

from workbench.losses import preference as P
from workbench.losses import reward


def draw(size=6, seed=0):
    return 3 * torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_bradley_terry_by_hand():
    losses = reward.bradley_terry_loss(torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.5]), torch.tensor([0.25, 1.0]))
    assert losses.tolist() == pytest.approx([math.log1p(math.exp(-0.75)), math.log1p(math.exp(1.0))])


def test_equal_scores_cost_ln_2():
    assert reward.bradley_terry_loss(torch.tensor([3.0]), torch.tensor([3.0])).item() == pytest.approx(math.log(2))


def test_bradley_terry_is_dpo_on_scores():
    chosen, rejected = draw(seed=1), draw(seed=2)
    assert torch.allclose(reward.bradley_terry_loss(chosen, rejected), P.sigmoid_loss(chosen - rejected, beta=1.0))


def test_only_the_difference_counts():
    chosen, rejected = draw(seed=1), draw(seed=2)
    assert torch.allclose(reward.bradley_terry_loss(chosen + 5, rejected + 5), reward.bradley_terry_loss(chosen, rejected))


def test_swapped_pair_differs_by_the_margin():
    chosen, rejected = draw(seed=1), draw(seed=2)
    difference = reward.bradley_terry_loss(rejected, chosen) - reward.bradley_terry_loss(chosen, rejected)
    assert torch.allclose(difference, chosen - rejected)


def test_margin_asks_for_more():
    chosen, rejected = draw(seed=1), draw(seed=2)
    with_margin = reward.bradley_terry_loss(chosen, rejected, torch.full((6,), 0.5, dtype=torch.float64))
    assert torch.allclose(with_margin, reward.bradley_terry_loss(chosen - 0.5, rejected))
    assert (with_margin > reward.bradley_terry_loss(chosen, rejected)).all()


def test_gradients():
    inputs = draw(seed=1).requires_grad_(), draw(seed=2).requires_grad_()
    margins = draw(seed=3).abs()
    assert torch.autograd.gradcheck(lambda c, r: reward.bradley_terry_loss(c, r, margins), inputs)
    assert torch.autograd.gradcheck(reward.centring_loss, inputs)


def test_finite_far_out():
    chosen = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = reward.bradley_terry_loss(chosen, -chosen)
    loss.sum().backward()
    assert loss.tolist() == [0.0, 2e4]
    assert torch.isfinite(chosen.grad).all()


def test_centring_by_hand():
    chosen, rejected = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([-1.0, 1.0])
    loss = reward.centring_loss(chosen, rejected)
    assert loss.tolist() == [0.0, 9.0]
    loss.sum().backward()
    assert chosen.grad.tolist() == [0.0, 6.0]


def test_metrics():
    chosen, rejected = (torch.tensor(v, requires_grad=True) for v in ([1.0, -2.0, 0.5], [0.0, 3.0, 0.5]))
    metrics = reward.reward_metrics(chosen, rejected)
    assert metrics["mean_reward"].tolist() == [0.5, 0.5, 0.5]
    assert metrics["min_reward"].tolist() == [0.0, -2.0, 0.5]
    assert metrics["max_reward"].tolist() == [1.0, 3.0, 0.5]
    assert metrics["accuracy"].tolist() == [1.0, 0.0, 0.0]
    assert metrics["margin"].tolist() == [1.0, -5.0, 0.0]
    assert not any(m.requires_grad for m in metrics.values())


# -- steps ----------------------------------------------------------------------------------------------------------


def test_steps_by_hand():
    logits = torch.tensor([[0.0, 0.0], [1.0, 3.0], [1.0, 3.0]])
    losses = reward.step_loss(logits, torch.tensor([True, True, False]))
    assert losses.tolist() == pytest.approx([math.log(2), math.log1p(math.exp(-2)), math.log1p(math.exp(2))])


def test_labels_of_any_type_give_one_loss():
    logits = draw(6).view(3, 2)
    booleans = reward.step_loss(logits, torch.tensor([True, False, True]))
    assert torch.equal(booleans, reward.step_loss(logits, torch.tensor([1, 0, 1])))
    assert torch.equal(booleans, reward.step_loss(logits, torch.tensor([1.0, 0.0, 1.0])))


def test_a_probability_mixes_the_two_labels():
    logits = draw(2).view(1, 2)
    right, wrong = (reward.step_loss(logits, torch.tensor([v])) for v in (1.0, 0.0))
    assert torch.allclose(reward.step_loss(logits, torch.tensor([0.3])), 0.3 * right + 0.7 * wrong)


def test_swapped_classes_are_the_opposite_label():
    logits = draw(6).view(3, 2)
    labels = torch.tensor([True, False, True])
    assert torch.allclose(reward.step_loss(logits.flip(-1), labels), reward.step_loss(logits, ~labels))


def test_step_gradient():
    labels = torch.tensor([1.0, 0.0, 0.3], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: reward.step_loss(x, labels), draw(6).view(3, 2).requires_grad_())


def test_step_loss_keeps_nan_to_its_own_step():
    """A step left out by weight 0 may hold anything."""
    logits = torch.tensor([[0.5, 1.0], [math.nan, math.nan]])
    losses = reward.step_loss(logits, torch.tensor([True, False]))
    assert torch.equal(losses[:1], reward.step_loss(logits[:1], torch.tensor([True])))


def test_step_accuracies():
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0], [2.0, 1.0], [2.0, 1.0]])
    assert reward.step_accuracies(logits, torch.tensor([True, False, False, True])).tolist() == [1.0, 0.0, 1.0, 0.0]
    assert reward.step_accuracies(logits[:3], torch.tensor([0.6, 0.4, 0.5])).tolist() == [1.0, 0.0, 0.0]
