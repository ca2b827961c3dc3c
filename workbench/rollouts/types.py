"""What an online method asks of an engine, and what it gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from workbench.errors import UserError, check_at_least

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from workbench.models.policy import Policy

Key = tuple[int, ...]
"""What a completion's random draws depend on, besides the position in it: (run seed, window, prompt row, attempt, sample)."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    The logits of a position are changed in this order: repetition penalty, temperature, top-k, top-p, min-p.

    Args:
        max_new_tokens: bound on a completion, its end token included.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keeps the k most likely tokens; None: all.
        top_p: keeps the most likely tokens that together have at least this probability; 1: all.
        min_p: keeps tokens with at least this share of the most likely one's probability; None: all.
        repetition_penalty: divides positive logits (multiplies negative ones) of tokens that prompt or completion hold.
        stop: texts at which a completion ends; it keeps the token that completes one of them.
        end_ids: tokens at which a completion ends; it keeps the token.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    end_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_at_least(1, method__max_completion_length=self.max_new_tokens, method__top_k=self.top_k)
        penalty = self.repetition_penalty
        checks = (
            ("temperature", self.temperature, 0 <= self.temperature < inf, "must be at least 0, and finite; 0 is greedy"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "must lie above 0 and be at most 1; 1 keeps all tokens"),
            ("min_p", self.min_p, self.min_p is None or 0 <= self.min_p <= 1, "must lie in [0, 1]; null keeps all tokens"),
            ("repetition_penalty", penalty, 0 < penalty < inf, "must be above 0, and finite; 1 changes nothing"),
            ("stop", list(self.stop), all(self.stop), "has an empty text, at which every completion would end; leave it out"),
        )
        for name, value, right, why in checks:
            if not right:
                raise UserError(f"method.{name}={value} {why}.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether tokens are left out, so that the sampler's distribution has a smaller support than the model's."""
        return self.top_k is not None or self.top_p < 1 or bool(self.min_p)


@dataclass(frozen=True)
class Request:
    """One completion to write.

    Args:
        prompt_ids: the prompt's tokens.
        key: of its random draws.
    """

    prompt_ids: Sequence[int]
    key: Key


@dataclass
class Rollout:
    """One completion.

    Args:
        token_ids: its tokens, the end token included where it has one ``[n]``.
        logps: log-probability of each under the distribution it was drawn from (after temperature, penalty and truncation), nats
            ``[n]``; NaN where the sampler gives none; None: no sampler's (a script's).
        finish: ``stop`` at an end token or text, ``length`` at the bound.
        version: of the weights it was drawn with.
        support: for each position the tokens that could have been drawn, where the sampler leaves out any.
    """

    token_ids: list[int]
    logps: np.ndarray | None
    finish: Literal["stop", "length"]
    version: int = 0
    support: list[np.ndarray] | None = None


class RolloutEngine(Protocol):
    """Writes completions.

    An engine is built from the config without touching a model; `start` comes before anything else. Its answers come in the order
    of the requests, whatever order it computes them in. Requests with equal ``prompt_ids`` usually lie together (a group).
    """

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and completion together; None: no bound of its own."""

    def start(self, policy: "Policy", tokenizer: "PreTrainedTokenizerBase") -> None:
        """Called once on every rank, after the policy is on its device and before any rollout."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """Writes one completion for each request. All ranks call it equally often, maybe with different numbers of requests."""

    def sync_weights(self, policy: "Policy", version: int) -> None:
        """Makes the engine draw from ``policy`` as it is now; every rank calls it."""

    def sleep(self) -> None:
        """Frees memory until `wake`."""

    def wake(self) -> None:
        """Takes it again."""

    def close(self) -> None:
        """Ends what the engine has started."""
