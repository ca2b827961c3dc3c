"""An engine that replays what it is given: for tests, comparisons, and completions that were written elsewhere."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import UserError, check_choice, file_errors
from workbench.rollouts.types import Key, Request, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from workbench.models.policy import Policy

Completion = dict[str, Any] | Sequence[int]
"""``token_ids``, and maybe ``logps`` (a number, None or NaN each), ``finish`` and ``support``; or the tokens alone."""
_FIELDS = ("token_ids", "logps", "finish", "support")


class ScriptedEngine:
    """Replays completions.

    Args:
        completions: one for each request, in the order of the calls; a JSON Lines file of them; or a function of
            ``(prompt_ids, key)`` that gives one.
        repeat: begin again where the completions are used up; otherwise that is an error.
        context: most tokens of prompt and completion together; None: any number.
    """

    def __init__(
        self,
        completions: Sequence[Completion] | str | Path | Callable[[Sequence[int], Key], Completion],
        repeat: bool = False,
        context: int | None = None,
    ) -> None:
        self.completions = _read(completions) if isinstance(completions, (str, Path)) else completions
        self.repeat = repeat
        self.context = context
        self.version = 0
        self.used = 0

    def start(self, policy: "Policy", tokenizer: "PreTrainedTokenizerBase") -> None:
        """Needs neither."""

    def sync_weights(self, policy: "Policy", version: int) -> None:
        """Notes the version."""
        self.version = version

    def sleep(self) -> None:
        """Holds nothing."""

    def wake(self) -> None:
        """Holds nothing."""

    def close(self) -> None:
        """Has started nothing."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """The next completions, or those that the function gives, as they are: of ``sampling`` only ``max_new_tokens`` and
        ``end_ids`` are read, to tell how a completion that does not say so has ended.

        Raises:
            UserError: the completions are used up, or one of them is not well formed.
        """
        return [self._rollout(self._next(request), sampling) for request in requests]

    def _next(self, request: Request) -> Completion:
        if callable(self.completions):
            return self.completions(list(request.prompt_ids), request.key)
        if self.used >= len(self.completions) and not (self.repeat and self.completions):
            raise UserError(
                f"the script's {len(self.completions)} completions are used up; give more, or set method.engine.repeat=true."
            )
        self.used += 1
        return self.completions[(self.used - 1) % len(self.completions)]

    def _rollout(self, completion: Completion, sampling: Sampling) -> Rollout:
        given = dict(completion) if isinstance(completion, dict) else {"token_ids": completion}
        for name in given:
            check_choice("field of a scripted completion", name, _FIELDS)
        tokens = [int(token) for token in given.get("token_ids", ())]
        ended = bool(tokens) and tokens[-1] in sampling.end_ids
        finish = given.get("finish") or ("stop" if ended or len(tokens) < sampling.max_new_tokens else "length")
        check_choice("finish", finish, ("stop", "length"))
        logps, support = given.get("logps"), given.get("support")
        for name, values in (("logps", logps), ("support", support)):
            if values is not None and len(values) != len(tokens):
                raise UserError(f"a scripted completion has {len(tokens)} tokens and {len(values)} {name}; give one for each.")
        if logps is not None:
            logps = np.array([np.nan if value is None else value for value in logps], dtype=np.float64)
        if support is not None:
            support = [np.asarray(ids, dtype=np.int32) for ids in support]
        return Rollout(tokens, logps, finish, self.version, support)


def _read(path: str | Path) -> list[Completion]:
    with file_errors(f"read the script {path}"), open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    try:
        return [json.loads(line) for line in lines if line.strip()]
    except json.JSONDecodeError as error:
        raise UserError(f"the script {path} is not JSON Lines ({error}); write one completion a line.") from error
