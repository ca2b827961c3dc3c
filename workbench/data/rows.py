"""Rows (dictionaries) into `datasets`, with nothing lost: uniform values in Arrow's own types, others as marked JSON text.

A *kind* describes the values of a column: None (no value yet), a scalar name, ``("list", kind)``,
``("struct", ((key, kind), ...))`` or ``"json"``, the kind of values that Arrow could not hold unchanged.
"""

import functools
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from datasets import Dataset, Features, Image, List, Value
from datasets.features.features import encode_nested_example, get_nested_type
from datasets.fingerprint import Hasher
from datasets.table import InMemoryTable

from workbench.cache import cache_home, many_objects
from workbench.data.jsontext import encode_value
from workbench.errors import UserError

Kind = Any
Kinds = dict[str, Kind]
Nested = Literal["keep", "encode"]
PEEK = 1000  # rows of a stream that are looked at to learn its columns
_BATCH = 1000
_SCALARS = {bool: "bool", float: "float64", str: "string", bytes: "binary"}


def kind_of(value: Any, column: str = "") -> Kind:
    """The kind of one value; `UserError` for objects that no data set holds."""
    if value is None:
        return None
    if type(value) in _SCALARS:
        return _SCALARS[type(value)]
    if isinstance(value, int) and not isinstance(value, bool):
        return "int64" if -(2**63) <= value < 2**63 else "json"
    if isinstance(value, Mapping):
        return _struct_kind(value, column)
    if isinstance(value, list | tuple):
        kind: Kind = None
        for item in value:
            kind = merge(kind, kind_of(item, column))
        return "json" if kind == "json" else ("list", kind)
    if type(value).__module__.startswith("PIL."):
        return "image"
    if hasattr(value, "tolist"):  # numpy and torch
        return kind_of(value.tolist(), column)
    raise UserError(f"Column {column!r} holds a {type(value).__name__}; rows hold text, numbers, lists, objects, images.")


def _struct_kind(value: Mapping, column: str) -> Kind:
    fields = tuple((key, kind_of(item, column)) for key, item in value.items())
    usable = fields and all(isinstance(key, str) and kind != "json" for key, kind in fields)
    return ("struct", fields) if usable else "json"


def fits(value: Any, kind: Kind) -> bool:
    """Whether ``merge(kind, kind_of(value))`` is certain to be ``kind``; False where that takes a closer look."""
    if value is None:
        return True
    if isinstance(kind, str):
        return _SCALARS.get(type(value)) == kind or (kind == "int64" and type(value) is int and -(2**63) <= value < 2**63)
    if kind is None:
        return False
    if kind[0] == "list":
        return type(value) is list and all(fits(item, kind[1]) for item in value)
    if type(value) is not dict or len(value) != len(kind[1]):
        return False
    for (key, item), (name, inner) in zip(value.items(), kind[1], strict=True):
        if key != name or not ((type(item) is str and inner == "string") or fits(item, inner)):
            return False
    return True


def merge(a: Kind, b: Kind) -> Kind:
    """The kind that holds the values of both, unchanged."""
    if a == b or b is None:
        return a
    if a is None:
        return b
    if not (isinstance(a, tuple) and isinstance(b, tuple)) or a[0] != b[0]:
        return "json"
    if a[0] == "list":
        inner = merge(a[1], b[1])
        return "json" if inner == "json" else ("list", inner)
    if [key for key, _ in a[1]] != [key for key, _ in b[1]]:  # a key more or less, or another order, is another text
        return "json"
    fields = tuple((key, merge(x, y)) for (key, x), (_, y) in zip(a[1], b[1], strict=True))
    return "json" if any(kind == "json" for _, kind in fields) else ("struct", fields)


def merge_columns(a: Kinds, b: Kinds) -> Kinds:
    """Columns of both, in order of appearance. A column of whole and broken numbers becomes one of broken numbers."""
    merged = dict(a)
    for name, kind in b.items():
        numbers = {merged.get(name), kind} == {"int64", "float64"}
        merged[name] = "float64" if numbers else merge(merged.get(name), kind)
    return merged


def scan(rows: Iterable[Mapping[str, Any]], kinds: Kinds | None = None) -> Kinds:
    """Columns of ``rows`` and the kind of each, merged with those known already."""
    kinds = kinds or {}
    for row in rows:
        if all(name in kinds and fits(value, kinds[name]) for name, value in row.items()):
            continue  # as most rows do
        found = {name: kind_of(value, name) for name, value in row.items()}
        if found != kinds:
            kinds = merge_columns(kinds, found)
    return kinds


def is_encoded(kind: Kind, nested: Nested = "keep") -> bool:
    """Whether a column of this kind is kept as marked JSON text (in streams every nested one is: rows to come may differ)."""
    return kind == "json" or (nested == "encode" and isinstance(kind, tuple) and kind != ("list", "image"))


def to_features(kinds: Kinds, nested: Nested = "keep") -> Features:
    return Features({name: Value("string") if is_encoded(k, nested) else _feature(k) for name, k in kinds.items()})


def _feature(kind: Kind) -> Any:
    if kind is None:
        return Value("string")
    if kind == "image":
        return Image()
    if isinstance(kind, str):
        return Value(kind)
    return List(_feature(kind[1])) if kind[0] == "list" else {key: _feature(inner) for key, inner in kind[1]}


def encode_row(row: Mapping[str, Any], kinds: Kinds, nested: Nested = "keep", index: int | str | None = None) -> dict[str, Any]:
    """The row with all columns of ``kinds``, as `to_features` of them stores it.

    Raises:
        UserError: in a stream, whose columns come from its first `PEEK` rows: a further column, or a number, truth value or
            image column that holds something else (text columns take anything, as marked JSON).
    """
    late = next((name for name in row if name not in kinds), None)
    if late is not None:
        raise UserError(_late_message(index, late, "is new"))
    return {name: _encode(row.get(name), name, kind, nested, index) for name, kind in kinds.items()}


def _encode(value: Any, name: str, kind: Kind, nested: Nested, index: int | str | None) -> Any:
    if value is None:
        return None
    value = value.tolist() if hasattr(value, "tolist") else value
    if kind is None or kind == "string" or is_encoded(kind, nested):
        return encode_value(value)
    if nested == "encode" and (found := kind_of(value, name)) != kind and {found, kind} != {"int64", "float64"}:
        raise UserError(_late_message(index, name, f"holds {value!r:.40}, where the rows before hold {kind}"))
    return value


def _late_message(index: int | str | None, name: str, what: str) -> str:
    row = "a row" if index is None else f"row {index}"
    return (
        f"Column {name!r} {what} in {row}: a stream takes its columns from its first {PEEK} rows."
        " Load it without streaming, or give every row the same columns."
    )


def build(make_rows: Callable[[], Iterable[Mapping]], *, kinds: Kinds | None = None, key: str | None = None) -> Dataset:
    """A data set of rows.

    Args:
        make_rows: gives the rows; called a second time where later rows do not fit the columns of the first ones.
        kinds: the kinds, if known already.
        key: name of the result in the disk cache (`cache_dir`); None: built in memory.
    """
    if key is None:
        return Dataset(InMemoryTable(pa.ipc.open_stream(_store(make_rows, kinds, pa.BufferOutputStream).getvalue()).read_all()))
    path = cache_dir() / f"{key}.arrow"
    if not path.exists():
        with _new_file(path) as temporary, many_objects():
            _store(make_rows, kinds, partial(pa.OSFile, temporary, "wb"))
    dataset = Dataset.from_file(str(path))
    dataset._fingerprint = key  # the default one depends on the file's time, which differs between machines
    return dataset


def _store(make_rows: Callable[[], Iterable[Mapping]], kinds: Kinds | None, open_file: Callable[[], Any]) -> Any:
    """Writes the rows as an Arrow stream to a new file and returns it.

    Without ``kinds`` those of the first rows are tried; if a later row does not fit them, the rest is read for its kinds
    only, and all is written anew.
    """
    if kinds is None:
        chunks = _chunks(make_rows())
        first = next(chunks, [])
        kinds = scan(first)
        with _Writer(open_file(), kinds) as writer:
            writer.write(first)
            for chunk in chunks:
                kinds = scan(chunk, kinds)
                if to_features(kinds) != writer.features:
                    break
                writer.write(chunk)
            else:
                return writer.file
        for chunk in chunks:
            kinds = scan(chunk, kinds)
    with _Writer(open_file(), kinds) as writer:
        for chunk in _chunks(make_rows()):
            writer.write(chunk)
    return writer.file


class _Writer:
    """Rows into an Arrow stream."""

    def __init__(self, file: Any, kinds: Kinds) -> None:
        self.file, self.kinds, self.features, self.rows = file, kinds, to_features(kinds), 0
        self.stream = pa.ipc.new_stream(file, self.features.arrow_schema)

    def write(self, chunk: list[Mapping]) -> None:
        encoded = [encode_row(row, self.kinds, index=self.rows + i) for i, row in enumerate(chunk)]
        columns = [_array([row[name] for row in encoded], name, self.features[name], self.rows) for name in self.kinds]
        self.stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=self.features.arrow_schema))
        self.rows += len(chunk)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.stream.close()
        if isinstance(self.file, pa.OSFile):
            self.file.close()


def cache_key(*parts: Any) -> str:
    """Name in the cache for what the code of this package makes of ``parts``."""
    return Hasher.hash((*parts, _code_hash()))


@functools.cache
def _code_hash() -> str:
    """Of the files that decide what a cached file holds, so that a change in them makes it anew."""
    folder = Path(__file__).parent
    names = ("conversions", "formats", "images", "jsontext", "messages", "mixtures", "pairs", "readers", "rows")
    return Hasher.hash([(folder / f"{name}.py").read_bytes() for name in names])


def cache_dir() -> Path:
    """Where rows read from files are kept as Arrow files."""
    return cache_home() / "rows"


def _chunks(rows: Iterable[Mapping]) -> Iterator[list[Mapping]]:
    iterator = iter(rows)
    while chunk := list(itertools.islice(iterator, _BATCH)):
        yield chunk


def _array(values: list, name: str, feature: Any, start: int) -> pa.Array:
    stored = [encode_nested_example(feature, v) for v in values] if _has_image(feature) else values
    try:
        return pa.array(stored, type=get_nested_type(feature))
    except UnicodeEncodeError as error:
        bad = next(i for i, v in enumerate(values) if not _is_unicode(v))
        raise UserError(f"Row {start + bad}, column {name!r}: the text is not valid Unicode ({error.reason}).") from None


def _has_image(feature: Any) -> bool:
    if isinstance(feature, dict):
        return any(_has_image(inner) for inner in feature.values())
    return isinstance(feature, Image) or (isinstance(feature, List) and _has_image(feature.feature))


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _new_file(path: Path) -> Iterator[str]:
    """A temporary name that becomes ``path`` at the end, so that neither a kill nor another process leaves half a file."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        os.close(handle)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"Cannot write to the data cache {path.parent} ({why}); set WORKBENCH_CACHE to another place.") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
