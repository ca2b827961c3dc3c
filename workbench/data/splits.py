"""Splits, slices of them, limits, and cutting an evaluation set off a training set."""

import math
import re
from typing import Any, TypeVar

from datasets import Dataset, IterableDataset

from workbench.errors import UserError, nearest

Rows = Dataset | IterableDataset
T = TypeVar("T")
Part = tuple[str, str]  # both ends of a slice as written, "" where open
_SPLIT = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>-?\d+%?)?:(?P<end>-?\d+%?)?\])?")


def parse_split(text: str) -> tuple[str, Part | None]:
    """``"train[10%:]"`` -> ``("train", ("10%", ""))``; `UserError` if it is not written like this."""
    match = _SPLIT.fullmatch(str(text).strip())
    if match is None:
        raise UserError(f"split={text!r} is not a split. Write train, train[:100], train[50:100] or train[10%:].")
    part = (match["start"] or "", match["end"] or "") if "[" in match[0] else None
    return match["name"], part


def choose_split(
    splits: dict[str, T], wanted: str | None, default: str, label: str, *, named: bool = True
) -> tuple[T, Part | None]:
    """One of ``splits`` and the slice of it to take.

    Args:
        wanted: what the source says; None: ``default``.
        named: the names mean something; otherwise the only entry is taken unless the source says a name.
    """
    if not named and wanted is None:
        return next(iter(splits.values())), None
    name, part = parse_split(wanted or default)
    if name not in splits:
        listed = ", ".join(splits)
        raise UserError(
            f"Source {label} has no split {name!r}.{nearest(name, splits)} Splits: {listed}."
            f" Set split in the source, for example split: {next(iter(splits), 'train')}."
        )
    return splits[name], part


def slice_rows(rows: Rows, part: Part | None, label: str) -> Rows:
    """The slice of a split; a stream, whose length is not known, takes row numbers only."""
    if part is None:
        return rows
    if isinstance(rows, Dataset):
        start, end = (_position(text, len(rows), fallback) for text, fallback in zip(part, (0, len(rows)), strict=True))
        return rows.select(range(start, end) if start < end else range(0))
    if any(text.endswith("%") or text.startswith("-") for text in part):
        raise UserError(f"Source {label}: a stream has no known length, so [{':'.join(part)}] is undefined; use row numbers.")
    start = int(part[0] or 0)
    rows = rows.skip(start) if start else rows
    return rows.take(max(0, int(part[1]) - start)) if part[1] else rows


def _position(text: str, length: int, fallback: int) -> int:
    if not text:
        return fallback
    number = round(int(text[:-1]) / 100 * length) if text.endswith("%") else int(text)
    return min(max(number + length if number < 0 else number, 0), length)


def limit_rows(rows: Rows, limit: int | float, label: str) -> Rows:
    """The first ``limit`` rows, a number or (below 1.0) a fraction of them; at least one row."""
    whole = isinstance(limit, int) and not isinstance(limit, bool) and limit > 0
    if not whole and not (isinstance(limit, float) and (0 < limit < 1 or (limit >= 1 and limit == int(limit)))):
        raise UserError(f"Source {label}: limit={limit!r}; use a number of rows, or a fraction between 0 and 1.")
    if isinstance(rows, IterableDataset):
        if limit < 1:
            raise UserError(f"Source {label}: a stream has no known length, so limit={limit} is undefined; use a number of rows.")
        return rows.take(int(limit))
    count = max(1, round(limit * len(rows))) if limit < 1 else min(int(limit), len(rows))
    return rows.select(range(count))


def split_off(rows: Rows, size: int | float, seed: int = 0, name: str = "test_split_size") -> tuple[Any, Any]:
    """Cuts an evaluation set off: ``(rest, cut)``.

    Args:
        rows: a data set (drawn at random under ``seed``) or a stream (its first rows).
        size: number of rows, or a fraction of them below 1.0 (not for a stream).
        seed: of the draw.
        name: what ``size`` is called where it was given.
    """
    number = isinstance(size, int | float) and not isinstance(size, bool) and math.isfinite(size)
    if not number or size <= 0 or (size >= 1 and size != int(size)):
        raise UserError(f"{name}={size!r}; use a number of rows, or a fraction between 0 and 1.")
    if isinstance(rows, IterableDataset):
        if size < 1:
            raise UserError(f"A stream has no known length, so {name}={size} is undefined; use a number of rows.")
        return rows.skip(int(size)), rows.take(int(size))
    count = max(1, round(size * len(rows))) if size < 1 else int(size)
    if count >= len(rows):
        raise UserError(f"{name}={size} leaves no row to train on: the data set has {len(rows)}.")
    both = rows.train_test_split(test_size=count, seed=seed, shuffle=True)
    return both["train"], both["test"]
