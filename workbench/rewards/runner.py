"""Calls the reward functions of a run and collects what they say."""

import asyncio
import inspect
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from workbench.errors import UserError, nearest
from workbench.losses.advantages import reward_metrics
from workbench.rewards.naming import RewardFunction, distinct, name_of, resolve
from workbench.rewards.results import to_values

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "prompt_texts", "end_ids")


@dataclass
class RewardResult:
    """What the functions gave for N completions.

    Args:
        values: float64 ``[N, F]``, NaN where a function abstained.
        names: of the functions ``[F]``.
        weights: of the functions ``[F]``.
        extras: values that functions logged for each completion, by column ``[N]``.
        metrics: numbers that functions logged, by name.
    """

    values: np.ndarray
    names: list[str]
    weights: list[float]
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def split(self, size: int) -> list["RewardResult"]:
        """Parts of ``size`` completions each; the first one has the metrics."""
        return [
            RewardResult(
                self.values[start : start + size],
                self.names,
                self.weights,
                {column: values[start : start + size] for column, values in self.extras.items()},
                {} if start else self.metrics,
            )
            for start in range(0, len(self.values), size)
        ]

    @classmethod
    def joined(cls, parts: Sequence["RewardResult"]) -> "RewardResult":
        """The parts as one, in their order. A column that some did not log is None there."""
        columns = dict.fromkeys(column for part in parts for column in part.extras)
        extras = {c: [v for part in parts for v in part.extras.get(c, [None] * len(part.values))] for c in columns}
        metrics: dict[str, list[float]] = {}
        for part in parts:
            for name, values in part.metrics.items():
                metrics.setdefault(name, []).extend(values)
        return cls(np.concatenate([part.values for part in parts]), parts[0].names, parts[0].weights, extras, metrics)

    def statistics(self, group: np.ndarray) -> dict[str, float]:
        """`workbench.losses.advantages.reward_metrics`, given which prompt each completion answers ``[N]``."""
        weights = torch.tensor(self.weights, dtype=torch.float64)
        return reward_metrics(torch.from_numpy(self.values), weights, torch.as_tensor(group), self.names)


class RewardFunctions:
    """Reward functions, called with keyword arguments only.

    Each gets ``prompts``, ``completions`` (texts, or lists of messages), ``completion_ids``, every column of the rows,
    ``trainer_state`` (``global_step``, ``max_steps``, ``epoch``), ``log_extra(column, values)``, ``log_metric(name, value)``,
    and, where the caller knows them, ``prompt_texts`` (the prompts as the model reads them) and ``end_ids``; one without
    ``**kwargs`` gets only what its signature names. It returns one number for each completion, None where it has no opinion.
    Async functions are awaited together, on an event loop of their own that lives as long as this object.

    Args:
        specs: what `workbench.rewards.naming.resolve` takes, one or several.
        weights: of the weighted sum, one for each function in their order or by name; None is 1 each.

    Raises:
        UserError: no function, one that cannot be found, or weights that do not fit.
    """

    def __init__(self, specs: Any, weights: Sequence[float] | Mapping[str, float] | None = None) -> None:
        if isinstance(specs, str) or not isinstance(specs, Sequence):
            specs = [] if specs is None else [specs]
        if not specs:
            raise UserError("method.rewards is empty: name at least one reward function.")
        self.functions: list[RewardFunction] = [resolve(spec) for spec in specs]
        self.names = distinct([name_of(f) for f in self.functions])
        self.weights = _weights(weights, self.names)
        self._loop: asyncio.AbstractEventLoop | None = None

    def place(self, device: torch.device | str) -> None:
        """Moves the reward models among the functions to ``device``."""
        for function in self.functions:
            if hasattr(function, "place"):
                function.place(device)

    def close(self) -> None:
        """Ends the event loop of the async functions."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]] | None = None,
        trainer_state: Any = None,
        *,
        prompt_texts: Sequence[str] | None = None,
        end_ids: Sequence[int] | None = None,
    ) -> RewardResult:
        """Rewards of N completions.

        Args:
            prompts: of each completion, texts or messages ``[N]``.
            completions: texts or messages ``[N]``.
            completion_ids: their tokens ``[N]``.
            columns: the rows' other columns ``[N]`` each.
            trainer_state: where the run is.
            prompt_texts: the prompts as the model reads them ``[N]``.
            end_ids: tokens that end a completion.

        Raises:
            UserError: a function failed, or returned what is no list of N numbers; one line that names it.
        """
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        given |= {"trainer_state": trainer_state, "prompt_texts": prompt_texts, "end_ids": end_ids}
        call = _Call(given, dict(columns or {}), len(completions))
        if not call.count:
            return RewardResult(np.zeros((0, len(self.names))), list(self.names), list(self.weights))
        answers = [call.start(f, name) for f, name in zip(self.functions, self.names, strict=True)]
        pending = [i for i, answer in enumerate(answers) if inspect.isawaitable(answer)]
        for i, answer in zip(pending, self._await([answers[i] for i in pending]), strict=True):
            if isinstance(answer, BaseException):
                raise _failure(self.names[i], answer) from answer
            answers[i] = answer
        found = [to_values(name, answer, call.count) for name, answer in zip(self.names, answers, strict=True)]
        values = np.ascontiguousarray(np.array(found, dtype=np.float64).T)
        return RewardResult(values, list(self.names), list(self.weights), call.extras, call.metrics)

    def _await(self, awaitables: list[Any]) -> list[Any]:
        """Results or exceptions. On a thread of its own: a notebook's main thread runs a loop already."""
        if not awaitables:
            return []
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()

        async def together() -> list[Any]:
            return await asyncio.gather(*awaitables, return_exceptions=True)

        future = asyncio.run_coroutine_threadsafe(together(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loop": None}


class _Call:
    """One call of all functions, and what they log."""

    def __init__(self, given: dict[str, Any], columns: dict[str, Sequence[Any]], count: int) -> None:
        self.given, self.columns, self.count = given, columns, count
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}
        self._owners: dict[str, str] = {}
        if taken := sorted(columns.keys() & set(GIVEN)):
            raise UserError(f"The rows have a column {taken[0]!r}, which rewards get something else under; rename it (columns).")
        for name, values in {**columns, **{k: given[k] for k in ("prompts", "completion_ids")}}.items():
            if len(values) != count:
                raise UserError(f"{name} holds {len(values)} values for {count} completions.")

    def start(self, function: RewardFunction, name: str) -> Any:
        """What the function returns: values, or something to await."""
        arguments = self._arguments(function, name)
        try:
            return function(**arguments)
        except Exception as error:  # a function of the user's may fail in any way
            raise _failure(name, error) from error

    def _arguments(self, function: RewardFunction, name: str) -> dict[str, Any]:
        known = {**self.given, **self.columns}
        # None edits another's lists, or the tokens that are trained.
        arguments = {k: _copied(list(v) if isinstance(v, tuple) else v) for k, v in known.items()}
        arguments["log_extra"] = lambda column, values: self._log_extra(name, column, values)
        arguments["log_metric"] = lambda metric, value: self._log_metric(name, metric, value)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # no signature to be had
            return arguments
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if positional:
            raise UserError(f"Reward function {name!r} takes {positional[0]!r} by position; rewards are called by keyword.")
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        lacking = [p.name for p in named if p.default is p.empty and p.name not in arguments]
        if lacking:
            there = ", ".join(self.columns) or "none"
            raise UserError(
                f"Reward function {name!r} needs {', '.join(map(repr, lacking))}, which the rows do not have. "
                f"Their columns: {there}."
            )
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return arguments
        return {p.name: arguments[p.name] for p in named if p.name in arguments}

    def _log_extra(self, name: str, column: str, values: Sequence[Any]) -> None:
        if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != self.count:
            got = f"{len(values)} values" if hasattr(values, "__len__") and not isinstance(values, str) else repr(values)
            raise UserError(f"Reward function {name!r}: log_extra({column!r}) got {got} for {self.count} completions.")
        if self._owners.setdefault(column, name) != name:
            raise UserError(f"Reward functions {self._owners[column]!r} and {name!r} both log the column {column!r}; rename one.")
        self.extras[column] = list(values)

    def _log_metric(self, name: str, metric: str, value: Any) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise UserError(f"Reward function {name!r}: log_metric({metric!r}) got {value!r}, which is no number.") from None
        self.metrics.setdefault(metric, []).append(number)


def _copied(value: Any) -> Any:
    """Lists and dicts of ``value``, all the way down, as new ones; what else they hold as it is."""
    if type(value) is list:
        return [_copied(part) for part in value]
    return {key: _copied(part) for key, part in value.items()} if type(value) is dict else value


def _failure(name: str, error: BaseException) -> UserError:
    if isinstance(error, UserError) and repr(name) in str(error):
        return error
    lines = str(error).strip().splitlines()
    told = lines[0] if lines else ""
    kind = "" if isinstance(error, UserError) else type(error).__name__
    return UserError(f"Reward function {name!r} failed: {': '.join(filter(None, (kind, told)))}")


def _weights(given: Sequence[float] | Mapping[str, float] | None, names: list[str]) -> list[float]:
    if given is None:
        return [1.0] * len(names)
    if isinstance(given, Mapping):
        for name in given:
            if name not in names:
                raise UserError(
                    f"method.reward_weights: there is no reward function {name!r}.{nearest(name, names)} "
                    f"They are: {', '.join(names)}."
                )
        if missing := [name for name in names if name not in given]:
            raise UserError(f"method.reward_weights: {missing[0]!r} has no weight.")
        given = [given[name] for name in names]
    given = list(given)
    if len(given) != len(names):
        raise UserError(f"method.reward_weights has {len(given)} weights for {len(names)} reward functions: {', '.join(names)}.")
    for name, weight in zip(names, given, strict=True):
        if isinstance(weight, bool | str) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise UserError(f"method.reward_weights: {name}={weight!r} is not a number.")
    return [float(weight) for weight in given]
