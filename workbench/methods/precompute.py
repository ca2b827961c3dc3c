"""Reference log-probabilities computed once, before training, and kept on disk under a hash of all they depend on."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from lightning.pytorch.strategies import Strategy
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm

from workbench.data.batch import MicroBatch
from workbench.data.loader import EvalDataset, row_sizes
from workbench.data.prepared_cache import data_digest
from workbench.errors import file_errors
from workbench.models.gguf import cache_home
from workbench.strategies.info import data_parallel, gather

log = logging.getLogger(__name__)

VERSION = 1  # of the code that computes them: raise it with every change of what it gives
COLUMN = "ref_logps"


def default_dir() -> Path:
    """``reference`` in the cache of this program."""
    return cache_home() / "reference"


def with_reference(
    rows: Dataset,
    compute: Callable[[MicroBatch], Tensor],
    depends_on: dict[str, Any],
    *,
    strategy: Strategy,
    device: torch.device,
    micro_batch_size: int,
    directory: Path | None = None,
    name: str = "train",
) -> Dataset:
    """``rows`` with the column ``ref_logps``: for every completion of a row, in order, its log-probability in nats (fp64).

    Every rank must call it; each computes its share, the first one writes. A file that is not complete counts as missing.

    Args:
        rows: prepared rows.
        compute: sums of log-probabilities of the completions of a micro-batch, in order; the same number for every row.
        depends_on: everything but the rows that the numbers depend on.
        strategy: of the trainer.
        device: to compute on.
        micro_batch_size: most rows in one forward.
        directory: where the file is looked for and written; None: `default_dir`.
        name: of the data set, for messages.
    """
    key = {"version": VERSION, "torch": torch.__version__, "transformers": transformers.__version__, **depends_on}
    key["rows"] = data_digest(rows)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    file = (directory or default_dir()) / f"{digest}.safetensors"
    found = _read(file, len(rows))
    if all(gather(found is not None, strategy)):  # processes on several machines may not see the same disk
        log.info("%s: reference log-probabilities of %s", name, file)
    else:
        found = per_row(rows, compute, strategy, device, micro_batch_size, f"Reference on {name}")
        if strategy.is_global_zero:
            _write(file, found)
        strategy.barrier("reference log-probabilities")
    if COLUMN in rows.column_names:
        rows = rows.remove_columns(COLUMN)
    return rows.add_column(COLUMN, list(found))


def per_row(
    rows: Dataset, compute: Callable[[MicroBatch], Tensor], strategy: Strategy, device: torch.device, size: int, title: str
) -> np.ndarray:
    """Numbers of every row ``[rows, n]``, fp64, computed by all ranks together, each its share.

    Args:
        rows: prepared rows.
        compute: ``n`` numbers for each row of a micro-batch, in order.
        strategy: of the trainer.
        device: to compute on.
        size: most rows in one forward.
        title: of the progress bar.
    """
    world_size, rank = data_parallel(strategy)
    items = EvalDataset(rows, row_sizes(rows), size, world_size, rank)
    mine: dict[int, list[float]] = {}
    bar = tqdm(range(len(items)), desc=title, delay=2, disable=not strategy.is_global_zero, leave=False)
    for item in bar:
        batch = items[item].to(device)
        sums = compute(batch).cpu()
        if not batch.is_empty:
            index = torch.unique_consecutive(batch.row).tolist()
            mine |= dict(zip(index, sums.view(len(index), -1).tolist(), strict=True))
    parts: dict[int, list[float]] = {}
    for part in gather(mine, strategy):
        parts |= part
    return np.array([parts[row] for row in range(len(rows))], dtype=np.float64)


def _read(file: Path, num_rows: int) -> np.ndarray | None:
    if not file.is_file():
        return None
    try:
        values = load_file(file)[COLUMN]
    except (OSError, SafetensorError, KeyError) as error:
        log.warning("%s cannot be read (%s); the reference log-probabilities are computed again.", file, error)
        return None
    if len(values) == num_rows and np.isfinite(values).all():
        return values
    log.warning("%s is not complete; the reference log-probabilities are computed again.", file)
    return None


def _write(file: Path, values: np.ndarray) -> None:
    with file_errors(f"write reference log-probabilities to {file.parent} (data.cache_dir)"):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, scratch = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        os.close(descriptor)
        try:
            save_file({COLUMN: values}, scratch)
            os.replace(scratch, file)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
