import math

import pytest
import torch
from torch.autograd import gradcheck

from workbench.errors import UserError
from workbench.losses.policy import PolicyOptions, gmpo_loss, log_ratios, policy_loss, reduction
from workbench.losses.policy_options import CLIPPED, LOSSES
from workbench.losses.policy_ratios import vespo_weights
from workbench.losses.reduce import Normalisers, reduce

F64 = torch.float64
SEGMENT = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3])
WEIGHTS = torch.tensor([1, 1, 1, 1, 1, 1, 1, 1, 1], dtype=F64)
ADVANTAGES = torch.tensor([1.5, -0.7, 0.0, -1.2], dtype=F64)


def options(loss, **changes):
    return PolicyOptions(**({"epsilon_high": 1.5} if loss == "cispo" else {}) | changes)


def level(loss):
    return "sequence" if loss == "luspo" else "token"


def drawn(seed=0, spread=0.5):
    generator = torch.Generator().manual_seed(seed)
    logps = -torch.rand(len(SEGMENT), dtype=F64, generator=generator) * 3
    return logps, logps + spread * torch.randn(len(SEGMENT), dtype=F64, generator=generator)


def losses_of(loss, logps, old, weights=WEIGHTS, segment=SEGMENT, advantages=ADVANTAGES, opts=None, correction=None, at=None):
    ratio = log_ratios(logps, old, weights, segment, len(advantages), at or level(loss))
    return policy_loss(
        loss,
        logps=logps,
        log_ratio=ratio,
        advantages=advantages,
        weights=weights,
        segment=segment,
        options=opts or options(loss),
        correction=correction,
    )


def of_ratio(loss, ratio, advantage, **changes):
    """Loss and its slope in log p of one token with this ratio."""
    logp = torch.tensor([math.log(0.5)], dtype=F64, requires_grad=True)
    old = torch.tensor([math.log(0.5 / ratio)], dtype=F64)
    one, zero = torch.ones(1, dtype=F64), torch.zeros(1, dtype=torch.long)
    value = losses_of(loss, logp, old, one, zero, torch.tensor([advantage], dtype=F64), options(loss, **changes))
    return value.item(), torch.autograd.grad(value.sum(), logp)[0].item()


@pytest.mark.parametrize("loss", CLIPPED)
@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.56, 0.0),  # 1 + 0.28
        (0.5, 2.0, -1.0, -1.0),  # the pessimistic side is not clipped
        (0.5, -2.0, 1.6, 0.0),  # 1 - 0.2
        (1.5, -2.0, 3.0, 3.0),
        (9.0, -2.0, 18.0, 18.0),
    ],
)
def test_the_clipped_surrogate(loss, ratio, advantage, value, slope):
    assert of_ratio(loss, ratio, advantage, epsilon=0.2, epsilon_high=0.28) == pytest.approx((value, slope), abs=1e-12)


def test_without_epsilon_high_both_bounds_are_epsilon():
    assert of_ratio("dapo", 1.5, 1.0, epsilon=0.3)[0] == pytest.approx(-1.3)
    assert of_ratio("dapo", 0.5, -1.0, epsilon=0.3)[0] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [(9.0, -2.0, 8.0, 0.0), (3.0, -2.0, 6.0, 6.0), (9.0, 2.0, -2.4, 0.0), (0.5, -2.0, 1.6, 0.0)],
)
def test_delta_bounds_the_loss_of_negative_advantages(ratio, advantage, value, slope):
    assert of_ratio("grpo", ratio, advantage, delta=4.0) == pytest.approx((value, slope), abs=1e-12)


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.1), (1.4, 1.4), (1.6, 1.5), (40.0, 1.5)])
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_cispo_bounds_a_weight_and_keeps_every_gradient(ratio, weight, advantage):
    value, slope = of_ratio("cispo", ratio, advantage)
    assert (value, slope) == pytest.approx((-weight * advantage * math.log(0.5), -weight * advantage))


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05), (2.0, 3.0)])
def test_sapo_by_hand(advantage, tau):
    name = "sapo_temperature_pos" if advantage > 0 else "sapo_temperature_neg"
    gate = 1 / (1 + math.exp(-tau * 0.5))
    value, slope = of_ratio("sapo", 1.5, advantage, **{name: tau})
    assert value == pytest.approx(-4 / tau * gate * advantage)
    assert slope == pytest.approx(-4 * gate * (1 - gate) * 1.5 * advantage)


def test_vespo_by_hand():
    logps = torch.tensor([-1.0, -2.0, -0.5], dtype=F64, requires_grad=True)
    old = torch.tensor([-1.3, -2.1, -0.9], dtype=F64)
    segment, weights, advantages = torch.tensor([0, 0, 1]), torch.ones(3, dtype=F64), torch.tensor([2.0, -1.0], dtype=F64)
    w = [math.exp(0.4), math.exp(0.4)]
    phi = [w[0] ** 2 * math.exp(3 * (1 - w[0])), w[1] ** 3 * math.exp(2 * (1 - w[1]))]
    values = losses_of("vespo", logps, old, weights, segment, advantages)
    assert values.tolist() == pytest.approx([phi[0] * 2, phi[0] * 4, -phi[1] * 0.5])
    assert torch.autograd.grad(values.sum(), logps)[0].tolist() == pytest.approx([-2 * phi[0], -2 * phi[0], phi[1]])


def test_vespo_takes_the_correction_into_its_weight():
    logps, old = drawn()
    correction = torch.full_like(logps, 1.1)
    corrected = losses_of("vespo", logps, old, correction=correction)
    assert torch.allclose(corrected, losses_of("vespo", logps, old - math.log(1.1)))
    masked = losses_of("vespo", logps, old, correction=correction.clone().index_fill(0, torch.tensor([0]), 0.0))
    assert masked[:3].tolist() == [0, 0, 0] and torch.allclose(masked[3:], corrected[3:])


@pytest.mark.parametrize("k", [0.0, 2.0])
@pytest.mark.parametrize("log_w", [-800.0, 800.0])
def test_vespo_weights_are_finite_at_the_edges(k, log_w):
    one, zero = torch.ones(1, dtype=F64), torch.zeros(1, dtype=torch.long)
    weight = vespo_weights(torch.tensor([log_w], dtype=F64), one, one, zero, PolicyOptions(vespo_k_pos=k))
    assert weight.item() == pytest.approx(math.exp(3) if k == 0 and log_w < 0 else 0.0)


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "vespo"])
def test_a_correction_multiplies_the_loss(loss):
    logps, old = drawn()
    correction = torch.linspace(0, 2, len(logps), dtype=F64)
    assert torch.allclose(losses_of(loss, logps, old, correction=correction), losses_of(loss, logps, old) * correction)


def test_at_ratio_one_all_clipped_losses_are_equal_and_all_gradients():
    logps, _ = drawn()
    expected = -ADVANTAGES[SEGMENT]
    for loss in LOSSES:
        leaf = logps.clone().requires_grad_()
        values = losses_of(loss, leaf, logps)
        if loss in CLIPPED:
            assert torch.allclose(values, expected)
        # Each is the plain policy gradient, -A d log p, also where the ratio is that of the sequence.
        wanted = torch.autograd.grad(values.sum(), leaf)[0]
        assert torch.allclose(wanted, expected, atol=1e-12), loss


def test_a_huge_epsilon_is_the_unclipped_surrogate():
    logps, old = drawn(spread=2.0)
    values = losses_of("dapo", logps, old, opts=PolicyOptions(epsilon=0.999999999, epsilon_high=1e9))
    assert torch.allclose(values, -(logps - old).exp() * ADVANTAGES[SEGMENT])


def test_gspo_at_length_one_is_the_token_level():
    logps, old = drawn()
    segment, advantages = torch.arange(9), torch.linspace(-1, 1, 9, dtype=F64)
    sequence = losses_of("grpo", logps, old, segment=segment, advantages=advantages, at="sequence")
    assert torch.allclose(sequence, losses_of("grpo", logps, old, segment=segment, advantages=advantages))


def test_gspo_clips_the_geometric_mean_and_its_gradient_reaches_every_token():
    logps = torch.tensor([-1.0, -2.0], dtype=F64, requires_grad=True)
    old, zero, one = torch.tensor([-1.1, -2.3], dtype=F64), torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=F64)
    values = losses_of("grpo", logps, old, one, zero, torch.tensor([2.0], dtype=F64), PolicyOptions(epsilon=0.5), at="sequence")
    ratio = math.exp(0.2)
    assert values.tolist() == pytest.approx([-2 * ratio] * 2)
    # Each of the two tokens carries half of the ratio's slope, twice.
    assert torch.autograd.grad(values.sum(), logps)[0].tolist() == pytest.approx([-2 * ratio] * 2)


def test_gmpo_clips_each_token_before_the_mean():
    old = torch.zeros(4, dtype=F64)
    logps = torch.tensor([0.9, -0.9, 0.9, -0.9], dtype=F64, requires_grad=True)
    segment, one = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=F64)
    ratio = log_ratios(logps, old, one, segment, 2)
    values = gmpo_loss(ratio, torch.tensor([2.0, -3.0], dtype=F64), one, segment, epsilon=0.4)
    low, high = math.exp((0.4 - 0.9) / 2), math.exp((0.9 - 0.4) / 2)
    assert values.tolist() == pytest.approx([-2 * low, 3 * high])
    assert torch.autograd.grad(values.sum(), logps)[0].tolist() == pytest.approx([0, -low, 1.5 * high, 0])


@pytest.mark.parametrize("loss", [name for name in LOSSES if name not in ("cispo", "vespo")])
def test_gradients_by_finite_differences(loss):
    logps, old = drawn(seed=3)
    assert gradcheck(lambda x: losses_of(loss, x, old), logps.requires_grad_())


def test_gmpo_gradient_by_finite_differences():
    logps, old = drawn(seed=3)
    assert gradcheck(lambda x: gmpo_loss(x - old, ADVANTAGES, WEIGHTS, SEGMENT, 0.4), logps.requires_grad_())


@pytest.mark.parametrize("loss", [*LOSSES, "gmpo"])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e4, 1e4])
def test_masking_a_token_is_deleting_it(loss, junk):
    logps, old = drawn()
    keep = torch.tensor([True, False, True, True, True, False, True, True, False])
    weights = WEIGHTS * keep

    def run(logps, old, weights, segment):
        if loss == "gmpo":
            return gmpo_loss(log_ratios(logps, old, weights, segment, 4), ADVANTAGES, weights, segment, 0.4)
        values = losses_of(loss, logps, old, weights, segment)
        return values * reduction(loss).weights(weights, segment, 4)

    masked = logps.masked_fill(~keep, junk).requires_grad_()
    values = run(masked, old.masked_fill(~keep, junk), weights, SEGMENT)
    deleted = logps[keep].requires_grad_()
    wanted = run(deleted, old[keep], WEIGHTS[keep], SEGMENT[keep])
    assert torch.equal(values if loss == "gmpo" else values[keep], wanted)
    gradient, of_deleted = (torch.autograd.grad(v.sum(), leaf)[0] for v, leaf in ((values, masked), (wanted, deleted)))
    assert torch.equal(gradient[keep], of_deleted) and gradient[~keep].eq(0).all()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("log_ratio", [-2000.0, 2000.0])
def test_overflow_of_a_clipped_ratio_leaves_no_nan(loss, log_ratio):
    logps = torch.tensor([-1.0], dtype=F64, requires_grad=True)
    one, zero = torch.ones(1, dtype=F64), torch.zeros(1, dtype=torch.long)
    for advantage in (1.0, 0.0, -1.0):
        opts = options(loss, **({"delta": 4.0} if loss in CLIPPED else {}))
        value = losses_of(loss, logps, logps.detach() - log_ratio, one, zero, torch.tensor([advantage], dtype=F64), opts)
        assert value.isfinite().all() and torch.autograd.grad(value.sum(), logps)[0].isfinite().all()


def norm(rows, micro=1):
    """What a step of sequences 0..3 holds."""
    return Normalisers(9.0, 4.0, 4.0, micro, num_micro=micro, scale=1.0, constant=4 * 8.0)


BY_HAND = {  # with the losses 1..9 of lengths 3, 2, 1, 3
    "grpo": (2 + 4.5 + 6 + 8) / 4,
    "sapo": (2 + 4.5 + 6 + 8) / 4,
    "dapo": 45 / 9,
    "cispo": 45 / 9,
    "vespo": 45 / 9,
    "bnpo": 45 / 9,
    "dr_grpo": 45 / 32,
    "luspo": 45 / 4,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_reductions_by_hand_and_in_any_order(loss):
    values, how = torch.arange(1, 10, dtype=F64), reduction(loss)
    assert reduce_all(values, how, SEGMENT) == pytest.approx(BY_HAND[loss])
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    assert reduce_all(values[order], how, SEGMENT[order]) == pytest.approx(BY_HAND[loss])


def reduce_all(values, how, segment, micro=1):
    weights = how.weights(torch.ones(len(values), dtype=F64), segment, 4)
    return reduce(values, weights, norm(4, micro), per=how.per, scope=how.scope or "step").item()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("cut", [3, 5, 6])
def test_a_step_does_not_depend_on_how_it_is_cut(loss, cut):
    values, how = torch.arange(1, 10, dtype=F64), reduction(loss)
    total = sum(reduce_all(values[part], how, SEGMENT[part], 2) for part in (slice(cut), slice(cut, None)))
    if loss == "bnpo":  # the mean of the means of micro-batches, by definition
        assert total == pytest.approx((values[:cut].mean() + values[cut:].mean()).item() / 2)
    else:
        assert total == pytest.approx(BY_HAND[loss])


def test_an_unknown_loss_is_named():
    with pytest.raises(UserError, match=r"'dapp'.*'dapo'"):
        reduction("dapp")
