"""Where rows come from: hub names, local files, saved data sets, functions, the embedded world, objects in memory.

`load_source` turns any of them, or a mixture, into one `datasets.Dataset` (or ``IterableDataset``). Values are those of the
source. Nested values that Arrow would change (and in streams all nested values) are kept as marked JSON text, so read rows
with `workbench.data.formats.normalise_row`, or with `workbench.data.jsontext.decode_row` where the type does not matter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from datasets import Dataset, Features, IterableDataset, Value
from datasets.fingerprint import Hasher

from workbench.data.conversions import column_names, convert, iterate, refuse_transformed, transform_rows
from workbench.data.imports import import_object
from workbench.data.jsontext import decode_row
from workbench.data.mixtures import Interleave, mix
from workbench.data.source_loaders import load_rows
from workbench.data.source_spec import SourceSpec, is_mixture, make_spec
from workbench.data.splits import limit_rows, split_off
from workbench.data.streams import Shuffle, stream_of
from workbench.errors import UserError, nearest

__all__ = ["SourceSpec", "load_source", "split_off"]

Rows = Dataset | IterableDataset
_MIXTURE_OPTIONS = ("sources", "interleave", "source_column")
TINY_TYPE = "prompt_completion"  # what an embedded task gives if nobody asks for another type
_SHUFFLE_BUFFER = 10_000  # rows of a stream that are shuffled at a time


def load_source(
    spec: Any,
    *,
    split: str = "train",
    streaming: bool = False,
    seed: int = 0,
    interleave: Interleave | None = None,
    source_column: str | None = None,
    data_types: Sequence[str] | None = None,
) -> Rows:
    """Rows of a source or a mixture.

    Args:
        spec: a path or name as in `SourceSpec`, a mapping of its fields, rows or a data set in memory, a list of sources to
            mix, or a mapping ``{sources, interleave, source_column}``.
        split: the split to take where a source has several and names none itself.
        streaming: an ``IterableDataset`` that reads rows as they are needed.
        seed: of the mixture, and of functions and tasks that take one.
        interleave: how to mix, see `workbench.data.mixtures.mix`.
        source_column: name of a column to add that tells each row's source.
        data_types: types that are wanted of sources that can give several (``tiny:<task>``) and are not told which.

    Raises:
        UserError: one line that names the source and what is wrong with it.
    """
    if type(spec) is dict and "sources" in spec:
        unknown = next((key for key in spec if key not in _MIXTURE_OPTIONS), None)
        if unknown is not None:
            hint = nearest(unknown, _MIXTURE_OPTIONS)
            raise UserError(f"Mixture option {unknown!r} is not known.{hint} Allowed: {', '.join(_MIXTURE_OPTIONS)}.")
        interleave = spec.get("interleave", interleave)
        source_column = spec.get("source_column", source_column)
        spec = list(spec["sources"])
    mixture = is_mixture(spec)
    specs = [_typed(make_spec(item), data_types) for item in (spec if mixture else [spec])]
    if not mixture and (interleave is not None or specs[0].weight is not None):
        raise UserError("interleave and weight have no effect on a single source; give a list of sources.")
    loaded = [_load_one(s, split, streaming, seed, source_column) for s in specs]
    if not mixture:
        return loaded[0]
    return mix(loaded, [s.label for s in specs], [s.weight for s in specs], interleave, seed)


def _typed(spec: SourceSpec, data_types: Sequence[str] | None) -> SourceSpec:
    """An embedded task gives rows of every type: of a wanted one, where neither its own options nor a conversion tell."""
    options = spec.kwargs or {}
    if spec.kind != "tiny" or "type" in options or spec.convert is not None or not data_types or TINY_TYPE in data_types:
        return spec
    return replace(spec, kwargs={**options, "type": data_types[0]})


def _load_one(spec: SourceSpec, split: str, streaming: bool, seed: int, source_column: str | None) -> Rows:
    rows = load_rows(spec, split, streaming, seed)
    refuse_transformed(rows)
    if isinstance(rows, Dataset):
        rows = rows.with_format(None)
        rows = rows.to_iterable_dataset() if streaming else rows
    elif not streaming:
        raise UserError(
            f"Source {spec.label} is a stream; set data.streaming=true to train from it. To evaluate on it, keep some rows: "
            "datasets.Dataset.from_list(list(stream.take(100)))."
        )
    return _add_source(_apply_options(rows, spec), spec, source_column)


def _apply_options(rows: Rows, spec: SourceSpec) -> Rows:
    if spec.columns:
        rows = _rename(rows, spec)
    _refuse_empty(rows, spec, "holds no row")
    if spec.map is not None:
        function = import_object(spec.map) if isinstance(spec.map, str) else spec.map
        changed = partial(_with_columns, function=function, label=f"{spec.label}, map {spec.map}")
        rows = transform_rows(rows, changed, f"map {Hasher.hash(function)}")
    if spec.filter is not None:
        keep = import_object(spec.filter) if isinstance(spec.filter, str) else spec.filter
        rows = _filter(rows, partial(_keeps, keep=keep))
        _refuse_empty(rows, spec, f"holds no row that the filter {spec.filter} keeps")
    if spec.shuffle is not None:
        rows = _shuffle(rows, spec.shuffle)
    if spec.limit is not None:
        rows = limit_rows(rows, spec.limit, spec.label)
    return rows if spec.convert is None else convert(rows, spec.convert)


def _shuffle(rows: Rows, seed: int) -> Rows:
    if isinstance(rows, Dataset):
        return rows.shuffle(seed=seed)
    return stream_of(Shuffle(seed, _SHUFFLE_BUFFER).rows, [rows])


def _refuse_empty(rows: Rows, spec: SourceSpec, what: str) -> None:
    empty = not len(rows) if isinstance(rows, Dataset) else next(iter(rows.take(1)), None) is None
    if empty:
        raise UserError(f"Source {spec.label} {what}.")


def _rename(rows: Rows, spec: SourceSpec) -> Rows:
    present = column_names(rows)
    for old, new in spec.columns.items():
        if old not in present:
            hint = nearest(old, present)
            raise UserError(f"Source {spec.label} has no column {old!r} to rename.{hint} Present: {', '.join(present)}.")
        if new in present and new not in spec.columns:
            raise UserError(f"Source {spec.label} already has a column {new!r}; rename that one too, or choose another name.")
    between = {old: f"{old} renamed" for old in spec.columns}  # streams refuse to swap two names in one go
    return rows.rename_columns(between).rename_columns({between[old]: new for old, new in spec.columns.items()})


def _filter(rows: Rows, keep: Callable[[dict], bool]) -> Rows:
    if isinstance(rows, IterableDataset):
        return rows.filter(keep)
    # by index, so that the fingerprint tells what was kept and not what the function is called
    return rows.select([index for index, row in enumerate(iterate(rows)) if keep(row)])


def _with_columns(row: dict, index: int, function: Callable[[dict], Any], label: str) -> list[dict]:
    row = decode_row(row)
    columns = function(row)
    if not isinstance(columns, Mapping):
        raise UserError(f"Source {label}: row {index} became a {type(columns).__name__}; return a mapping of columns.")
    return [{**row, **columns}]


def _keeps(row: dict, keep: Callable[[dict], Any]) -> bool:
    return bool(keep(decode_row(row)))


def _add_source(rows: Rows, spec: SourceSpec, column: str | None) -> Rows:
    if column is None:
        return rows
    if column in column_names(rows):
        raise UserError(f"source_column={column!r} is already a column of {spec.label}; choose another name.")
    if isinstance(rows, Dataset):
        return rows.add_column(column, [spec.label] * len(rows))
    features = Features({**rows.features, column: Value("string")})
    return rows.map(partial(_with_column, column=column, value=spec.label), features=features)


def _with_column(row: dict, column: str, value: str) -> dict:
    return {**row, column: value}
