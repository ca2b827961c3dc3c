"""Packing: several prepared rows of one segment put into one row of at most ``max_length`` tokens.

- ``bfd``: best-fit decreasing. Rows whole, one segment each; the tail of a longer row is dropped.
- ``bfd_split``: the same after cutting longer rows into pieces of ``max_length``; no token is lost.
- ``wrapped``: all rows in one stream of tokens, cut at every ``max_length``; a pack is one segment that attends across
  its documents, as in T5 (Raffel et al. 2020, section 3.1.2). The last pack may be shorter.

A segment's first token has no context and weight 0, so ``bfd`` trains exactly the tokens of the rows packed, and each cut
of the other two costs one token at most. In ``wrapped`` a document's first token stays untrained within a pack, too.

Order, the same in every run: rows are placed from the longest to the shortest, equal ones as they come, each into the
fullest pack that has room (among equally full ones the earliest opened) or a new one; packs in the order of their opening.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset

from workbench.data.batch import Role
from workbench.data.spec import Packing, PrepareReport

_BATCH = 1000
_LEAST_PACKS = 10_000  # of a process: fewer are packed sooner than one has started


@dataclass
class Packs:
    """Pieces of rows, pack after pack.

    Args:
        rows: row of each piece.
        starts: its first token in the row.
        stops: one past its last token.
        sizes: number of pieces of each pack.
        dropped_tokens: tokens that no piece holds.
        cuts: places where a row was cut in two.
    """

    rows: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    sizes: np.ndarray
    dropped_tokens: int = 0
    cuts: int = 0


def best_fit_decreasing(lengths: Sequence[int] | np.ndarray, max_length: int) -> list[list[int]]:
    """Items of each pack, in the order described above; no length may exceed ``max_length``."""
    lengths = np.asarray(lengths)
    packs: list[list[int]] = []
    with_room: dict[int, deque[int]] = {}  # packs by free tokens
    rooms: list[int] = []  # its keys, sorted
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            number, room = len(packs), max_length
            packs.append([])
        else:
            room = rooms[at]
            number = with_room[room].popleft()
            if not with_room[room]:
                del with_room[room], rooms[at]
        packs[number].append(item)
        left = room - length
        if left:
            if left not in with_room:
                with_room[left] = deque()
                insort(rooms, left)
            with_room[left].append(number)
    return packs


def plan_packs(lengths: np.ndarray, max_length: int, strategy: Packing) -> Packs:
    """Which tokens of which rows make each pack."""
    if strategy == "wrapped":
        return _wrapped(lengths, max_length)
    if strategy == "bfd":
        pieces = np.stack([np.arange(len(lengths)), np.zeros_like(lengths), np.minimum(lengths, max_length)])
    else:
        pieces = _split(lengths, max_length)
    packs = best_fit_decreasing(pieces[2] - pieces[1], max_length)
    rows, starts, stops = pieces[:, np.concatenate(packs)] if packs else pieces
    sizes = np.array([len(p) for p in packs], dtype=np.int64)
    dropped = int(lengths.sum() - (pieces[2] - pieces[1]).sum())
    return Packs(rows, starts, stops, sizes, dropped, pieces.shape[1] - len(lengths))


def _split(lengths: np.ndarray, max_length: int) -> np.ndarray:
    """Pieces ``[3, n]`` (row, start, stop) of at most ``max_length`` tokens."""
    counts = -(-lengths // max_length)
    rows = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * max_length
    return np.stack([rows, starts, np.minimum(starts + max_length, lengths[rows])])


def _wrapped(lengths: np.ndarray, max_length: int) -> Packs:
    """The stream of all tokens cut at row ends and at multiples of ``max_length``; pieces between two multiples are a pack."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(ends, np.arange(max_length, total, max_length))
    begins = np.concatenate([[0], cuts[:-1]]).astype(np.int64)
    rows = np.searchsorted(ends, begins, "right")
    first = (ends - lengths)[rows]
    packs = begins // max_length
    sizes = np.bincount(packs) if len(packs) else np.zeros(0, np.int64)
    return Packs(rows, begins - first, cuts - first, sizes, 0, len(cuts) - len(np.unique(rows)))


def pack(
    dataset: Dataset, max_length: int, strategy: Packing, *, work: Path | None = None, num_proc: int | None = None
) -> tuple[Dataset, Packs]:
    """Packed rows of prepared rows with one segment each.

    Args:
        dataset: prepared rows.
        max_length: most tokens of a pack.
        strategy: how.
        work: folder for the file that is written; None: in memory.
        num_proc: processes, as far as there is work for them.
    """
    lengths = np.concatenate([np.zeros(0, np.int64), *_lengths(dataset)])
    plan = plan_packs(lengths, max_length, strategy)
    ends = np.cumsum(plan.sizes)
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    columns = {n: pa.ListArray.from_arrays(offsets, pa.array(getattr(plan, n))) for n in ("rows", "starts", "stops")}
    target: dict[str, Any] = {"cache_file_name": str(work / "packs.arrow")} if work else {"keep_in_memory": True}
    processes = min(num_proc or 1, len(plan.sizes) // _LEAST_PACKS)
    packed = Dataset(pa.table(columns)).map(
        _Gather(dataset, strategy == "wrapped"),
        batched=True,
        batch_size=_BATCH,
        num_proc=processes if processes > 1 else None,
        remove_columns=list(columns),
        load_from_cache_file=False,
        new_fingerprint="1" * 16,
        desc="Packing",
        **target,
    )
    return packed, plan


def _lengths(dataset: Dataset) -> list[np.ndarray]:
    batches = dataset.select_columns(["weights"]).with_format("arrow").iter(batch_size=50_000)
    return [np.diff(t["weights"].combine_chunks().offsets.to_numpy()).astype(np.int64) for t in batches]


class _Gather:
    """Builds packs from their pieces."""

    def __init__(self, dataset: Dataset, one_segment: bool) -> None:
        self.dataset = dataset.select_columns(["input_ids", "weights"]).with_format("arrow")
        self.one_segment = one_segment

    def __call__(self, batch: Mapping[str, list[list[int]]]) -> pa.Table:
        rows, starts, stops = (np.concatenate([np.asarray(x) for x in batch[n]]) for n in ("rows", "starts", "stops"))
        table = self.dataset[rows.tolist()]
        return gather(table, starts, stops, np.array([len(p) for p in batch["rows"]]), self.one_segment)


def gather(table: pa.Table, starts: np.ndarray, stops: np.ndarray, sizes: np.ndarray, one_segment: bool) -> pa.Table:
    """Packed rows.

    Args:
        table: ``input_ids`` and ``weights`` of the row of each piece.
        starts: first token of each piece.
        stops: one past its last.
        sizes: number of pieces of each pack.
        one_segment: a pack is one segment, else each piece is one.
    """
    ids, weights = (table[name].combine_chunks() for name in ("input_ids", "weights"))
    offsets = ids.offsets.to_numpy()[:-1] - ids.offsets[0].as_py()
    lengths = stops - starts
    ends = np.cumsum(lengths)
    index = np.arange(ends[-1]) + np.repeat(offsets + starts - (ends - lengths), lengths)
    out_ids = ids.flatten().to_numpy()[index]
    out_weights = weights.flatten().to_numpy()[index]
    last_piece = np.cumsum(sizes)
    pack_ends = ends[last_piece - 1]
    segment_ends, segments = (pack_ends, np.ones_like(sizes)) if one_segment else (ends, sizes)
    segment_lengths = np.diff(segment_ends, prepend=0)
    out_weights[segment_ends - segment_lengths] = 0.0
    return pa.table(
        {
            "input_ids": _lists(out_ids, pack_ends, pa.int32()),
            "weights": _lists(out_weights, pack_ends, pa.float32()),
            "lengths": _lists(segment_lengths, np.cumsum(segments), pa.int32()),
            "parents": _lists(np.full(len(segment_lengths), -1), np.cumsum(segments), pa.int32()),
            "roles": _lists(np.full(len(segment_lengths), int(Role.TEXT)), np.cumsum(segments), pa.int32()),
        }
    )


def _lists(values: np.ndarray, ends: np.ndarray, kind: pa.DataType) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], ends]).astype(np.int32)), pa.array(values, kind))


def pack_stream(
    dataset: IterableDataset, max_length: int, strategy: Packing, buffer: int, report: PrepareReport
) -> IterableDataset:
    """Packed rows of a stream: each window of ``buffer`` prepared rows is packed by itself."""
    columns = ["input_ids", "weights", "lengths", "parents", "roles"]
    return dataset.map(
        _Window(max_length, strategy, report), batched=True, batch_size=buffer, remove_columns=columns, features=None
    )


class _Window:
    """Packs one window of a stream."""

    def __init__(self, max_length: int, strategy: Packing, report: PrepareReport) -> None:
        self.max_length = max_length
        self.strategy: Packing = strategy
        self.report = report

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        lengths = np.array([len(x) for x in batch["input_ids"]], dtype=np.int64)
        plan = plan_packs(lengths, self.max_length, self.strategy)
        table = pa.table(
            {
                "input_ids": pa.array([batch["input_ids"][i] for i in plan.rows], pa.list_(pa.int32())),
                "weights": pa.array([batch["weights"][i] for i in plan.rows], pa.list_(pa.float32())),
            }
        )
        packed = gather(table, plan.starts, plan.stops, plan.sizes, self.strategy == "wrapped")
        self.report.packs += len(packed)
        weights = packed["weights"].combine_chunks().flatten().to_numpy()
        self.report.tokens += len(weights)
        self.report.trained_tokens += int(np.count_nonzero(weights))
        self.report.packing_dropped_tokens += plan.dropped_tokens
        self.report.packing_cuts += plan.cuts
        return packed.to_pydict()
