"""How a source is described: `SourceSpec` and what it makes of a path, a mapping or an object."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from workbench.data.formats import TYPE_COLUMNS
from workbench.data.imports import is_import_path
from workbench.data.readers import SUFFIXES, Format, SampleBy, is_glob, suffix
from workbench.errors import UserError, nearest

Convert = Literal[
    "language_modeling",
    "prompt_only",
    "prompt_completion",
    "preference",
    "implicit_preference",
    "triple_preference",
    "unpaired_preference",
    "stepwise_supervision",
]
Kind = Literal["memory", "tiny", "reasoning_gym", "import", "saved", "files", "hub"]
_FILE_OPTIONS = {"format", "field", "sample_by"}
_HUB_OPTIONS = {"name", "revision"}
_WITHOUT_EFFECT: dict[Kind, set[str]] = {
    "memory": _FILE_OPTIONS | _HUB_OPTIONS | {"data_files", "kwargs"},
    "tiny": _FILE_OPTIONS | _HUB_OPTIONS | {"data_files"},
    "reasoning_gym": _FILE_OPTIONS | _HUB_OPTIONS | {"data_files"},
    "import": _FILE_OPTIONS | _HUB_OPTIONS | {"data_files"},
    "saved": _FILE_OPTIONS | _HUB_OPTIONS | {"data_files", "kwargs"},
    "files": _HUB_OPTIONS | {"kwargs"},
    "hub": _FILE_OPTIONS,
}


@dataclass(frozen=True)
class SourceSpec:
    """One source. Its options apply in this order: split, columns, map, filter, shuffle, limit, convert.

    Args:
        path: hub name; file, folder or pattern (.jsonl .json .csv .tsv .parquet .arrow .txt, text ones also .gz); folder of
            a saved data set; ``module:function``; ``tiny:<task>``; ``reasoning_gym:<task>``; or an object in memory.
        name: configuration of a hub data set.
        split: split, also a slice of it such as ``train[:1000]`` or ``train[10%:]``. None: the one asked for, or the only one.
        revision: branch, tag or commit of a hub data set.
        data_files: files of a hub data set or of the folder ``path``, or a mapping of split names to files.
        format: format of local files, where the extension does not tell.
        field: key of the list of rows in a JSON file that holds an object.
        sample_by: what is one row of a text file; None: a line.
        kwargs: arguments for the function, the task or ``datasets.load_dataset``.
        columns: new column names, ``{old: new}``.
        map: ``module:function`` that gives, for a row, columns to add or replace, as a mapping.
        filter: ``module:function`` that says of a row whether to keep it.
        shuffle: seed to shuffle the rows with before the limit; None: keep their order.
        limit: number of rows to keep, or a fraction of them below 1.0.
        convert: data type to convert the rows to.
        weight: share of this source in a mixture.
    """

    path: str
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    data_files: str | list[str] | dict[str, str | list[str]] | None = None
    format: Format | None = None
    field: str | None = None
    sample_by: SampleBy | None = None
    kwargs: dict[str, Any] | None = None
    columns: dict[str, str] | None = None
    map: str | None = None
    filter: str | None = None
    shuffle: int | None = None
    limit: int | float | None = None
    convert: Convert | None = None
    weight: float | None = None

    @property
    def label(self) -> str:
        """How messages and the source column call it."""
        return self.path if isinstance(self.path, str) else f"<{type(self.path).__name__}>"

    @property
    def kind(self) -> Kind:
        return source_kind(self.path)


OPTIONS = tuple(f.name for f in fields(SourceSpec))


def make_spec(spec: Any) -> SourceSpec:
    """A `SourceSpec` of a path, a mapping of options, or an object in memory.

    Raises:
        UserError: an option is unknown, or has no effect on this kind of source.
    """
    if isinstance(spec, SourceSpec):
        return spec
    if not isinstance(spec, Mapping) or "path" not in spec:
        if type(spec) is dict:
            raise UserError(f"A source needs a path; got the options {', '.join(map(str, spec)) or 'none'}.")
        return SourceSpec(path=os.fspath(spec) if isinstance(spec, os.PathLike) else spec)
    unknown = next((key for key in spec if key not in OPTIONS), None)
    if unknown is not None:
        raise UserError(f"Source option {unknown!r} is not known.{nearest(unknown, OPTIONS)} Allowed: {', '.join(OPTIONS)}.")
    made = SourceSpec(**spec)
    useless = sorted(name for name in _WITHOUT_EFFECT[made.kind] if getattr(made, name) is not None)
    if useless:
        raise UserError(f"Source {made.label}: {', '.join(useless)} has no effect on a source of the kind {made.kind!r}.")
    return made


def source_kind(path: Any) -> Kind:
    """What a path stands for; strings that are no file here and look like none are hub names."""
    if not isinstance(path, str | os.PathLike):
        return "memory"
    path = os.fspath(path)
    place = Path(path).expanduser()
    if path.startswith("tiny:"):
        return "tiny"
    if path.startswith("reasoning_gym:"):
        return "reasoning_gym"
    if is_import_path(path) and not place.exists():
        return "import"
    if any((place / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return "saved"
    looks_local = suffix(path) in SUFFIXES or path.startswith((".", "/", "~")) or path.count("/") > 1 or not path
    return "files" if looks_local or place.exists() or is_glob(path) else "hub"


def is_mixture(spec: Any) -> bool:
    """Whether ``spec`` lists sources (texts, data sets, mappings with a path) and not rows."""
    if not isinstance(spec, list | tuple):
        return False
    if not spec:
        raise UserError("The list of sources is empty.")
    return all(not isinstance(item, Mapping) or _has_options(item) for item in spec)


def _has_options(item: Mapping) -> bool:
    return type(item) is not dict or ("path" in item and not item.keys() & set(TYPE_COLUMNS))
