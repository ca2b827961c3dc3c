"""Counts over prepared rows, read from Arrow in blocks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from workbench.data.batch import Role
from workbench.models.tokenizer import turn_terminator

_BLOCK = 10_000
_BLANKS = " \t\r\n\u2581\u0120\u010a\u0109\u010d"  # white space, also as SentencePiece and byte-level BPE write it
_BLANK_BYTES = {"<0x09>", "<0x0A>", "<0x0D>", "<0x20>"}
PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)


@dataclass(frozen=True)
class Vocabulary:
    """What the counts need to know about token ids.

    Args:
        ends: ids that end a text or an assistant's turn.
        bos: id of the start token, if there is one.
        is_end: for each id, whether it is one of ``ends``.
        is_blank: for each id, whether it is white space.
    """

    ends: tuple[int, ...]
    bos: int | None
    is_end: np.ndarray
    is_blank: np.ndarray

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, more_ends: Iterable[int] = ()) -> "Vocabulary":
        """``more_ends``: those of the model's config."""
        found = (tokenizer.eos_token_id, turn_terminator(tokenizer), *more_ends)
        size = len(tokenizer)
        ends = tuple(dict.fromkeys(int(i) for i in found if i is not None and i < size))
        is_end, is_blank = np.zeros(size, bool), np.zeros(size, bool)
        is_end[list(ends)] = True
        tokens = tokenizer.convert_ids_to_tokens(range(size))
        is_blank[:] = [t is not None and (not t.strip(_BLANKS) or t in _BLANK_BYTES) for t in tokens]
        return cls(ends, tokenizer.bos_token_id, is_end, is_blank & ~is_end)


@dataclass
class Block:
    """Some rows, flat: N tokens in S segments of R rows.

    Args:
        ids: token ids ``[N]``.
        weights: their weights ``[N]``.
        starts: first token of each segment and the end of the last, ``[S + 1]``.
        parents: the segment of this block that each one continues, or -1, ``[S]``.
        rows: row of each segment ``[S]``.
        roles: its `Role` ``[S]``.
        row_starts: first token of each row and the end of the last, ``[R + 1]``.
    """

    ids: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    parents: np.ndarray
    rows: np.ndarray
    roles: np.ndarray
    row_starts: np.ndarray

    @classmethod
    def of(cls, table: pa.Table) -> "Block":
        ids, row_starts = _flat(table, "input_ids")
        lengths, first = _flat(table, "lengths")
        parents, _ = _flat(table, "parents")
        rows = np.repeat(np.arange(len(table)), np.diff(first))
        parents = np.where(parents >= 0, parents + first[rows], -1)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        roles = _flat(table, "roles")[0]
        return cls(ids, _flat(table, "weights")[0], starts, parents, rows, roles, row_starts)

    def unpacked(self) -> "Block":
        """The same tokens with every segment a row: the documents of packs."""
        return replace(self, rows=np.arange(len(self.rows)), row_starts=self.starts)

    def leaves(self) -> np.ndarray:
        """Indices of the segments that no other continues."""
        inner = np.zeros(len(self.rows), bool)
        inner[self.parents[self.parents >= 0]] = True
        return np.flatnonzero(~inner)

    def trained(self) -> np.ndarray:
        """Trained tokens of each segment ``[S]``."""
        before = np.concatenate([[0], np.cumsum(self.weights != 0)])
        return before[self.starts[1:]] - before[self.starts[:-1]]

    def depths(self) -> np.ndarray:
        """Tokens from the root of each segment's sequence to its own end ``[S]``."""
        depths = np.diff(self.starts)
        for segment in np.flatnonzero(self.parents >= 0):  # parents come first
            depths[segment] += depths[self.parents[segment]]
        return depths


def blocks(rows: Dataset) -> Iterator[Block]:
    """The prepared rows, block by block."""
    columns = ["input_ids", "weights", "lengths", "parents", "roles"]
    for table in rows.select_columns(columns).with_format("arrow").iter(batch_size=_BLOCK):
        yield Block.of(table)


def _flat(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """All values of a list column, and where each row's begin (with the end of the last)."""
    column = table.column(name).combine_chunks()
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0]


@dataclass
class Sequences:
    """What a model without shared prompts reads, per row: sequences from a root to a leaf.

    Args:
        count: sequences of each row ``[R]``.
        tokens: their tokens, a shared prompt counted in each, ``[R]``.
        longest: tokens of the longest one ``[R]``.
    """

    count: np.ndarray
    tokens: np.ndarray
    longest: np.ndarray

    @classmethod
    def of(cls, rows: Dataset) -> "Sequences":
        parts = [_block_sequences(block) for block in blocks(rows)]
        return cls(*(np.concatenate(values) if values else np.zeros(0, np.int64) for values in zip(*parts, strict=True)))

    def __len__(self) -> int:
        return len(self.count)


def _block_sequences(block: Block) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    leaves, size = block.leaves(), len(block.row_starts) - 1
    rows, depths = block.rows[leaves], block.depths()[leaves]
    longest = np.zeros(size, np.int64)
    np.maximum.at(longest, rows, depths)
    tokens = np.bincount(rows, weights=depths, minlength=size).astype(np.int64)
    return np.bincount(rows, minlength=size), tokens, longest


@dataclass
class Counts:
    """Counts over prepared, unpacked rows.

    Args:
        rows: number of rows.
        tokens: their tokens.
        trained: tokens of weight above 0.
        weighted: trained tokens whose weight is not 1.
        double_bos: rows in which a sequence starts with two start tokens.
        unended: rows in which a sequence trains no end token after its last text, rows cut to the limit apart.
        ended: rows in which every sequence trains one.
        blank: rows in which a sequence trains end tokens and white space alone.
        digests: a hash of each row's tokens ``[rows]``.
        lengths: tokens of the longest sequence of each row ``[rows]``.
        trained_by_role: trained tokens of the segments of each role, in pairs and triples.
        chosen_longer: pairs whose chosen completion has more trained tokens than the rejected one.
        rejected_longer: pairs in which it is the other way round.
    """

    rows: int = 0
    tokens: int = 0
    trained: int = 0
    weighted: int = 0
    double_bos: int = 0
    unended: int = 0
    ended: int = 0
    blank: int = 0
    digests: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    trained_by_role: dict[str, int] = field(default_factory=dict)
    chosen_longer: int = 0
    rejected_longer: int = 0

    @property
    def duplicates(self) -> int:
        """Rows that repeat an earlier one."""
        return self.rows - len(np.unique(self.digests))

    def shared_with(self, other: "Counts") -> int:
        """Rows that ``other`` has as well."""
        return int(np.isin(self.digests, other.digests).sum())

    def percentiles(self) -> dict[int, int]:
        """Length that this share of the rows (in percent) does not exceed."""
        if not self.rows:
            return {}
        values = np.percentile(self.lengths, PERCENTILES, method="inverted_cdf")
        return dict(zip(PERCENTILES, values.astype(int).tolist(), strict=True))


def count_rows(rows: Dataset, vocabulary: Vocabulary, limit: int | None, *, packed: bool = False) -> Counts:
    """Counts of prepared rows.

    Args:
        rows: before packing, or packs whose segments are whole rows.
        vocabulary: of their tokenizer.
        limit: length that longer rows were cut to, if any was; a row of that length is not expected to end.
        packed: each segment is a row of its own.
    """
    counts = Counts()
    digests, lengths = [], []
    for block in blocks(rows):
        block = block.unpacked() if packed else block
        counts.rows += len(block.row_starts) - 1
        counts.tokens += len(block.ids)
        counts.trained += int(np.count_nonzero(block.weights))
        counts.weighted += int(((block.weights != 0) & (block.weights != 1)).sum())
        _count_sequences(counts, block, vocabulary, limit)
        _count_sides(counts, block)
        data, width = block.ids.tobytes(), block.ids.itemsize
        digests.append(np.array([hash(data[a * width : b * width]) for a, b in pairwise(block.row_starts.tolist())], np.int64))
        lengths.append(_block_sequences(block)[2])
    if digests:
        counts.digests, counts.lengths = np.concatenate(digests), np.concatenate(lengths)
    return counts


def _count_sequences(counts: Counts, block: Block, vocabulary: Vocabulary, limit: int | None) -> None:
    """Start and end tokens: a row counts if one of its sequences does."""
    ids = np.minimum(block.ids, len(vocabulary.is_end) - 1)
    trained, end = block.weights != 0, vocabulary.is_end[ids]
    content = trained & ~end & ~vocabulary.is_blank[ids]
    leaves = block.leaves()
    leaves = leaves[np.diff(block.starts)[leaves] > 0]
    last_content, last_end, last_trained = (_last(mask, block.starts, leaves) for mask in (content, trained & end, trained))
    whole = block.depths()[leaves] != limit
    unended = (last_trained >= 0) & (last_end <= last_content) & whole
    counts.unended += _rows_with(unended, block.rows[leaves])
    counts.ended += len(block.row_starts) - 1 - _rows_with(last_end <= last_content, block.rows[leaves])
    counts.blank += _rows_with((last_trained >= 0) & (last_content < 0), block.rows[leaves])
    roots = np.flatnonzero((block.parents < 0) & (np.diff(block.starts) > 1))
    first = block.starts[roots]
    if vocabulary.bos is not None:
        doubled = (block.ids[first] == vocabulary.bos) & (block.ids[first + 1] == vocabulary.bos)
        counts.double_bos += _rows_with(doubled, block.rows[roots])


def _count_sides(counts: Counts, block: Block) -> None:
    """Trained tokens of both sides of pairs, and of a gold completion."""
    trained = block.trained()
    sides = {role: trained[block.roles == int(role)] for role in (Role.CHOSEN, Role.REJECTED, Role.GOLD)}
    if not len(sides[Role.CHOSEN]):
        return
    for role, found in sides.items():
        if len(found):
            name = role.name.lower()
            counts.trained_by_role[name] = counts.trained_by_role.get(name, 0) + int(found.sum())
    counts.chosen_longer += int((sides[Role.CHOSEN] > sides[Role.REJECTED]).sum())
    counts.rejected_longer += int((sides[Role.CHOSEN] < sides[Role.REJECTED]).sum())


def _last(mask: np.ndarray, starts: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Last place where ``mask`` holds within each of the segments; -1 where it never does."""
    places = np.where(mask, np.arange(len(mask)), -1)
    # a segment's maximum over [start, end): every second value of reduceat over the interleaved bounds
    bounds = np.stack([starts[segments], starts[segments + 1]], 1).ravel()
    if not len(bounds):
        return np.zeros(0, np.int64)
    return np.maximum.reduceat(np.append(places, -1), bounds)[::2]


def _rows_with(hit: np.ndarray, rows: np.ndarray) -> int:
    return len(np.unique(rows[hit]))


@dataclass(frozen=True)
class Bin:
    """Rows whose length lies in ``[low, high]``."""

    low: int
    high: int
    rows: int

    @property
    def name(self) -> str:
        """The lengths in words."""
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}-{self.high:,}"


def histogram(lengths: np.ndarray, bins: int = 12) -> list[Bin]:
    """At most ``bins`` bins of one width (1, 2, 5, 10, 20, 50 ...) that hold the shortest row and the longest."""
    if not len(lengths):
        return []
    low, high = int(lengths.min()), int(lengths.max())
    width = next(w for w in _widths() if high // w - low // w < bins)
    first = low // width * width
    numbers = np.bincount((lengths - first) // width)
    return [Bin(first + i * width, first + (i + 1) * width - 1, int(n)) for i, n in enumerate(numbers)]


def _widths() -> Iterator[int]:
    scale = 1
    while True:
        yield from (scale, 2 * scale, 5 * scale)
        scale *= 10


def margin_range(rows: Dataset) -> tuple[float, float, float] | None:
    """Least, mean and largest margin of pairs, where they have one."""
    if "margin" not in rows.column_names:
        return None
    values = rows.with_format("arrow")[:].column("margin").to_numpy()
    return float(values.min()), float(values.mean()), float(values.max())


def label_counts(rows: Dataset) -> dict[str, int]:
    """How often each label occurs, in unpaired and stepwise rows."""
    for name in ("label", "labels"):
        if name in rows.column_names:
            column: Any = rows.with_format("arrow")[:].column(name).combine_chunks()
            values = column.flatten() if pa.types.is_list(column.type) else column
            found = values.value_counts().to_pylist()
            return {_label(v["values"]): v["counts"] for v in sorted(found, key=lambda v: -v["values"])}
    return {}


def _label(value: Any) -> str:
    return str(bool(value)).lower() if value in (0, 1) else f"{value:g}"
