"""Which rows make up an optimizer step, and how they are dealt to ranks and micro-batches. Pure functions of their arguments.

The set and the canonical order of a step's rows depend on (number of rows, seed, epoch, step, batch size) alone; the number of
ranks and the size of a micro-batch only decide where a row is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np

from workbench.errors import UserError, check_at_least
from workbench.losses.reduce import Normalisers

Balance = Literal["tokens", "none"]
Bins = list[list[int]]


def epoch_order(num_rows: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The order ``[num_rows]`` in which an epoch visits the rows."""
    if not shuffle:
        return np.arange(num_rows)
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def deal(lengths: Sequence[int], num_bins: int, *, max_rows: int | None = None, max_tokens: int | None = None) -> Bins:
    """Spreads items over bins with about equal numbers of tokens: longest first, into the lightest bin with room.

    Args:
        lengths: tokens of each item.
        num_bins: number of bins; some stay empty if there are fewer items.
        max_rows: most items in a bin.
        max_tokens: most tokens in a bin; an item that is longer by itself gets a bin of its own.

    Returns:
        Item indices of each bin, ascending within a bin; heaviest bins first. More bins than asked for if ``max_tokens`` needs
        them.
    """
    bins: Bins = [[] for _ in range(num_bins)]
    load = [0] * num_bins
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [
            b
            for b in range(len(bins))
            if (max_rows is None or len(bins[b]) < max_rows)
            and (max_tokens is None or not bins[b] or load[b] + lengths[item] <= max_tokens)
        ]
        if not fits:
            bins.append([])
            load.append(0)
            fits = [len(bins) - 1]
        lightest = min(fits, key=lambda b: (load[b], b))
        bins[lightest].append(item)
        load[lightest] += lengths[item]
    order = sorted(range(len(bins)), key=lambda b: (-load[b], b))
    return [sorted(bins[b]) for b in order]


def deal_in_order(num_items: int, num_bins: int, max_rows: int) -> Bins:
    """Consecutive runs of ``max_rows`` items, without regard to their lengths."""
    return [list(range(b * max_rows, min((b + 1) * max_rows, num_items))) for b in range(num_bins)]


def to_ranks(bins: Bins, world_size: int, *, balanced: bool = True) -> list[Bins]:
    """``[rank][k]``: bin i goes to rank ``i % world_size`` as its micro-batch ``i // world_size``. For ``balanced`` bins, sorted
    by weight, odd rounds run backwards, so that the ranks' sums stay close."""
    per_rank: list[Bins] = [[] for _ in range(world_size)]
    for start in range(0, len(bins), world_size):
        group = bins[start : start + world_size]
        group += [[] for _ in range(world_size - len(group))]
        backwards = balanced and (start // world_size) % 2 == 1
        for rank, rows in enumerate(reversed(group) if backwards else group):
            per_rank[rank].append(rows)
    return per_rank


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step.

    Args:
        rows: its rows in canonical order.
        micro: ``[rank][k]`` rows of each micro-batch.
        norm: its normalisers.
    """

    rows: list[int]
    micro: list[Bins]
    norm: Normalisers


@dataclass(frozen=True)
class RowSizes:
    """Per row: ``tokens`` in all, ``weight`` summed over trained tokens, each ``[num_rows]``; ``weight`` again of single roles
    (``chosen``, ``gold``), where rows have them."""

    tokens: np.ndarray
    weight: np.ndarray
    by_role: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)


class Planner:
    """The plan of a map-style data set.

    Args:
        sizes: of every row.
        batch_size: rows per optimizer step over all ranks.
        micro_batch_size: most rows in one micro-batch; None: a rank's whole share.
        micro_batch_tokens: most tokens in one micro-batch (a longer row is alone in its own); excludes ``micro_batch_size``.
        world_size: data-parallel ranks.
        seed: of the shuffling.
        shuffle: a new order each epoch, else rows as they are.
        drop_last: leave out the last step of an epoch if it is shorter.
        balance: ``tokens`` evens out the micro-batches; ``none`` cuts the step's rows in order.
        total_steps: steps that will be asked for (None: unknown), over which K is taken.
        extra_scale: what the backward pass divides by beyond K x ranks (DeepSpeed: K).
    """

    def __init__(
        self,
        sizes: RowSizes,
        *,
        batch_size: int,
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        balance: Balance = "tokens",
        total_steps: int | None = None,
        extra_scale: Callable[[int], float] = lambda num_micro: 1.0,
    ) -> None:
        check_batch_sizes(batch_size, micro_batch_size, micro_batch_tokens, balance)
        self.sizes = sizes
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.micro_batch_tokens = micro_batch_tokens
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.balance = balance
        full, rest = divmod(len(sizes), batch_size)
        self.steps_per_epoch = full + bool(rest and not drop_last)
        if not self.steps_per_epoch:
            raise UserError(
                f"batch_size={batch_size} is larger than the data set ({len(sizes)} rows) and drop_last leaves no step; "
                f"set data.batch_size to at most {len(sizes)} or data.drop_last=false."
            )
        self.num_micro = self._num_micro(total_steps)
        self.scale = self.num_micro * world_size * extra_scale(self.num_micro)
        self._order = lru_cache(maxsize=2)(self._epoch_order)
        self.step = lru_cache(maxsize=8)(self._step)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        return epoch_order(len(self.sizes), seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    @property
    def num_rows(self) -> int:
        """Rows of the data set."""
        return len(self.sizes)

    def rows(self, epoch: int, step: int) -> list[int]:
        """The rows of a step in canonical order."""
        return self._order(epoch)[step * self.batch_size : (step + 1) * self.batch_size].tolist()

    def _max_rows(self) -> int:
        return self.micro_batch_size or -(-self.batch_size // self.world_size)

    def _num_micro(self, total_steps: int | None) -> int:
        """K: the most micro-batches that any step needs on a rank. With a token bound and an unknown number of steps, that of the
        worst possible step (the longest rows together)."""
        if not self.micro_batch_tokens:
            return -(-self.batch_size // (self.world_size * self._max_rows()))
        if not self.shuffle:
            total_steps = self.steps_per_epoch
        if total_steps is None:
            worst = np.sort(self.sizes.tokens)[::-1][: self.batch_size]
            return -(-len(self._bins(worst.tolist(), 1)) // self.world_size)
        most = 0
        for epoch in range(-(-total_steps // self.steps_per_epoch)):
            order = self._epoch_order(epoch)
            for step in range(min(self.steps_per_epoch, total_steps - epoch * self.steps_per_epoch)):
                rows = order[step * self.batch_size : (step + 1) * self.batch_size]
                most = max(most, len(self._bins(self.sizes.tokens[rows].tolist(), 1)))
        return -(-most // self.world_size)

    def _bins(self, lengths: list[int], num_bins: int) -> Bins:
        if self.balance == "none":
            return deal_in_order(len(lengths), num_bins, self._max_rows())
        max_rows = None if self.micro_batch_tokens else self._max_rows()
        return deal(lengths, num_bins, max_rows=max_rows, max_tokens=self.micro_batch_tokens)

    def _step(self, epoch: int, step: int) -> StepPlan:
        return self.plan_rows(self.rows(epoch, step), self.sizes)

    def plan_rows(self, rows: list[int], sizes: RowSizes) -> StepPlan:
        """Deals ``rows`` (indices into ``sizes``) of one step."""
        lengths = sizes.tokens[rows].tolist()
        num_bins = self.num_micro * self.world_size
        bins = self._bins(lengths, num_bins)
        if len(bins) > num_bins:
            # Only a step beyond the planned ones can need more; then the token bound gives way, K does not.
            bins = deal(lengths, num_bins)
        norm = Normalisers(
            tokens=float(sizes.weight[rows].sum()),
            sequences=float(len(rows)),
            unmasked=float((sizes.weight[rows] > 0).sum()),
            micro_batches=float(sum(bool(b) for b in bins)),
            num_micro=self.num_micro,
            world_size=self.world_size,
            scale=self.scale,
            **{role: float(weight[rows].sum()) for role, weight in sizes.by_role.items()},
        )
        micro = to_ranks([[rows[i] for i in b] for b in bins], self.world_size, balanced=self.balance == "tokens")
        return StepPlan(rows=rows, micro=micro, norm=norm)


def check_batch_sizes(
    batch_size: int, micro_batch_size: int | None, micro_batch_tokens: int | None, balance: Balance = "tokens"
) -> None:
    """Raises `UserError` if the sizes cannot go together."""
    check_at_least(1, data__batch_size=batch_size, data__micro_batch_tokens=micro_batch_tokens)
    if micro_batch_size is not None and micro_batch_tokens is not None:
        raise UserError("data.micro_batch_size and data.micro_batch_tokens exclude each other; set one of them to null.")
    if micro_batch_tokens is not None and balance == "none":
        raise UserError("data.micro_batch_tokens needs data.balance=tokens.")
    if micro_batch_size is None:
        return
    if not 1 <= micro_batch_size <= batch_size or batch_size % micro_batch_size:
        divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
        raise UserError(
            f"data.batch_size={batch_size} is not divisible by data.micro_batch_size={micro_batch_size}. "
            f"Allowed micro-batch sizes: {', '.join(map(str, divisors))}."
        )
