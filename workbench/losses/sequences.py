"""From tokens to sequences: sums over the trained tokens of each segment.

Tokens come flat, in the order of the micro-batch, with the segment each belongs to. A token of weight 0 counts for nothing,
whatever its value (NaN too).
"""

import torch
from torch import Tensor


def sequence_sums(values: Tensor, weights: Tensor, segment: Tensor, size: int) -> Tensor:
    """``sum_t w_t v_t`` of each segment.

    Args:
        values: per token ``[T]``, e.g. log-probabilities.
        weights: per token ``[T]``.
        segment: the segment of each token ``[T]``.
        size: number of segments S.

    Returns:
        Sums ``[S]`` in fp64; 0 for a segment without trained tokens. A log-ratio is the small difference of two large sums: in
        fp32 it would keep three or four digits, and which ones would depend on the order of summation.
    """
    dtype = torch.float32 if values.device.type == "mps" else torch.float64  # MPS has no fp64
    kept = torch.where(weights == 0, 0.0, values.to(dtype) * weights)
    return kept.new_zeros(size).index_add(0, segment, kept)


def sequence_lengths(weights: Tensor, segment: Tensor, size: int) -> Tensor:
    """Number of trained tokens (the sum of their weights) of each segment ``[S]``."""
    return sequence_sums(torch.ones_like(weights), weights, segment, size)


def sequence_means(values: Tensor, weights: Tensor, segment: Tensor, size: int) -> Tensor:
    """``sum_t w_t v_t / sum_t w_t`` of each segment ``[S]``; 0 for a segment without trained tokens."""
    lengths = sequence_lengths(weights, segment, size)
    return sequence_sums(values, weights, segment, size) / torch.where(lengths == 0, 1.0, lengths)


def ld_weights(weights: Tensor, segment: Tensor, partner: Tensor, *, alpha: float) -> Tensor:
    """LD-DPO: weights in which a completion's tokens past the length of its partner count ``alpha`` times (Liu et al. 2024,
    arXiv:2409.06411, eq. 9).

    ``log p(y) = sum_{t <= l} log p(y_t) + alpha * sum_{t > l} log p(y_t)`` with l the length of the pair's shorter completion.
    Policy and reference take the same weights. ``alpha=1`` changes nothing, ``alpha=0`` cuts the longer completion.

    Args:
        weights: per token ``[T]``.
        segment: the segment of each token ``[T]``, not decreasing.
        partner: for each segment the other completion of its pair, or itself where it has none ``[S]``.
        alpha: weight of the tail, in [0, 1].

    Returns:
        Weights ``[T]``.
    """
    trained = weights.ne(0).long()
    counts = torch.zeros_like(partner).index_add(0, segment, trained)
    before = counts.cumsum(0) - counts
    position = trained.cumsum(0) - before[segment]
    shared = torch.minimum(counts, counts[partner])
    return torch.where(position > shared[segment], weights * alpha, weights)


def wpo_weights(logps: Tensor, log_collisions: Tensor, weights: Tensor, segment: Tensor, size: int) -> Tensor:
    """WPO: how much each sequence looks like the policy's own (Zhou et al. 2024, arXiv:2406.11827, eq. 2).

    ``w(y) = exp(mean_t log( p(y_t) / sum_v p(v)^2 ))``; the quotient is 1 on average for tokens that the policy samples. A pair's
    loss is multiplied by ``w(chosen) * w(rejected)``.

    Args:
        logps: log-probabilities of the tokens ``[T]``.
        log_collisions: ``log sum_v p(v)^2`` of the distributions that they come from ``[T]``.
        weights: per token ``[T]``.
        segment: the segment of each token ``[T]``.
        size: number of segments S.

    Returns:
        Weights ``[S]``, no gradient; 1 for a segment without trained tokens.
    """
    return sequence_means((logps - log_collisions).detach(), weights, segment, size).exp()
