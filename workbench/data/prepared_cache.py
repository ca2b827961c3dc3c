"""The disk cache of prepared data sets: one folder per key, complete or absent."""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import transformers
from datasets import Dataset
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from workbench.data.spec import PrepareReport, PrepareSpec
from workbench.errors import file_errors
from workbench.models.gguf import cache_home

log = logging.getLogger(__name__)

VERSION = 7  # of the code that makes features: raise it with every change of what it makes
_HASHED_BYTES = 4 << 30  # larger data sets are known by the fingerprint that `datasets` gives them
_STATE = ("truncation", "padding")  # of a fast tokenizer, set by every call


def default_cache_dir() -> Path:
    """``prepared`` in the cache of this program."""
    return cache_home() / "prepared"


def cache_key(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, spec: PrepareSpec, data_type: str) -> str:
    """Hash of everything that the prepared rows depend on."""
    versions = [VERSION, transformers.__version__, tokenizers.__version__]
    parts = [versions, spec.to_json(), data_type, data_digest(dataset), tokenizer_digest(tokenizer)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def data_digest(dataset: Dataset) -> str:
    """Hash of the rows, in order; for very large data sets, the fingerprint of their origin."""
    if (dataset.dataset_size or dataset.data.nbytes) > _HASHED_BYTES:
        return str(dataset._fingerprint)
    digest = hashlib.blake2b(str(dataset.features).encode())
    for table in dataset.with_format("arrow").iter(batch_size=10_000):
        for batch in table.combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of what the tokenizer does with a text or a conversation."""
    parts: list[Any] = [type(tokenizer).__name__, tokenizer.special_tokens_map, tokenizer.chat_template]
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        parts.append({k: v for k, v in backend.items() if k not in _STATE})
    else:
        added = {i: repr(t) for i, t in tokenizer.added_tokens_decoder.items()}
        parts += [sorted(tokenizer.get_vocab().items()), added, tokenizer.init_kwargs]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def cached(key: str, directory: Path, make: Callable[[Path], tuple[Dataset, PrepareReport]]) -> tuple[Dataset, PrepareReport]:
    """The folder ``directory/key``, made by ``make(scratch)`` if it is not there.

    Processes that want the same key wait for the one that makes it. A folder appears under its name only when complete.
    """
    target = directory / key
    if not target.exists():
        with file_errors(f"write prepared data to {directory} (data.cache_dir)"):
            directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / f"{key}.lock"):
            if not target.exists():
                _make(target, make)
        with suppress(OSError):
            (directory / f"{key}.lock").unlink()
    report = PrepareReport.from_dict(json.loads((target / "report.json").read_text()))
    return datasets.load_from_disk(target / "rows"), report


def _make(target: Path, make: Callable[[Path], tuple[Dataset, PrepareReport]]) -> None:
    with file_errors(f"write prepared data to {target.parent} (data.cache_dir)"):
        scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
        _fill(scratch, target, make)


def _fill(scratch: Path, target: Path, make: Callable[[Path], tuple[Dataset, PrepareReport]]) -> None:
    try:
        (scratch / "work").mkdir()
        (scratch / "done").mkdir()
        dataset, report = make(scratch / "work")
        dataset.save_to_disk(scratch / "done" / "rows")
        (scratch / "done" / "report.json").write_text(json.dumps(dataclasses.asdict(report), indent=1))
        with suppress(OSError):  # another machine on a shared disk was first
            os.rename(scratch / "done", target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
