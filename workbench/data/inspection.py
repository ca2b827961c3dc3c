"""What data would teach: every set of a `DataModule` prepared as in training, counted, and judged.

`inspect_sets` gives a `SetInspection` for each set, `workbench.data.inspection_steps` the plan,
`workbench.data.inspection_findings` what is wrong with them.
"""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from workbench.data.formats import normalise_row
from workbench.data.images import count_images
from workbench.data.inspection_counts import (
    Bin,
    Counts,
    Vocabulary,
    count_rows,
    histogram,
    label_counts,
    margin_range,
)
from workbench.data.inspection_rows import Shower, ShownRow, Traced, choose, documents_of, spread, trace, unpacked
from workbench.data.module import DataModule
from workbench.data.prepare import prepare
from workbench.data.spec import PrepareReport, PrepareSpec
from workbench.errors import UserError

SCANNED = 20_000  # raw rows whose messages and images are counted
TRACED = 500  # raw rows among which those to show are looked for
_UNTERMINATED = ("prompt_only", "stepwise_supervision")  # types that train no end token
_PROBED = 999  # rows that are looked at where no row can be trained

Prepared = Callable[[PrepareSpec], tuple[Dataset | IterableDataset, PrepareReport]]


@dataclass
class Raw:
    """What raw rows hold, of the first `SCANNED`.

    Args:
        rows: rows counted.
        roles: messages of each role.
        images: images.
        with_images: rows that hold one.
    """

    rows: int = 0
    roles: dict[str, int] = field(default_factory=dict)
    images: int = 0
    with_images: int = 0


@dataclass
class Packing:
    """Packed rows.

    Args:
        strategy: ``data.packing``.
        packs: number of packs.
        efficiency: share of ``packs * max_length`` places that hold a token.
        documents: rows and pieces of rows per pack, mean.
        untrained: packs without a trained token.
        dropped_tokens: tokens of tails that were left out.
        cuts: places where a row was cut in two.
    """

    strategy: str
    packs: int
    efficiency: float
    documents: float
    untrained: int
    dropped_tokens: int
    cuts: int


@dataclass
class SetInspection:
    """One data set.

    Args:
        name: ``train``, or that of the evaluation set.
        report: of its preparation; of the rows looked at, where no row can be trained.
        spec: how it was prepared.
        counts: over its rows before packing.
        raw: over its raw rows.
        ends: ids of the tokens that end a turn or text.
        labels: how often each label occurs.
        margins: least, mean and largest margin of pairs that have one.
        packing: None without packing.
        rows: prepared rows as trained: packs, if packed; None where no row can be trained.
        shown: rows to look at.
        longest: tokens of the longest raw row among those looked at, before cutting.
        also_in_train: rows of an evaluation set that the training set has as well.
        is_stream: only the first rows were read.
        stops: the message with which training stops at the first bad row; they were skipped here.
        error: why no row can be trained.
    """

    name: str
    report: PrepareReport
    spec: PrepareSpec
    counts: Counts
    raw: Raw
    ends: tuple[int, ...] = ()
    labels: dict[str, int] = field(default_factory=dict)
    margins: tuple[float, float, float] | None = None
    packing: Packing | None = None
    rows: Dataset | None = None
    shown: list[ShownRow] = field(default_factory=list)
    longest: int = 0
    also_in_train: int = 0
    is_stream: bool = False
    stops: str = ""
    error: str = ""

    @property
    def share_trained(self) -> float:
        """Trained tokens of all tokens."""
        return self.counts.trained / self.counts.tokens if self.counts.tokens else 0.0

    @property
    def ends_expected(self) -> bool:
        """Whether rows of this type are to train an end token."""
        return self.report.data_type not in _UNTERMINATED

    def bins(self) -> list[Bin]:
        """Rows by length."""
        return histogram(self.counts.lengths)

    def to_dict(self) -> dict[str, Any]:
        """Numbers alone, for JSON."""
        counts = self.counts
        return {
            **{k: v for k, v in asdict(self.report).items() if k != "warnings"},
            "tokens": counts.tokens,
            "trained_tokens": counts.trained,
            "trained_share": self.share_trained,
            "weighted_tokens": counts.weighted,
            "rows_without_terminator": counts.unended if self.ends_expected else None,
            "trained_double_bos": counts.double_bos,
            "empty_answers": counts.blank if self.ends_expected else None,
            "duplicates": counts.duplicates,
            "also_in_train": self.also_in_train,
            "roles": self.raw.roles,
            "images": self.raw.images,
            "labels": self.labels,
            "margins": self.margins,
            "trained_by_role": counts.trained_by_role,
            "chosen_longer": counts.chosen_longer,
            "rejected_longer": counts.rejected_longer,
            "length_mean": float(counts.lengths.mean()) if counts.rows else 0.0,
            "length_percentiles": counts.percentiles(),
            "packing": None if self.packing is None else asdict(self.packing),
        }


def inspect_sets(
    data: DataModule,
    tokenizer: PreTrainedTokenizerBase,
    data_types: Sequence[str],
    *,
    rows: int | Sequence[int] = 4,
    stream_rows: int = 1000,
    ends: Sequence[int] = (),
) -> dict[str, SetInspection]:
    """The training set and each evaluation set.

    Args:
        data: sources and options, as for training; it is left as it is.
        tokenizer: that rows are prepared with.
        data_types: types that the method takes.
        rows: how many rows are shown of each set, or which rows of the training set.
        stream_rows: rows read of a stream.
        ends: further end tokens, such as those of the model's config.

    Raises:
        UserError: as in training, but for a set of which no row can be trained: that is an inspection's result.
    """
    inspector = _Inspector(data, tokenizer, tuple(data_types), Vocabulary.of(tokenizer, ends), stream_rows)
    few = 2 if isinstance(rows, int) and rows > 2 else rows if isinstance(rows, int) else 0
    train = inspector.train(rows)
    found = {"train": train}
    for name in data.eval_names:
        shown = inspector.evaluation(name, few)
        shown.also_in_train = shown.counts.shared_with(train.counts)
        found[f"eval {name}" if name == "train" else name] = shown
    return found


class _Inspector:
    def __init__(
        self,
        data: DataModule,
        tokenizer: PreTrainedTokenizerBase,
        data_types: tuple[str, ...],
        vocabulary: Vocabulary,
        stream_rows: int,
    ) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.data_types = data_types
        self.vocabulary = vocabulary
        self.stream_rows = stream_rows

    def train(self, rows: int | Sequence[int]) -> SetInspection:
        data = self.data
        raw = data.load_train(self.data_types)
        read = raw
        if isinstance(raw, IterableDataset):
            read = Dataset.from_list(list(islice(raw, self.stream_rows)), features=raw.features)
            raw = read.to_iterable_dataset()

        def prepared(spec: PrepareSpec) -> tuple[Dataset | IterableDataset, PrepareReport]:
            own = _copy(data, train_source=raw, eval_size=None, spec=spec)
            return own.prepare_train(self.tokenizer, self.data_types), own.reports["train"]

        return self._inspect("train", read, data.spec, prepared, rows)

    def evaluation(self, name: str, rows: int | Sequence[int]) -> SetInspection:
        data = self.data
        raw = data.load_eval(name, self.data_types)

        def prepared(spec: PrepareSpec) -> tuple[Dataset | IterableDataset, PrepareReport]:
            own = _copy(data, eval_source={name: raw}, eval_size=None, spec=spec)
            return own.prepare_eval(self.tokenizer, self.data_types)[name], own.reports[name]

        return self._inspect(name, raw, data.eval_spec, prepared, rows)

    def _inspect(
        self, name: str, raw: Dataset, spec: PrepareSpec, prepared: Prepared, rows: int | Sequence[int]
    ) -> SetInspection:
        """Prepares, counts, and picks rows to show. A row that training would stop at is skipped and told."""
        try:
            made = self._counted(name, raw, spec, prepared)
        except UserError as error:
            skipping = replace(spec, on_bad_row="skip")
            if skipping == spec:
                raise
            try:
                made = self._counted(name, raw, skipping, prepared)
            except UserError:
                raise error from None
            if made.report.dropped.keys() <= {"bad_row"} and not made.counts.rows:
                raise
            made.stops = str(error)
        return self._shown(made, raw, rows)

    def _counted(self, name: str, raw: Dataset, spec: PrepareSpec, prepared: Prepared) -> SetInspection:
        """The set without rows to show. Packings that cut rows hide where they end: then rows are counted before packing."""
        try:
            with _quiet():
                final, report = _read(*prepared(spec), name)
                plain = final
                if spec.packing in ("bfd_split", "wrapped"):
                    plain, single = _read(*prepared(unpacked(spec)), name)
                    report = replace(single, packs=report.packs, **_packing_counts(report))
        except UserError as error:
            failed = self._nothing_left(raw, spec, name)
            if failed is None:
                raise
            return SetInspection(name, failed, spec, Counts(), scan(raw, spec, failed), error=str(error))
        limit = spec.row_limit if report.truncated and spec.truncation == "keep_start" else None
        made = SetInspection(
            name,
            report,
            spec,
            count_rows(plain, self.vocabulary, limit, packed=spec.packing == "bfd"),
            scan(raw, spec, report),
            self.vocabulary.ends,
            label_counts(plain) if report.data_type.startswith(("unpaired", "stepwise")) else {},
            margins=margin_range(plain),
            rows=final,
            is_stream=self.data.streaming and name == "train",
        )
        if spec.packing:
            made.packing = _packing(final, spec, report)
        return made

    def _nothing_left(self, raw: Dataset, spec: PrepareSpec, name: str) -> PrepareReport | None:
        """The report of the first rows, if none of them can be trained; None if the fault is another one."""
        stream = raw.select(range(min(len(raw), _PROBED))).to_iterable_dataset()
        spec = replace(unpacked(spec), data_types=self.data_types)
        try:
            made, report = prepare(stream, self.tokenizer, spec, name=name)
            kept = sum(1 for _ in made)
        except UserError:
            return None
        return None if kept else report

    def _shown(self, made: SetInspection, raw: Dataset, rows: int | Sequence[int]) -> SetInspection:
        """Adds the rows to show."""
        chosen, picked = isinstance(rows, int), list(rows) if not isinstance(rows, int) else []
        indices = spread(len(raw), TRACED) if chosen else picked
        for index in indices:
            if not 0 <= index < len(raw):
                raise UserError(f"inspect.rows: {made.name} has no row {index}. Allowed: 0 to {len(raw) - 1}.")
        traced = trace([raw[i] for i in indices], indices, self.tokenizer, made.spec, made.report.data_type)
        made.longest = max((t.length for t in traced if not t.features.reason or t.whole), default=0)
        shower = Shower(self.tokenizer, made.spec, made.report.data_type)
        wanted: list[tuple[str, Traced]] = choose(traced, rows) if isinstance(rows, int) else [("", t) for t in traced]
        if made.packing is not None and made.rows is not None and wanted:
            made.shown.append(_shown_pack(shower, made.rows, made.spec, made.counts))
        made.shown += [shower.traced(reason, row) for reason, row in wanted]
        return made


def scan(raw: Dataset, spec: PrepareSpec, report: PrepareReport) -> Raw:
    """Counts messages by role, and images, in the first rows; rows that cannot be read are left to the preparation."""
    found, roles = Raw(), Counter[str]()
    for row in islice(raw, SCANNED):
        found.rows += 1
        try:
            normal = normalise_row(row, report.data_type, roles=spec.role_names)
        except UserError:
            continue
        images = count_images(normal)
        found.images += images
        found.with_images += bool(images)
        roles.update(_roles(normal))
    found.roles = dict(roles.most_common())
    return found


def _roles(row: Mapping[str, Any]) -> Iterator[str]:
    for name in ("prompt", "messages", "completion", "chosen", "rejected", "reference"):
        value = row.get(name)
        if isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value):
            yield from (message["role"] for message in value)


def _copy(data: DataModule, **changes: Any) -> DataModule:
    """A data module of its own, with other sources or another spec."""
    own = copy.copy(data)
    own.reports = {}
    own._eval_rows = {}
    for name, value in changes.items():
        setattr(own, name, value)
    return own


def _packing_counts(report: PrepareReport) -> dict[str, int]:
    return {"packing_dropped_tokens": report.packing_dropped_tokens, "packing_cuts": report.packing_cuts}


def _read(rows: Dataset | IterableDataset, report: PrepareReport, name: str) -> tuple[Dataset, PrepareReport]:
    """A stream's rows in memory; its report is complete once it is read."""
    if isinstance(rows, Dataset):
        return rows, report
    listed = list(rows)
    if not listed:
        raise UserError(f"No row of {name!r} is left of {report.rows_in}: {report.drops()}.")
    return Dataset.from_list(listed), report


def _packing(packs: Dataset, spec: PrepareSpec, report: PrepareReport) -> Packing:
    untrained, tokens = 0, 0
    for table in packs.select_columns(["weights"]).with_format("arrow").iter(batch_size=10_000):
        column = table["weights"].combine_chunks()
        ends = np.cumsum(np.diff(column.offsets.to_numpy()))
        trained = np.concatenate([[0], np.cumsum(column.flatten().to_numpy(zero_copy_only=False) != 0)])
        untrained += int((np.diff(trained[np.concatenate([[0], ends])]) == 0).sum())
        tokens += int(ends[-1])
    efficiency = tokens / (len(packs) * (spec.max_length or 1))
    dropped, cuts = report.packing_dropped_tokens, report.packing_cuts
    documents = (report.rows_out + cuts) / len(packs)
    return Packing(str(spec.packing), len(packs), efficiency, documents, untrained, dropped, cuts)


def _shown_pack(shower: Shower, packs: Dataset, spec: PrepareSpec, counts: Counts) -> ShownRow:
    """The first pack that holds several rows."""
    if spec.packing == "wrapped":
        documents = documents_of(packs, counts.lengths, 0)
        return shower.packed("pack 0, one sequence: attention crosses the borders of its documents", packs[0], documents)
    segments = packs.select_columns(["lengths"])[:TRACED]["lengths"]
    number = next((i for i, lengths in enumerate(segments) if len(lengths) > 1), 0)
    return shower.packed(f"pack {number}", packs[number])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps warnings of the preparation out of the terminal: an inspection reports them all itself."""
    logger = logging.getLogger("workbench.data.prepare")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
