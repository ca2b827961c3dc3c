"""How often the policy-gradient losses clip, and what VESPO's weights are. Shapes are those of `workbench.losses.policy`."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from workbench.losses.policy_options import Level, Loss, PolicyOptions
from workbench.losses.policy_ratios import kept, vespo_weights
from workbench.losses.sequences import sequence_lengths, sequence_means


class ClipMetrics(NamedTuple):
    """What a step's metrics are made of.

    Args:
        means: by name, values and their weights, both ``[n]``: the metric is their mean over the step.
        extremes: by name, values ``[n]`` and whether the smallest or the largest is wanted.
    """

    means: dict[str, tuple[Tensor, Tensor]]
    extremes: dict[str, tuple[Tensor, Literal["min", "max"]]]


@torch.no_grad()
def clip_metrics(
    loss: Loss,
    log_ratio: Tensor,
    advantages: Tensor,
    weights: Tensor,
    segment: Tensor,
    options: PolicyOptions,
    *,
    level: Level = "token",
    correction: Tensor | None = None,
) -> ClipMetrics:
    """How often a loss clips, where clipping matters: at the lower bound where A < 0, at the upper one where A > 0.

    ``clip_ratio/{low,high,region}_mean`` are shares of tokens (of sequences with ``level="sequence"``), ``clip_ratio/low_min``
    and ``clip_ratio/high_max`` the smallest and largest share of any completion. ``cispo_clip_ratio`` is the share above
    ``epsilon_high`` with A > 0, ``vespo/phi_seq_mean`` the mean of `vespo_weights`. SAPO clips nothing.
    """
    size = len(advantages)
    trained = sequence_lengths(weights, segment, size) != 0
    if loss == "vespo":
        phi = vespo_weights(kept(log_ratio, weights), advantages, weights, segment, options, correction)
        return ClipMetrics({"vespo/phi_seq_mean": (phi, trained.to(phi))}, {})
    of_token, log_ratio = kept(advantages[segment], weights), kept(log_ratio, weights)
    if loss == "cispo":
        above = (log_ratio > math.log(options.high)) & (of_token > 0)
        return ClipMetrics({"cispo_clip_ratio": _shares(above, weights, segment, trained, level)}, {})
    if loss == "sapo":
        return ClipMetrics({}, {})
    ratio = log_ratio.exp()
    low, high = (ratio < 1 - options.epsilon) & (of_token < 0), (ratio > 1 + options.high) & (of_token > 0)
    return _clip_ratios(low, high, weights, segment, trained, level)


@torch.no_grad()
def gmpo_clip_metrics(log_ratio: Tensor, advantages: Tensor, weights: Tensor, segment: Tensor, epsilon: float) -> ClipMetrics:
    """`clip_metrics` of `gmpo_loss`."""
    of_token, log_ratio = kept(advantages[segment], weights), kept(log_ratio, weights)
    trained = sequence_lengths(weights, segment, len(advantages)) != 0
    low, high = (log_ratio < -epsilon) & (of_token < 0), (log_ratio > epsilon) & (of_token > 0)
    return _clip_ratios(low, high, weights, segment, trained, "token")


def _clip_ratios(low: Tensor, high: Tensor, weights: Tensor, segment: Tensor, trained: Tensor, level: Level) -> ClipMetrics:
    named = {"low": low, "high": high, "region": low | high}
    means = {f"clip_ratio/{name}_mean": _shares(where, weights, segment, trained, level) for name, where in named.items()}
    share = {name: _shares(where, weights, segment, trained, "sequence")[0][trained] for name, where in named.items()}
    return ClipMetrics(means, {"clip_ratio/low_min": (share["low"], "min"), "clip_ratio/high_max": (share["high"], "max")})


def _shares(where: Tensor, weights: Tensor, segment: Tensor, trained: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Whether each token, or what share of each completion, with the weights."""
    if level == "token":
        return where.to(weights), weights
    return sequence_means(where.to(weights), weights, segment, len(trained)), trained.to(weights)
