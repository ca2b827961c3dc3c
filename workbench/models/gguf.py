"""GGUF files: dequantised once to safetensors in a cache, and read from there afterwards.

The cache key is a hash of the file's content and of the versions that decide what comes out of it, so a file that was
replaced under its old name, or a newer converter, is converted anew.
"""

import functools
import hashlib
import importlib.util
import logging
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import transformers
from filelock import FileLock

from workbench.cache import cache_home
from workbench.errors import UserError

log = logging.getLogger(__name__)

# Raise when the layout of a converted directory changes.
FORMAT = 1
# What a cut file, an unknown architecture or an unknown block type raise.
READ_ERRORS = (ValueError, KeyError, IndexError, TypeError, RuntimeError, struct.error)


def converted(file: Path) -> Path | None:
    """The directory ``file`` was converted to earlier, or None."""
    directory = cache_home() / "gguf" / _key(file)
    return directory if directory.is_dir() else None


def convert(file: Path) -> Path:
    """A directory with the float32 weights, the config and the tokenizer of a GGUF file; later calls reuse it.

    Float32 holds every GGUF block exactly, so the stored model is the file's own whatever dtype it is loaded in later.

    Raises:
        UserError: not a GGUF file, an architecture transformers cannot read, no ``gguf`` package, or a full disk.
    """
    check_readable(file)
    if found := converted(file):
        return found
    target = cache_home() / "gguf" / _key(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):  # the other ranks of this machine wait, and then find it
        if not target.is_dir():
            log.info("Converting %s to safetensors, once; it will be read from %s.", file.name, target)
            _convert_to(file, target)
    return target


def check_readable(file: Path) -> None:
    """Raises `UserError` unless ``file`` starts as GGUF does and the ``gguf`` package is installed."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"Reading {file.name} needs the gguf package: pip install gguf")
    with open(file, "rb") as opened:
        if opened.read(4) != b"GGUF":
            raise UserError(f"{file} is not a GGUF file (it does not start with 'GGUF'); copy or download it again.")


def unreadable(file: str | os.PathLike, error: BaseException) -> UserError:
    """The one line for a file that starts as GGUF does and then fails."""
    return UserError(
        f"{file} is damaged, or of a kind that transformers {transformers.__version__} cannot read: {first_line(error)}"
    )


def loading_kwargs(file: Path) -> dict[str, Any]:
    """Arguments with which transformers reads ``file`` from its folder, dequantised."""
    kwargs: dict[str, Any] = {"gguf_file": file.name}
    if hasattr(transformers, "GgufConfig"):  # older releases always dequantise
        kwargs["quantization_config"] = transformers.GgufConfig(gguf_file=file.name, dequantize=True)
    return kwargs


def read_tokenizer(file: Path) -> Any:
    """The tokenizer in a GGUF file, with the special tokens that the file names.

    Some releases of transformers (5.17) take the first token of the template for the EOS.
    """
    import gguf

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    fields = gguf.GGUFReader(file).fields
    for role, name in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        if field := fields.get(f"tokenizer.ggml.{name}_token_id"):
            setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(int(field.parts[field.data[0]][0])))
    return tokenizer


def _convert_to(file: Path, target: Path) -> None:
    temporary = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        _write(file, temporary)
        os.rename(temporary, target)
    except OSError as error:
        raise UserError(
            f"Converting {file} in {target.parent} failed: {first_line(error)}; set WORKBENCH_CACHE to another place."
        ) from error
    except READ_ERRORS as error:
        raise unreadable(file, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(file: Path, directory: str) -> None:
    folder, kwargs = str(file.parent), loading_kwargs(file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", **kwargs)
    tokenizer = read_tokenizer(file)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _key(file: Path) -> str:
    stat = file.stat()
    versions = f"{_digest(str(file.resolve()), stat.st_size, stat.st_mtime_ns)} {FORMAT} {transformers.__version__}"
    return f"{file.stem}-{hashlib.sha256(versions.encode()).hexdigest()[:16]}"


@functools.lru_cache(maxsize=64)
def _digest(path: str, size: int, mtime_ns: int) -> str:
    """Hash of the content; size and time only spare reading the same file twice within one process."""
    with open(path, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
