"""Policy-gradient losses on sampled completions, per token ``[T]`` and not reduced; `reduction` says how each one is.

They see one of two things, both per token:

- ``log_ratio``: `log_ratios`, the policy against the one that wrote the completions, of the token or of its whole sequence;
- ``logps``: the policy's log-probabilities, for losses whose ratio is a weight without gradient.

Tokens are flat. ``segment [T]`` says which of C completions each belongs to, ``weights [T]`` how much it counts; one of weight 0
counts for nothing and has no gradient, whatever stands there (NaN too). ``advantages [C]`` are those of the completions.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from workbench.errors import check_choice
from workbench.losses.policy_metrics import ClipMetrics, clip_metrics, gmpo_clip_metrics
from workbench.losses.policy_options import LOSSES, Loss, PolicyOptions, check_gmpo_options, check_policy_options
from workbench.losses.policy_ratios import kept, kl_estimate, log_ratios, pick, vespo_weights
from workbench.losses.reduce import Scope
from workbench.losses.sequences import sequence_lengths, sequence_means

__all__ = [
    "ClipMetrics",
    "PolicyOptions",
    "Reduction",
    "check_gmpo_options",
    "check_policy_options",
    "cispo_loss",
    "clip_metrics",
    "clipped_loss",
    "gmpo_clip_metrics",
    "gmpo_loss",
    "kl_estimate",
    "log_ratios",
    "policy_loss",
    "reduction",
    "sapo_loss",
]

_SATURATED = 20.0  # SAPO's gate has no slope left in fp64 at a ratio of e^20, whose exponential does not overflow yet


# -- losses ---------------------------------------------------------------------------------------------------------


def policy_loss(
    loss: Loss,
    *,
    logps: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    weights: Tensor,
    segment: Tensor,
    options: PolicyOptions,
    correction: Tensor | None = None,
) -> Tensor:
    """Losses of the tokens ``[T]``, to be reduced as `reduction` says; 0 at tokens of weight 0.

    Args:
        loss: which one.
        logps: log-probabilities under the policy ``[T]``.
        log_ratio: as `log_ratios` gives it ``[T]``; of ``vespo`` per token, of ``luspo`` per sequence.
        advantages: of the completions ``[C]``.
        weights: of the tokens ``[T]``.
        segment: the completion of each ``[T]``.
        options: of the losses.
        correction: ratio of the trainer's to the sampler's probability (see `workbench.losses.sampler`) ``[T]``. It multiplies
            the losses; ``vespo`` has it in its sequence's weight instead.
    """
    check_choice("method.loss", loss, LOSSES)
    of_token = kept(advantages[segment], weights)
    log_ratio, logps = kept(log_ratio, weights), kept(logps, weights)
    if loss == "vespo":
        weight = vespo_weights(log_ratio, advantages, weights, segment, options, correction)[segment]
        return kept(-weight * of_token * logps, weights)
    if loss == "cispo":
        values = cispo_loss(logps, log_ratio, of_token, options.high)
    elif loss == "sapo":
        values = sapo_loss(log_ratio, of_token, options.sapo_temperature_pos, options.sapo_temperature_neg)
    else:
        values = clipped_loss(log_ratio, of_token, options)
    return values if correction is None else values * kept(correction, weights)


def clipped_loss(log_ratio: Tensor, advantages: Tensor, options: PolicyOptions) -> Tensor:
    """``-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)``, PPO's surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    With ``delta``: ``-min(min(r, delta) A, clip(...) A)`` (INTELLECT-2, arXiv:2505.07291), which bounds the loss
    where A < 0; ``delta`` is above ``1 + epsilon_high``.

    Args:
        log_ratio: ``log r`` ``[T]``.
        advantages: of each token ``[T]``.
        options: ``epsilon``, ``epsilon_high`` and ``delta``.
    """
    # The minimum bounds r from above where A > 0 and from below where A < 0. Bounding log r keeps an overflowing r, whose slope
    # would be 0 * inf, out of the exponential.
    floor = math.log(1 - options.epsilon) if options.epsilon < 1 else -math.inf
    ceiling = math.inf if options.delta is None else math.log(options.delta)
    low = pick(advantages < 0, floor, -math.inf, log_ratio)
    high = pick(advantages < 0, ceiling, math.log1p(options.high), log_ratio)
    return -torch.clamp(log_ratio, low, high).exp() * advantages


def cispo_loss(logps: Tensor, log_ratio: Tensor, advantages: Tensor, epsilon_high: float) -> Tensor:
    """``-sg(min(r, epsilon_high)) A log p`` (MiniMax-M1, arXiv:2506.13585), without a lower bound, as the paper
    runs it: every token keeps a gradient, none weighs more than ``epsilon_high``."""
    return -log_ratio.detach().clamp(max=math.log(epsilon_high)).exp() * advantages * logps


def sapo_loss(log_ratio: Tensor, advantages: Tensor, temperature_pos: float, temperature_neg: float) -> Tensor:
    """``-f(r) A`` with ``f(r) = 4 / tau * sigmoid(tau (r - 1))`` (SAPO, arXiv:2511.20347); at r = 1 its slope is 1.

    ``tau`` is ``temperature_pos`` where A > 0, else ``temperature_neg``.
    """
    tau = pick(advantages > 0, temperature_pos, temperature_neg, log_ratio)
    return -4 / tau * torch.sigmoid(tau * torch.expm1(log_ratio.clamp(max=_SATURATED))) * advantages


def gmpo_loss(
    log_ratio: Tensor, advantages: Tensor, weights: Tensor, segment: Tensor, epsilon: float, num_rows: int | None = None
) -> Tensor:
    """``-A (prod_t r_t)^(1 / |y|)`` of each completion ``[C]``, its tokens' ratios clipped first (Geometric-Mean Policy
    Optimization, arXiv:2507.20673).

    ``log r_t`` is at most ``epsilon`` where A > 0 and at least ``-epsilon`` where A < 0.

    Args:
        log_ratio: per token ``[T]``.
        advantages: of the completions ``[C]``.
        weights: of the tokens ``[T]``.
        segment: the completion of each ``[T]``.
        epsilon: bound of the log-ratios, nats.
        num_rows: number of completions; None: that of ``advantages``.

    Returns:
        ``[C]``, to be averaged over completions; one without trained tokens has ``-A`` and no gradient: give it weight 0.
    """
    log_ratio, of_token = kept(log_ratio, weights), kept(advantages[segment], weights)
    low = pick(of_token < 0, -epsilon, -math.inf, log_ratio)
    high = pick(of_token < 0, math.inf, epsilon, log_ratio)
    means = sequence_means(torch.clamp(log_ratio, low, high), weights, segment, num_rows or len(advantages))
    return -means.exp() * advantages


# -- how they are reduced -------------------------------------------------------------------------------------------


class Reduction(NamedTuple):
    """How the losses of tokens become one number.

    Args:
        mean_over_tokens: whether each completion's tokens are averaged first (weights ``1 / |y|``), or each token counts 1.
        per: the normaliser that divides the sum (see `workbench.losses.reduce`).
        scope: over what, where the definition says so; None: as the method's.
    """

    mean_over_tokens: bool
    per: Literal["tokens", "sequences", "constant"]
    scope: Scope | None = None

    def weights(self, weights: Tensor, segment: Tensor, num_rows: int) -> Tensor:
        """The tokens' weights in the sum ``[T]``."""
        if not self.mean_over_tokens:
            return weights
        lengths = sequence_lengths(weights, segment, num_rows)[segment]
        return weights / torch.where(lengths == 0, 1.0, lengths)


def reduction(loss: Loss) -> Reduction:
    """How ``loss`` is reduced.

    ``grpo`` and ``sapo`` average over a completion's tokens, then over completions (arXiv:2402.03300, arXiv:2511.20347).
    ``dapo``, ``cispo`` and ``vespo`` average over the tokens of the step (arXiv:2503.14476), ``bnpo`` over those of the
    micro-batch. ``dr_grpo`` divides the sum by a constant (arXiv:2503.20783): completions times the longest one allowed.
    ``luspo`` adds a completion's tokens and averages over completions (arXiv:2602.05261).
    """
    check_choice("method.loss", loss, LOSSES)
    if loss in ("grpo", "sapo"):
        return Reduction(True, "sequences")
    if loss == "luspo":
        return Reduction(False, "sequences")
    if loss == "dr_grpo":
        return Reduction(False, "constant")
    return Reduction(False, "tokens", "micro_batch" if loss == "bnpo" else None)
