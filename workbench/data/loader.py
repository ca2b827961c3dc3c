"""Loaders whose items are whole micro-batches, addressed by (epoch, step, k)."""

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from workbench.data.batch import NORMALISED_ROLES, MicroBatch
from workbench.data.mismatched import Mismatch
from workbench.data.plan import Planner, RowSizes, StepPlan, to_ranks
from workbench.errors import UserError
from workbench.losses.reduce import Normalisers


class Rows(Protocol):
    """A map-style data set of prepared rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


def ignore_interrupts(worker: int) -> None:
    """In a loader's worker: Ctrl-C reaches all processes of a terminal, but the step under way still needs its data."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class StepLoader(DataLoader):
    """A loader that needs no state of its own: the trainer's optimizer step says where it continues.

    Its two state methods tell Lightning that it resumes exactly.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"worker_init_fn": ignore_interrupts, **kwargs})

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class StepDataset(Dataset):
    """One rank's micro-batches of a plan.

    Args:
        rows: prepared rows.
        planner: deals them.
        rank: this data-parallel rank.
        mismatch: makes the companions of micro-batches; None: they have none.
    """

    def __init__(self, rows: Rows, planner: Planner, rank: int, mismatch: Mismatch | None = None) -> None:
        self.rows = rows
        self.planner = planner
        self.rank = rank
        self.mismatch = mismatch

    def __getitem__(self, key: tuple[int, int, int]) -> MicroBatch:
        epoch, step, k = key
        plan = self.planner.step(epoch, step)
        return _item(self.rows, plan, self.rank, k, step, self.mismatch)

    def __len__(self) -> int:
        return self.planner.steps_per_epoch * self.planner.num_micro


class StepSampler(DistributedSampler):
    """Keys of one epoch's micro-batches, from the optimizer step at which iteration starts.

    It derives from ``DistributedSampler`` so that Lightning leaves it in place; the plan has dealt rows to ranks already.

    Args:
        dataset: the micro-batches.
        position: optimizer steps done so far, over all epochs.
        steps_per_epoch: steps after which the trainer starts a new epoch.
    """

    def __init__(self, dataset: StepDataset, position: Callable[[], int], steps_per_epoch: int) -> None:
        super().__init__(dataset, num_replicas=1, rank=0, shuffle=False)
        self.position = position
        self.steps_per_epoch = steps_per_epoch
        self.num_micro = dataset.planner.num_micro

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        epoch, first = divmod(self.position(), self.steps_per_epoch)
        for step in range(first, self.steps_per_epoch):
            for k in range(self.num_micro):
                yield epoch, step, k

    def __len__(self) -> int:
        return self.steps_per_epoch * self.num_micro


class StreamDataset(IterableDataset):
    """One rank's micro-batches of an endless stream: passes over the source, each cut into windows of ``batch_size`` rows.

    Every rank reads the same rows in the same order and keeps its share of each window by the same plan.

    Args:
        stream: prepared rows; iterated anew for every pass.
        window_plan: plans a window from its rows' sizes.
        batch_size: rows of an optimizer step.
        rank: this data-parallel rank.
        drop_last: leave out a pass's last window if it is shorter.
        mismatch: as for `StepDataset`.

    ``skip`` windows, those of the steps done so far, are read and left out.
    """

    def __init__(
        self,
        stream: Any,
        window_plan: Callable[[list[dict[str, Any]]], Planner],
        batch_size: int,
        rank: int,
        drop_last: bool = False,
        mismatch: Mismatch | None = None,
    ) -> None:
        self.stream = stream
        self.window_plan = window_plan
        self.batch_size = batch_size
        self.rank = rank
        self.drop_last = drop_last
        self.mismatch = mismatch
        self.skip = 0

    def windows(self) -> Iterator[list[dict[str, Any]]]:
        """Windows of rows, pass after pass; a pass's last one may be shorter. Ends at a pass without any."""
        for epoch in range(2**62):
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)
            window: list[dict[str, Any]] = []
            empty = True
            for row in self.stream:
                window.append(row)
                if len(window) == self.batch_size:
                    empty = False
                    yield window
                    window = []
            if window and not self.drop_last:
                empty = False
                yield window
            if empty and self.drop_last and window:
                raise UserError(
                    f"data.batch_size={self.batch_size} is more than the {len(window)} rows of the stream, and data.drop_last "
                    "leaves no step; set a smaller batch or data.drop_last=false."
                )
            if empty:
                return

    def __iter__(self) -> Iterator[MicroBatch]:
        for step, window in enumerate(self.windows()):
            if step < self.skip:
                continue
            plan = self.window_plan(window).step(0, 0)
            for k in range(len(plan.micro[self.rank])):
                yield _item(window, plan, self.rank, k, step, self.mismatch)


def _item(rows: Rows, plan: StepPlan, rank: int, k: int, step: int, mismatch: Mismatch | None) -> MicroBatch:
    """Micro-batch ``k`` of a rank's share of a step."""
    index = plan.micro[rank][k]
    batch = MicroBatch.from_rows([rows[i] for i in index], index, plan.norm, step=step, k=k)
    if mismatch is not None:
        batch.companions = mismatch.companions(rows.__getitem__, plan, rank, k, step)
    return batch


class StreamLoader(StepLoader):
    """Starts the stream at the trainer's optimizer step.

    Args:
        dataset: the stream.
        position: optimizer steps done so far.
        options: as for ``DataLoader``.
    """

    def __init__(self, dataset: StreamDataset, position: Callable[[], int], **options: Any) -> None:
        super().__init__(dataset, batch_size=None, **options)
        self._position = position

    def __iter__(self) -> Any:
        self.dataset.skip = self._position()
        return super().__iter__()


class EvalDataset(Dataset):
    """One rank's micro-batches of an evaluation set: every row once, longest first; ranks without a row get an empty one.

    Args:
        rows: prepared rows.
        sizes: of every row.
        micro_batch_size: most rows in one forward.
        world_size: data-parallel ranks.
        rank: this one.
        mismatch: makes the companion of each, in the order of the set; None: they have none.
    """

    def __init__(
        self,
        rows: Rows,
        sizes: RowSizes,
        micro_batch_size: int,
        world_size: int,
        rank: int,
        mismatch: Mismatch | None = None,
    ) -> None:
        self.rows = rows
        self.mismatch = mismatch
        order = np.argsort(-sizes.tokens, kind="stable").tolist()
        bins = [order[i : i + micro_batch_size] for i in range(0, len(order), micro_batch_size)]
        self.items = to_ranks(bins, world_size)[rank]
        self.norm = Normalisers(
            tokens=float(sizes.weight.sum()),
            sequences=float(len(sizes)),
            unmasked=float((sizes.weight > 0).sum()),
            micro_batches=float(len(bins)),
            **{role: float(weight.sum()) for role, weight in sizes.by_role.items()},
        )

    def __getitem__(self, item: int) -> MicroBatch:
        index = self.items[item]
        batch = MicroBatch.from_rows([self.rows[i] for i in index], index, self.norm, step=item)
        if self.mismatch is not None:
            batch.companions = self.mismatch.batches(self.rows.__getitem__, range(len(self.rows)), [index], self.norm, item)
        return batch

    def __len__(self) -> int:
        return len(self.items)


class InOrder(DistributedSampler):
    """Items as they come; the data set has dealt them to ranks already."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset, num_replicas=1, rank=0, shuffle=False)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.dataset)))

    def __len__(self) -> int:
        return len(self.dataset)


def row_sizes(rows: Any) -> RowSizes:
    """Tokens and trained weight of every row of a prepared Arrow data set, without making Python objects of them."""
    tables = rows.select_columns(["weights", "lengths", "roles"]).with_format("arrow").iter(batch_size=20_000)
    return _joined([_sizes(*(_flat(table.column(name)) for name in ("weights", "lengths", "roles"))) for table in tables])


def sizes_of(rows: Sequence[dict[str, Any]]) -> RowSizes:
    """`RowSizes` of rows in memory."""
    columns = [[np.asarray(row[name]) for row in rows] for name in ("weights", "lengths", "roles")]
    return _sizes(*((np.concatenate(lists), np.array([len(values) for values in lists])) for lists in columns))


_Lists = tuple[np.ndarray, np.ndarray]  # all values of a column of lists, and how many each row has


def _flat(column: Any) -> _Lists:
    lists = column.combine_chunks()
    return lists.flatten().to_numpy(zero_copy_only=False), np.diff(lists.offsets.to_numpy())


def _sizes(weights: _Lists, lengths: _Lists, roles: _Lists) -> RowSizes:
    values, tokens = weights[0].astype(np.float64), weights[1].astype(np.int64)
    row = np.repeat(np.arange(len(tokens)), tokens)
    role = np.repeat(roles[0], lengths[0])
    present = set(np.unique(roles[0]).tolist())
    by_role = {
        name: np.bincount(row, np.where(np.isin(role, kinds), values, 0.0), len(tokens))
        for name, kinds in NORMALISED_ROLES.items()
        if int(kinds[0]) in present
    }
    return RowSizes(tokens, np.bincount(row, values, len(tokens)), by_role)


def _joined(parts: list[RowSizes]) -> RowSizes:
    by_role = {name: np.concatenate([part.by_role[name] for part in parts]) for name in parts[0].by_role}
    return RowSizes(np.concatenate([p.tokens for p in parts]), np.concatenate([p.weight for p in parts]), by_role)
