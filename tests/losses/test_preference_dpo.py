"""DPO's losses by name: values at policy = reference, what each is a function of, weighted lists, divergences, refusals."""

import math

import pytest
import torch

from workbench.errors import UserError
from workbench.losses import preference as P
from workbench.losses.divergence import divergence_scores
from workbench.losses.dpo import DPO_LOSSES, check_dpo_options, dpo_loss, loss_weights, options_of
from workbench.losses.preference import Pairs

ON_PAIRS = [name for name in DPO_LOSSES if name != "sft"]
OPTIONS = {"beta": 0.7, "label_smoothing": 0.2, "tau": 0.5, "reward_shift": 0.4, "divergence": "js_divergence"}
BASE = {"beta": 0.3, "label_smoothing": 0.1, "tau": 0.05, "reward_shift": 0.0, "divergence": "reverse_kl"}


def draw(size=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    columns = [-20 + 3 * torch.randn(size, dtype=torch.float64, generator=generator) for _ in range(4)]
    lengths = [torch.randint(1, 9, (size,), generator=generator).double() for _ in range(2)]
    return Pairs(columns[0], columns[1], *lengths, ref_chosen=columns[2], ref_rejected=columns[3])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sigmoid", math.log(2)),
        ("hinge", 1.0),
        ("ipo", 1 / (4 * 0.3**2)),
        ("exo_pair", 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)),
        ("nca_pair", 2 * math.log(2)),
        ("robust", math.log(2)),
        ("bco_pair", 2 * math.log(2)),
        ("sppo_hard", 1 / (2 * 0.3**2)),
        ("aot", math.log(2)),
        ("aot_unpaired", math.log(2)),
        ("discopop", (math.log(2) + 1) / 2),
        ("apo_zero", 1.0),
        ("apo_down", 1.0),
        ("sigmoid_norm", math.log(2)),
    ],
)
def test_at_the_reference(name, expected):
    pairs = draw()
    pairs = pairs._replace(ref_chosen=pairs.chosen, ref_rejected=pairs.rejected)
    assert torch.allclose(dpo_loss(pairs, name, beta=0.3, label_smoothing=0.1), torch.full((5,), expected, dtype=torch.float64))


@pytest.mark.parametrize("name", ON_PAIRS)
def test_gradient(name):
    pairs = draw()

    def loss(chosen, rejected):
        return dpo_loss(pairs._replace(chosen=chosen, rejected=rejected), name, beta=0.23, label_smoothing=0.1)

    assert torch.autograd.gradcheck(loss, (pairs.chosen.requires_grad_(), pairs.rejected.requires_grad_()))


@pytest.mark.parametrize("name", [n for n in ON_PAIRS if not n.startswith("aot")])
def test_pairs_are_independent(name):
    """A pair's loss is the same alone as among others."""
    pairs = draw()
    alone = torch.cat([dpo_loss(Pairs(*(field[i : i + 1] for field in pairs)), name, label_smoothing=0.1) for i in range(5)])
    assert torch.allclose(dpo_loss(pairs, name, label_smoothing=0.1), alone)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_a_single_pair_has_one_quantile(name):
    pairs = draw(1)
    assert torch.allclose(dpo_loss(pairs, name), dpo_loss(pairs, "sigmoid"))


def test_aot_sorts_margins_and_aot_unpaired_log_ratios():
    pairs = draw()
    margins = (pairs.chosen - pairs.rejected).sort().values - (pairs.ref_chosen - pairs.ref_rejected).sort().values
    assert torch.allclose(dpo_loss(pairs, "aot", beta=0.3), P.sigmoid_loss(margins, beta=0.3))
    chosen, rejected = pairs.logratios()
    expected = P.sigmoid_loss(chosen.sort().values - rejected.sort().values, beta=0.3)
    assert torch.allclose(dpo_loss(pairs, "aot_unpaired", beta=0.3), expected)


@pytest.mark.parametrize(("name", "loss"), [("ipo", P.ipo_loss), ("sigmoid_norm", P.sigmoid_loss)])
def test_per_token_losses_divide_by_each_length(name, loss):
    pairs = draw()
    chosen, rejected = pairs.logratios()
    margins = chosen / pairs.chosen_lengths - rejected / pairs.rejected_lengths
    assert torch.allclose(dpo_loss(pairs, name, beta=0.3), loss(margins, beta=0.3))


def test_an_empty_completion_divides_by_one():
    pairs = draw()
    one = pairs._replace(chosen_lengths=torch.ones(5), rejected_lengths=torch.ones(5))
    empty = pairs._replace(chosen_lengths=torch.zeros(5), rejected_lengths=torch.zeros(5))
    assert torch.equal(dpo_loss(empty, "ipo"), dpo_loss(one, "ipo"))


@pytest.mark.parametrize("name", ON_PAIRS)
def test_reference_free_is_a_reference_of_zero(name):
    pairs = draw()
    free = Pairs(*pairs[:4])
    zeros = pairs._replace(ref_chosen=torch.zeros(5), ref_rejected=torch.zeros(5))
    assert torch.equal(dpo_loss(free, name, label_smoothing=0.1), dpo_loss(zeros, name, label_smoothing=0.1))
    assert not torch.equal(dpo_loss(free, name, label_smoothing=0.1), dpo_loss(pairs, name, label_smoothing=0.1))


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ON_PAIRS)
def test_exactly_the_options_it_reads_change_it(name, option):
    pairs = draw()
    changed = not torch.equal(dpo_loss(pairs, name, **BASE), dpo_loss(pairs, name, **{**BASE, option: OPTIONS[option]}))
    assert changed == (option in options_of(name))


def test_defaults_are_the_papers():
    pairs = draw()
    for name in ("sigmoid", "discopop"):
        assert torch.equal(dpo_loss(pairs, name), dpo_loss(pairs, name, beta=0.1, label_smoothing=0.0, tau=0.05))
    chosen, rejected = (divergence_scores(r, "alpha_divergence", alpha=0.5) for r in pairs.logratios())
    assert torch.equal(dpo_loss(pairs, divergence="alpha_divergence"), P.sigmoid_loss(chosen - rejected, beta=0.1))
    assert torch.equal(
        divergence_scores(pairs.chosen, "alpha_divergence"), divergence_scores(pairs.chosen, "alpha_divergence", alpha=0.5)
    )
    assert torch.equal(P.discopop_loss(pairs.chosen, beta=0.1), P.discopop_loss(pairs.chosen, beta=0.1, tau=0.05))


def test_divergence_order_changes_the_loss():
    pairs = draw()
    low, high = (dpo_loss(pairs, divergence="alpha_divergence", divergence_alpha=a) for a in (0.3, 0.6))
    assert not torch.allclose(low, high)


def test_weighted_list_is_the_weighted_sum():
    """MPO's mixture (and `sft` left to the tokens)."""
    pairs = draw()
    mixed = dpo_loss(pairs, {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}, beta=0.3)
    assert torch.allclose(mixed, 0.8 * dpo_loss(pairs, "sigmoid", beta=0.3) + 0.2 * dpo_loss(pairs, "bco_pair", beta=0.3))


def test_order_of_the_list_does_not_matter():
    pairs = draw()
    a = dpo_loss(pairs, {"hinge": 0.5, "apo_zero": 2.0, "sft": 1.0})
    b = dpo_loss(pairs, {"sft": 1.0, "apo_zero": 2.0, "hinge": 0.5})
    assert torch.allclose(a, b)


def test_sft_alone_has_no_pair_loss():
    assert dpo_loss(draw(), "sft").tolist() == [0.0] * 5


def test_label_smoothing_by_name():
    pairs = draw()
    mixed = dpo_loss(pairs, {"sigmoid": 1.0, "robust": 1.0}, label_smoothing={"robust": 0.1})
    assert torch.allclose(mixed, dpo_loss(pairs, "sigmoid") + dpo_loss(pairs, "robust", label_smoothing=0.1))


# -- divergences ----------------------------------------------------------------------------------------------------


def test_divergences_by_hand():
    # u = exp(0.5): 1 - 1/u = 0.3934693; log(2u / (1 + u)) = 0.2190706; (1 - u^-0.3) / 0.3 = 0.4643067.
    x = torch.tensor([0.5], dtype=torch.float64)
    assert divergence_scores(x, "reverse_kl").item() == 0.5
    assert divergence_scores(x, "forward_kl").item() == pytest.approx(1 - math.exp(-0.5))
    assert divergence_scores(x, "js_divergence").item() == pytest.approx(math.log(2 * math.exp(0.5) / (1 + math.exp(0.5))))
    assert divergence_scores(x, "alpha_divergence", alpha=0.3).item() == pytest.approx((1 - math.exp(-0.15)) / 0.3)


@pytest.mark.parametrize(
    ("divergence", "slope"), [("reverse_kl", 1), ("forward_kl", 1), ("js_divergence", 0.5), ("alpha_divergence", 1)]
)
def test_divergences_at_the_reference(divergence, slope):
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    score = divergence_scores(x, divergence)
    score.backward()
    assert score.item() == pytest.approx(0.0, abs=1e-12)
    assert x.grad.item() == pytest.approx(slope)


def test_alpha_divergence_joins_the_two_kl():
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    assert torch.equal(divergence_scores(x, "alpha_divergence", alpha=0.0), x)
    assert torch.allclose(divergence_scores(x, "alpha_divergence", alpha=1e-9), x, atol=1e-7)
    assert torch.allclose(divergence_scores(x, "alpha_divergence", alpha=1.0), divergence_scores(x, "forward_kl"))


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_divergence_is_exact_for_small_ratios(divergence):
    # Scores of 1e-6 in fp32: 1 - exp(-x) would keep one digit.
    slope = 0.5 if divergence == "js_divergence" else 1.0
    score = divergence_scores(torch.tensor([1e-4]), divergence) / slope
    assert score.item() == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_divergence_gradient_and_extremes(divergence):
    x = torch.linspace(-2, 2, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: divergence_scores(v, divergence), x)
    far = torch.tensor([-1e4, 1e4], requires_grad=True)
    margins = divergence_scores(far, divergence)
    loss = P.sigmoid_loss(margins, beta=0.1)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(far.grad).all()


def test_unknown_divergence():
    with pytest.raises(ValueError, match="unknown divergence 'kl'"):
        divergence_scores(torch.zeros(1), "kl")


# -- refusals -------------------------------------------------------------------------------------------------------


def test_loss_weights():
    assert loss_weights("ipo") == {"ipo": 1.0}
    assert loss_weights(["sigmoid", "sft"]) == {"sigmoid": 1.0, "sft": 1.0}
    assert loss_weights(["sigmoid", "sft"], [1.0, 0.005]) == {"sigmoid": 1.0, "sft": 0.005}


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        ("sigmiod", None, "Did you mean 'sigmoid'"),
        (["sigmoid", "sigmoid"], None, "none twice"),
        ([], None, "at least one"),
        (["sigmoid", "sft"], [1.0], "one value for each of the 2 losses sigmoid, sft"),
    ],
)
def test_loss_weights_refuses(names, weights, message):
    with pytest.raises(UserError, match=message):
        loss_weights(names, weights)


@pytest.mark.parametrize(
    ("losses", "options", "message"),
    [
        (["sigmoid"], {"beta": 0.0}, "beta=0.0 must be above 0"),
        (["sigmoid"], {"label_smoothing": 0.5}, "must lie in"),
        (["robust"], {"label_smoothing": -0.1}, "must lie in"),
        (
            ["hinge", "ipo"],
            {"label_smoothing": 0.1},
            "no effect on loss hinge, ipo; .* use losses among sigmoid, exo_pair, robust, aot,",
        ),
        (["sigmoid", "hinge"], {"label_smoothing": {"hinge": 0.1}}, "no effect on loss sigmoid, hinge"),
        (["exo_pair"], {}, "needs label_smoothing above 0"),
        (["exo_pair", "sigmoid"], {"label_smoothing": {"sigmoid": 0.1}}, "needs label_smoothing above 0"),
        (
            ["sigmoid", "apo_zero"],
            {"divergence": "forward_kl"},
            "does not go with loss sigmoid, apo_zero: .* use reverse_kl, or losses among sigmoid, hinge, ipo,",
        ),
        (["sft"], {"divergence": "forward_kl"}, "does not go with loss sft"),
        (["aot"], {"weighting": True}, "WPO weights belong to pairs"),
        (["sft"], {"weighting": True}, "WPO weights belong to pairs"),
    ],
)
def test_options_without_meaning_are_refused(losses, options, message):
    with pytest.raises(UserError, match=message):
        check_dpo_options(loss_weights(losses), **options)


@pytest.mark.parametrize(
    ("losses", "options"),
    [
        (["sigmoid", "hinge"], {"label_smoothing": 0.1}),
        (["exo_pair"], {"label_smoothing": 1e-3}),
        (["sigmoid", "robust"], {"label_smoothing": {"robust": 0.1}}),
        (["sigmoid", "sft"], {"divergence": "js_divergence", "weighting": True}),
        (["apo_zero"], {"weighting": True}),
    ],
)
def test_options_that_mean_something_pass(losses, options):
    check_dpo_options(loss_weights(losses), **options)
