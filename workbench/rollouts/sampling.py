"""Drawing tokens: what is done to the logits, and random numbers that depend on a completion's key and a position alone.

A draw inverts the cumulative distribution at one uniform number, ``min {v: F(v) > u}`` with tokens in the order of their ids, so
that the same logits give the same token wherever and beside whatever else it is drawn.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workbench.models.logps import penalise
from workbench.rollouts.types import Key, Sampling

_SLACK = 1e-6  # of a cumulative probability, which rounding must not push past a bound


def uniforms(key: Key, count: int, start: int = 0) -> np.ndarray:
    """Numbers in [0, 1) for positions ``start`` to ``start + count`` of a completion, fp64 ``[count]``.

    They are Philox's (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"), a function of key and counter.

    Args:
        key: of the completion; any integers, of any number.
        count: how many.
        start: the first position.
    """
    text = ",".join(str(int(part)) for part in key).encode()
    words = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), dtype="<u8").astype(np.uint64)
    bits = np.random.Philox(key=words, counter=start // 4)  # a block of the counter gives four numbers
    return (bits.random_raw(count + start % 4)[start % 4 :] >> np.uint64(11)) * 2.0**-53


def process(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """The logits of the distribution to draw from ``[B, V]``: -inf for tokens that are left out.

    Args:
        logits: the model's, fp32 ``[B, V]``.
        sampling: what to do to them; at temperature 0 all but the most likely token are left out.
        seen: which tokens a row's prompt and completion hold ``[B, V]``; needed where there is a repetition penalty.
    """
    if sampling.repetition_penalty != 1.0:
        logits = penalise(logits, seen, sampling.repetition_penalty)
    if sampling.greedy:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, float("-inf")).scatter_(-1, best, 0.0)
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.top_k is not None or sampling.top_p < 1:
        logits = keep_most_likely(logits, sampling.top_k, sampling.top_p)
    if sampling.min_p:
        floor = logits.amax(-1, keepdim=True) + np.log(sampling.min_p) - _SLACK
        logits = logits.masked_fill(logits < floor, float("-inf"))
    return logits


def keep_most_likely(logits: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Leaves out all but the ``top_k`` most likely tokens, then all but the fewest that have ``top_p`` of what is left
    (arXiv:1904.09751, sec. 3.1). Of equal tokens the first are kept."""
    vocabulary = logits.shape[-1]
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    ordered, tokens = ordered[:, : top_k or vocabulary], tokens[:, : top_k or vocabulary]
    if top_p < 1:
        probs = ordered.double().softmax(-1)
        before = probs.cumsum(-1) - probs
        ordered = ordered.masked_fill(before >= top_p - _SLACK, float("-inf"))
        ordered[:, 0] = logits.amax(-1)
    return torch.full_like(logits, float("-inf")).scatter_(-1, tokens, ordered)


@dataclass
class Draw:
    """One token for each of B rows.

    Args:
        tokens: ``[B]``.
        logps: log-probability of each under what it was drawn from, fp64 ``[B]``, nats.
        support: the tokens that could be drawn, end to end ``[K]``, in the order of their ids; None: all.
        counts: how many of them each row has ``[B]``.
    """

    tokens: Tensor
    logps: Tensor
    support: Tensor | None = None
    counts: Tensor | None = None


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Draw:
    """Draws one token for each row.

    Args:
        logits: the model's, fp32 ``[B, V]``.
        uniform: in [0, 1), fp64 ``[B]``; not read at temperature 0.
        sampling: how to draw.
        seen: as in `process`.
    """
    if logits.device.type == "mps":  # which has no fp64
        logits, uniform, seen = logits.cpu(), uniform.cpu(), None if seen is None else seen.cpu()
    shaped = process(logits, sampling, seen)
    if sampling.greedy:
        tokens = shaped.argmax(-1)
        drawn = Draw(tokens, torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device))
        if sampling.truncates:
            drawn.support, drawn.counts = tokens, torch.ones_like(tokens)
        return drawn
    shifted = shaped - shaped.amax(-1, keepdim=True)
    cumulative = shifted.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # a product rounded up to the total would lie past every token
    tokens = torch.searchsorted(cumulative, torch.minimum(uniform[:, None] * total, below), right=True)
    logps = shifted.gather(-1, tokens).double() - total.log()
    drawn = Draw(tokens.squeeze(-1), logps.squeeze(-1))
    if sampling.truncates:
        kept = shaped > float("-inf")
        drawn.support, drawn.counts = kept.nonzero()[:, 1], kept.sum(-1)
    return drawn
