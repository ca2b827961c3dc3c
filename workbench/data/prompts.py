"""Which prompts an online method answers when, and where its completions are trained. Pure functions of their arguments.

A window of ``steps_per_generation`` optimizer steps is generated at once and swept ``num_iterations`` times. With B completions
per optimizer step, G per prompt, s steps per window and n prompts, an epoch has ``num_iterations * ceil(n G / B)`` steps: every
prompt is answered once in it, and its last window (and step) may be shorter.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from workbench.data.loader import Rows
from workbench.data.plan import Balance, Bins, StepPlan, check_batch_sizes, deal, deal_in_order, epoch_order, to_ranks
from workbench.errors import UserError, check_at_least
from workbench.losses.reduce import Normalisers


@dataclass(frozen=True)
class Geometry:
    """How many completions go where.

    Args:
        batch_size: completions per optimizer step over all ranks.
        num_generations: completions per prompt.
        steps_per_generation: optimizer steps that one window serves.
        num_iterations: how often a window is swept.

    Raises:
        UserError: a window would hold part of a group.
    """

    batch_size: int
    num_generations: int
    steps_per_generation: int = 1
    num_iterations: int = 1

    def __post_init__(self) -> None:
        check_at_least(
            1,
            method__num_generations=self.num_generations,
            method__steps_per_generation=self.steps_per_generation,
            method__num_iterations=self.num_iterations,
        )
        window, group = self.batch_size * self.steps_per_generation, self.num_generations
        if window % group:
            lower, upper = (self._batch_size_at(window, up) for up in (False, True))
            sizes = " or ".join(str(size) for size in (lower, upper) if size)
            divisors = ", ".join(str(d) for d in range(1, min(window, 64) + 1) if window % d == 0)
            raise UserError(
                f"a window of {window} completions (data.batch_size={self.batch_size} completions x "
                f"method.steps_per_generation={self.steps_per_generation}) holds no whole number of groups of "
                f"method.num_generations={group}: set data.batch_size={sizes}, or method.num_generations to one of {divisors}."
            )

    def _batch_size_at(self, window: int, up: bool) -> int:
        """The nearest batch size below or above that divides into groups; 0 for none."""
        size = self.batch_size
        while size > 0 and size * self.steps_per_generation % self.num_generations:
            size += 1 if up else -1
        return size

    @property
    def prompts(self) -> int:
        """Prompts of a whole window."""
        return self.batch_size * self.steps_per_generation // self.num_generations

    @property
    def steps(self) -> int:
        """Optimizer steps of a whole window, all sweeps together."""
        return self.steps_per_generation * self.num_iterations

    def sweep(self, prompts: int) -> int:
        """Optimizer steps of one sweep over the completions of so many prompts."""
        return -(-prompts * self.num_generations // self.batch_size)


@dataclass(frozen=True)
class WindowPlan:
    """A window: ``prompts`` (rows) to answer, its ``number`` over all epochs, the step within the epoch that is its ``first``."""

    number: int
    first: int
    prompts: list[int]


class PromptPlanner:
    """The plan of the prompts.

    Args:
        num_rows: prompts in the data set.
        geometry: of windows.
        micro_batch_size: most completions in one forward on one rank; None: a rank's whole share of a step.
        world_size: data-parallel ranks.
        seed: of the order of the prompts.
        shuffle: a new order each epoch.
        drop_last: leave out the last window of an epoch if it is shorter.
        balance: ``tokens`` evens out the micro-batches of completions; ``none`` cuts them in order.
        extra_scale: what the backward pass divides by beyond K x ranks.
    """

    def __init__(
        self,
        num_rows: int,
        geometry: Geometry,
        *,
        micro_batch_size: int | None = None,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        balance: Balance = "tokens",
        extra_scale: Callable[[int], float] = lambda num_micro: 1.0,
    ) -> None:
        check_batch_sizes(geometry.batch_size, micro_batch_size, None, balance)
        self.num_rows = num_rows
        self.geometry = geometry
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.balance = balance
        self.max_rows = micro_batch_size or -(-geometry.batch_size // world_size)
        self.num_micro = -(-geometry.batch_size // (world_size * self.max_rows))
        self.scale = self.num_micro * world_size * extra_scale(self.num_micro)
        whole, rest = divmod(num_rows, geometry.prompts)
        self.num_windows = whole + bool(rest and not drop_last)
        if not self.num_windows:
            raise UserError(
                f"data.drop_last=true leaves no window: {num_rows} prompts are less than the {geometry.prompts} of one; set it "
                "to false, or a smaller data.batch_size."
            )
        self.steps_per_epoch = whole * geometry.steps
        if rest and not drop_last:
            self.steps_per_epoch += geometry.sweep(rest) * geometry.num_iterations
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_order(num_rows, seed=seed, epoch=epoch, shuffle=shuffle))

    def window(self, epoch: int, step: int) -> WindowPlan:
        """The window that a step of an epoch belongs to."""
        index = step // self.geometry.steps
        size = self.geometry.prompts
        prompts = self._order(epoch)[index * size : (index + 1) * size].tolist()
        return WindowPlan(epoch * self.num_windows + index, index * self.geometry.steps, prompts)

    def replacements(self, number: int, attempt: int, taken: set[int], count: int) -> list[int]:
        """Further prompts for a window (dynamic sampling): up to ``count`` rows that are not ``taken``, drawn by (seed, window,
        attempt) alone."""
        left = np.setdiff1d(np.arange(self.num_rows), np.fromiter(taken, np.int64, len(taken)))
        rng = np.random.default_rng([self.seed, number, attempt, 1])
        return rng.permutation(left)[:count].tolist()

    def plan_step(
        self,
        rows: Sequence[int],
        *,
        tokens: Sequence[int],
        weight: Sequence[float],
        group: Sequence[int],
        counted: Sequence[bool],
        longest: int,
    ) -> StepPlan:
        """Deals the completions of one step to ranks and micro-batches; those of a prompt stay together where there is room.

        Args:
            rows: the step's completions (indices into the others), in canonical order.
            tokens: of every completion of the window, prompt included.
            weight: trained tokens of each.
            group: the prompt of each.
            counted: whether each takes part in means over completions.
            longest: most tokens of a completion, the constant of `Normalisers`.
        """
        units = self._units(rows, group)
        lengths = [sum(tokens[row] for row in unit) for unit in units]
        num_bins, most = self.num_micro * self.world_size, max(1, self.max_rows // max(map(len, units), default=1))
        dealt: Bins
        if self.balance == "none":
            dealt = deal_in_order(len(units), num_bins, most)
        else:
            dealt = deal(lengths, num_bins, max_rows=most)
        bins = [[row for unit in b for row in units[unit]] for b in dealt]
        sizes = np.asarray(weight, dtype=np.float64)[list(rows)]
        sequences = float(np.asarray(counted)[list(rows)].sum())
        norm = Normalisers(
            tokens=float(sizes.sum()),
            sequences=sequences,
            unmasked=float((sizes > 0).sum()),
            constant=sequences * longest,
            micro_batches=float(sum(bool(b) for b in bins)),
            num_micro=self.num_micro,
            world_size=self.world_size,
            scale=self.scale,
        )
        return StepPlan(list(rows), to_ranks(bins, self.world_size, balanced=self.balance == "tokens"), norm)

    def _units(self, rows: Sequence[int], group: Sequence[int]) -> list[list[int]]:
        """Whole groups, if micro-batches hold them without splitting any; else single completions."""
        size = self.geometry.num_generations
        units: dict[int, list[int]] = {}
        for row in rows:
            units.setdefault(group[row], []).append(row)
        room = self.num_micro * self.world_size * (self.max_rows // size)
        if self.balance == "none" or self.max_rows % size or len(units) > room:
            return [[row] for row in rows]
        return list(units.values())


class Ticket:
    """What the loader hands an online method for a micro-batch: where it is, and at the start of a window the prompts.

    Args:
        epoch: of the data.
        step: optimizer step within it.
        k: micro-batch within that.
        num_micro: micro-batches per step.
        plan: the window that it belongs to.
        rows: the window's prepared prompts with all their columns, at its first micro-batch; else None.
    """

    def __init__(
        self, epoch: int, step: int, k: int, num_micro: int, plan: WindowPlan, rows: list[dict[str, Any]] | None = None
    ) -> None:
        self.epoch = epoch
        self.step = step
        self.k = k
        self.num_micro = num_micro
        self.plan = plan
        self.rows = rows

    @property
    def closes_step(self) -> bool:
        """True for the step's last micro-batch."""
        return self.k == self.num_micro - 1

    @property
    def offset(self) -> int:
        """The step within its window."""
        return self.step - self.plan.first

    def to(self, device: Any, **kwargs: Any) -> "Ticket":
        """Itself: prompts stay where they are."""
        return self


class PromptDataset(Dataset):
    """Tickets of a plan, the same on every rank.

    Args:
        rows: prepared prompts.
        planner: of their windows.
    """

    def __init__(self, rows: Rows, planner: PromptPlanner) -> None:
        self.rows = rows
        self.planner = planner

    def __getitem__(self, key: tuple[int, int, int]) -> Ticket:
        epoch, step, k = key
        plan = self.planner.window(epoch, step)
        opens = step == plan.first and k == 0
        rows = [self.rows[row] for row in plan.prompts] if opens else None
        return Ticket(epoch, step, k, self.planner.num_micro, plan, rows)

    def __len__(self) -> int:
        return self.planner.steps_per_epoch * self.planner.num_micro


class PromptStream(IterableDataset):
    """Tickets of an endless stream of prompts, pass after pass, cut into whole windows.

    Args:
        stream: prepared prompts; iterated anew for every pass.
        geometry: of windows.
        num_micro: micro-batches per step.

    ``skip`` steps, those done so far, are left out; a window that they end in is not given again.
    """

    def __init__(self, stream: Any, geometry: Geometry, num_micro: int) -> None:
        self.stream = stream
        self.geometry = geometry
        self.num_micro = num_micro
        self.skip = 0

    def _rows(self) -> Iterator[dict[str, Any]]:
        for epoch in range(2**62):
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)
            empty = True
            for row in self.stream:
                empty = False
                yield row
            if empty:
                return

    def __iter__(self) -> Iterator[Ticket]:
        rows, steps = self._rows(), self.geometry.steps
        for number in range(2**62):
            window = [row for _, row in zip(range(self.geometry.prompts), rows, strict=False)]
            if len(window) < self.geometry.prompts:
                return
            first = number * self.geometry.prompts
            plan = WindowPlan(number, number * steps, list(range(first, first + len(window))))
            for step in range(max(plan.first, self.skip), plan.first + steps):
                for k in range(self.num_micro):
                    opens = step == plan.first and k == 0
                    yield Ticket(0, step, k, self.num_micro, plan, window if opens else None)
