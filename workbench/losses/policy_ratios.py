"""Ratios of the policy to others on the tokens of sampled completions: to the one that wrote them, and to the reference.

Shapes are those of `workbench.losses.policy`.
"""

from typing import Literal

import torch
from torch import Tensor

from workbench.errors import check_choice
from workbench.losses.policy_options import Level, PolicyOptions
from workbench.losses.sequences import sequence_means, sequence_sums

Estimator = Literal["k1", "k2", "k3"]


def kept(values: Tensor, weights: Tensor) -> Tensor:
    """``values`` with 0 at tokens of weight 0, without gradient there."""
    return torch.where(weights == 0, 0.0, values)


def pick(where: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """``yes`` or ``no``, in the precision of ``like``; two plain numbers would come in fp32."""
    return torch.where(where, like.new_full((), yes), like.new_full((), no))


def log_ratios(
    logps: Tensor, old_logps: Tensor, weights: Tensor, segment: Tensor, num_rows: int, level: Level = "token"
) -> Tensor:
    """``log p - log p_old`` of each token, or its mean over the token's sequence.

    The mean is the logarithm of GSPO's ratio ``s_i = (p(y) / p_old(y))^(1 / |y|)`` (Zheng et al. 2025, arXiv:2507.18071);
    the gradient reaches all tokens of the sequence through it.

    Args:
        logps: log-probabilities under the policy ``[T]``.
        old_logps: under the policy that the ratio compares with ``[T]``; ``logps.detach()`` where it is the same.
        weights: of the tokens ``[T]``.
        segment: the completion of each ``[T]``.
        num_rows: number of completions C.
        level: ``token`` or ``sequence``.

    Returns:
        ``[T]``, nats; 0 at tokens of weight 0 (with ``sequence`` their sequence's value).
    """
    check_choice("method.importance_sampling_level", level, ("token", "sequence"))
    ratios = kept(logps - old_logps, weights)
    return ratios if level == "token" else sequence_means(ratios, weights, segment, num_rows)[segment]


def vespo_weights(
    log_ratio: Tensor,
    advantages: Tensor,
    weights: Tensor,
    segment: Tensor,
    options: PolicyOptions,
    correction: Tensor | None = None,
) -> Tensor:
    """``w^k exp(lambda (1 - w))`` of each completion's importance weight w ``[C]``, without gradient (VESPO, arXiv:2602.10693,
    section 3.4).

    ``w`` is the product over the tokens of the policy's ratio to the one that wrote them: ``log_ratio`` and ``correction``.

    Args:
        log_ratio: per token ``[T]``.
        advantages: of the completions ``[C]``, whose sign picks k and lambda.
        weights: of the tokens ``[T]``.
        segment: the completion of each ``[T]``.
        options: ``vespo_k_*`` and ``vespo_lambda_*``.
        correction: per token ``[T]``, not negative; a completion with a 0 has weight 0.
    """
    total = log_ratio.detach() if correction is None else log_ratio.detach() + correction.log()
    log_w = sequence_sums(total, weights, segment, len(advantages)).clamp(min=-1e30)  # of w = 0: k = 0 must not meet infinity
    positive = advantages > 0
    k = pick(positive, options.vespo_k_pos, options.vespo_k_neg, log_w)
    decay = pick(positive, options.vespo_lambda_pos, options.vespo_lambda_neg, log_w)
    return (k * log_w - decay * torch.expm1(log_w)).exp().to(log_ratio)


def kl_estimate(
    logps: Tensor,
    ref_logps: Tensor,
    kind: Estimator = "k3",
    *,
    weights: Tensor | None = None,
    log_ratio: Tensor | None = None,
) -> Tensor:
    """Estimates of ``KL(p || p_ref)`` from single tokens drawn from p (Schulman 2020, "Approximating KL divergence").

    With ``d = log p - log p_ref``: k1 is d, k2 is ``d^2 / 2``, k3 is ``exp(-d) - 1 + d``, never negative. k1 and k3 are unbiased.

    Args:
        logps: under the policy ``[T]``.
        ref_logps: under the reference ``[T]``.
        kind: which estimator.
        weights: of the tokens ``[T]``; those of weight 0 get 0.
        log_ratio: per token ``[T]``, the policy against the one that drew the tokens. The estimate is multiplied by its
            exponential, which makes it and its gradient unbiased off policy (DeepSeek-V3.2, arXiv:2512.02556, section 3.1); the
            gradient goes through the ratio.

    Returns:
        ``[T]``, nats.
    """
    check_choice("method.kl_estimator", kind, ("k1", "k2", "k3"))
    d = logps - ref_logps if weights is None else kept(logps - ref_logps, weights)
    estimate = {"k1": lambda: d, "k2": lambda: d**2 / 2, "k3": lambda: torch.expm1(-d) + d}[kind]()
    if log_ratio is None:
        return estimate
    return estimate * (log_ratio if weights is None else kept(log_ratio, weights)).exp()
