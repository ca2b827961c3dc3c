"""What to do about completions that the policy in training would not have written with the same probability: the sampler computes
with other kernels, or its weights are older."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from workbench.errors import check_choice
from workbench.losses.policy_options import MODES
from workbench.losses.sequences import sequence_lengths, sequence_means, sequence_sums

Mode = Literal["sequence_mask", "sequence_truncate", "token_mask", "token_truncate"]


class Correction(NamedTuple):
    """Ratios of the trainer's to the sampler's probability, and what their metrics are made of. Nothing has a gradient.

    Args:
        ratio: per token, bounded ``[T]``; 0 where masked, 1 at tokens of weight 0.
        ratios: those that were bounded: of tokens ``[T]`` or of completions ``[C]``.
        ratio_weights: of the metrics of ``ratios``, the same shape; 0 leaves one out.
        logp_difference: ``|log p_old - log p_sampler|`` per token ``[T]``, nats.
        difference_weights: of the metrics of that ``[T]``.
    """

    ratio: Tensor
    ratios: Tensor
    ratio_weights: Tensor
    logp_difference: Tensor
    difference_weights: Tensor


@torch.no_grad()
def importance_correction(
    old_logps: Tensor,
    sampler_logps: Tensor,
    weights: Tensor,
    segment: Tensor,
    num_rows: int,
    mode: Mode = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> Correction:
    """``p_old / p_sampler`` of each token, or of the token's sequence (the product over its tokens), within bounds.

    ``*_truncate`` moves a ratio to the nearest bound (Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"), ``*_mask`` sets one outside of them to 0 (IcePop, arXiv:2510.18855). One per sequence leaves the
    policy gradient unbiased, one per token varies less (Liu et al. 2025, "When speed kills stability").

    Args:
        old_logps: under the trainer's policy of that time ``[T]``.
        sampler_logps: as the sampler gave them ``[T]``; NaN where it gave none: the token's ratio is 1.
        weights: of the tokens ``[T]``.
        segment: the completion of each ``[T]``.
        num_rows: number of completions C.
        mode: what has a ratio, and what happens to one out of bounds.
        clip_min: the smallest ratio; None: none.
        clip_max: the largest; None: none.
    """
    check_choice("method.importance_sampling_mode", mode, MODES)
    difference = old_logps - sampler_logps
    known = (weights != 0) & ~sampler_logps.isnan()
    difference = torch.where(known, difference, 0.0)
    if mode.startswith("token"):
        ratios, ratio_weights = difference.exp(), weights
    else:
        # A sequence's ratio is that of its text, in which a token counts once whatever its weight in the loss.
        ratios = sequence_sums(difference, torch.ones_like(weights), segment, num_rows).exp()
        ratio_weights = (sequence_lengths(weights, segment, num_rows) != 0).to(weights)
    ratios = _bounded(ratios, mode, clip_min, clip_max)
    of_token = ratios if mode.startswith("token") else ratios[segment]
    ratio = torch.where(weights == 0, 1.0, of_token)
    return Correction(ratio, ratios, ratio_weights, difference.abs(), torch.where(known, weights, 0.0))


def _bounded(ratios: Tensor, mode: Mode, clip_min: float | None, clip_max: float | None) -> Tensor:
    low, high = 0.0 if clip_min is None else clip_min, torch.inf if clip_max is None else clip_max
    if mode.endswith("truncate"):
        return ratios.clamp(low, high)
    return torch.where((ratios >= low) & (ratios <= high), ratios, 0.0)


@torch.no_grad()
def off_policy_mask(
    behaviour_logps: Tensor, logps: Tensor, advantages: Tensor, weights: Tensor, segment: Tensor, threshold: float
) -> Tensor:
    """Whether each token's sequence stays in the loss ``[T]``: not if its advantage is negative and the policy has drifted from
    the one that wrote it (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

    The drift is the mean over the tokens of ``log p_behaviour - log p``. The mask multiplies the policy's loss; the sequence's KL
    term stays, and so do the normalisers.

    Args:
        behaviour_logps: under the policy that wrote the tokens ``[T]``: the sampler's, or the old policy's; NaN: unknown.
        logps: under the policy ``[T]``.
        advantages: of the completions ``[C]``.
        weights: of the tokens ``[T]``.
        segment: the completion of each ``[T]``.
        threshold: of the drift, nats per token.
    """
    known = torch.where(behaviour_logps.isnan(), 0.0, weights)
    drift = sequence_means(behaviour_logps - logps, known, segment, len(advantages))
    return ~((advantages < 0) & (drift > threshold))[segment]
