"""Rows of the canonical runs, one function per data type: made of a few words, always the same, of very unequal lengths."""

from collections.abc import Iterator
from random import Random
from typing import Any

SIZE = 29  # no multiple of the batch size: an epoch's last step is a shorter one
PROMPTS = 7  # of online methods: an epoch's last window, and its last step, are shorter ones
TREES = "ash birch cedar elm fir hazel ivy juniper larch maple oak pine rowan spruce willow yew"
WORDS = TREES.split()


def texts() -> Iterator[dict[str, Any]]:
    """Plain texts of 2 to 60 characters."""
    rng = Random(1)
    for _ in range(SIZE):
        yield {"text": _words(rng, 1, 10)}


def messages() -> Iterator[dict[str, Any]]:
    """Conversations of one to three exchanges, some with a system message; a few assistant messages count half or not at all."""
    rng = Random(2)
    for row in range(SIZE):
        turns = [{"role": "system", "content": _words(rng, 1, 2)}] if row % 3 == 0 else []
        for turn in range(rng.randint(1, 3)):
            turns.append({"role": "user", "content": _words(rng, 1, 3)})
            weight = 0.5 if (row + turn) % 5 == 0 else 0.0 if turn == 1 and row % 4 == 0 else 1.0
            turns.append({"role": "assistant", "content": _words(rng, 1, 6), "weight": weight})
        yield {"messages": turns}


def prompt_completions() -> Iterator[dict[str, Any]]:
    """Plain prompts with completions of one to eight words."""
    rng = Random(3)
    for _ in range(SIZE):
        yield {"prompt": _words(rng, 1, 5) + ": ", "completion": _words(rng, 1, 8)}


def preferences() -> Iterator[dict[str, Any]]:
    """Conversational pairs with a margin; the longer side is now the chosen one, now the other."""
    rng = Random(4)
    for row in range(SIZE):
        sizes = [(1, 2), (4, 7)] if row % 2 else [(4, 7), (1, 2)]
        chosen, rejected = (_words(rng, *size) for size in sizes)
        yield {
            "prompt": [{"role": "user", "content": _words(rng, 1, 5)}],
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected + "?"}],
            "margin": 0.25 * (row % 4),
        }


def triples() -> Iterator[dict[str, Any]]:
    """The pairs, each with a gold completion."""
    rng = Random(7)
    for row in preferences():
        yield {**row, "reference": [{"role": "assistant", "content": _words(rng, 1, 6) + "!"}]}


def unpaired() -> Iterator[dict[str, Any]]:
    """Conversational completions, two of three with a good label."""
    rng = Random(5)
    for row in range(SIZE):
        yield {
            "prompt": [{"role": "user", "content": _words(rng, 1, 5)}],
            "completion": [{"role": "assistant", "content": _words(rng, 1, 7)}],
            "label": row % 3 != 0,
        }


def stepwise() -> Iterator[dict[str, Any]]:
    """Solutions of one to four steps with a label each; every fifth step has none (-100)."""
    rng = Random(6)
    count = 0
    for _ in range(SIZE):
        steps = [_words(rng, 1, 4) for _ in range(rng.randint(1, 4))]
        labels = []
        for _ in steps:
            count += 1
            labels.append(-100 if count % 5 == 0 else int(rng.random() < 0.6))
        if set(labels) == {-100}:
            labels[0] = 1
        yield {"prompt": _words(rng, 1, 4), "completions": steps, "labels": labels}


def prompts() -> Iterator[dict[str, Any]]:
    """Prompts of one to six words, every other one a conversation's, with the words that an answer should hold."""
    rng = Random(8)
    for row in range(PROMPTS):
        text = _words(rng, 1, 6)
        yield {"prompt": [{"role": "user", "content": text}], "answer": TREES[2 * row :], "level": row % 3}


def _words(rng: Random, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))
