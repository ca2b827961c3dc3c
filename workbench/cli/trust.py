"""Saved overrides may come with a folder from elsewhere: those that name code are taken from this user's own runs alone.

A configuration can name objects to import. What is typed is the user's word; a run's folder is not, unless its overrides
carry the signature of a key that stays in this user's cache.
"""

import hashlib
import hmac
import logging
import os
import pathlib
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from workbench.cache import cache_home
from workbench.errors import UserError

log = logging.getLogger(__name__)

KEY_FILE = "signing_key"
_MARK = "# signed "
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_HARMLESS = ("tiny:", "reasoning_gym:", "package:")  # names of embedded data and models, which import nothing
_SWITCHES = ("trust_remote_code", "weights_only", "use_kernels", "_target_")


def signed(text: str) -> str:
    """``text`` with a signature as its last line (a comment in YAML); without one where the cache cannot hold a key."""
    key = _key(create=True)
    return text if key is None else f"{text}{_MARK}{_digest(key, text)}\n"


def is_signed(text: str) -> bool:
    """Whether this user's key signed ``text`` as it is."""
    body, mark, signature = text.rpartition(_MARK)
    key = _key(create=False) if mark else None
    return key is not None and hmac.compare_digest(_digest(key, body), signature.strip())


def check(overrides: Sequence[str], file: pathlib.Path) -> None:
    """Raises `UserError` for an override that names code, in a file that this user's key did not sign."""
    for override in overrides:
        if _names_code(override):
            raise UserError(
                f"{file} was not written here, and its override {override!r} can name code to run: read it, then type it again "
                "after resume= or run= to allow it."
            )


def _names_code(override: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return True
    keys = (parsed.key_or_group or "").split(".")
    value = parsed.value()
    return keys[0] == "hydra" or any(_is_code(word) for word in (*keys, *_words(value))) or _is_kernel(keys[-1], value)


def _words(value: Any) -> Iterator[str]:
    """Every key and every text in a value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _words(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _words(inner)
    elif value is not None:
        yield str(getattr(value, "text", value))


def _is_code(word: str) -> bool:
    if word in _SWITCHES or "${" in word:
        return True
    return _IMPORT_PATH.fullmatch(word) is not None and not word.startswith(_HARMLESS)


def _is_kernel(key: str, value: Any) -> bool:
    """An attention function that transformers would fetch from the hub."""
    return key == "attn_implementation" and "/" in str(value)


def _digest(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key(*, create: bool) -> bytes | None:
    file = cache_home() / KEY_FILE
    try:
        if not file.exists() and create:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f".{KEY_FILE}.{os.getpid()}")
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as handle:
                handle.write(secrets.token_hex(32))
            try:
                os.link(temporary, file)  # whole or absent; another process may be first
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        return bytes.fromhex(file.read_text())
    except (OSError, ValueError) as error:
        log.debug("no key to sign with: %s", error)
        return None
