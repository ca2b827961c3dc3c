"""Rewards that look at a completion's length in tokens, its end token included."""

import math
from collections.abc import Sequence
from typing import Any

from workbench.errors import UserError, check_at_least
from workbench.rewards.answers import accuracy
from workbench.rewards.texts import Completion


class SoftOverlong:
    """Soft overlong punishment (DAPO: Yu et al. 2025, arXiv:2503.14476, eq. 13).

    0.0 up to ``max_completion_length - cache`` tokens, then linearly down to -1.0 at ``max_completion_length`` and beyond.

    Args:
        max_completion_length: longest completion, as in the sampling.
        cache: over how many tokens before it the punishment grows.
    """

    __name__ = "soft_overlong"

    def __init__(self, max_completion_length: int, cache: int) -> None:
        check_at_least(1, max_completion_length=max_completion_length, cache=cache)
        if cache > max_completion_length:
            raise UserError(f"soft_overlong: cache={cache} must be at most max_completion_length={max_completion_length}.")
        self.max_completion_length, self.cache = max_completion_length, cache

    def __call__(self, completion_ids: list[Sequence[int]], **columns: Any) -> list[float]:
        """Rewards, one for each completion."""
        start = self.max_completion_length - self.cache
        return [-min(max(len(ids) - start, 0) / self.cache, 1.0) for ids in completion_ids]


class CosineScaled:
    """Accuracy scaled by length (Yeo et al. 2025, arXiv:2502.03373, appendix C.1).

    Along half a cosine a right answer earns ``right_short`` at no token and ``right_long`` at ``max_length``; a wrong one
    ``wrong_short`` and ``wrong_long``. Longer completions count as of ``max_length``. The paper's values are 2, 1, -10, 0 and
    -10 for ``exceeded``.

    Args:
        max_length: longest completion, as in the sampling.
        right_short: of a right answer at no token.
        right_long: of a right answer at ``max_length``.
        wrong_short: of a wrong answer at no token.
        wrong_long: of a wrong answer at ``max_length``.
        exceeded: of any completion that has ``max_length`` tokens or more; None leaves these as they are.
    """

    __name__ = "cosine_scaled"

    def __init__(
        self,
        max_length: int,
        right_short: float = 1.0,
        right_long: float = 0.5,
        wrong_short: float = -1.0,
        wrong_long: float = -0.5,
        exceeded: float | None = None,
    ) -> None:
        check_at_least(1, max_length=max_length)
        self.max_length, self.exceeded = max_length, exceeded
        self.right, self.wrong = (right_short, right_long), (wrong_short, wrong_long)

    def __call__(
        self,
        completions: list[Completion],
        completion_ids: list[Sequence[int]],
        answer: list[Any] | None = None,
        solution: list[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Rewards, one for each completion; None where `accuracy` gives none."""
        judged = accuracy(completions, answer, solution)
        return [
            None if right is None else self._scaled(right, len(ids)) for right, ids in zip(judged, completion_ids, strict=True)
        ]

    def _scaled(self, right: float, length: int) -> float:
        if length >= self.max_length and self.exceeded is not None:
            return self.exceeded
        short, long = self.right if right else self.wrong
        share = min(length / self.max_length, 1.0)
        return long + (short - long) * (1 + math.cos(math.pi * share)) / 2
