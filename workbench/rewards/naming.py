"""Reward functions from the configuration: what each is, and what it is called in the metrics."""

import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from workbench.data.imports import import_object, is_import_path
from workbench.errors import UserError, nearest

SHORT_NAMES = {
    "accuracy": "answers:accuracy",
    "reasoning_accuracy": "answers:ReasoningAccuracy",
    "exact_match": "answers:exact_match",
    "think_format": "form:think_format",
    "missing_eos_penalty": "form:MissingEosPenalty",
    "repetition_penalty": "form:RepetitionPenalty",
    "soft_overlong": "length:SoftOverlong",
    "cosine_scaled": "length:CosineScaled",
    "reasoning_gym": "gym:reasoning_gym",
}
RewardFunction = Callable[..., Any]


def resolve(spec: Any) -> RewardFunction:
    """The reward function that ``spec`` stands for.

    Args:
        spec: a short name of `SHORT_NAMES`; ``module:function`` or ``package.module.function``; the folder or hub name of a
            reward model; a function, an object with ``__call__``, or a model.

    Raises:
        UserError: nothing of the kind.
    """
    if isinstance(spec, os.PathLike):
        spec = os.fspath(spec)
    if isinstance(spec, str):
        return _from_text(spec)
    if isinstance(spec, nn.Module):
        from workbench.rewards.model import RewardModel

        return RewardModel(spec)
    return _callable(spec, repr(spec))


def _from_text(text: str) -> RewardFunction:
    if text in SHORT_NAMES:
        module, _, name = SHORT_NAMES[text].partition(":")
        return _callable(getattr(importlib.import_module(f"workbench.rewards.{module}"), name), text)
    here = Path(text).expanduser().exists()
    if is_import_path(text) and not here:
        return _callable(import_object(text), text)
    if here or text.count("/") == 1 or text.startswith((".", "/", "~")):
        from workbench.rewards.model import RewardModel

        return RewardModel(text)
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text):
        module, _, name = text.rpartition(".")
        return _callable(import_object(f"{module}:{name}"), text)
    raise UserError(
        f"Reward function {text!r} is not known.{nearest(text, SHORT_NAMES)} Allowed: {', '.join(SHORT_NAMES)}; "
        "module:function; the folder or hub name of a reward model."
    )


def _callable(value: Any, label: str) -> RewardFunction:
    if isinstance(value, type):
        value = _built(value, label)
    if not callable(value):
        raise UserError(f"Reward function {label} is a {type(value).__name__}, which cannot be called.")
    return value


def _built(cls: type, label: str) -> Any:
    needed = [
        name
        for name, p in inspect.signature(cls).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if needed:
        options = ", ".join(f"{name}: ..." for name in needed)
        place = f"{cls.__module__}.{cls.__qualname__}"
        raise UserError(f"Reward function {label} has options without a default: write {{_target_: {place}, {options}}}.")
    return cls()


def name_of(function: RewardFunction) -> str:
    """Its own name; of an object its ``__name__`` or its class in snake case."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(function).__name__).lower()
    return str(name).strip("<>_") or "reward"


def distinct(names: Sequence[str]) -> list[str]:
    """The names, the second of equal ones with ``_2`` behind it and so on."""
    found: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in found:
            number += 1
            candidate = f"{name}_{number}"
        found.append(candidate)
    return found
