"""Rows of one source, by its kind. Options that any source takes are applied in `workbench.data.sources`."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, IterableDataset

from workbench.data import rows as arrow
from workbench.data.imports import call_object, guarded, import_object, parameters
from workbench.data.readers import Format, file_format, group_splits, list_files, read_rows
from workbench.data.source_spec import SourceSpec
from workbench.data.splits import choose_split, parse_split, slice_rows
from workbench.errors import UserError

log = logging.getLogger(__name__)

Rows = Dataset | IterableDataset
_BUILDERS = ("arrow", "csv", "json", "pandas", "parquet", "text", "xml")  # load_dataset would read the working directory


def load_rows(spec: SourceSpec, split: str, streaming: bool, seed: int) -> Rows:
    """The rows of ``spec``'s split; ``split`` where it names none. May be map-style although streaming was asked for."""
    loader = {
        "memory": _load_memory,
        "tiny": _load_tiny,
        "reasoning_gym": _load_reasoning_gym,
        "import": _load_import,
        "saved": _load_saved,
        "files": _load_files,
        "hub": _load_hub,
    }[spec.kind]
    return loader(spec, split, streaming, seed)


def _load_memory(spec: SourceSpec, split: str, streaming: bool, seed: int) -> Rows:
    return _from_object(spec.path, spec, split, streaming)


def _load_tiny(spec: SourceSpec, split: str, streaming: bool, seed: int) -> Rows:
    from workbench.tiny import load_tiny

    name, part = parse_split(spec.split or split)
    arguments = {"seed": seed, **(spec.kwargs or {})}
    return slice_rows(
        call_object(load_tiny, spec.path, spec.path.removeprefix("tiny:"), split=name, **arguments), part, spec.path
    )


def _load_reasoning_gym(spec: SourceSpec, split: str, streaming: bool, seed: int) -> Rows:
    from workbench.rewards.gym import load_reasoning_gym

    name, part = parse_split(spec.split or split)
    arguments = {"seed": seed, **(spec.kwargs or {})}
    return slice_rows(call_object(load_reasoning_gym, spec.path, spec.path, split=name, **arguments), part, spec.path)


def _load_import(spec: SourceSpec, split: str, streaming: bool, seed: int) -> Rows:
    """What the function returns. ``split`` and ``seed`` are passed to it if it has parameters of these names."""
    function = import_object(spec.path)
    arguments = dict(spec.kwargs or {})
    name, part = parse_split(spec.split or split)
    taken = {"split": name, "seed": seed}
    arguments.update({k: v for k, v in taken.items() if k in parameters(function) and k not in arguments})
    make = partial(call_object, function, spec.path, **arguments)
    value = make()
    if "split" in parameters(function) and not isinstance(value, Mapping):
        return slice_rows(_as_rows(value, spec, streaming, make), part, spec.label)
    return _from_object(value, spec, split, streaming, make)


def _load_saved(spec: SourceSpec, split: str, streaming: bool, seed: int) -> Rows:
    try:
        saved = datasets.load_from_disk(str(Path(spec.path).expanduser()))
    except Exception as error:  # a damaged folder fails in many ways
        raise UserError(f"Source {spec.label}: the saved data set cannot be read ({_first_line(error)}).") from error
    return _from_object(saved, spec, split, streaming)


def _load_hub(spec: SourceSpec, split: str, streaming: bool, seed: int) -> Rows:
    if spec.path in _BUILDERS:
        raise UserError(f"{spec.path!r} is a file format, not a data set; give the path of the files.")
    name, part = parse_split(spec.split or split)
    options = {"revision": spec.revision, "data_files": spec.data_files, "streaming": streaming, **(spec.kwargs or {})}
    try:
        rows = datasets.load_dataset(spec.path, spec.name, split=name, **options)
    except Exception as error:  # the hub, the network and the files fail in many ways
        raise UserError(_hub_message(spec, name, error)) from error
    if isinstance(rows, IterableDataset) and rows.features is None:
        rows = _with_features(rows, spec)
    return slice_rows(rows, part, spec.label)


def _hub_message(spec: SourceSpec, split: str, error: Exception) -> str:
    text = _first_line(error)
    if "split" in text.lower():
        return f"Source {spec.label} has no split {split!r} ({text}). Set split in the source."
    if isinstance(error, ConnectionError | datasets.exceptions.DatasetNotFoundError):
        return (
            f"Source {spec.label}: neither a file or folder here nor a data set that can be reached on the hub ({text})."
            " Check the name, the network and HF_HUB_OFFLINE, or use a local path or tiny:<task>."
        )
    return f"Source {spec.label} cannot be loaded from the hub ({text})."


def _first_line(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__ else error
    return " ".join(str(cause).split())[:300] or type(cause).__name__


# -- objects ------------------------------------------------------------------------------------------------------------


def _from_object(value: Any, spec: SourceSpec, split: str, streaming: bool, remake: Callable[[], Iterable] | None = None) -> Rows:
    """Rows of a data set, a dictionary of splits, or an iterable of rows (``remake`` gives it anew, for streams)."""
    named = isinstance(value, Mapping)
    splits = dict(value) if named else {"train": value}
    chosen, part = choose_split(splits, spec.split, split, spec.label, named=named)
    return slice_rows(_as_rows(chosen, spec, streaming, remake), part, spec.label)


def _as_rows(value: Any, spec: SourceSpec, streaming: bool, remake: Callable[[], Iterable] | None = None) -> Rows:
    if isinstance(value, IterableDataset):
        return _with_features(value, spec) if value.features is None else value
    if isinstance(value, Dataset):
        return value
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise UserError(
            f"Source {spec.label}: a {type(value).__name__} holds no rows; give a data set, a list of dictionaries,"
            " or a function that yields dictionaries."
        )
    if streaming and remake is not None and not isinstance(value, list | tuple):
        return _stream({"make": remake, "label": spec.label}, _made_rows, spec)
    rows = list(_checked(value, spec.label))
    if not rows:
        raise UserError(f"Source {spec.label} holds no row.")
    return arrow.build(lambda: rows)


def _made_rows(make: Callable[[], Iterable], label: str) -> Iterator[tuple[str, dict]]:
    for number, row in enumerate(_checked(make(), label)):
        yield str(number), row


def _checked(rows: Iterable, label: str) -> Iterator[dict]:
    for number, row in enumerate(guarded(rows, label)):
        if not isinstance(row, Mapping):
            raise UserError(f"Source {label}, row {number}: expected a dictionary, got {type(row).__name__}.")
        yield dict(row)


# -- files --------------------------------------------------------------------------------------------------------------


def _load_files(spec: SourceSpec, split: str, streaming: bool, seed: int) -> Rows:
    splits, named = _file_splits(spec)
    files, part = choose_split(splits, spec.split, split, spec.label, named=named)
    form = file_format(files, spec.format)
    if (form == "json") < (spec.field is not None) or (form == "text") < (spec.sample_by is not None):
        option = "field" if spec.field is not None else "sample_by"
        raise UserError(f"Source {spec.label}: {option} has no effect on {form} files.")
    if form in ("parquet", "arrow"):
        rows = _load_arrow(form, files, spec, streaming)
    else:
        options = {"form": form, "field": spec.field, "sample_by": spec.sample_by or "line"}
        rows = _load_text_files(files, options, spec, streaming)
    return slice_rows(rows, part, spec.label)


def _file_splits(spec: SourceSpec) -> tuple[dict[str, list[Path]], bool]:
    """Files of each split, and whether the splits have names."""
    if spec.data_files is None:
        files = list_files(spec.path)
        splits = group_splits(files) if len(files) > 1 or files[0] != Path(spec.path).expanduser() else {"": files}
        unnamed = splits.pop("", None)
        if unnamed and splits:
            left = ", ".join(f.name for f in unnamed[:3])
            log.warning("%s: files whose names tell no split are left out (%s); list them in data_files.", spec.label, left)
        return (splits, True) if splits else ({"train": unnamed or []}, False)
    named = isinstance(spec.data_files, Mapping)
    listed = dict(spec.data_files) if named else {"train": spec.data_files}
    splits = {}
    for name, patterns in listed.items():
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        splits[name] = [file for pattern in patterns for file in list_files(str(Path(spec.path) / pattern))]
    return splits, named


def _load_arrow(form: Format, files: list[Path], spec: SourceSpec, streaming: bool) -> Rows:
    try:
        names = [str(f) for f in files]
        return datasets.load_dataset(form, data_files={"train": names}, split="train", streaming=streaming)
    except Exception as error:
        raise UserError(f"Source {spec.label}: the {form} files cannot be read ({_first_line(error)}).") from error


def _load_text_files(files: list[Path], options: dict[str, Any], spec: SourceSpec, streaming: bool) -> Rows:
    if streaming:
        return _stream({"files": [str(f) for f in files], "options": options}, _file_rows, spec)
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = arrow.cache_key(stats, sorted(options.items(), key=str))
    return arrow.build(lambda: (row for f in files for row in read_rows(f, **options)), key=key)


def _file_rows(files: list[str], options: dict[str, Any]) -> Iterator[tuple[str, dict]]:
    for file in files:
        for number, row in enumerate(read_rows(file, **options)):
            yield f"{number} of {file}", row


# -- streams ------------------------------------------------------------------------------------------------------------


def _stream(arguments: dict[str, Any], numbered: Callable[..., Iterator[tuple[str, dict]]], spec: SourceSpec) -> IterableDataset:
    """A stream of ``numbered(**arguments)``, whose columns and kinds are those of its first `rows.PEEK` rows."""
    kinds = _peek((row for _, row in numbered(**arguments)), spec)
    return IterableDataset.from_generator(
        _encoded_rows,
        features=arrow.to_features(kinds, "encode"),
        gen_kwargs={**arguments, "numbered": numbered, "kinds": kinds},
    )


def _encoded_rows(numbered: Callable[..., Iterator[tuple[str, dict]]], kinds: arrow.Kinds, **arguments: Any) -> Iterator[dict]:
    for number, row in numbered(**arguments):
        yield arrow.encode_row(row, kinds, "encode", number)


def _peek(rows: Iterable[dict], spec: SourceSpec) -> arrow.Kinds:
    kinds = arrow.scan(itertools.islice(rows, arrow.PEEK))
    if not kinds:
        raise UserError(f"Source {spec.label} holds no row.")
    return kinds


def _with_features(rows: IterableDataset, spec: SourceSpec) -> IterableDataset:
    """A stream that does not know its columns, with those of its first rows."""
    kinds = _peek(rows, spec)
    return rows.map(partial(_encode, kinds=kinds), with_indices=True, features=arrow.to_features(kinds, "encode"))


def _encode(row: dict, index: int, kinds: arrow.Kinds) -> dict:
    return arrow.encode_row(row, kinds, "encode", index)
