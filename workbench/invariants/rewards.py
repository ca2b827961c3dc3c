"""Rewards of the canonical runs of online methods: plain functions of the text, with a spread for a model that knows nothing."""

from collections.abc import Sequence
from typing import Any


def letters(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Vowels, less a tenth of all characters."""
    return [sum(text.count(vowel) for vowel in "aeiou") - 0.1 * len(text) for text in map(_text, completions)]


def likeness(completions: Sequence[Any], answer: Sequence[str], level: Sequence[int], **columns: Any) -> list[float | None]:
    """Share of a completion's characters that its row's answer begins with; no opinion of every third row's empty ones."""
    return [
        None if depth == 2 and len(text) < 3 else len({*text} & {*wanted[:20]}) / (1 + len({*text}))
        for text, wanted, depth in zip(map(_text, completions), answer, level, strict=True)
    ]


def ending(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 for a text that ends with a vowel, else 0: a group often has one value alone."""
    return [float(text[-1:] in {*"aeiou"}) for text in map(_text, completions)]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]
