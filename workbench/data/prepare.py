"""`prepare`: raw rows to features, once, with a report of what happened to them.

Features are flat columns: ``input_ids`` and ``weights`` of all segments of the row, ``lengths``, ``parents`` and ``roles``
of each segment (see `workbench.data.batch`), and the scalars that the method needs.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from workbench.cache import many_objects
from workbench.data.drafts import Flag
from workbench.data.features import REASONS, RowPreparer, to_rows
from workbench.data.formats import TYPE_COLUMNS, detect_type, is_conversational, meant_by, unread_column
from workbench.data.packing import pack, pack_stream
from workbench.data.prepared_cache import cache_key, cached, default_cache_dir
from workbench.data.spec import PrepareReport, PrepareSpec
from workbench.errors import UserError, nearest

__all__ = ["PrepareReport", "PrepareSpec", "prepare"]

log = logging.getLogger(__name__)

_BATCH = 1000
_STREAM_BATCH = 64
_PATIENCE = 1000  # rows of a stream that may be dropped before the first is kept
_PACKED_TYPES = ("language_modeling", "prompt_completion")
_READ_COLUMNS = {*TYPE_COLUMNS, "tools", "images", "margin", "chat_template_kwargs", "system", "system_prompt"}
_READ_COLUMNS |= {"conversations", "conversation", "instruction", "input", "context", "history", "output", "response"}
_COUNTED = {
    Flag.TRUNCATED: "truncated",
    Flag.CUT_TERMINATOR: "cut_before_terminator",
    Flag.DOUBLE_BOS: "double_bos",
    Flag.UNTRAINED: "untrained_rows",
    Flag.REASONING_DROPPED: "reasoning_dropped",
    Flag.TEXT_DROPPED: "text_dropped",
    Flag.UNTERMINATED: "unterminated",
    Flag.OPEN_MARKERS: "open_markers",
    Flag.OTHER_ROLES: "other_roles",
    Flag.PROMPT_DIFFERS: "prompt_differs",
    Flag.NO_MARGIN: "no_margin",
}
_LARGE_SHARE = 0.1  # of rows dropped or without a trained token, from which on it is a warning


def prepare(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    spec: PrepareSpec,
    *,
    num_proc: int | None = None,
    cache_dir: str | Path | bool | None = None,
    name: str = "train",
) -> tuple[Dataset | IterableDataset, PrepareReport]:
    """Prepared rows and a report.

    Args:
        dataset: raw rows of one of the seven types.
        tokenizer: with its chat template, if rows are conversations.
        spec: how they are prepared.
        num_proc: processes.
        cache_dir: where the result is kept and looked for; None: the default cache; False: nowhere.
        name: of the data set, for messages.

    Returns:
        A ``Dataset`` in the order of the rows (packed: of the packs), or an ``IterableDataset`` whose report counts on
        as it is read.

    Raises:
        UserError: the rows are of another type, a row is bad, an option is impossible here, or no row is left.
    """
    first = _first_row(dataset, name)
    data_type = spec.data_type or detect_type(_columns(dataset, first), spec.data_types)
    if spec.data_types is not None and data_type not in spec.data_types:
        raise UserError(f"data.data_type={data_type} is not what this method takes. Allowed: {', '.join(spec.data_types)}.")
    if spec.packing and data_type not in _PACKED_TYPES:
        raise UserError(f"data.packing={spec.packing} is for {' and '.join(_PACKED_TYPES)} rows, not {data_type}: leave it out.")
    preparer = RowPreparer(tokenizer, spec, data_type, _columns(dataset, first))
    report = PrepareReport(data_type=data_type)
    _describe(report, preparer, first, name)
    if isinstance(dataset, IterableDataset):
        _log_warnings(report, name)
        return _stream(dataset, preparer, report, name), report
    if cache_dir is False:
        made, report = _make(dataset, preparer, report, num_proc, None, name)
    else:
        directory = Path(cache_dir) if isinstance(cache_dir, str | Path) else default_cache_dir()
        key = cache_key(dataset, tokenizer, spec, data_type)
        made, report = cached(key, directory, lambda work: _make(dataset, preparer, report, num_proc, work, name))
    _log_warnings(report, name)
    return made, report


def _log_warnings(report: PrepareReport, name: str) -> None:
    for warning in report.warnings:
        log.warning("%s: %s", name, warning)


def _first_row(dataset: Dataset | IterableDataset, name: str) -> dict[str, Any]:
    first = next(iter(dataset), None) if isinstance(dataset, IterableDataset) or len(dataset) else None
    if first is None:
        raise UserError(f"The data set {name!r} has no rows.")
    return first


def _columns(dataset: Dataset | IterableDataset, first: Mapping[str, Any]) -> list[str]:
    return list(dataset.column_names or first)


def _describe(report: PrepareReport, preparer: RowPreparer, first: Mapping[str, Any], name: str) -> None:
    """Checks the options against the form of the first row, before anything is tokenised."""
    conversational, spec = is_conversational(first, report.data_type), preparer.spec
    train_on = preparer.drafter.targets(conversational).train_on
    report.train_on = "" if train_on == "auto" else train_on
    for option in ("fold_system", "chat_template_kwargs"):
        if getattr(spec, option) and not conversational:
            raise UserError(f"data.{option} has no effect on plain text rows: leave it out.")
    if conversational:
        report.template = preparer.renderer.describe()
        _check_variables(spec, preparer)
    if report.data_type != "prompt_only":
        read = _READ_COLUMNS | ({"reference"} if report.data_type == "triple_preference" else set())
        report.unused_columns = [c for c in first if c not in read]
    if report.unused_columns:
        log.info("%s: columns that nothing reads: %s.", name, ", ".join(report.unused_columns))
    report.warnings = [unread_column(c) for c in report.unused_columns if meant_by(c)]


def _check_variables(spec: PrepareSpec, preparer: RowPreparer) -> None:
    if not spec.chat_template_kwargs:
        return
    known = preparer.renderer.variables()
    for name in spec.chat_template_kwargs:
        if name not in known:
            raise UserError(
                f"data.chat_template_kwargs: the chat template {preparer.renderer.describe()} reads no variable {name!r}."
                f"{nearest(name, known)} It reads: {', '.join(sorted(known))}."
            )


def _make(
    dataset: Dataset, preparer: RowPreparer, report: PrepareReport, num_proc: int | None, work: Path | None, name: str
) -> tuple[Dataset, PrepareReport]:
    spec = preparer.spec
    options: dict[str, Any] = {"keep_in_memory": True} if work is None else {"cache_file_name": str(work / "rows.arrow")}
    with _quiet_forks(num_proc), many_objects():
        made = dataset.map(
            preparer.table,
            with_indices=True,
            batched=True,
            batch_size=_BATCH,
            num_proc=num_proc,
            remove_columns=dataset.column_names,
            load_from_cache_file=False,
            new_fingerprint="0" * 16,
            desc=f"Preparing {name}",
            **options,
        )
    kept = _count(made, report)
    _check_left(report, preparer, name)
    made = made.remove_columns(["_flags", "_reason", "_note"])
    if preparer.data_type == "prompt_only":
        others = dataset.remove_columns([c for c in dataset.column_names if c in made.column_names])
        made = concatenate_datasets([made, others], axis=1)
    made = made if len(kept) == len(made) else made.select(kept)
    if spec.packing:
        made, packed = pack(made, spec.max_length, spec.packing, work=work, num_proc=num_proc)
        report.packs, report.packing_dropped_tokens, report.packing_cuts = len(made), packed.dropped_tokens, packed.cuts
    _count_tokens(made, report)
    _warn(report, preparer)
    return made, report


def _count(made: Dataset, report: PrepareReport) -> np.ndarray:
    """Reads the notes of all rows into the report; the indices of the rows kept."""
    table = made.select_columns(["_flags", "_reason", "_note"]).with_format("arrow")[:]
    flags, reasons = table["_flags"].to_numpy(), table["_reason"].to_numpy()
    kept = np.flatnonzero(reasons == 0)
    report.rows_in, report.rows_out = len(flags), len(kept)
    for number, reason in enumerate(REASONS[1:], 1):
        count = int((reasons == number).sum())
        if count:
            report.drop(reason, count)
    for flag, field in _COUNTED.items():
        setattr(report, field, int(((flags & int(flag)) != 0).sum()))
    report.bad_rows = pc.drop_null(table["_note"])[:10].to_pylist()
    return kept


def _count_tokens(made: Dataset, report: PrepareReport) -> None:
    for table in made.select_columns(["weights"]).with_format("arrow").iter(batch_size=50_000):
        weights = table["weights"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        report.tokens += len(weights)
        report.trained_tokens += int(np.count_nonzero(weights))


def _check_left(report: PrepareReport, preparer: RowPreparer, name: str) -> None:
    """`UserError` if no row is left to train on."""
    if report.rows_out:
        return
    template = f" with the chat template {report.template}" if report.template else ""
    if report.untrained_rows == report.rows_in:
        raise UserError(
            f"No row of {name!r} has a trained token with data.train_on={preparer.spec.train_on}{template}. "
            "See what is trained with `workbench inspect`, or set data.train_on=all."
        )
    first = f" First bad row: {report.bad_rows[0]}" if report.bad_rows else ""
    raise UserError(
        f"No row of {name!r} is left of {report.rows_in}{template}: {report.drops()} "
        f"(data.max_length={preparer.spec.max_length}, data.truncation={preparer.spec.truncation}).{first}"
    )


def _warn(report: PrepareReport, preparer: RowPreparer) -> None:
    rows, template = report.rows_in, f"The chat template {report.template}"
    lost = rows - report.rows_out
    say = report.warnings.append
    if lost >= _LARGE_SHARE * rows:
        say(f"{lost} of {rows} rows are left out: {report.drops()}.")
    elif lost:
        log.info("%d of %d rows are left out: %s.", lost, rows, report.drops())
    if report.reasoning_dropped:
        say(f"{template} leaves out reasoning in {report.reasoning_dropped} of {rows} rows: it is not trained there.")
    if report.text_dropped:
        say(f"{template} leaves out text or tool calls of the assistant in {report.text_dropped} of {rows} rows.")
    if report.unterminated:
        say(f"{template} ends a conversation without a terminator: {report.unterminated} rows do not train to stop.")
    if report.open_markers:
        say(f"{template} has generation markers that leave out the turn's terminator: the model does not learn to stop.")
    if report.other_roles:
        say(f"{report.other_roles} completions hold messages of other roles, trained as well: use data.train_on=assistant.")
    if report.prompt_differs:
        say(
            f"{report.prompt_differs} of {rows} rows do not begin with the tokens of their prompt alone (a space at the end "
            "joins the answer, or the template asks with an open thinking block): it is asked otherwise than it is trained."
        )
    if report.no_margin:
        say(f"{report.no_margin} of {rows} rows have no margin, which counts as 0.")
    if report.cut_before_terminator >= _LARGE_SHARE * rows:
        say(f"{report.cut_before_terminator} of {rows} rows lose their end to data.max_length={preparer.spec.max_length}.")
    if report.template and "strftime_now" in preparer.renderer.template():
        say(f"{template} prints today's date: rows differ from day to day unless data.chat_template_kwargs fixes it.")


@contextmanager
def _quiet_forks(num_proc: int | None) -> Iterator[None]:
    """Keeps the tokenizer's own threads out of forked processes."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    if (num_proc or 1) > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if (num_proc or 1) > 1:
            os.environ.pop("TOKENIZERS_PARALLELISM")
            if before is not None:
                os.environ["TOKENIZERS_PARALLELISM"] = before


class _StreamPreparer:
    """Batches of a stream to batches of features, counting as it goes."""

    def __init__(self, preparer: RowPreparer, report: PrepareReport, name: str) -> None:
        self.preparer = preparer
        self.report = report
        self.name = name

    def __call__(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        rows, report = to_rows(batch), self.report
        made = self.preparer.features(rows, indices)
        columns = [*_feature_names(self.preparer), *(self._others(batch))]
        out: dict[str, list[Any]] = {name: [] for name in columns}
        for raw, row in zip(rows, made, strict=True):
            self._count(row)
            if row.reason:
                continue
            values = {
                **vars(row),
                "input_ids": row.ids.tolist(),
                "weights": row.weights.tolist(),
                **row.extras,
                **{k: raw[k] for k in self._others(batch)},
            }
            for column in columns:
                out[column].append(values[column])
        if report.rows_in >= _PATIENCE:
            _check_left(report, self.preparer, self.name)
        return out

    def _others(self, batch: Mapping[str, Any]) -> list[str]:
        return [c for c in batch if c not in _feature_names(self.preparer)] if self.preparer.data_type == "prompt_only" else []

    def _count(self, row: Any) -> None:
        report = self.report
        report.rows_in += 1
        for flag, field in _COUNTED.items():
            setattr(report, field, getattr(report, field) + bool(row.flags & flag))
        if row.reason:
            report.drop(row.reason)
            if row.note and len(report.bad_rows) < 10:
                report.bad_rows.append(row.note)
            return
        report.rows_out += 1
        if not self.preparer.spec.packing:  # which counts what it makes
            report.tokens += len(row.ids)
            report.trained_tokens += int(np.count_nonzero(row.weights))


def _feature_names(preparer: RowPreparer) -> list[str]:
    return ["input_ids", "weights", "lengths", "parents", "roles", *preparer.tail, *preparer.extras]


def _stream(dataset: IterableDataset, preparer: RowPreparer, report: PrepareReport, name: str) -> IterableDataset:
    columns = dataset.column_names or list(next(iter(dataset)))
    prompts = preparer.data_type == "prompt_only"
    made = dataset.map(
        _StreamPreparer(preparer, report, name),
        with_indices=True,
        batched=True,
        batch_size=_STREAM_BATCH,
        remove_columns=[] if prompts else columns,
    )
    spec = preparer.spec
    return pack_stream(made, spec.max_length, spec.packing, spec.packing_buffer, report) if spec.packing else made
