"""Objects named by import path (``module:function``). The names come from the configuration, never from data."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from workbench.errors import UserError, nearest

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_import_path(text: str) -> bool:
    return _IMPORT_PATH.fullmatch(text) is not None


def import_object(path: str) -> Any:
    """The object at ``module:name``; modules beside the working directory's files are found too.

    Raises:
        UserError: the path is malformed, the module cannot be imported, or it has no such name.
    """
    if not is_import_path(path):
        raise UserError(f"{path!r} is not an import path; write module:function.")
    module_name, _, name = path.partition(":")
    value = _import_module(module_name, path)
    for part in name.split("."):
        if not hasattr(value, part):
            raise UserError(f"{path}: {module_name} has no {part!r}.{nearest(part, dir(value))}")
        value = getattr(value, part)
    return value


def _import_module(name: str, path: str) -> Any:
    here = str(Path.cwd())
    added = here not in sys.path
    if added:  # a console script does not have the working directory on its path
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        why = "there is no such module" if name.startswith(missing) else f"it needs the module {missing!r}"
        raise UserError(f"{path}: cannot import {name}: {why} (looked in {here} too).") from error
    except Exception as error:  # a module may fail in any way while it is imported
        raise UserError(f"{path}: importing {name} failed: {_told(error)}") from error
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def call_object(function: Callable, label: str, *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``; arguments that do not fit and exceptions become one line that names ``label``."""
    if not callable(function):
        raise UserError(f"{label} is a {type(function).__name__}, not a function.")
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(parameters(function)) or "none"
        raise UserError(f"{label}: {error}. Its parameters: {names}.") from None
    except ValueError:  # no signature to be had
        pass
    try:
        return function(*args, **kwargs)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{label} failed: {_told(error)}") from error


def guarded(rows: Iterable, label: str) -> Iterator:
    """The rows of a generator; its exceptions become one line that names ``label``."""
    try:
        yield from rows
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{label} failed: {_told(error)}") from error


def parameters(function: Callable) -> list[str]:
    """Names of the parameters that can be given by name."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, p in signature.parameters.items() if p.kind in named]


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
