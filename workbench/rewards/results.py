"""What a reward function gave, checked value by value."""

import inspect
import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from workbench.errors import UserError


def to_values(name: str, given: Any, count: int) -> list[float]:
    """One float for each of ``count`` completions, NaN for None.

    Lists, tuples, numpy arrays and tensors of one dimension are taken, of integers, floats, booleans or None.

    Raises:
        UserError: anything else, another number of values, or a NaN or infinity; it names the function.
    """
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu().double().numpy() if given.ndim == 1 else given
    if isinstance(given, np.ndarray) and given.ndim == 1:
        given = list(given)
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise UserError(f"Reward function {name!r} returned {_kind(given)}, not a list of {count} numbers.")
    if len(given) != count:
        raise UserError(
            f"Reward function {name!r} returned {len(given)} value{'s' * (len(given) != 1)} for {count} "
            f"completion{'s' * (count != 1)}; it must give one for each, None where it has no opinion."
        )
    try:
        return [_to_value(name, value, i) for i, value in enumerate(given)]
    finally:
        for value in given:
            if inspect.iscoroutine(value):  # or Python warns that nobody awaited it
                value.close()


def _to_value(name: str, value: Any, index: int) -> float:
    if value is None:
        return math.nan
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, numbers.Real | np.bool_):
        raise UserError(f"Reward function {name!r} returned {_kind(value)} for completion {index}, not a number or None.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UserError(f"Reward function {name!r} returned {number} for completion {index}; give None where there is no reward.")
    return number


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{'a tensor' if isinstance(value, torch.Tensor) else 'an array'} of shape {list(value.shape)}"
    if value is None:
        return "None"
    if isinstance(value, bool | int | float):
        return f"the single number {value}"
    return f"a {type(value).__name__}"
