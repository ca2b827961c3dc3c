"""Rows to look at: their tokens in words, what is trained, what was cut, and why a row was left out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from workbench.data.batch import Role
from workbench.data.drafts import Flag, RowDraft
from workbench.data.features import Features, RowPreparer, Tokens
from workbench.data.spec import PrepareSpec

_HEAD, _AROUND, _TAIL = 200, 60, 100  # tokens shown of a long segment: at its start, around changes, at its end
_SEGMENTS = 12  # segments shown of a row


@dataclass(frozen=True)
class ShownToken:
    """One token.

    Args:
        text: what it reads as; empty where several tokens make one character and this is not the last.
        id: its id.
        weight: weight of predicting it, 0 for untrained.
        special: one of the tokenizer's special tokens.
        cut: lost to the length limit.
    """

    text: str
    id: int
    weight: float
    special: bool = False
    cut: bool = False


@dataclass(frozen=True)
class Skipped:
    """Tokens that are not shown."""

    count: int


@dataclass
class ShownSegment:
    """A stretch of a row."""

    title: str
    tokens: list[ShownToken | Skipped]
    length: int


@dataclass
class ShownRow:
    """A row.

    Args:
        title: which row, and why it is shown.
        segments: its segments; none if it could not be read.
        length: tokens it has as prepared.
        trained: trained ones.
        note: what happened to it, in words; empty if nothing did.
        more: segments that are not shown.
    """

    title: str
    segments: list[ShownSegment] = field(default_factory=list)
    length: int = 0
    trained: int = 0
    note: str = ""
    more: int = 0


@dataclass
class Traced:
    """A row with its sequences as they were before anything was cut."""

    index: int
    features: Features
    whole: list[Tokens]

    @property
    def length(self) -> int:
        """Tokens of the longest sequence before cutting."""
        return max((len(s.ids) for s in self.whole), default=0)


class _Tracer(RowPreparer):
    """Prepares rows and keeps what a dropped one would have been."""

    def trace(self, rows: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[Traced]:
        self._kept: dict[int, list[Tokens]] = {}
        made = self.features(rows, indices)
        return [Traced(i, f, self._kept.get(id(f), [])) for i, f in zip(indices, made, strict=True)]

    def _finish(self, row: RowDraft, sequences: list[Tokens]) -> Features:
        features = super()._finish(row, sequences)
        self._kept[id(features)] = sequences
        return features


def trace(
    rows: Sequence[Mapping[str, Any]],
    indices: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    spec: PrepareSpec,
    data_type: str,
) -> list[Traced]:
    """Prepares some raw rows one by one; rows that cannot be read are traced with their message."""
    spec = replace(unpacked(spec), on_bad_row="skip")
    columns = list(rows[0]) if rows else []
    return _Tracer(tokenizer, spec, data_type, columns).trace(rows, indices)


def unpacked(spec: PrepareSpec) -> PrepareSpec:
    """The same rows before they are packed."""
    return replace(spec, packing=None, max_length=spec.row_limit)


def spread(size: int, count: int) -> list[int]:
    """``count`` of ``size`` positions, evenly spread from the first to the last."""
    if size <= count:
        return list(range(size))
    return np.unique(np.linspace(0, size - 1, count).round().astype(int)).tolist()


# -- which rows -------------------------------------------------------------------------------------------------------

_KINDS: tuple[tuple[str, Callable[[Traced], bool]], ...] = (
    ("cut", lambda t: bool(t.features.flags & Flag.TRUNCATED)),
    ("untrained", lambda t: t.features.reason == "untrained"),
    ("two start tokens", lambda t: bool(t.features.flags & Flag.DOUBLE_BOS)),
    ("left out", lambda t: t.features.reason not in ("", "untrained")),
    ("no terminator", lambda t: bool(t.features.flags & (Flag.UNTERMINATED | Flag.OPEN_MARKERS))),
    ("weighted", lambda t: bool(((t.features.weights > 0) & (t.features.weights != 1)).any())),
)


def choose(traced: Sequence[Traced], count: int) -> list[tuple[str, Traced]]:
    """At most ``count`` rows with the reason for each: the first, the longest, one of each kind of fault, then the next ones."""
    wanted: list[tuple[str, Traced]] = []
    left = list(traced)

    def take(reason: str, found: Iterator[Traced]) -> None:
        row = next(found, None)
        if row is not None and len(wanted) < count:
            wanted.append((reason, row))
            left.remove(row)

    take("first", iter(left))
    take("longest", iter(sorted((t for t in left if not t.features.reason), key=lambda t: -t.length)))
    for reason, test in _KINDS:
        if not any(test(row) for _, row in wanted):
            take(reason, filter(test, left))
    while left and len(wanted) < count:
        take("", iter(left))
    return sorted(wanted, key=lambda pair: pair[1].index)


# -- how they read ----------------------------------------------------------------------------------------------------


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; tokens that only together make a character add it with the last of them."""

    def decode(start: int, end: int) -> str:
        return tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    out, start, read = [], 0, 0
    for end in range(1, len(ids) + 1):
        before, now = decode(start, read), decode(start, end)
        whole = len(now) > len(before) and not now.endswith("\ufffd")
        out.append(now[len(before) :] if whole or end == len(ids) else "")
        if whole:
            start, read = read, end
    return out


@dataclass
class _Part:
    """A segment before it is put in words; ``cut`` marks the tokens that were lost, ``[n]`` like the others."""

    title: str
    ids: np.ndarray
    weights: np.ndarray
    cut: np.ndarray

    @classmethod
    def of(cls, title: str, ids: np.ndarray, weights: np.ndarray, cut: bool = False) -> "_Part":
        return cls(title, ids, weights, np.full(len(ids), cut))

    def plus(self, other: "_Part") -> "_Part":
        return _Part(self.title, *(np.concatenate([getattr(self, n), getattr(other, n)]) for n in ("ids", "weights", "cut")))

    def visible(self) -> np.ndarray:
        """Which tokens are shown of a long one: its start, its end, and where it begins to be trained or cut."""
        show = np.arange(len(self.ids)) < _HEAD
        show[-_TAIL:] = True
        for state in (self.weights != 0, self.cut):
            for place in np.flatnonzero(np.diff(state.astype(np.int8)))[:2] + 1:
                show[max(0, place - _AROUND) : place + _AROUND] = True
        return show


class Shower:
    """Makes `ShownRow`.

    Args:
        tokenizer: that the rows were prepared with.
        spec: how they were prepared.
        data_type: their type.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, spec: PrepareSpec, data_type: str) -> None:
        self.tokenizer = tokenizer
        self.limit = spec.row_limit
        self.keep_end = spec.truncation == "keep_end"
        self.data_type = data_type
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = {*tokenizer.all_special_ids, *added}

    def traced(self, reason: str, row: Traced) -> ShownRow:
        """A raw row: as prepared, with the part that was cut; or as it would have been, if it was left out."""
        features = row.features
        title = f"row {row.index}" + (f", {reason}" if reason else "")
        if features.reason:
            parts = [self._dropped(s, i, features.reason) for i, s in enumerate(row.whole)]
            return ShownRow(title, self._show(parts), note=f"left out: {features.note or features.reason.replace('_', ' ')}")
        parts = _parts(features.ids, features.weights, features.lengths, features.roles)
        extras = dict(features.extras)
        _label_steps(parts, features.roles, extras.pop("labels", ()))
        if features.flags & Flag.TRUNCATED and self.limit is not None:
            self._add_cut(parts, row.whole, self.limit)
        note = ", ".join([*_notes(features.flags), *(f"{k} {_value(v)}" for k, v in extras.items())])
        return ShownRow(
            title, self._show(parts), len(features.ids), int(np.count_nonzero(features.weights)), note, _beyond(parts)
        )

    def packed(self, title: str, row: Mapping[str, Any], documents: Sequence[int] | None = None) -> ShownRow:
        """A pack; ``documents`` are the lengths of its documents where its segments do not tell."""
        ids, weights = np.asarray(row["input_ids"]), np.asarray(row["weights"])
        lengths = list(documents or row["lengths"])
        parts = _parts(ids, weights, lengths, [Role.TEXT] * len(lengths), "document")
        return ShownRow(title, self._show(parts), len(ids), int(np.count_nonzero(weights)), more=_beyond(parts))

    def _show(self, parts: Sequence[_Part]) -> list[ShownSegment]:
        return [ShownSegment(p.title, self._tokens(p), len(p.ids)) for p in parts[:_SEGMENTS]]

    def _tokens(self, part: _Part) -> list[ShownToken | Skipped]:
        show = part.visible()
        edges = [0, *(np.flatnonzero(np.diff(show.astype(np.int8))) + 1).tolist(), len(show)]
        tokens: list[ShownToken | Skipped] = []
        for start, end in pairwise(edges):
            if end > start and not show[start]:
                tokens.append(Skipped(end - start))
                continue
            ids = part.ids[start:end].tolist()
            marks = zip(pieces(self.tokenizer, ids), ids, part.weights[start:end], part.cut[start:end], strict=True)
            tokens += [ShownToken(t, i, float(w), i in self.special, bool(c)) for t, i, w, c in marks]
        return tokens

    def _add_cut(self, parts: list[_Part], whole: Sequence[Tokens], limit: int) -> None:
        """Puts what each sequence lost after its last segment or, where the end is kept, before the first one."""
        first = len(parts) - len(whole)
        for number, sequence in enumerate(whole):
            lost = len(sequence.ids) - limit
            if lost <= 0:
                continue
            if self.keep_end:
                head = _Part.of(parts[0].title, sequence.ids[:lost], sequence.weights[:lost], cut=True)
                parts[0] = head.plus(parts[0])
                return
            kept = len(sequence.cut(limit, keep_end=False).ids)
            tail = _Part.of("", sequence.ids[kept:], sequence.weights[kept:], cut=True)
            parts[first + number] = parts[first + number].plus(tail)

    def _dropped(self, sequence: Tokens, number: int, reason: str) -> _Part:
        """A sequence of a row that was left out."""
        paired = self.data_type in ("preference", "triple_preference")
        title = ("chosen", "rejected", "gold")[number] if paired else "text"
        part = _Part.of(title, sequence.ids, sequence.weights.copy())
        part.weights[:1] = 0.0
        if reason in ("cut_away", "too_long") and self.limit is not None and len(part.ids) > self.limit:
            lost = slice(0, -self.limit) if self.keep_end else slice(self.limit, None)
            part.cut[lost] = True
        return part


def _parts(ids: np.ndarray, weights: np.ndarray, lengths: Sequence[int], roles: Sequence[int], text: str = "text") -> list[_Part]:
    """A row's segments, numbered where there are several of a kind."""
    ends = np.cumsum([0, *lengths]).tolist()
    parts = []
    for number, ((start, end), role) in enumerate(zip(pairwise(ends), roles, strict=True)):
        name = text if role == Role.TEXT else Role(role).name.lower()
        if len(lengths) > 1 and role in (Role.TEXT, Role.STEP):
            name += f" {list(roles[: number + 1]).count(role)}"
        parts.append(_Part.of(name, ids[start:end], weights[start:end]))
    return parts


def _label_steps(parts: Sequence[_Part], roles: Sequence[int], labels: Sequence[float]) -> None:
    """Says beside each step what is learnt of it."""
    steps = [part for part, role in zip(parts, roles, strict=True) if role == Role.STEP]
    words = {0.0: "wrong", 1.0: "right", -100.0: "no label"}
    for step, label in zip(steps, labels, strict=bool(labels)):
        step.title += f" ({words.get(float(label), f'right with probability {label:g}')})"


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _beyond(parts: Sequence[_Part]) -> int:
    return max(0, len(parts) - _SEGMENTS)


def _notes(flags: Flag) -> list[str]:
    """A row's flags in words."""
    words = {
        Flag.TRUNCATED: "cut to the limit",
        Flag.CUT_TERMINATOR: "its end is lost",
        Flag.DOUBLE_BOS: "two start tokens",
        Flag.REASONING_DROPPED: "the template leaves reasoning out",
        Flag.TEXT_DROPPED: "the template leaves text out",
        Flag.UNTERMINATED: "no terminator",
        Flag.OPEN_MARKERS: "generation markers leave the terminator out",
    }
    return [text for flag, text in words.items() if flags & flag]


def documents_of(packs: Dataset, lengths: np.ndarray, number: int) -> list[int]:
    """Lengths of the documents in a ``wrapped`` pack, from the lengths of all rows in order."""
    width = [len(x) for x in packs.select_columns(["input_ids"])[: number + 1]["input_ids"]]
    start, end = sum(width[:number]), sum(width)
    ends = np.cumsum(lengths)
    inner = ends[(ends > start) & (ends < end)]
    return np.diff([start, *inner.tolist(), end]).tolist()
