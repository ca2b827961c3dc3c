"""CPO, SimPO, AlphaPO, TPO and ORPO: numbers by hand, gradients, what equals what, options, extremes."""

import math

import pytest
import torch

from workbench.losses import preference as P
from workbench.losses.dpo import dpo_loss
from workbench.losses.preference import Pairs
from workbench.losses.reference_free import READS, cpo_loss, log_odds_margins, orpo_loss, policy_scores, tpo_loss

CPO = ("sigmoid", "hinge", "ipo", "simpo", "alphapo")
TPO = ("sigmoid", "hinge", "ipo", "tpo-l")
# Log-probabilities -4 and -9 over 2 and 3 tokens: margin 5, per token -2 - -3 = 1.
PAIR = Pairs(torch.tensor([-4.0]), torch.tensor([-9.0]), torch.tensor([2.0]), torch.tensor([3.0]))


def draw(size=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sums = [-10 * torch.rand(size, dtype=torch.float64, generator=generator) - 0.5 for _ in range(2)]
    return Pairs(*sums, *(torch.randint(1, 9, (size,), generator=generator).double() for _ in range(2)))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("sigmoid", math.log1p(math.exp(-0.5))),
        ("hinge", 0.5),
        ("ipo", (1 - 5.0) ** 2),
        ("simpo", math.log1p(math.exp(-(0.1 - 0.3)))),
        # (1 - p^-0.5) / 0.5 at p = e^-2, e^-3: -3.4365637 and -6.9633781.
        ("alphapo", math.log1p(math.exp(-(0.1 * 3.5268144 - 0.3)))),
    ],
)
def test_cpo_by_hand(loss, expected):
    alpha = 0.5 if loss == "alphapo" else 0.0
    assert cpo_loss(PAIR, loss, beta=0.1, gamma=0.3, alpha=alpha).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss", CPO)
def test_cpo_gradient(loss):
    pairs = draw()

    def value(chosen, rejected):
        return cpo_loss(pairs._replace(chosen=chosen, rejected=rejected), loss, beta=0.23, label_smoothing=0.1, alpha=0.25)

    assert torch.autograd.gradcheck(value, (pairs.chosen.requires_grad_(), pairs.rejected.requires_grad_()))


@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo"])
def test_cpo_is_dpo_without_a_reference(loss):
    pairs = draw()
    assert torch.equal(cpo_loss(pairs, loss, beta=0.3), dpo_loss(pairs, loss, beta=0.3))


@pytest.mark.parametrize("loss", CPO)
def test_cpo_does_not_read_the_reference(loss):
    pairs = draw()
    assert torch.equal(
        cpo_loss(pairs, loss), cpo_loss(pairs._replace(ref_chosen=pairs.chosen, ref_rejected=pairs.rejected), loss)
    )


def test_swapped_pair_is_the_opposite_label():
    pairs = draw()
    swapped = Pairs(pairs.rejected, pairs.chosen, pairs.rejected_lengths, pairs.chosen_lengths)
    assert torch.allclose(cpo_loss(swapped, label_smoothing=0.2), cpo_loss(pairs, label_smoothing=0.8))


def test_alphapo_at_alpha_zero_is_simpo():
    pairs = draw()
    simpo = cpo_loss(pairs, "simpo", beta=2.0)
    assert torch.equal(cpo_loss(pairs, "alphapo", beta=2.0, alpha=0.0), simpo)
    assert torch.allclose(cpo_loss(pairs, "alphapo", beta=2.0, alpha=1e-8), simpo, atol=1e-6)


@pytest.mark.parametrize(("tpo", "cpo"), [("sigmoid", "sigmoid"), ("hinge", "hinge"), ("ipo", "ipo"), ("tpo-l", "simpo")])
def test_tpo_is_the_same_family(tpo, cpo):
    pairs = draw()
    ours = tpo_loss(pairs, tpo, beta=0.3, label_smoothing=0.1, gamma=0.2)
    assert torch.equal(ours, cpo_loss(pairs, cpo, beta=0.3, label_smoothing=0.1, gamma=0.2))


def test_simpo_uses_the_mean_and_its_margin():
    pairs = draw()
    margins = pairs.chosen / pairs.chosen_lengths - pairs.rejected / pairs.rejected_lengths
    assert torch.allclose(cpo_loss(pairs, "simpo", beta=2.0, gamma=0.5), P.simpo_loss(margins, beta=2.0, gamma=0.5))


@pytest.mark.parametrize("option", ["beta", "label_smoothing", "gamma"])
@pytest.mark.parametrize("loss", sorted({*CPO, *TPO}))
def test_exactly_the_options_it_reads_change_it(loss, option):
    function = cpo_loss if loss in CPO else tpo_loss
    base, other = {"beta": 0.1, "label_smoothing": 0.0, "gamma": 0.5}, {"beta": 0.2, "label_smoothing": 0.1, "gamma": 0.7}
    changed = not torch.equal(function(draw(), loss, **base), function(draw(), loss, **{**base, option: other[option]}))
    assert changed == (option in READS[loss])


def test_defaults_are_the_papers():
    pairs = draw()
    for loss in CPO:
        explicit = cpo_loss(pairs, loss, beta=0.1, label_smoothing=0.0, gamma=0.5, alpha=0.0)
        assert torch.equal(cpo_loss(pairs, loss), explicit)
        assert torch.equal(policy_scores(pairs, loss)[0], policy_scores(pairs, loss, alpha=0.0)[0])
    for loss in TPO:
        assert torch.equal(tpo_loss(pairs, loss), tpo_loss(pairs, loss, beta=0.01, label_smoothing=0.0, gamma=0.5))


@pytest.mark.parametrize("loss", CPO)
def test_alpha_changes_every_cpo_loss(loss):
    assert not torch.allclose(cpo_loss(draw(), loss, alpha=0.3), cpo_loss(draw(), loss))


def test_logged_margins_are_what_the_loss_sees():
    pairs = draw()
    chosen, rejected = policy_scores(pairs, "sigmoid", alpha=0.25)
    margins = P.pair_metrics(0.3 * chosen, 0.3 * rejected)["rewards/margins"]
    assert torch.allclose(torch.log1p(torch.exp(-margins)), cpo_loss(pairs, "sigmoid", beta=0.3, alpha=0.25))


def test_alpha_reward_is_finite_for_unlikely_sums():
    # p = exp(-500) is 0 in fp32, and 0^-alpha infinite.
    pairs = Pairs(*(torch.tensor([v], requires_grad=True) for v in (-500.0, -600.0)), torch.tensor([9.0]), torch.tensor([9.0]))
    loss = cpo_loss(pairs, "sigmoid", alpha=0.25)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(pairs.chosen.grad)


# -- ORPO -----------------------------------------------------------------------------------------------------------


def test_log_odds_by_hand():
    # odds 0.4 / 0.6 and 0.25 / 0.75: their quotient is 2.
    log_odds = log_odds_margins(torch.tensor([0.4]).log(), torch.tensor([0.25]).log())
    assert log_odds.item() == pytest.approx(math.log(2), rel=1e-6)
    assert orpo_loss(log_odds, beta=0.1).item() == pytest.approx(0.1 * math.log(1.5), rel=1e-6)


def test_log_odds_change_sign_with_the_pair():
    chosen, rejected = -draw().chosen_lengths / 7, -draw(seed=1).chosen_lengths / 5
    assert torch.allclose(log_odds_margins(chosen, rejected), -log_odds_margins(rejected, chosen))


def test_log_odds_gradient():
    chosen = torch.tensor([-0.1, -0.5, -0.8, -4.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([-3.0, -0.69, -0.7, -0.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c, r: orpo_loss(log_odds_margins(c, r), beta=0.3), (chosen, rejected))


@pytest.mark.parametrize("logp", [-1e-6, -1e-3, -0.6931, -0.6932, -20.0, -80.0])
def test_log_odds_are_accurate_near_certainty_and_far_from_it(logp):
    exact = logp - math.log(-math.expm1(logp))
    ours = log_odds_margins(torch.tensor([logp]), torch.tensor([-math.log(2)]))  # odds of 1/2 are 1
    assert ours.item() == pytest.approx(exact, rel=1e-5, abs=1e-6)


def test_certain_and_impossible_completions_stay_finite():
    chosen, rejected = torch.tensor([0.0, -1e4], requires_grad=True), torch.tensor([-1e4, 0.0], requires_grad=True)
    loss = orpo_loss(log_odds_margins(chosen, rejected), beta=0.1)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(chosen.grad).all()
    assert torch.isfinite(rejected.grad).all()
