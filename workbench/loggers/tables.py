"""Tables of a run (generated samples, completions): Parquet files in its folder, and whatever its loggers take."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
import pyarrow as pa
from pyarrow import parquet

log = logging.getLogger(__name__)

FOLDER = "tables"
_LONGEST = 400  # characters of a printed cell


def log_table(
    trainer: "L.Trainer", name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None = None
) -> None:
    """Keeps a table of the current step: as ``<run folder>/tables/<name>/step-000120.parquet``, which `read_table`
    reads, and in every logger that has ``log_table`` (Trackio, Weights & Biases). Does nothing on ranks other than 0.

    Args:
        trainer: whose run it belongs to; its ``default_root_dir`` is the run's folder.
        name: the table's name; may contain ``/``.
        columns: names of the columns.
        rows: the rows, each as long as ``columns``. Cells other than text, numbers, booleans and None become JSON.
        step: optimizer step; None: the trainer's.
    """
    if not trainer.is_global_zero:
        return
    step = trainer.global_step if step is None else int(step)
    rows = [[plain_cell(cell) for cell in row] for row in rows]
    write_table(trainer.default_root_dir, name, columns, rows, step)
    for logger in trainer.loggers:
        if hasattr(logger, "log_table"):
            logger.log_table(key=name, columns=list(columns), data=rows, step=step)


def plain_cell(value: Any) -> str | int | float | bool | None:
    """What every table can hold."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if hasattr(value, "item") and getattr(value, "size", 2) == 1:
        return value.item()
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        return str(value)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table on the terminal; conversations as lines of text, long cells cut."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, show_lines=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_shown(cell)) for cell in row))
    Console().print(table)


def _shown(cell: Any) -> str:
    if isinstance(cell, list) and cell and isinstance(cell[-1], dict):
        cell = "\n".join(f"{m.get('role', '?')}: {m.get('content', '')}" for m in cell)
    cell = plain_cell(cell)
    text = f"{cell:.4g}" if isinstance(cell, float) else "" if cell is None else str(cell)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def write_table(run_dir: str | Path, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> Path:
    """Writes one step of a table; a step that is written again replaces the earlier one."""
    folder = Path(run_dir) / FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.parquet"
    cells = [_one_type([plain_cell(row[i]) for row in rows]) for i in range(len(columns))]
    temporary = path.with_suffix(".tmp")
    parquet.write_table(pa.table(cells, names=list(columns)), temporary)
    temporary.replace(path)
    return path


def _one_type(cells: list[Any]) -> list[Any]:
    """A Parquet column has one type: where types are mixed, all but the texts become JSON."""
    types = {type(cell) for cell in cells if cell is not None}
    if len(types) < 2 or types == {int, float}:
        return cells
    return [cell if cell is None or isinstance(cell, str) else json.dumps(cell) for cell in cells]


def read_table(run_dir: str | Path, name: str) -> pd.DataFrame:
    """All steps of a table, in order, with the step as the first column (``step``) where the table has none."""
    frames = []
    for path in sorted((Path(run_dir) / FOLDER / name).glob("step-*.parquet"), key=_step):
        frame = pd.read_parquet(path)
        if "step" not in frame:
            frame.insert(0, "step", _step(path))
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"step": []})


def rewind(trainer: "L.Trainer") -> None:
    """Makes a run's logs end at the step that training (re)starts from, so that what follows is one point per step."""
    if not trainer.is_global_zero:
        return
    step = trainer.global_step
    for logger in trainer.loggers:
        if hasattr(logger, "rewind"):
            logger.rewind(step)
    for path in Path(trainer.default_root_dir, FOLDER).glob("**/step-*.parquet"):
        if step and _step(path) > step:
            path.unlink()


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
