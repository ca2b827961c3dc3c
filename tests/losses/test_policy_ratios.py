import math

import pytest
import torch
from torch.autograd import gradcheck

from workbench.errors import UserError
from workbench.losses.policy import PolicyOptions, clip_metrics, gmpo_clip_metrics, kl_estimate, log_ratios

F64 = torch.float64


def test_log_ratios_of_tokens_and_of_sequences():
    logps, old = torch.tensor([-1.0, -2.0, -3.0, math.nan], dtype=F64), torch.tensor([-1.5, -2.1, -2.0, 0.0], dtype=F64)
    weights, segment = torch.tensor([1.0, 1, 1, 0], dtype=F64), torch.tensor([0, 0, 1, 1])
    assert log_ratios(logps, old, weights, segment, 2).tolist() == pytest.approx([0.5, 0.1, -1.0, 0.0])
    assert log_ratios(logps, old, weights, segment, 2, "sequence")[:3].tolist() == pytest.approx([0.3, 0.3, -1.0])
    with pytest.raises(UserError, match="importance_sampling_level"):
        log_ratios(logps, old, weights, segment, 2, "row")


def test_the_three_estimators():
    logps, ref = torch.tensor([0.5, -0.5], dtype=F64), torch.zeros(2, dtype=F64)
    assert kl_estimate(logps, ref, "k1").tolist() == [0.5, -0.5]
    assert kl_estimate(logps, ref, "k2").tolist() == [0.125, 0.125]
    assert kl_estimate(logps, ref, "k3").tolist() == pytest.approx([0.10653, 0.14872], abs=5e-6)
    with pytest.raises(UserError, match="kl_estimator"):
        kl_estimate(logps, ref, "k4")


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_penalty_rises_with_distance_and_vanishes_at_the_reference(kind):
    logps = torch.tensor([-1.0, -0.3, 0.0, 0.2, 2.0], dtype=F64, requires_grad=True)
    values = kl_estimate(logps, torch.zeros(5, dtype=F64), kind)
    assert (values >= 0).all() and values[2] == 0
    slope = torch.autograd.grad(values.sum(), logps)[0]
    assert torch.equal(slope.sign(), logps.detach().sign())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_correction_multiplies_and_has_a_gradient(kind):
    old, ref = torch.tensor([-1.0, -0.4], dtype=F64), torch.tensor([-0.8, -0.9], dtype=F64)
    logps = torch.tensor([-0.7, -0.6], dtype=F64, requires_grad=True)
    corrected = kl_estimate(logps, ref, kind, log_ratio=logps - old)
    assert torch.allclose(corrected, kl_estimate(logps, ref, kind) * (logps - old).exp())
    assert gradcheck(lambda x: kl_estimate(x, ref, kind, log_ratio=x - old), logps)


def test_the_corrected_gradient_is_that_of_the_divergence():
    """Averaged over the old policy's tokens, ``r k3`` has value and gradient of KL(p || ref)."""
    scores = torch.tensor([0.3, -0.2, 0.9], dtype=F64, requires_grad=True)
    logps, ref = scores.log_softmax(0), torch.tensor([0.1, 0.5, -0.4], dtype=F64).log_softmax(0)
    old = torch.tensor([-0.5, 0.2, 0.3], dtype=F64).log_softmax(0)
    expected = (logps.exp() * (logps - ref)).sum()
    estimate = (old.exp() * kl_estimate(logps, ref, "k3", log_ratio=logps - old)).sum()
    assert torch.allclose(estimate, expected)
    wanted, got = (torch.autograd.grad(v, scores, retain_graph=True)[0] for v in (expected, estimate))
    assert torch.allclose(got, wanted)


def test_a_masked_token_has_no_divergence_and_no_gradient():
    logps = torch.tensor([0.5, math.nan, math.inf], dtype=F64, requires_grad=True)
    weights, ref = torch.tensor([1.0, 0, 0], dtype=F64), torch.tensor([0.0, 1.0, math.nan], dtype=F64)
    values = kl_estimate(logps, ref, weights=weights, log_ratio=logps)
    assert values[1:].tolist() == [0, 0]
    assert torch.autograd.grad(values.sum(), logps)[0][1:].tolist() == [0, 0]


def mean(pair):
    values, weights = pair
    return ((values * weights).sum() / weights.sum()).item()


SEGMENT = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
WEIGHTS = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0], dtype=F64)
ADVANTAGES = torch.tensor([1.0, -1.0, 0.0, -1.0], dtype=F64)  # the last completion is left out
RATIOS = torch.tensor([1.5, 0.5, 1.1, 2.0, 0.5, 1.5, 9.0, math.nan], dtype=F64)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "bnpo", "luspo"])
def test_clip_ratios_count_where_clipping_matters(loss):
    metrics = clip_metrics(loss, RATIOS.log(), ADVANTAGES, WEIGHTS, SEGMENT, PolicyOptions())
    means = {name: mean(pair) for name, pair in metrics.means.items()}
    assert means == pytest.approx({"clip_ratio/low_mean": 1 / 7, "clip_ratio/high_mean": 2 / 7, "clip_ratio/region_mean": 3 / 7})
    (low, smallest), (high, largest) = metrics.extremes["clip_ratio/low_min"], metrics.extremes["clip_ratio/high_max"]
    assert (low.tolist(), smallest) == ([0.0, 0.5, 0.0], "min")
    assert (high.tolist(), largest) == ([0.5, 0.0, 0.0], "max")


def test_clip_ratios_of_sequences_count_sequences():
    ratio = torch.tensor([1.5, 1.5, 1.5, 1.5, 0.5, 0.5, 9.0, 1.0], dtype=F64).log()
    metrics = clip_metrics("grpo", ratio, ADVANTAGES, WEIGHTS, SEGMENT, PolicyOptions(), level="sequence")
    means = {name: mean(pair) for name, pair in metrics.means.items()}
    assert means == pytest.approx({"clip_ratio/low_mean": 1 / 3, "clip_ratio/high_mean": 1 / 3, "clip_ratio/region_mean": 2 / 3})


def test_cispo_counts_its_own_bound():
    metrics = clip_metrics("cispo", RATIOS.log(), ADVANTAGES, WEIGHTS, SEGMENT, PolicyOptions(epsilon_high=1.6))
    assert {name: mean(pair) for name, pair in metrics.means.items()} == pytest.approx({"cispo_clip_ratio": 1 / 7})
    assert not metrics.extremes


def test_vespo_reports_its_weights_and_sapo_nothing():
    ratio = torch.tensor([0.1, 0.1, 0, 0, 0.2, 0.2, 0, math.nan], dtype=F64)
    metrics = clip_metrics("vespo", ratio, ADVANTAGES, WEIGHTS, SEGMENT, PolicyOptions())
    w = [math.exp(0.2), math.exp(0.4)]
    phi = [w[0] ** 2 * math.exp(3 * (1 - w[0])), w[1] ** 3 * math.exp(2 * (1 - w[1])), 1.0]
    assert mean(metrics.means["vespo/phi_seq_mean"]) == pytest.approx(sum(phi) / 3)
    assert clip_metrics("sapo", ratio, ADVANTAGES, WEIGHTS, SEGMENT, PolicyOptions()) == ({}, {})


def test_gmpo_counts_in_log_space():
    metrics = gmpo_clip_metrics(RATIOS.log(), ADVANTAGES, WEIGHTS, SEGMENT, epsilon=0.5)
    assert mean(metrics.means["clip_ratio/high_mean"]) == pytest.approx(1 / 7)  # log 1.5 is below 0.5
    assert mean(metrics.means["clip_ratio/low_mean"]) == pytest.approx(1 / 7)


def test_means_are_weighed_by_tokens_over_micro_batches():
    """2 tokens at 1.0 and 8 at 3.0 have the mean 2.6."""
    logps = [torch.full((n,), value, dtype=F64) for n, value in ((2, 1.0), (8, 3.0))]
    sums = [(kl_estimate(part, torch.zeros_like(part), "k1").sum(), len(part)) for part in logps]
    assert sum(s for s, _ in sums).item() / sum(n for _, n in sums) == pytest.approx(2.6)
    whole = clip_metrics("dapo", RATIOS.log(), ADVANTAGES, WEIGHTS, SEGMENT, PolicyOptions())
    parts = [
        clip_metrics("dapo", RATIOS[cut].log(), ADVANTAGES, WEIGHTS[cut], SEGMENT[cut], PolicyOptions())
        for cut in (slice(4), slice(4, None))
    ]
    for name, pair in whole.means.items():
        joined = tuple(torch.cat([part.means[name][i] for part in parts]) for i in (0, 1))
        assert mean(joined) == pytest.approx(mean(pair))
