"""Sums and counts of a step's metrics, divided once."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class Meter:
    """Collects ``(total, count)`` per name over micro-batches and ranks; a metric is the quotient of the two sums.

    Every rank must add the same names in the same order (an empty micro-batch adds zeros), since the sums are
    exchanged as one vector.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor | None] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float | None) -> None:
        """Adds to a metric.

        Args:
            name: its name.
            total: sum of the values.
            count: how many they are (or the sum of their weights); None for a metric that is a plain sum.
        """
        total = torch.as_tensor(total, dtype=torch.float64).detach()
        if name not in self._totals:
            self._totals[name] = total
            self._counts[name] = None if count is None else torch.as_tensor(count, dtype=torch.float64).detach()
            return
        self._totals[name] = self._totals[name] + total
        if count is not None:
            self._counts[name] = self._counts[name] + torch.as_tensor(count, dtype=torch.float64).detach()

    def compute(self, device: torch.device, group: ProcessGroup | None = None) -> dict[str, float]:
        """The metrics over all ranks of ``group``, in one all-reduce; the meter is empty afterwards.

        A mean over nothing (a step whose rows train no token) is left out: it has no value.
        """
        names = list(self._totals)
        if not names:
            return {}
        counts = [self._counts[n] for n in names]
        vector = torch.stack([t.to(device) for t in _interleave(self._totals.values(), counts)])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(vector, group=group)
        values = vector.view(-1, 2).tolist()
        self._totals, self._counts = {}, {}
        return {
            name: total if count is None else total / n
            for name, count, (total, n) in zip(names, counts, values, strict=True)
            if count is None or n
        }


def _interleave(totals: Iterable[Tensor], counts: Iterable[Tensor | None]) -> Iterable[Tensor]:
    for total, count in zip(totals, counts, strict=True):
        yield total
        yield torch.zeros((), dtype=torch.float64) if count is None else count
