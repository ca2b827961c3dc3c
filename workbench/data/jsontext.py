"""Nested values that Arrow cannot hold without changing them, kept as marked JSON text in a string column.

Arrow gives all rows of a column one schema: it fills missing keys with None, turns 3 into 3.0 and refuses a column whose
rows differ in type. (`datasets.Json` keeps such values too, but writes numbers with ten digits and reads 10.681 back as
10.681000000000001.) The mark is the record separator that RFC 7464 puts before a JSON text, so that a column may mix
plain text and encoded values.
"""

import json
from collections.abc import Mapping
from typing import Any

from workbench.errors import UserError

MARK = "\x1e"


def encode_value(value: Any) -> str | None:
    """Text and None as they are, anything else as marked JSON."""
    if value is None or (isinstance(value, str) and not value.startswith(MARK)):
        return value
    return MARK + json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy and torch
        return value.tolist()
    kind = type(value).__name__
    raise UserError(f"A {kind} inside a nested value cannot be stored; put images into an 'images' column of their own.")


def decode_value(value: Any) -> Any:
    """Inverse of `encode_value`; values that carry no mark are returned as they are."""
    return json.loads(value[len(MARK) :]) if isinstance(value, str) and value.startswith(MARK) else value


def decode_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its encoded values decoded."""
    return {name: decode_value(value) for name, value in row.items()}
