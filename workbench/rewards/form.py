"""Rewards for the form of a completion: its thinking block, its end, its repetitions."""

from collections.abc import Sequence
from typing import Any

from workbench.errors import UserError, check_at_least
from workbench.rewards.texts import END_THINK, THINK, Completion, prefill_of, text_of


def think_format(
    prompts: list[Completion], completions: list[Completion], prompt_texts: list[str] | None = None, **columns: Any
) -> list[float]:
    """1.0 where the answer begins with one ``<think>...</think>`` block and has no further tag, otherwise 0.0.

    An opening tag that stands at the end of the prompt belongs to the answer: some chat templates write it.

    Args:
        prompts: texts or messages.
        completions: texts or messages.
        prompt_texts: the prompts as the model reads them.
    """
    rendered = prompt_texts or [None] * len(prompts)
    texts = [prefill_of(p, r) + text_of(c) for p, c, r in zip(prompts, completions, rendered, strict=True)]
    return [float(_is_one_block(text)) for text in texts]


def _is_one_block(text: str) -> bool:
    once = text.count(THINK) == text.count(END_THINK) == 1
    return once and text.lstrip().startswith(THINK)


class MissingEosPenalty:
    """0.0 where a completion ends with an end token, otherwise ``-penalty``: with a weight of 1 it is subtracted from the other
    rewards. The prompt does not count, nor do end tokens before the last one.

    Args:
        penalty: what a completion without an end loses.
        end_ids: token ids that end a completion; None: those that end a completion in this run.
    """

    __name__ = "missing_eos_penalty"

    def __init__(self, penalty: float = 1.0, end_ids: Sequence[int] | None = None) -> None:
        if not penalty > 0:
            raise UserError(f"missing_eos_penalty: penalty={penalty} must be above 0; it is subtracted.")
        self.penalty, self.end_ids = penalty, end_ids

    def __call__(self, completion_ids: list[Sequence[int]], end_ids: Sequence[int] | None = None, **columns: Any) -> list[float]:
        """Rewards, one for each completion."""
        ends = self.end_ids if self.end_ids is not None else end_ids
        if not ends:
            raise UserError("missing_eos_penalty knows no end token; give end_ids.")
        return [0.0 if len(ids) and int(ids[-1]) in set(ends) else -float(self.penalty) for ids in completion_ids]


class RepetitionPenalty:
    """``max_penalty * (1 - different n-grams / n-grams)`` of the completion's tokens (Yeo et al. 2025, arXiv:2502.03373, appendix
    C.2, as one reward for the whole completion); 0.0 where it is shorter than an n-gram.

    Args:
        ngram_size: n.
        max_penalty: what a completion nears that repeats one n-gram for ever; 0 or less.
    """

    __name__ = "repetition_penalty"

    def __init__(self, ngram_size: int = 3, max_penalty: float = -1.0) -> None:
        check_at_least(1, ngram_size=ngram_size)
        if not max_penalty < 0:
            raise UserError(f"repetition_penalty: max_penalty={max_penalty} must be below 0; it is added to the reward.")
        self.ngram_size, self.max_penalty = ngram_size, max_penalty

    def __call__(self, completion_ids: list[Sequence[int]], **columns: Any) -> list[float]:
        """Rewards, one for each completion."""
        return [self.max_penalty * self._repeated(ids) for ids in completion_ids]

    def _repeated(self, ids: Sequence[int]) -> float:
        grams = [tuple(map(int, ids[i : i + self.ngram_size])) for i in range(len(ids) - self.ngram_size + 1)]
        return 1 - len(set(grams)) / len(grams) if grams else 0.0
