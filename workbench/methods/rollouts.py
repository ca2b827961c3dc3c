"""From prompts to scored completions: requests, rewards, groups without spread, and what is reported of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.rollouts.types import Request, Rollout, RolloutEngine, Sampling

Row = dict[str, Any]
# Columns of a prepared row that are no columns of the data set.
PREPARED = ("input_ids", "weights", "lengths", "parents", "roles")


@dataclass
class Group:
    """A prompt with its completions.

    Args:
        row: the prepared prompt with the data set's columns.
        index: its row in the data set.
        rollouts: G completions.
        texts: of them, without special tokens.
        rewards: of each function ``[G, F]``, NaN where one abstained.
    """

    row: Row
    index: int
    rollouts: list[Rollout]
    texts: list[str]
    rewards: np.ndarray | None = None


def answer(
    engine: RolloutEngine,
    rows: Sequence[Row],
    index: Sequence[int],
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_generations: int,
    key: tuple[int, ...],
    attempt: int = 0,
) -> list[Group]:
    """Completions of prompts; ``key`` is (run seed, window), to which the prompt's row, the attempt and the sample are added."""
    requests = [
        Request(row["input_ids"], (*key, number, attempt, sample))
        for row, number in zip(rows, index, strict=True)
        for sample in range(num_generations)
    ]
    rollouts = engine.generate(requests, sampling)
    texts = tokenizer.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True) if rollouts else []
    size = num_generations
    return [
        Group(row, number, rollouts[i * size : (i + 1) * size], texts[i * size : (i + 1) * size])
        for i, (row, number) in enumerate(zip(rows, index, strict=True))
    ]


def as_arguments(groups: Sequence[Group], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What reward functions are called with: a prompt, completion and value of each column per completion."""
    asked = tokenizer.batch_decode([group.row["input_ids"] for group in groups]) if groups else []
    each = [(group, i) for group in groups for i in range(len(group.rollouts))]
    prompts = [group.row["prompt"] for group, _ in each]
    completions = [
        [{"role": "assistant", "content": group.texts[i]}] if isinstance(group.row["prompt"], list) else group.texts[i]
        for group, i in each
    ]
    names = [name for name in groups[0].row if name != "prompt" and name not in PREPARED] if groups else []
    return {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [group.rollouts[i].token_ids for group, i in each],
        "columns": {name: [group.row[name] for group, _ in each] for name in names},
        "prompt_texts": [text for group, text in zip(groups, asked, strict=True) for _ in group.rollouts],
    }


def means_of(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Means of the numbers that reward functions have logged, by name, over all parts."""
    joined: dict[str, list[float]] = {}
    for part in parts:
        for name, values in part.items():
            joined.setdefault(name, []).extend(values)
    return {name: float(np.mean(joined[name])) for name in sorted(joined)}


def completion_metrics(lengths: np.ndarray, truncated: np.ndarray) -> dict[str, float]:
    """``completions/*``: lengths in tokens, of all and of those that ended by themselves (0 where none did), and the share that
    did not."""
    ended = lengths[~truncated] if (~truncated).any() else np.zeros(1)
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(truncated.mean()),
        "completions/mean_terminated_length": float(ended.mean()),
        "completions/min_terminated_length": float(ended.min()),
        "completions/max_terminated_length": float(ended.max()),
    }
