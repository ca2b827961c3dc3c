"""Each pair loss: numbers by hand, its gradient, its symmetries, special cases that must agree, extremes."""

import math

import pytest
import torch

from workbench.losses import preference as P

BETA = 0.5
CHOSEN, REJECTED = torch.tensor([0.6]), torch.tensor([-1.2])
MARGIN = CHOSEN - REJECTED  # beta * margin = 0.9, sigmoid(0.9) = 0.7109495

OF_MARGINS = {
    "sigmoid": P.sigmoid_loss,
    "conservative": lambda m, beta: P.sigmoid_loss(m, beta=beta, label_smoothing=0.1),
    "hinge": P.hinge_loss,
    "ipo": P.ipo_loss,
    "exo": lambda m, beta: P.exo_loss(m, beta=beta, label_smoothing=0.1),
    "robust": lambda m, beta: P.robust_loss(m, beta=beta, label_smoothing=0.1),
    "discopop": lambda m, beta: P.discopop_loss(m, beta=beta, tau=0.5),
    "simpo": lambda m, beta: P.simpo_loss(m, beta=beta, gamma=0.4),
}
OF_BOTH = {
    "nca": P.nca_loss,
    "bco": P.bco_pair_loss,
    "bco shifted": lambda c, r, beta: P.bco_pair_loss(c, r, beta=beta, reward_shift=0.1),
    "sppo": P.sppo_hard_loss,
    "apo_zero": P.apo_zero_loss,
    "apo_down": P.apo_down_loss,
    "aot_unpaired": P.aot_unpaired_loss,
    "aot": P.aot_loss,
}


def draw(size=6, seed=0, scale=3.0):
    return scale * torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Computed from the papers' formulas with sigmoid(0.9) = 0.7109495, sigmoid(0.3) = 0.5744425, sigmoid(-0.6) = 0.3543437.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sigmoid", 0.3411539),
        ("conservative", 0.4311539),
        ("hinge", 0.1),
        ("ipo", 0.64),
        ("exo", 0.1391701),
        ("robust", 0.2286539),
        ("discopop", 0.3972904),
        ("simpo", 0.4740770),
    ],
)
def test_of_the_margin_by_hand(name, expected):
    assert OF_MARGINS[name](MARGIN, beta=BETA).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nca", 1.2002768),
        ("bco", 0.9918432),
        ("bco shifted", 1.0013249),
        ("sppo", 0.2),
        ("apo_zero", 0.7799012),
        ("apo_down", 0.8634930),
        ("aot_unpaired", 0.3411539),
        ("aot", 0.3411539),
    ],
)
def test_of_both_log_ratios_by_hand(name, expected):
    assert OF_BOTH[name](CHOSEN, REJECTED, beta=BETA).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", OF_MARGINS)
def test_gradient_of_the_margin(name):
    # 0.37: no margin lies on the kink of the hinge.
    assert torch.autograd.gradcheck(lambda m: OF_MARGINS[name](m, beta=0.37), draw().requires_grad_())


@pytest.mark.parametrize("name", OF_BOTH)
def test_gradient_of_both(name):
    inputs = draw(seed=1).requires_grad_(), draw(seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda c, r: OF_BOTH[name](c, r, beta=0.37), inputs)


@pytest.mark.parametrize("name", [n for n in OF_BOTH if n != "apo_down"])
def test_first_step_raises_the_chosen_and_lowers_the_rejected(name):
    chosen, rejected = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    OF_BOTH[name](chosen, rejected, beta=BETA).sum().backward()
    assert (chosen.grad < 0).all()
    assert (rejected.grad > 0).all()


def test_apo_down_lowers_both_and_the_rejected_more():
    # Both rise or fall together: the anchor alone acts, and lowers them.
    both = torch.zeros(1, requires_grad=True)
    P.apo_down_loss(both, both, beta=1.0).backward()
    assert both.grad.item() == pytest.approx(0.25)
    # Well apart, the chosen one still falls; d/dr = sigmoid'(r - c) is above 0 always.
    chosen, rejected = torch.tensor([0.5], requires_grad=True), torch.tensor([-6.0], requires_grad=True)
    P.apo_down_loss(chosen, rejected, beta=1.0).backward()
    assert chosen.grad.item() > 0.2
    assert rejected.grad.item() > 0


@pytest.mark.parametrize("name", OF_MARGINS)
def test_first_step_widens_the_margin(name):
    margins = torch.zeros(2, requires_grad=True)
    OF_MARGINS[name](margins, beta=BETA).sum().backward()
    assert (margins.grad < 0).all()


# -- swapping the pair ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [P.sigmoid_loss, P.exo_loss])
def test_swapped_pair_is_the_opposite_label(loss):
    m = draw()
    assert torch.allclose(loss(m, beta=BETA, label_smoothing=0.2), loss(-m, beta=BETA, label_smoothing=0.8))


def test_swapped_pair_differs_by_the_margin():
    m = draw()
    assert torch.allclose(P.sigmoid_loss(-m, beta=BETA) - P.sigmoid_loss(m, beta=BETA), BETA * m)
    assert torch.allclose(P.ipo_loss(-m, beta=BETA) - P.ipo_loss(m, beta=BETA), 2 * m / BETA)


def test_swapped_and_negated_pairs():
    c, r = draw(seed=1), draw(seed=2)
    assert torch.allclose(P.sppo_hard_loss(c, r, beta=BETA), P.sppo_hard_loss(-r, -c, beta=BETA))
    shifted = P.bco_pair_loss(c, r, beta=BETA, reward_shift=0.3)
    assert torch.allclose(shifted, P.bco_pair_loss(-r, -c, beta=BETA, reward_shift=-0.3))
    assert torch.allclose(P.apo_zero_loss(c, r, beta=BETA) + P.apo_zero_loss(r, c, beta=BETA), torch.full_like(c, 2.0))


def test_robust_is_unbiased():
    """Over labels flipped with probability e its mean is the loss of the true label."""
    m, e = draw(), 0.2
    mean = (1 - e) * P.robust_loss(m, beta=BETA, label_smoothing=e) + e * P.robust_loss(-m, beta=BETA, label_smoothing=e)
    assert torch.allclose(mean, P.sigmoid_loss(m, beta=BETA))


# -- special cases --------------------------------------------------------------------------------------------------


def test_without_noise_robust_is_sigmoid():
    m = draw()
    assert torch.equal(P.robust_loss(m, beta=BETA, label_smoothing=0.0), P.sigmoid_loss(m, beta=BETA))


def test_without_a_target_margin_simpo_is_sigmoid():
    m = draw()
    assert torch.allclose(P.simpo_loss(m, beta=BETA, gamma=0.0), P.sigmoid_loss(m, beta=BETA))


def test_simpo_gamma_is_a_margin_of_the_reward():
    m = draw()
    assert torch.allclose(P.simpo_loss(m + 0.6 / BETA, beta=BETA, gamma=0.6), P.sigmoid_loss(m, beta=BETA))


def test_discopop_at_the_ends_of_its_temperature():
    m = draw()
    logistic, exponential = P.sigmoid_loss(m, beta=BETA), torch.exp(-BETA * m)
    assert torch.allclose(P.discopop_loss(m, beta=BETA, tau=1e9), (logistic + exponential) / 2)
    assert torch.allclose(P.discopop_loss(m, beta=BETA, tau=1e-9), torch.where(m > 0, exponential, logistic))


def test_exo_is_zero_where_the_policy_gives_the_target():
    # sigmoid(beta m) = 0.9 at m = log(9) / beta.
    assert P.exo_loss(torch.tensor([math.log(9.0) / BETA]), beta=BETA, label_smoothing=0.1).item() == pytest.approx(0.0, abs=1e-7)


def test_squared_losses_are_zero_at_their_targets():
    assert P.ipo_loss(torch.tensor([1.0]), beta=BETA).item() == 0.0
    assert P.sppo_hard_loss(torch.tensor([1.0]), torch.tensor([-1.0]), beta=BETA).item() == 0.0


def test_hinge_stops_at_the_margin():
    assert P.hinge_loss(torch.tensor([1.9, 2.0, 5.0]), beta=BETA).tolist() == pytest.approx([0.05, 0.0, 0.0])


def test_a_tight_cross_entropy_bounds_dpo():
    """BCO's cross-entropy lies above DPO's loss, whatever the shift (the paper's theorem 1)."""
    c, r = draw(50, seed=1), draw(50, seed=2)
    for shift in (-1.0, 0.0, 2.0):
        assert (P.bco_pair_loss(c, r, beta=BETA, reward_shift=shift) > P.sigmoid_loss(c - r, beta=BETA)).all()


def test_aot_compares_quantiles():
    c, r = torch.tensor([3.0, -1.0, 0.5]), torch.tensor([2.0, 4.0, -2.0])
    expected = P.sigmoid_loss(torch.tensor([-1.0 - -2.0, 0.5 - 2.0, 3.0 - 4.0]), beta=BETA, label_smoothing=0.1)
    assert torch.allclose(P.aot_unpaired_loss(c, r, beta=BETA, label_smoothing=0.1), expected)
    assert torch.allclose(P.aot_loss(c, r, beta=BETA, label_smoothing=0.1), expected)


def test_aot_does_not_depend_on_the_order_of_the_pairs():
    c, r, order = draw(seed=1), draw(seed=2), torch.randperm(6, generator=torch.Generator().manual_seed(3))
    assert torch.equal(P.aot_unpaired_loss(c[order], r, beta=BETA), P.aot_unpaired_loss(c, r, beta=BETA))
    # Paired: the policy's margins against those of the reference, each on its own.
    assert torch.equal(P.aot_loss(c[order], r, beta=BETA), P.aot_loss(c, r, beta=BETA))


def test_aot_without_a_reference():
    m = draw()
    assert torch.equal(P.aot_loss(m, 0.0, beta=BETA), P.sigmoid_loss(m.sort().values, beta=BETA))


# -- extremes and metrics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_MARGINS)
@pytest.mark.parametrize("value", [-1e4, 1e4])
def test_finite_far_out(name, value):
    margins = torch.tensor([value], requires_grad=True)
    loss = OF_MARGINS[name](margins, beta=BETA)
    loss.backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(margins.grad).all()


def test_discopop_follows_the_logistic_where_the_exponential_overflows():
    # exp(5000) is infinite; its weight is sigmoid(-1e5).
    assert P.discopop_loss(torch.tensor([-1e4]), beta=0.5, tau=0.05).item() == pytest.approx(5000.0)


@pytest.mark.parametrize("name", OF_BOTH)
@pytest.mark.parametrize(("c", "r"), [(-1e4, 1e4), (1e4, -1e4)])
def test_both_finite_far_out(name, c, r):
    chosen, rejected = torch.tensor([c], requires_grad=True), torch.tensor([r], requires_grad=True)
    loss = OF_BOTH[name](chosen, rejected, beta=BETA)
    loss.backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(chosen.grad).all()
    assert torch.isfinite(rejected.grad).all()


def test_metrics_are_detached_and_ties_are_no_hits():
    chosen, rejected = (torch.tensor(v, requires_grad=True) for v in ([1.0, 2.0, -3.0], [0.5, 2.0, 1.0]))
    metrics = P.pair_metrics(chosen, rejected)
    assert metrics["rewards/accuracies"].tolist() == [1.0, 0.0, 0.0]
    assert metrics["rewards/margins"].tolist() == [0.5, 0.0, -4.0]
    assert metrics["rewards/chosen"].tolist() == [1.0, 2.0, -3.0]
    assert metrics["rewards/rejected"].tolist() == [0.5, 2.0, 1.0]
    assert not any(m.requires_grad for m in metrics.values())
