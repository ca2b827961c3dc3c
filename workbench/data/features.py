"""Rows to features: the ids, weights and segments of one prepared row.

Tokens are cut here and nowhere else: each sequence on its own, before any batch exists.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from workbench.data.align import Encoded, TextEncoder
from workbench.data.batch import Role
from workbench.data.chat import ChatRenderer
from workbench.data.drafts import Draft, Drafter, Flag, RowDraft
from workbench.data.formats import drop_reason, normalise_row
from workbench.data.spec import PrepareSpec
from workbench.data.targets import END
from workbench.errors import UserError

T = TypeVar("T")
REASONS = ("", "bad_row", "untrained", "cut_away", "too_long", "identical_pair", "empty")
_COLUMNS = {
    "input_ids": pa.list_(pa.int32()),
    "weights": pa.list_(pa.float32()),
    "lengths": pa.list_(pa.int32()),
    "parents": pa.list_(pa.int32()),
    "roles": pa.list_(pa.int32()),
}
_EXTRAS = {
    "preference": {"margin": pa.float32()},
    "unpaired_preference": {"label": pa.bool_()},
    "stepwise_supervision": {"labels": pa.list_(pa.float32())},
}
# What truncation cut off a labelled completion's end, as far as a row with a shorter prompt has room for it.
_TAIL = {"tail_ids": pa.list_(pa.int32()), "tail_weights": pa.list_(pa.float32())}
_NOTES = {"_flags": pa.int32(), "_reason": pa.int8(), "_note": pa.string()}


@dataclass
class Tokens:
    """One tokenised text.

    Args:
        ids: token ids ``[n]``.
        weights: weight of predicting each ``[n]``.
        boundary: number of tokens before the completion.
        steps: number of tokens up to each step's end.
    """

    ids: np.ndarray
    weights: np.ndarray
    boundary: int
    steps: list[int]

    def trained(self, *, answer: bool) -> bool:
        """Whether a token (of the completion, if ``answer``) is trained; the first one has no context."""
        return bool(self.weights[max(1, self.boundary if answer else 0) :].any())

    def cut(self, limit: int, keep_end: bool) -> "Tokens":
        """The first or last ``limit`` tokens."""
        if not keep_end:
            steps = [s for s in self.steps if s <= limit]
            size = steps[-1] if steps else limit
            return Tokens(self.ids[:size], self.weights[:size], min(self.boundary, size), steps)
        off = len(self.ids) - limit
        shifted = [max(0, s - off) for s in self.steps]
        return Tokens(self.ids[off:], self.weights[off:], max(0, self.boundary - off), shifted)


@dataclass
class Features:
    """A prepared row, or the reason why there is none."""

    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    lengths: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    tail_ids: list[int] = field(default_factory=list)
    tail_weights: list[float] = field(default_factory=list)
    flags: Flag = Flag.NONE
    reason: str = ""
    note: str | None = None

    def add(self, ids: np.ndarray, weights: np.ndarray, parent: int, role: Role) -> "Features":
        """Appends a segment."""
        weights = weights.astype(np.float32)
        if parent < 0:
            weights[:1] = 0.0
        self.ids = np.concatenate([self.ids, ids]) if self.lengths else ids
        self.weights = np.concatenate([self.weights, weights]) if self.lengths else weights
        self.lengths.append(len(ids))
        self.parents.append(parent)
        self.roles.append(int(role))
        return self


class RowPreparer:
    """Makes features of batches of raw rows; picklable, the same in every process.

    Args:
        tokenizer: with its chat template.
        spec: how rows are prepared.
        data_type: type of the rows.
        columns: columns of the rows.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, spec: PrepareSpec, data_type: str, columns: Sequence[str] = ()
    ) -> None:
        self.spec = spec
        self.data_type = data_type
        self.encoder = TextEncoder(tokenizer)
        self.renderer = ChatRenderer(tokenizer, chat_template_kwargs=spec.chat_template_kwargs, fold_system=spec.fold_system)
        self.drafter = Drafter(
            self.renderer,
            data_type,
            train_on=spec.train_on,
            role_weights=spec.role_weights,
            step_separator=spec.step_separator,
        )
        extras = _EXTRAS.get(data_type, {})
        self.extras = {k: v for k, v in extras.items() if k != "margin" or "margin" in columns}
        self.tail = _TAIL if data_type == "unpaired_preference" else {}

    def features(self, rows: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[Features]:
        """Features of raw rows; ``indices`` are their numbers for messages."""
        drafted = [self._draft(row, i) for row, i in zip(rows, indices, strict=True)]
        drafts = [d for row in drafted if isinstance(row, RowDraft) for d in row.drafts]
        encoded = map(self._steps_apart, drafts, self.encoder.encode([d.text for d in drafts], [d.has_places for d in drafts]))
        made = []
        for row, index in zip(drafted, indices, strict=True):
            if isinstance(row, RowDraft):
                sequences = [self._tokens(d, next(encoded), row) for d in row.drafts]
                made.append(self._or_bad(lambda row=row, sequences=sequences: self._finish(row, sequences), f"Row {index}: "))
            else:
                made.append(row)
        return made

    def table(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> pa.Table:
        """For ``Dataset.map``: one row of features and notes for each raw row, empty where it is dropped."""
        rows = self.features(to_rows(batch), indices)
        columns: dict[str, Any] = {
            "input_ids": _lists([r.ids for r in rows], pa.int32()),
            "weights": _lists([r.weights for r in rows], pa.float32()),
        }
        for name, kind in {**_COLUMNS, **self.tail}.items():
            if name not in columns:
                columns[name] = pa.array([getattr(r, name) for r in rows], kind)
        for name, kind in self.extras.items():
            columns[name] = pa.array([r.extras.get(name) for r in rows], kind)
        notes = [(int(r.flags), REASONS.index(r.reason), r.note) for r in rows]
        for (name, kind), values in zip(_NOTES.items(), zip(*notes, strict=True), strict=True):
            columns[name] = pa.array(values, kind)
        return pa.table(columns)

    def _draft(self, row: Mapping[str, Any], index: int) -> RowDraft | Features:
        normal = self._or_bad(lambda: normalise_row(row, self.data_type, index=index, roles=self.spec.role_names))
        if isinstance(normal, Features):
            return normal
        reason = drop_reason(normal)
        if reason:
            return Features(reason=reason)
        column = next(c for c in ("messages", "prompt", "text") if c in normal)
        return self._or_bad(lambda: self.drafter.draft(normal), f"Row {index}, column {column!r}: ")

    def _or_bad(self, make: Callable[[], T], place: str = "") -> T | Features:
        """What ``make`` gives, or a dropped row where it finds the row bad and bad rows are skipped."""
        try:
            return make()
        except UserError as error:
            if self.spec.on_bad_row == "error":
                raise UserError(f"{place}{error}") from None
            return Features(reason="bad_row", note=f"{place}{error}")

    def _steps_apart(self, draft: Draft, encoded: Encoded) -> Encoded:
        """The draft's tokens, none of which lies in two steps: a label must not be read where the next step has begun."""
        if not any(encoded.joined(end) for end in draft.steps[:-1]):
            return encoded
        return self.encoder.encode_apart(draft.text, draft.steps)

    def _tokens(self, draft: Draft, encoded: Encoded, row: RowDraft) -> Tokens:
        """The draft tokenised, with its special tokens and weights."""
        ids, weights = encoded.ids, np.zeros(len(encoded.ids), dtype=np.float32)
        for start, end, weight in draft.spans:
            first, last = encoded.tokens_in(start, min(end, len(draft.text)))
            weights[first:last] = weight
        boundary = encoded.tokens_in(draft.boundary, draft.boundary)[0] if draft.boundary else 0
        steps = [encoded.tokens_in(0, end)[1] for end in draft.steps]
        if draft.boundary and encoded.joined(draft.boundary):
            row.flags |= Flag.PROMPT_DIFFERS
        if not draft.plain:
            starts_twice = len(ids) > 1 and ids[0] == ids[1] == self.encoder.bos
            row.flags |= Flag.DOUBLE_BOS if starts_twice else Flag.NONE
            return Tokens(ids, weights, boundary, steps)
        before, off, after, doubled = self.encoder.around(ids, end=draft.end)
        row.flags |= Flag.DOUBLE_BOS if doubled else Flag.NONE
        ends_trained = [s[2] for s in draft.spans if s[1] == END][-1:] or [0.0]
        shift = len(before) - off
        return Tokens(
            np.concatenate([np.array(before, np.int32), ids[off:], np.array(after, np.int32)]),
            np.concatenate([np.zeros(len(before), np.float32), weights[off:], np.full(len(after), ends_trained[0], np.float32)]),
            max(0, boundary + shift),
            [max(0, s + shift) for s in steps],
        )

    def _finish(self, row: RowDraft, sequences: list[Tokens]) -> Features:
        """Truncates, judges and assembles."""
        flags = row.flags
        if self.data_type == "stepwise_supervision":
            _mark_steps(sequences[0], row.extras, last_alone=self.spec.train_on == "last_step")
        if "margin" in self.extras and "margin" not in row.extras:
            flags |= Flag.NO_MARGIN
        trains = self.data_type != "prompt_only"
        answers = self.data_type.endswith("preference")
        if trains and not all(s.trained(answer=answers) for s in sequences):
            return Features(flags=flags | Flag.UNTRAINED, reason="untrained")
        limit, whole = self.spec.row_limit, sequences[0]
        if limit is not None and any(len(s.ids) > limit for s in sequences):
            if self.spec.truncation == "drop" or (self.spec.truncation == "keep_start" and not trains):
                # a prompt without its end asks nothing: the question and the turn to answer would be cut off
                return Features(flags=flags, reason="too_long")
            keep_end = self.spec.truncation == "keep_end"
            lost_end = not keep_end and any(s.weights[limit:].any() for s in sequences)
            sequences = [s.cut(limit, keep_end) if len(s.ids) > limit else s for s in sequences]
            if trains and not all(s.trained(answer=answers) for s in sequences):
                return Features(flags=flags, reason="cut_away")
            flags |= Flag.TRUNCATED | (Flag.CUT_TERMINATOR if lost_end else Flag.NONE)
        if not len(sequences[0].ids):
            return Features(flags=flags, reason="empty")
        if len(sequences) > 1 and np.array_equal(sequences[0].ids, sequences[1].ids):
            return Features(flags=flags, reason="identical_pair")
        features = _ASSEMBLE[self.data_type](sequences, Features(extras=row.extras, flags=flags))
        if self.tail and flags & Flag.TRUNCATED and self.spec.truncation == "keep_start":
            room = slice(limit, limit + whole.boundary)
            features.tail_ids, features.tail_weights = whole.ids[room].tolist(), whole.weights[room].tolist()
        features.extras = {k: features.extras.get(k, 0.0) for k in self.extras}
        return features


def to_rows(batch: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A batch of columns as rows."""
    names = list(batch)
    return [dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _lists(arrays: list[np.ndarray], kind: pa.DataType) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum([len(a) for a in arrays])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays), kind))


def _mark_steps(sequence: Tokens, extras: dict[str, Any], *, last_alone: bool) -> None:
    """Weight 1 on the last token of each step that has a label, or of the last step alone."""
    ends = [sequence.boundary, *sequence.steps]
    if any(a >= b for a, b in pairwise(ends)):
        raise UserError("A step of a stepwise row has no token of its own: give it text, or another data.step_separator.")
    steps = list(zip(sequence.steps, extras["labels"], strict=True))
    for end, label in steps[-1:] if last_alone else steps:
        sequence.weights[end - 1] = float(label != -100)


def _text(sequences: list[Tokens], features: Features) -> Features:
    return features.add(sequences[0].ids, sequences[0].weights, -1, Role.TEXT)


def _prompt(sequences: list[Tokens], features: Features) -> Features:
    return features.add(sequences[0].ids, sequences[0].weights, -1, Role.PROMPT)


def _completion(sequences: list[Tokens], features: Features) -> Features:
    return _branches(sequences, sequences[0].boundary, features, (Role.COMPLETION,))


def _pair(sequences: list[Tokens], features: Features) -> Features:
    return _answers(sequences, features, (Role.CHOSEN, Role.REJECTED))


def _triple(sequences: list[Tokens], features: Features) -> Features:
    return _answers(sequences, features, (Role.CHOSEN, Role.REJECTED, Role.GOLD))


def _answers(sequences: list[Tokens], features: Features, roles: tuple[Role, ...]) -> Features:
    """The prompt once, as far as the renderings agree on its tokens; nothing shared: each side whole."""
    size = min(s.boundary for s in sequences)
    differs = np.any([s.ids[:size] != sequences[0].ids[:size] for s in sequences], axis=0)
    shared = int(differs.argmax()) if differs.any() else size
    for sequence in sequences:
        # A trained prompt is trained where it is shared: what is left of it in an answer's segment is no answer.
        sequence.weights[shared : sequence.boundary] = 0.0
    return _branches(sequences, shared, features, roles)


def _branches(sequences: list[Tokens], shared: int, features: Features, roles: tuple[Role, ...]) -> Features:
    if shared:
        features.add(sequences[0].ids[:shared], sequences[0].weights[:shared], -1, Role.PROMPT)
    for sequence, role in zip(sequences, roles, strict=True):
        features.add(sequence.ids[shared:], sequence.weights[shared:], 0 if shared else -1, role)
    return features


def _steps(sequences: list[Tokens], features: Features) -> Features:
    sequence = sequences[0]
    if sequence.boundary:
        features.add(sequence.ids[: sequence.boundary], sequence.weights[: sequence.boundary], -1, Role.PROMPT)
    ends = [sequence.boundary, *sequence.steps]
    labels = features.extras["labels"][: len(sequence.steps)]
    kept = [(a, b, label) for a, b, label in zip(ends[:-1], ends[1:], labels, strict=True) if b > a]
    for start, end, _ in kept:
        features.add(sequence.ids[start:end], sequence.weights[start:end], len(features.lengths) - 1, Role.STEP)
    features.extras = {"labels": [label for *_, label in kept]}
    return features


_ASSEMBLE = {
    "language_modeling": _text,
    "prompt_completion": _text,
    "prompt_only": _prompt,
    "preference": _pair,
    "triple_preference": _triple,
    "unpaired_preference": _completion,
    "stepwise_supervision": _steps,
}
