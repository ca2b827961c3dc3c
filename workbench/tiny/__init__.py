"""The embedded world: nano models, a character tokenizer and verifiable tasks, all made by script."""

import importlib

_EXPORTS = {
    "TASKS": "tasks",
    "load_tiny": "tasks",
    "make_rows": "tasks",
    "tiny_dataset": "tasks",
    "verifier": "tasks",
    "ARCHITECTURES": "model",
    "tiny_model": "model",
    "tiny_tokenizer": "tokenizer",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module 'workbench.tiny' has no attribute {name!r}")
    return getattr(importlib.import_module(f"workbench.tiny.{_EXPORTS[name]}"), name)
