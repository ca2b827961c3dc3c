"""Whether the final answer is right."""

import functools
import importlib.util
import logging
import threading
from typing import Any

from workbench.errors import UserError
from workbench.rewards.texts import END_THINK, Completion, after_thinking, final_answer, last_boxed, text_of
from workbench.tiny.tasks import exact_match

log = logging.getLogger(__name__)

__all__ = ["ReasoningAccuracy", "accuracy", "exact_match", "right_answers"]


def accuracy(
    completions: list[Completion], answer: list[Any] | None = None, solution: list[Any] | None = None, **columns: Any
) -> list[float | None]:
    r"""1.0 where the final answer equals that of the column ``answer`` (or ``solution``), otherwise 0.0.

    With math-verify installed two answers are equal where it finds them mathematically so; without it, and for right answers it
    can make nothing of, where the texts are the same. The log says once which of the two judges. The final answer is the last
    ``\boxed{...}``, else the last ``<answer>...</answer>``, else the whole text. A row without a right answer has no reward.

    Raises:
        UserError: neither column is there.
    """
    return _judge([text_of(c) for c in completions], right_answers(answer, solution))


class ReasoningAccuracy:
    """`accuracy` of what follows the thinking block; 0.0 where no block has ended.

    Args:
        end: text that ends the block.
    """

    __name__ = "reasoning_accuracy"

    def __init__(self, end: str = END_THINK) -> None:
        if not end:
            raise UserError("reasoning_accuracy: end is empty; give the text that ends the thinking block.")
        self.end = end

    def __call__(
        self, completions: list[Completion], answer: list[Any] | None = None, solution: list[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        """Rewards, one for each completion; see `accuracy`."""
        answers = [after_thinking(text_of(c), self.end) for c in completions]
        found = _judge([a or "" for a in answers], right_answers(answer, solution))
        return [value if a is not None or value is None else 0.0 for value, a in zip(found, answers, strict=True)]


def right_answers(answer: list[Any] | None, solution: list[Any] | None) -> list[Any]:
    """The column with the right answers."""
    right = answer if answer is not None else solution
    if right is None:
        raise UserError("the rows need a column answer or solution with the right answers; rename one in data.train.columns.")
    return right


def _judge(texts: list[str], right: list[Any]) -> list[float | None]:
    verify = _announced()
    judge = _mathematically if verify else _literally
    return [None if r is None else float(judge(t, str(r))) for t, r in zip(texts, right, strict=True)]


@functools.cache
def _announced() -> bool:
    """Whether math-verify is installed; said once."""
    found = importlib.util.find_spec("math_verify") is not None
    how = "math-verify" if found else "the same text (pip install 'workbench[math-verify]' compares mathematically)"
    log.info("Rewards: answers are compared by %s.", how)
    return found


def _literally(text: str, right: str) -> bool:
    return final_answer(text) == final_answer(right)


def _mathematically(text: str, right: str) -> bool:
    import math_verify

    if _literally(text, right):
        return True
    # Its time limits are signals, which the main thread alone can set.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    plain_latex = "\\" in right and "$" not in right and last_boxed(right) is None  # is read only where marked as such
    gold = math_verify.parse(f"\\boxed{{{right}}}" if plain_latex else right, parsing_timeout=limit)
    if not gold:
        return False
    found = math_verify.parse(text, parsing_timeout=limit)
    return bool(math_verify.verify(gold, found, timeout_seconds=limit))
