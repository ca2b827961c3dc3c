"""Reward functions, and what calls them.

``method.rewards`` takes one or a list of: a short name (`SHORT_NAMES`), ``module:function``, the folder or hub name of a reward
model, or a node with a ``_target_`` such as
``{_target_: workbench.rewards.SoftOverlong, max_completion_length: 512, cache: 64}``.
"""

import importlib

_EXPORTS = {
    "CosineScaled": "length",
    "MissingEosPenalty": "form",
    "ReasoningAccuracy": "answers",
    "RepetitionPenalty": "form",
    "RewardFunctions": "runner",
    "RewardModel": "model",
    "RewardResult": "runner",
    "SHORT_NAMES": "naming",
    "SoftOverlong": "length",
    "accuracy": "answers",
    "exact_match": "answers",
    "reasoning_gym": "gym",
    "think_format": "form",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module 'workbench.rewards' has no attribute {name!r}")
    return getattr(importlib.import_module(f"workbench.rewards.{_EXPORTS[name]}"), name)
