"""Metrics as a CSV file with one row per step."""

import csv
import io
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from workbench.errors import file_errors

log = logging.getLogger(__name__)

FILENAME = "metrics.csv"


class CSVLogger(Logger):
    """One row per optimizer step and one column per metric, on disk after every call, continued by a resumed run.

    What is logged for the step of the last row is added to that row; `read_history` merges the rest. (Lightning's own
    CSV logger deletes the file of an earlier run in the same folder, so that a resumed run loses its history.)

    Args:
        save_dir: folder of the file.
        filename: its name.
    """

    def __init__(self, save_dir: str = ".", filename: str = FILENAME) -> None:
        super().__init__()
        self._save_dir = str(save_dir)
        self.path = Path(save_dir) / filename
        self._columns: list[str] | None = None  # None: the file has not been looked at
        self._row: dict[str, Any] = {}
        self._row_start = 0

    @property
    def name(self) -> str:
        """The logger's name."""
        return "csv"

    @property
    def version(self) -> str:
        """Runs are told apart by their folders, not by versions."""
        return ""

    @property
    def save_dir(self) -> str:
        """Folder of the file."""
        return self._save_dir

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the configuration lies beside the file, as YAML."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Adds metrics to the row of ``step`` (None: the step of the last row)."""
        self._open()
        step = int(step if step is not None else self._row.get("step", 0))
        if self._row.get("step") != step:
            self._row, self._row_start = {"step": step}, self.path.stat().st_size
        self._row.update({name: float(value) for name, value in metrics.items() if name != "step"})
        new = [name for name in self._row if name not in self._columns]
        if new:
            rows = _read_rows(self.path, end=self._row_start)
            self._columns += new
            self._row_start = _write_rows(self.path, self._columns, rows)
        _write_rows(self.path, self._columns, [self._row], start=self._row_start)

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Forgets rows after ``step``, which a run is about to train again. A run from the beginning keeps the old file
        under another name."""
        self._open()
        rows = _read_rows(self.path)
        kept = [row for row in rows if int(row["step"]) <= step]
        if len(kept) == len(rows):
            return
        if step == 0:
            log.info("the metrics of an earlier run are kept in %s", _set_aside(self.path))
        else:
            log.info("resuming from step %d: %d later rows of %s are dropped", step, len(rows) - len(kept), self.path)
            _write_rows(self.path, self._columns, kept)
        self._columns, self._row = None, {}

    def _open(self) -> None:
        """Takes over an earlier file: its columns, and its last row, which may still grow."""
        if self._columns is not None:
            return
        with file_errors(f"make the folder {self.path.parent}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = _read_rows(self.path) if self.path.exists() else []
        self._columns = list(rows[0]) if rows else ["step"]
        self._row_start = _write_rows(self.path, self._columns, rows[:-1])
        self._row = {}
        if rows:
            last = {name: float(text) for name, text in rows[-1].items() if text and name != "step"}
            self._row = {"step": int(rows[-1]["step"]), **last}
            _write_rows(self.path, self._columns, [self._row], start=self._row_start)


def read_history(path: str | Path) -> pd.DataFrame:
    """The metrics of a run, one row per step in ascending order, one column per metric.

    Args:
        path: the CSV file, or the folder of the run.
    """
    path = Path(path)
    path = path / FILENAME if path.is_dir() else path
    if not path.exists() or not path.stat().st_size:
        return pd.DataFrame({"step": pd.Series(dtype=int)})
    frame = pd.DataFrame(_read_rows(path)).replace("", None)
    frame = frame.astype({name: int if name == "step" else float for name in frame})
    return frame.groupby("step", as_index=False).last().sort_values("step", ignore_index=True)


def _read_rows(path: Path, end: int | None = None) -> list[dict[str, str]]:
    """Rows as text, up to byte ``end``; a last line that a killed process left unfinished does not count."""
    text = path.read_bytes()[:end].decode()
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


def _write_rows(path: Path, columns: list[str], rows: list[dict[str, Any]], start: int | None = None) -> int:
    """Writes rows from byte ``start`` on, or a whole new file in place of the old one; returns the file's size."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if start is None:
        writer.writeheader()
    writer.writerows(rows)
    data = text.getvalue().encode()
    with file_errors(f"write {path}"):
        return _write_bytes(path, data, start)


def _write_bytes(path: Path, data: bytes, start: int | None) -> int:
    if start is None:
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(data)
        os.replace(temporary, path)
        return len(data)
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(data)
        file.truncate()
    return start + len(data)


def _set_aside(path: Path) -> Path:
    n = 1
    while (target := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists():
        n += 1
    return path.rename(target)
