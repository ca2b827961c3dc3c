"""The fifteen conversions between data types, each for text and for messages.

================= ================= ================= ============ =================== ==========
from \\ to         language_modeling prompt_completion prompt_only  preference          unpaired
================= ================= ================= ============ =================== ==========
prompt_completion yes                                 yes
preference        chosen            chosen            yes          implicit <-> explicit both sides
unpaired          label true        label true        yes
================= ================= ================= ============ =================== ==========

``implicit_preference`` is a preference whose chosen and rejected both begin with the prompt; every conversion of a
preference takes it too. Convert before a chat template is applied.

Other columns are carried along; a row that becomes two repeats them in both. Columns that belong to a data type (`text`,
`messages`, ..., `label`) are not carried, so that the result has the type asked for.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from datasets import Audio, Dataset, DatasetDict, Features, Image, IterableDataset, IterableDatasetDict, List, Video

from workbench.data import rows as arrow
from workbench.data.formats import ALIASES, DATA_TYPES, DROP, TYPE_COLUMNS, WITHOUT_TRIPLES, detect_type, normalise_row
from workbench.errors import UserError, check_choice

IMPLICIT = "implicit_preference"
Row = dict[str, Any]
Recipe = Callable[[Row], list[Row]]
RowMap = Callable[[Mapping[str, Any], int], list[Row]]
AnyRows = Dataset | DatasetDict | IterableDataset | IterableDatasetDict | list[Row] | Row


def _whole(row: Row, answer: str) -> Row:
    """Prompt and answer as one text or conversation."""
    whole = row["prompt"] + row[answer]
    return {"messages": whole} if isinstance(whole, list) else {"text": whole}


def _completion_to_lm(row: Row) -> list[Row]:
    return [_whole(row, "completion")]


def _to_prompt(row: Row) -> list[Row]:
    return [{"prompt": row["prompt"]}]


def _chosen_to_lm(row: Row) -> list[Row]:
    return [_whole(row, "chosen")]


def _chosen_to_completion(row: Row) -> list[Row]:
    return [{"prompt": row["prompt"], "completion": row["chosen"]}]


def _to_explicit(row: Row) -> list[Row]:
    return [{"prompt": row["prompt"], "chosen": row["chosen"], "rejected": row["rejected"]}]


def _to_implicit(row: Row) -> list[Row]:
    return [{"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]}]


def _unpair(row: Row) -> list[Row]:
    """Chosen with label true, then rejected with label false; an identical pair gives nothing.

    Chosen and rejected are good and bad only relative to each other: check (with a reward model, say) that they are in
    absolute terms before training on the labels.
    """
    if DROP in row:
        return []
    pair = ((row["chosen"], True), (row["rejected"], False))
    return [{"prompt": row["prompt"], "completion": answer, "label": label} for answer, label in pair]


def _good_to_lm(row: Row) -> list[Row]:
    return [_whole(row, "completion")] if row["label"] else []


def _good_to_completion(row: Row) -> list[Row]:
    return [{"prompt": row["prompt"], "completion": row["completion"]}] if row["label"] else []


CONVERSIONS: dict[tuple[str, str], Recipe] = {
    ("prompt_completion", "language_modeling"): _completion_to_lm,
    ("prompt_completion", "prompt_only"): _to_prompt,
    ("implicit_preference", "language_modeling"): _chosen_to_lm,
    ("implicit_preference", "prompt_completion"): _chosen_to_completion,
    ("implicit_preference", "prompt_only"): _to_prompt,
    ("implicit_preference", "preference"): _to_explicit,
    ("implicit_preference", "unpaired_preference"): _unpair,
    ("preference", "language_modeling"): _chosen_to_lm,
    ("preference", "prompt_completion"): _chosen_to_completion,
    ("preference", "prompt_only"): _to_prompt,
    ("preference", "implicit_preference"): _to_implicit,
    ("preference", "unpaired_preference"): _unpair,
    ("unpaired_preference", "language_modeling"): _good_to_lm,
    ("unpaired_preference", "prompt_completion"): _good_to_completion,
    ("unpaired_preference", "prompt_only"): _to_prompt,
}


def possible_targets(from_: str) -> list[str]:
    """Types that rows of type ``from_`` can be converted to."""
    return [to for start, to in CONVERSIONS if start == from_]


def convert(dataset: AnyRows, to: str, from_: str | None = None) -> Any:
    """Rows of another data type.

    Args:
        dataset: a map-style or streaming data set, a dictionary of splits of either, a list of rows, or one row.
        to: one of `DATA_TYPES` or ``implicit_preference``.
        from_: the type of the rows; None: found by their columns.

    Returns:
        The same kind of object; a list for one row, since a row may become two or none. Rows that have the type already
        are returned as they are. Rows converted have the form that `normalise_row` gives.

    Raises:
        UserError: there is no such conversion (the possible ones are named), or no row is left.
    """
    check_choice("convert", to, (*DATA_TYPES, IMPLICIT))
    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        return type(dataset)({split: convert(rows, to, from_) for split, rows in dataset.items()})
    if isinstance(dataset, Mapping):
        return convert([dict(dataset)], to, from_)
    if from_ is None:
        columns = column_names(dataset)
        from_ = detect_type(columns) if to == "triple_preference" else source_type(columns)
    check_choice("from_", from_, (*DATA_TYPES, IMPLICIT))
    if from_ == to:
        return dataset
    row_map = _row_map(from_, to)
    return transform_rows(dataset, row_map, f"convert {from_} to {to}")


def source_type(columns: Iterable[str]) -> str:
    """`detect_type`, with ``implicit_preference`` told apart from ``preference``, and triples the pairs that they hold."""
    columns = list(columns)
    data_type = detect_type(columns, WITHOUT_TRIPLES)
    names = {ALIASES.get(name, name) for name in columns}
    return IMPLICIT if data_type == "preference" and not names & {"prompt", "messages", "instruction"} else data_type


def _row_map(from_: str, to: str) -> RowMap:
    if (from_, to) not in CONVERSIONS:
        possible = possible_targets(from_)
        way = f"It can become {', '.join(possible)}." if possible else "It cannot be converted to any other type."
        raise UserError(f"{from_} cannot be converted to {to}. {way}")
    return partial(_convert_row, from_=from_, to=to)


def _convert_row(row: Mapping[str, Any], index: int, from_: str, to: str) -> list[Row]:
    normal = normalise_row(row, "preference" if from_ == IMPLICIT else from_, index=index)
    others = {k: v for k, v in normal.items() if ALIASES.get(k, k) not in TYPE_COLUMNS and k != DROP}
    return [{**out, **others} for out in CONVERSIONS[from_, to](normal)]


def canonicalise(dataset: AnyRows, data_type: str) -> Any:
    """Rows with the columns of their type in the form of `normalise_row`; other columns unchanged, none dropped."""
    return transform_rows(dataset, partial(_normal_row, data_type=data_type), f"normalise {data_type}")


def _normal_row(row: Mapping[str, Any], index: int, data_type: str) -> list[Row]:
    return [{k: v for k, v in normalise_row(row, data_type, index=index).items() if k != DROP}]


def column_names(dataset: Dataset | IterableDataset | list[Row]) -> list[str]:
    """Columns, read off the first row where the data set does not tell."""
    if isinstance(dataset, list):
        if not dataset:
            raise UserError("The list of rows is empty.")
        return list(dict.fromkeys(name for row in dataset for name in row))
    if dataset.column_names is not None:
        return list(dataset.column_names)
    return list(dict.fromkeys(name for row in dataset.take(arrow.PEEK) for name in row))


def transform_rows(dataset: Dataset | IterableDataset | list[Row], row_map: RowMap, what: str) -> Any:
    """Each row replaced by the rows that ``row_map(row, index)`` makes of it; ``what`` names it in errors and the cache."""
    if isinstance(dataset, list):
        return [out for index, row in enumerate(dataset) for out in row_map(row, index)]
    if isinstance(dataset, IterableDataset):
        return _transform_stream(dataset, row_map, what)
    refuse_transformed(dataset)
    stored = dataset.with_format(None)
    media = _media(stored.features)
    for name, feature in media.items():
        stored = stored.cast_column(name, _undecoded(feature))
    key = arrow.cache_key(dataset._fingerprint, what) if dataset.cache_files else None
    result = arrow.build(lambda: _mapped(iterate(stored), row_map), key=key)
    if not len(result):
        raise UserError(f"No row is left after: {what} ({len(dataset)} rows before).")
    if "image" in media:
        media["images"] = List(media["image"])
    for name in media.keys() & set(result.column_names):
        result = result.cast_column(name, media[name])
    return result


def refuse_transformed(dataset: Any) -> None:
    """Raises `UserError` for a data set with a lazy transform, which preparing it once would freeze."""
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom":
        raise UserError(
            "The data set has a transform that runs at every access (set_transform or with_transform); preparing it once"
            " would freeze one outcome. Apply it with map, or take it off with reset_format()."
        )


def iterate(dataset: Dataset, batch_size: int = 1000) -> Iterator[Row]:
    """Rows in order, read in batches (much faster than one by one)."""
    for batch in dataset.iter(batch_size):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _mapped(rows: Iterable[Mapping], row_map: RowMap) -> Iterator[Row]:
    for index, row in enumerate(rows):
        yield from row_map(row, index)


def _transform_stream(dataset: IterableDataset, row_map: RowMap, what: str) -> IterableDataset:
    head = list(itertools.islice(_mapped(dataset, row_map), arrow.PEEK))
    if not head:
        raise UserError(f"No row is left after: {what}.")
    kinds = arrow.scan(head)
    # one row at a time, so that the position in the stream is exact when a run is resumed
    return dataset.map(
        partial(_encode_batch, row_map=row_map, kinds=kinds),
        with_indices=True,
        batched=True,
        batch_size=1,
        remove_columns=column_names(dataset),
        features=arrow.to_features(kinds, "encode"),
    )


def _encode_batch(batch: Mapping[str, list], indices: list[int], row_map: RowMap, kinds: arrow.Kinds) -> dict[str, list]:
    row = {name: values[0] for name, values in batch.items()}
    out = [arrow.encode_row(new, kinds, "encode", indices[0]) for new in row_map(row, indices[0])]
    return {name: [new[name] for new in out] for name in kinds}


def _media(features: Features) -> dict[str, Any]:
    """Columns of images, audio or video; a single ``image`` leaves `normalise_row` as a list ``images``."""
    return {name: feature for name, feature in features.items() if _undecoded(feature) is not None}


def _undecoded(feature: Any) -> Any:
    """The feature with its files left encoded, or None if it holds none."""
    if isinstance(feature, Image | Audio | Video):
        return type(feature)(decode=False)
    inner = _undecoded(feature.feature) if isinstance(feature, List) else None
    return None if inner is None else List(inner)
