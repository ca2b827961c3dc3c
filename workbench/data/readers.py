"""Local files as rows: JSON Lines, JSON, CSV, TSV and text, each error with file and line.

Read here and not by the loaders of `datasets`, because those change values: dates in text become time stamps, ``NA`` and
``12`` in a CSV become missing and a number, and nested values with different keys are filled up with None.
"""

import csv
import glob
import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from workbench.errors import UserError, nearest

Format = Literal["jsonl", "json", "csv", "tsv", "parquet", "arrow", "text"]
SampleBy = Literal["line", "paragraph", "document"]

SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
}
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
_GLOB = re.compile(r"[*?\[]")


def suffix(path: str | Path) -> str:
    """Extension, with ``.gz`` taken off."""
    path = Path(path)
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def is_glob(path: str) -> bool:
    return bool(_GLOB.search(path)) and not Path(path).exists()


def list_files(path: str) -> list[Path]:
    """The data files that a file name, a folder or a pattern stands for, in order; `UserError` if there are none."""
    if is_glob(path):
        files = sorted(Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file())
        if not files:
            raise UserError(f"No file matches {path!r}.{_neighbours(Path(path))}")
        return files
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(f for f in place.rglob("*") if f.is_file() and suffix(f) in SUFFIXES and not _hidden(f, place))
        if not files:
            raise UserError(f"The folder {path!r} holds no data file ({', '.join(SUFFIXES)}).")
        return files
    if not place.exists():
        raise UserError(f"There is no file {path!r}.{_neighbours(place)}")
    return [place]


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.relative_to(root).parts)


def _neighbours(path: Path) -> str:
    """What lies beside a path that does not exist."""
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    names = sorted(f.name for f in folder.iterdir() if f.suffix in (*SUFFIXES, ".gz") or f.is_dir())
    guess = nearest(path.name, names)
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{guess} In {str(folder)!r}: {listed or 'nothing'}."


def file_format(files: list[Path], given: Format | None) -> Format:
    """The one format of the files; `UserError` for an unknown extension or a mix."""
    if given is not None:
        return given
    unknown = next((f for f in files if suffix(f) not in SUFFIXES), None)
    if unknown is not None:
        raise UserError(
            f"Cannot tell the format of {str(unknown)!r} from {unknown.suffix or 'no extension'!r}."
            f" Known: {', '.join(SUFFIXES)} (also with .gz); or set format: jsonl."
        )
    formats = sorted({SUFFIXES[suffix(f)] for f in files})
    if len(formats) > 1:
        raise UserError(f"The files are of several formats ({', '.join(formats)}); choose some with a pattern: dir/*.jsonl.")
    return formats[0]


def group_splits(files: list[Path]) -> dict[str, list[Path]]:
    """Files by the split that their names (or their folders' names) tell, under "" those that tell none."""
    groups: dict[str, list[Path]] = {}
    for file in files:
        split = _split_of(file.name) or _split_of(file.parent.name)
        groups.setdefault(split or "", []).append(file)
    return groups


def _split_of(name: str) -> str | None:
    words = re.split(r"[^a-z]+", name.lower())
    return next((split for split, known in _SPLIT_WORDS.items() if any(w in known for w in words)), None)


def read_rows(file: str | Path, form: Format, field: str | None = None, sample_by: SampleBy = "line") -> Iterator[dict]:
    """Rows of one file."""
    try:
        with _open(Path(file)) as handle:
            if form == "jsonl":
                yield from _json_lines(handle, file)
            elif form == "json":
                yield from _json_rows(handle.read(), file, field)
            elif form in ("csv", "tsv"):
                yield from _csv_rows(handle, file, "," if form == "csv" else "\t")
            else:
                yield from _text_rows(handle, sample_by)
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text (byte {error.start}: {error.reason}). Save it as UTF-8.") from None
    except (EOFError, gzip.BadGzipFile) as error:
        raise UserError(f"{file}: not a whole gzip file ({error}).") from None


def _open(file: Path) -> TextIO:
    # utf-8-sig takes off a byte order mark; newline="" is what the csv module asks for
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8-sig", newline="")
    return open(file, encoding="utf-8-sig", newline="")


def _json_lines(lines: Any, file: str | Path) -> Iterator[dict]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{file}:{number}: not valid JSON ({error.msg} at column {error.colno}).") from None
        yield _checked(row, f"{file}:{number}")


def _json_rows(text: str, file: str | Path, field: str | None) -> Iterator[dict]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):  # JSON Lines under the name .json
            yield from _json_lines(text.split("\n"), file)
            return
        raise UserError(f"{file}:{error.lineno}: not valid JSON ({error.msg} at column {error.colno}).") from None
    data = _field(data, file, field)
    for number, row in enumerate(data):
        yield _checked(row, f"{file}, element {number}")


def _field(data: Any, file: str | Path, field: str | None) -> list:
    if field is not None:
        if not isinstance(data, dict) or field not in data:
            keys = ", ".join(data) if isinstance(data, dict) else "none, it is a list"
            raise UserError(f"{file}: no field {field!r}. Its keys: {keys}.")
        data = data[field]
    if isinstance(data, dict):
        lists = [key for key, value in data.items() if isinstance(value, list)]
        way = f" Name the list of rows with field: {lists[0]}." if lists else ""
        raise UserError(f"{file}: holds one object with the keys {', '.join(data)}, not a list of rows.{way}")
    if not isinstance(data, list):
        raise UserError(f"{file}: holds a {type(data).__name__}, not a list of rows.")
    return data


def _checked(row: Any, place: str) -> dict:
    if not isinstance(row, dict):
        raise UserError(f"{place}: a row must be an object such as {{'text': ...}}, not {type(row).__name__}.")
    return row


def _csv_rows(handle: TextIO, file: str | Path, delimiter: str) -> Iterator[dict]:
    """Cells are text and stay text: `normalise_row` reads labels and numbers where the type wants them."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(handle, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if not cells:
                continue
            if header is None:
                header = _header(cells, file)
                continue
            if len(cells) != len(header):
                raise UserError(f"{file}:{reader.line_num}: {len(cells)} cells, the header has {len(header)}.")
            yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise UserError(f"{file}:{reader.line_num}: not valid CSV ({error}).") from None


def _header(cells: list[str], file: str | Path) -> list[str]:
    repeated = next((c for c in cells if cells.count(c) > 1), None)
    if repeated is not None or "" in cells:
        what = f"repeats {repeated!r}" if repeated else "has an empty name"
        raise UserError(f"{file}:1: the header {what}. The first line must name every column once.")
    return cells


def _text_rows(handle: TextIO, sample_by: SampleBy) -> Iterator[dict]:
    """A row for each line, each paragraph (parted by blank lines) or the whole; blank ones are left out."""
    if sample_by == "line":
        parts: Any = (line.rstrip("\r\n") for line in handle)
    else:
        text = handle.read().replace("\r\n", "\n")
        parts = [text] if sample_by == "document" else (p.strip("\n") for p in re.split(r"\n(?:[ \t]*\n)+", text))
    yield from ({"text": part} for part in parts if part.strip())
