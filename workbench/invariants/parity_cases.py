"""Recorded cases: what another trainer logged on the fixture's model and rows, step by step. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import UserError, file_errors, nearest

# What a step of a record says besides numbers to compare: its own position, or counts that depend on how rows are laid out.
BESIDE = frozenset({"step", "epoch", "learning_rate", "num_tokens", "num_input_tokens_seen"})
_READ = ("case", "kind", "data", "args", "common", "steps")
_UNREAD = ("peer", "note")
_EXTRAS = ("lora", "margin", "columns", "attn_implementation", "ref_model_scale", "bema", "udm", "rollouts", "orders")

_MISSING: dict[str, Any] = {"args": {}, "common": {}, "data": ""}
ONLINE = ("grpo", "rloo")  # kinds whose records answer the fixture's prompts

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One record.

    Args:
        name: of the case.
        kind: of the trainer: ``sft``, ``dpo`` ...
        data: name of the fixture's rows, path of a ``.jsonl`` file, or the rows themselves.
        options: the trainer's options that were given.
        steps: what it logged: ``step``, ``loss``, ``grad_norm`` and metrics.
        extras: what else the run had: ``lora`` (true, or fields of an adapter), ``margin`` or other ``columns`` (a value
            for each row, or one for all), ``attn_implementation``, ``ref_model_scale`` (the reference is the model with its
            head times this), ``bema`` (a reference that follows this average).
        path: of the file.
        unread: keys of the file that nothing reads.
    """

    name: str
    kind: str
    data: str | list[Row]
    options: dict[str, Any]
    steps: list[dict[str, Any]]
    extras: dict[str, Any] = field(default_factory=dict)
    path: Path = Path()
    unread: tuple[str, ...] = ()


def load_case(path: Path) -> Case:
    """Reads a case file.

    Raises:
        UserError: no such file, not JSON, or not a case; in one line that names the file.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such case file.")
    with file_errors(f"read {path}"):
        text = path.read_bytes()
    try:
        case = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}.") from None
    if not isinstance(case, dict):
        raise UserError(f"{path} holds no case: it must be an object with kind, data, args and steps.")
    for key, types, form in (
        ("kind", str, "a text"),
        ("data", str | list, "a name of rows, or the rows"),
        ("steps", list, "a list"),
        ("args", dict, "an object"),
        ("common", dict, "an object"),
    ):
        if not isinstance(case.get(key) if case.get(key) is not None else _MISSING.get(key), types):
            raise UserError(f"{path}: {key}={_short(case.get(key))} must be {form}.")
    _check_extras(path, case)
    return Case(
        name=str(case.get("case", path.stem)),
        kind=case["kind"],
        data=case["data"] if case.get("data") is not None else "prompt" if case["kind"] in ONLINE else "",
        options={**(case.get("common") or {}), **(case.get("args") or {})},
        steps=_steps(path, case["steps"]),
        extras={key: case[key] for key in _EXTRAS if case.get(key) not in (None, False)},
        path=path,
        unread=tuple(key for key in case if key not in (*_READ, *_UNREAD, *_EXTRAS)),
    )


def _check_extras(path: Path, case: Mapping[str, Any]) -> None:
    columns = case.get("columns") or {}
    if not isinstance(columns, Mapping):
        raise UserError(f"{path}: columns={_short(columns)} must be an object: a list of values, or one, for each column.")
    margins = case.get("margin", columns.get("margin", 0.0))
    for value in margins if isinstance(margins, list) else [margins]:
        if not _is_number(value):
            raise UserError(f"{path}: margin={_short(value)} must be a number for each row, or one for all.")
    if not isinstance(case.get("lora") or {}, bool | Mapping):
        raise UserError(f"{path}: lora={_short(case['lora'])} must be true, or fields of an adapter.")
    if not _is_number(case.get("ref_model_scale", 1.0)):
        raise UserError(f"{path}: ref_model_scale={_short(case['ref_model_scale'])} must be a number.")
    if not isinstance(case.get("bema") or {}, Mapping):
        raise UserError(f"{path}: bema={_short(case['bema'])} must be an object.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _steps(path: Path, steps: list[Any]) -> list[dict[str, Any]]:
    if not steps:
        raise UserError(f"{path}: steps is empty, so there is nothing to compare.")
    position = 0
    for i, step in enumerate(steps):
        if not isinstance(step, dict) or "loss" not in step:
            raise UserError(f"{path}: steps[{i}]={_short(step)} must be an object with step, loss and metrics.")
        for name, value in step.items():
            if value is not None and not _is_number(value):
                raise UserError(f"{path}: steps[{i}].{name}={_short(value)} must be a number.")
        at = step.setdefault("step", position + 1)
        if at != int(at) or at <= position:
            raise UserError(f"{path}: steps[{i}].step={at} must be a whole number above {position}, the step before it.")
        position = int(at)
    return steps


def load_rows(case: Case, fixture: Path) -> list[Row]:
    """The rows of a case, with the columns that it adds."""
    rows = case.data if isinstance(case.data, list) else _read_rows(_data_file(case, fixture))
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(f"{case.path}: data holds no rows: it must be a list of objects.")
    columns = dict(case.extras.get("columns") or {})
    if "margin" in case.extras:
        columns["margin"] = case.extras["margin"]
    for name, values in columns.items():
        values = values if isinstance(values, list) else [values] * len(rows)
        if len(values) != len(rows):
            raise UserError(f"{case.path}: column {name!r} has {len(values)} values for {len(rows)} rows.")
        rows = [{**row, name: value} for row, value in zip(rows, values, strict=True)]
    return rows


def _data_file(case: Case, fixture: Path) -> Path:
    if case.data.endswith((".jsonl", ".json")):
        file = case.path.parent / case.data
    else:
        file = fixture / "data" / f"{case.data}.jsonl"
    if not case.data or not file.is_file():
        there = sorted(f.stem for f in (fixture / "data").glob("*.jsonl"))
        raise UserError(
            f"{case.path}: data={case.data!r} names no rows of the fixture.{nearest(case.data, there)} Put them at {file}, or "
            f"write them into the case. There: {', '.join(there) or 'none'}."
        )
    return file


def _read_rows(file: Path) -> list[Row]:
    rows = []
    with file_errors(f"read {file}"):
        lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file}, line {number} is not JSON: {error}.") from None
        if not isinstance(row, Mapping):
            raise UserError(f"{file}, line {number} is no row: it must be an object.")
        rows.append(dict(row))
    return rows


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
