"""KTO, APO-zero and BCO on single completions: numbers by hand, gradients, symmetries, baselines, weights."""

import math

import pytest
import torch

from workbench.losses import bco, kto
from workbench.losses import preference as P

LOGRATIOS = torch.tensor([0.6, -1.2, 2.0])
DESIRABLE = torch.tensor([True, False, False])


def draw(size=6, seed=0):
    return 3 * torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_kto_by_hand():
    losses = kto.kto_loss(LOGRATIOS, DESIRABLE, 0.4, beta=0.5, desirable_weight=1.5, undesirable_weight=0.7)
    # 1 - sigmoid(0.5 * 0.2), 1 - sigmoid(0.5 * 1.6), 1 - sigmoid(0.5 * -1.6)
    expected = [1.5 * (1 - sigmoid(0.1)), 0.7 * (1 - sigmoid(0.8)), 0.7 * (1 - sigmoid(-0.8))]
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)


def test_kto_starts_at_one_half():
    assert kto.kto_loss(torch.zeros(3), DESIRABLE, 0.0, beta=0.1).tolist() == [0.5] * 3


@pytest.mark.parametrize("desirable", [True, False])
def test_kto_gradient(desirable):
    labels = torch.full((6,), desirable)
    assert torch.autograd.gradcheck(
        lambda x: kto.kto_loss(x, labels, 0.3, beta=0.4, desirable_weight=1.2, undesirable_weight=0.8), draw().requires_grad_()
    )


def test_kto_raises_the_desirable_and_lowers_the_undesirable():
    logratios = LOGRATIOS.clone().requires_grad_()
    kto.kto_loss(logratios, DESIRABLE, 0.4, beta=0.5).sum().backward()
    assert (logratios.grad < 0).tolist() == DESIRABLE.tolist()


def test_kto_mirrored_about_the_baseline_is_the_other_label():
    x, labels = draw(), torch.tensor([True, False] * 3)
    assert torch.allclose(kto.kto_loss(x, labels, 0.3, beta=0.4), kto.kto_loss(0.6 - x, ~labels, 0.3, beta=0.4))


def test_kto_saturates_on_both_sides():
    far = torch.tensor([1e4, -1e4])
    assert kto.kto_loss(far, torch.tensor([True, True]), 0.0, beta=1.0).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "option",
    [{"beta": 0.6}, {"desirable_weight": 2.0}, {"undesirable_weight": 2.0}, {"baseline": 1.0}],
    ids=lambda o: next(iter(o)),
)
def test_every_option_changes_kto(option):
    base = {"baseline": 0.4, "beta": 0.5}
    assert not torch.allclose(
        kto.kto_loss(LOGRATIOS, DESIRABLE, **base), kto.kto_loss(LOGRATIOS, DESIRABLE, **{**base, **option})
    )


def test_weights_belong_to_their_label():
    plain = kto.kto_loss(LOGRATIOS, DESIRABLE, 0.4, beta=0.5)
    weighted = kto.kto_loss(LOGRATIOS, DESIRABLE, 0.4, beta=0.5, desirable_weight=3.0)
    assert (weighted / plain).tolist() == pytest.approx([3.0, 1.0, 1.0])


def test_apo_zero_unpaired_has_no_baseline():
    x, labels = draw(), torch.tensor([True, False] * 3)
    ours = kto.apo_zero_unpaired_loss(x, labels, beta=0.4, desirable_weight=1.5, undesirable_weight=0.7)
    expected = torch.where(labels, 1.5 * (1 - torch.sigmoid(0.4 * x)), 0.7 * torch.sigmoid(0.4 * x))
    assert torch.allclose(ours, expected)
    assert torch.equal(ours, kto.kto_loss(x, labels, 0.0, beta=0.4, desirable_weight=1.5, undesirable_weight=0.7))


def test_apo_zero_is_its_two_halves():
    chosen, rejected = draw(seed=1), draw(seed=2)
    yes, no = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)
    halves = kto.apo_zero_unpaired_loss(chosen, yes, beta=0.4) + kto.apo_zero_unpaired_loss(rejected, no, beta=0.4)
    assert torch.allclose(halves, P.apo_zero_loss(chosen, rejected, beta=0.4))


def test_baseline_is_the_mean_but_not_below_zero():
    assert kto.kl_baseline(torch.tensor(3.0), 4).item() == 0.75
    assert kto.kl_baseline(torch.tensor(-3.0), 4).item() == 0.0
    assert kto.kl_baseline(torch.tensor(3.0), 1).item() == 3.0
    assert kto.kl_baseline(torch.tensor(0.0), 0).item() == 0.0


def test_baseline_carries_no_gradient():
    total = torch.tensor(3.0, requires_grad=True)
    assert not kto.kl_baseline(total, 4).requires_grad


def test_balance_and_the_weights_that_restore_it():
    assert kto.balance(60, 20, 1.0, 1.0) == 3.0
    assert kto.balance(5, 0, 1.0, 1.0) == math.inf
    ranges = kto.recommended_weights(60, 20, 1.0, 1.0)
    assert ranges["desirable_weight"] == pytest.approx((1 / 3, 4 / 9))
    assert ranges["undesirable_weight"] == pytest.approx((9 / 4, 3.0))
    assert [kto.balance(60, 20, w, 1.0) for w in ranges["desirable_weight"]] == pytest.approx(kto.BALANCE)
    assert [kto.balance(60, 20, 1.0, w) for w in ranges["undesirable_weight"]] == pytest.approx(kto.BALANCE[::-1])
    assert kto.recommended_weights(60, 20, 2.0, 3.0)["desirable_weight"] == pytest.approx((1.0, 4 / 3))
    assert kto.recommended_weights(60, 20, 2.0, 3.0)["undesirable_weight"] == pytest.approx((4.5, 6.0))


def test_metrics_separate_the_labels():
    metrics = kto.unpaired_metrics(LOGRATIOS.clone().requires_grad_(), DESIRABLE)
    means = {name: ((values * weights).sum() / weights.sum()).item() for name, (values, weights) in metrics.items()}
    assert means == pytest.approx({"rewards/chosen": 0.6, "rewards/rejected": 0.4})
    assert not any(values.requires_grad for values, _ in metrics.values())


# -- BCO ------------------------------------------------------------------------------------------------------------


def test_bco_by_hand():
    losses = bco.bco_loss(LOGRATIOS, DESIRABLE, 0.1, beta=0.5, undesirable_weights=torch.tensor([9.0, 2.0, 0.5]))
    expected = [-math.log(sigmoid(0.2)), -2 * math.log(sigmoid(0.7)), -0.5 * math.log(sigmoid(-0.9))]
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("desirable", [True, False])
def test_bco_gradient(desirable):
    labels, weights = torch.full((6,), desirable), draw(seed=1).abs()
    assert torch.autograd.gradcheck(
        lambda x: bco.bco_loss(x, labels, 0.3, beta=0.4, undesirable_weights=weights), draw().requires_grad_()
    )


def test_bco_on_a_pair_is_its_two_halves():
    chosen, rejected = draw(seed=1), draw(seed=2)
    yes, no = torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)
    halves = bco.bco_loss(chosen, yes, 0.2, beta=0.4) + bco.bco_loss(rejected, no, 0.2, beta=0.4)
    assert torch.allclose(halves, P.bco_pair_loss(chosen, rejected, beta=0.4, reward_shift=0.2))


def test_bco_mirrored_about_the_shift_is_the_other_label():
    x, labels = draw(), torch.tensor([True, False] * 3)
    mirrored = bco.bco_loss(2 * 0.2 / 0.4 - x, ~labels, 0.2, beta=0.4)
    assert torch.allclose(bco.bco_loss(x, labels, 0.2, beta=0.4), mirrored)


def test_bco_is_finite_far_out():
    x = torch.tensor([1e4, -1e4], requires_grad=True)
    for labels in (torch.tensor([True, False]), torch.tensor([False, True])):
        loss = bco.bco_loss(x, labels, 0.0, beta=1.0)
        assert torch.isfinite(torch.autograd.grad(loss.sum(), x)[0]).all()
        assert torch.isfinite(loss).all()


def test_shift_is_halfway_between_the_labels():
    """However many rows each has."""
    total = torch.tensor(6.0, requires_grad=True)
    shift = bco.reward_shift(total, 2, torch.tensor(-10.0), 10)
    assert shift.item() == 1.0
    assert not shift.requires_grad


def test_shift_with_one_label_or_none():
    assert bco.reward_shift(torch.tensor(6.0), 2, torch.tensor(0.0), 0).item() == 3.0
    assert bco.reward_shift(torch.tensor(0.0), 0, torch.tensor(-6.0), 3).item() == -2.0
    assert bco.reward_shift(torch.tensor(6.0), 1, torch.tensor(-2.0), 1).item() == 2.0
    assert bco.reward_shift(torch.tensor(0.0), 0, torch.tensor(0.0), 0).item() == 0.0


def test_distribution_weights_are_clipped_odds():
    weights = bco.distribution_weights(torch.tensor([0.75, 0.1, 0.99, 1.0, 0.0]))
    assert weights.tolist() == pytest.approx([3.0, 0.5, 10.0, 10.0, 0.5])
    assert bco.distribution_weights(torch.tensor([0.1]), minimum=0.0).item() == pytest.approx(1 / 9)
    assert bco.distribution_weights(torch.tensor([0.99]), maximum=20.0).item() == 20.0
    assert not bco.distribution_weights(torch.tensor([0.75], requires_grad=True)).requires_grad


@pytest.mark.parametrize("shape", [(40, 3), (6, 20)])
def test_the_prompts_classifier_is_at_its_minimum(shape):
    """The gradient of the penalised, balanced loss vanishes; also with more dimensions than rows, far from the origin."""
    x = 5 + draw(shape[0] * shape[1]).reshape(shape)
    labels = torch.arange(shape[0]) % 3 == 0
    w, b = (value.requires_grad_() for value in bco.fit_density_ratio(x, labels))
    weights = torch.where(labels, 0.5 / labels.double().mean(), 0.5 / (~labels).double().mean())
    signs = torch.where(labels, 1.0, -1.0).double()
    loss = 0.5 * w.square().sum() - (weights * torch.nn.functional.logsigmoid(signs * (x @ w + b))).sum()
    loss.backward()
    assert w.grad.abs().max() < 1e-8
    assert b.grad.abs() < 1e-8
    assert w.abs().max() > 0.05


def test_the_prompts_classifier_knows_the_densities_not_the_frequencies():
    """With features that tell nothing the odds are 1, however rare a label is."""
    labels = torch.arange(40) % 10 == 0
    w, b = bco.fit_density_ratio(torch.ones(40, 2), labels)
    assert bco.distribution_weights(torch.sigmoid(torch.ones(2).double() @ w + b)) == pytest.approx(1.0)
