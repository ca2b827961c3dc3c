"""Sums and counts of a step's metrics, divided once."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

Kind = Literal["mean", "sum", "min", "max"]
_EMPTY = {"min": float("inf"), "max": float("-inf")}


class Meter:
    """Collects ``(total, count)`` per name over micro-batches and ranks; a metric is the quotient of the two sums. Smallest and
    largest values are kept as such.

    Every rank must add the same names in the same order (an empty micro-batch adds zeros), since they are exchanged as one
    vector.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._kinds: dict[str, Kind] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float | None) -> None:
        """Adds to a metric.

        Args:
            name: its name.
            total: sum of the values.
            count: how many they are (or the sum of their weights); None for a metric that is a plain sum.
        """
        self._keep(name, "sum" if count is None else "mean", total, 0.0 if count is None else count, torch.add)

    def extreme(self, name: str, values: Tensor, kind: Literal["min", "max"]) -> None:
        """Takes the smallest or largest of ``values`` (any number of them, or none) into a metric."""
        values = torch.cat([values.detach().double().flatten(), values.new_full((1,), _EMPTY[kind], dtype=torch.float64)])
        smallest = kind == "min"
        self._keep(name, kind, values.amin() if smallest else values.amax(), 0.0, torch.minimum if smallest else torch.maximum)

    def _keep(self, name: str, kind: Kind, total: Tensor | float, count: Tensor | float, join: Callable[..., Tensor]) -> None:
        total, count = (torch.as_tensor(v, dtype=torch.float64).detach() for v in (total, count))
        if name in self._totals:
            total, count = join(self._totals[name], total.to(self._totals[name].device)), self._counts[name] + count
        self._totals[name], self._counts[name], self._kinds[name] = total, count, kind

    def compute(self, device: torch.device, group: ProcessGroup | None = None) -> dict[str, float]:
        """The metrics over all ranks of ``group``, in one exchange; the meter is empty afterwards.

        A mean over nothing (a step whose rows train no token) is left out: it has no value. So is an extreme of nothing.
        """
        names, kinds = list(self._totals), self._kinds
        if not names:
            return {}
        pairs = torch.stack([torch.stack([self._totals[n].to(device), self._counts[n].to(device)]) for n in names])
        self._totals, self._counts, self._kinds = {}, {}, {}
        values = {}
        for name, ranks in zip(names, _of_all_ranks(pairs, group).unbind(1), strict=True):
            totals, count = ranks[:, 0], ranks[:, 1].sum().item()
            kind = kinds[name]
            value = (totals.amin() if kind == "min" else totals.amax() if kind == "max" else totals.sum()).item()
            if (kind == "mean" and not count) or value == _EMPTY.get(kind):
                continue
            values[name] = value / count if kind == "mean" else value
        return values


def _of_all_ranks(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """``values`` of every rank, stacked in the order of the ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values[None]
    parts = [torch.empty_like(values) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, values, group=group)
    return torch.stack(parts)
