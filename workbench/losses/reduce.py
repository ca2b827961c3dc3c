"""The one place where a loss is divided.

Losses return unreduced values. A step's loss is ``sum over all its values / normaliser``, where the normaliser counts the whole
optimizer step (all micro-batches of all ranks), so that the result does not depend on how the step was cut. Lightning divides
by the number of micro-batches and DDP or FSDP by the number of ranks; `reduce` multiplies by both beforehand.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scope = Literal["step", "micro_batch"]


@dataclass(frozen=True)
class Normalisers:
    """What one optimizer step holds, over all ranks and micro-batches.

    Args:
        tokens: sum of the trained tokens' weights (their number, where all weights are 1).
        sequences: number of rows.
        unmasked: number of rows with at least one trained token.
        micro_batches: number of micro-batches that hold a row.
        num_micro: micro-batches per rank K, the empty ones included.
        world_size: data-parallel ranks.
        scale: what the backward pass will divide by (K x ranks; DeepSpeed divides by K once more).
        constant: a constant length (Dr. GRPO), if the method sets one.
        chosen: `tokens` of the chosen completions alone, and of pairs' prompts where these are trained; None where the rows are
            no pairs.
        gold: `tokens` of the gold completions of triples.
    """

    tokens: float
    sequences: float
    unmasked: float
    micro_batches: float
    num_micro: int = 1
    world_size: int = 1
    scale: float = 1.0
    constant: float | None = None
    chosen: float | None = None
    gold: float | None = None


def masked_sum(values: Tensor, weights: Tensor) -> Tensor:
    """``sum(values * weights)`` in fp32 that ignores values (NaN too) whose weight is 0."""
    return torch.where(weights == 0, 0.0, values.float() * weights).sum()


def reduce(
    values: Tensor,
    weights: Tensor,
    norm: Normalisers,
    *,
    per: Literal["tokens", "chosen", "gold", "sequences", "unmasked", "constant"],
    scope: Scope = "step",
) -> Tensor:
    """Weighted sum of ``values`` divided by the step's normaliser, scaled for the backward pass.

    Args:
        values: unreduced losses, any shape.
        weights: same shape; 0 leaves a value out, also when it is NaN.
        norm: the step's normalisers.
        per: which of them divides. With ``scope="micro_batch"`` its counterpart within this micro-batch does.
        scope: ``step``, or ``micro_batch`` for the mean over micro-batches of their own means.

    Returns:
        A scalar to return from ``training_step``. Divided by ``norm.scale`` and summed over the micro-batches and ranks of the
        step it gives the step's loss. An empty step gives 0.

    Raises:
        ValueError: the normaliser is missing.
    """
    total = masked_sum(values, weights)
    denominator = getattr(norm, per)
    if denominator is None:
        raise ValueError(f"this step has no normaliser {per!r}")
    if scope == "micro_batch":
        local = weights.sum() if per in ("tokens", "chosen", "gold") else weights.ne(0).sum()
        return total / local.clamp(min=torch.finfo(torch.float32).tiny) * (norm.scale / max(norm.micro_batches, 1))
    return total * (norm.scale / denominator) if denominator else total * 0.0
