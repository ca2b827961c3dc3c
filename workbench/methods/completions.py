"""What preference methods read off a forward pass: log-probabilities per completion, and metrics of each side."""

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.data.batch import MicroBatch, Role
from workbench.losses.preference import Pairs
from workbench.losses.sequences import sequence_lengths, sequence_sums
from workbench.models.policy import PolicyOutput

Record = Callable[[str, Tensor | None, Tensor], None]
"""``record(name, values, weights)``: adds to the mean of ``values`` under ``weights``."""


class Completions:
    """The completions of a micro-batch of S segments under a policy.

    Args:
        batch: the micro-batch.
        out: the policy's outputs ``[T]`` on it.
        weights: of the outputs in the sums ``[T]``; None: those of the batch.

    Attributes:
        weights: the batch's own weights ``[T]``.
        segment: the segment of each output ``[T]``.
        sums: log-probability of each segment's trained tokens ``[S]``, fp64, nats.
        lengths: their number ``[S]``.
    """

    def __init__(self, batch: MicroBatch, out: PolicyOutput, weights: Tensor | None = None) -> None:
        self.batch = batch
        self.out = out
        outputs = batch.outputs
        self.targets = batch.tokens[outputs]
        self.segment = batch.segment[outputs]
        self.weights = batch.weights[outputs]
        self.sums = sequence_sums(out.logps, self.weights if weights is None else weights, self.segment, len(batch.row))
        self.lengths = sequence_lengths(self.weights, self.segment, len(batch.row))

    def pairs(self, reference: Tensor | None = None) -> Pairs:
        """Chosen and rejected completions ``[P]``; ``reference`` holds the sums ``[S]`` of the reference."""
        chosen, rejected = (self.batch.segments_of(role) for role in (Role.CHOSEN, Role.REJECTED))
        sums = (self.sums[chosen], self.sums[rejected], self.lengths[chosen], self.lengths[rejected])
        return Pairs(*sums) if reference is None else Pairs(*sums, reference[chosen], reference[rejected])

    def trained_in(self, *roles: Role) -> Tensor:
        """1 for each output within these roles' segments that is trained, else 0 ``[T]``."""
        role = self.batch.role[self.segment]
        inside = torch.stack([role == int(r) for r in roles]).any(0)
        return (inside & (self.weights != 0)).to(self.weights.dtype)

    def weights_in(self, role: Role) -> Tensor:
        """The outputs' weights within the segments of one role, 0 elsewhere ``[T]``."""
        return torch.where(self.batch.role[self.segment] == int(role), self.weights, 0.0)

    def hits(self) -> Tensor | None:
        """1 where the most likely token is the target ``[T]``; None where that was not asked for."""
        return None if self.out.top1 is None else (self.out.top1 == self.targets).float()


def ones(values: Tensor) -> Tensor:
    """Equal weights for values per row."""
    return torch.ones_like(values)


def record_sides(record: Record, completions: Completions, pairs: Pairs, *, per_token: bool = False) -> None:
    """``logps/*`` (mean over completions of their sums, or means per token) and ``logits/*`` (mean logit over trained tokens)."""
    sides = (pairs.chosen, pairs.rejected)
    sides = pairs.per_token(*sides) if per_token else sides
    for name, logps, role in zip(("chosen", "rejected"), sides, (Role.CHOSEN, Role.REJECTED), strict=True):
        record(f"logps/{name}", logps, ones(logps))
        record(f"logits/{name}", completions.out.mean_logit, completions.trained_in(role))


def record_rows(record: Record, metrics: dict[str, Tensor]) -> None:
    """Metrics per row, each a mean over rows."""
    for name, values in metrics.items():
        record(name, values, ones(values))
