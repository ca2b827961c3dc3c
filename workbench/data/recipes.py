"""How papers make their rows: small functions of scores, labels and samples."""

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from workbench.errors import UserError, check_at_least, nearest

Row = dict[str, Any]

RATINGS: dict[str, float] = {
    "significantly better": 1.0,
    "better": 2 / 3,
    "slightly better": 1 / 3,
    "negligibly better": 0.0,
    "unsure": 0.0,
    "negligibly better / unsure": 0.0,
}


def llama2_margin(row: Mapping[str, Any], column: str = "preference_label", scale: float = 1.0) -> Row:
    """The ``margin`` of a pair by its rating (Touvron et al. 2023, arXiv:2307.09288, table 27, "Margin Small"); for
    ``data.train.map``.

    Args:
        row: with the rating, one of `RATINGS`, in any case.
        column: of the rating.
        scale: margin of the clearest preference; 3 gives the table's "Margin Large".
    """
    if column not in row:
        raise UserError(f"There is no column {column!r} to make a margin of. Present: {', '.join(row)}.")
    rating = str(row[column]).strip().lower()
    if rating not in RATINGS:
        raise UserError(f"{column}={row[column]!r} is not a rating.{nearest(rating, RATINGS)} Allowed: {', '.join(RATINGS)}.")
    return {"margin": scale * RATINGS[rating]}


def rso_keep(rewards: Sequence[float], count: int, beta: float, *, seed: int = 0) -> list[bool]:
    """Which of a prompt's samples statistical rejection sampling accepts (Liu et al. 2023, arXiv:2309.06657, algorithm 1).

    A sample of reward r is accepted with probability ``exp((r - m) / beta)``, where m is the highest reward of those not accepted
    yet, in passes until ``count`` are: then they are distributed as under the optimal policy of the penalty ``beta``. With beta
    near 0 the best ones are kept, with a large one any. Pairs of the accepted samples, ranked by their rewards, are RSO's data.

    Args:
        rewards: of the samples of one prompt.
        count: how many to accept; all where there are no more.
        beta: temperature of the acceptance, in units of reward.
        seed: of the draws.

    Returns:
        For each sample whether it is kept.
    """
    check_at_least(1, count=count)
    if not beta > 0:
        raise UserError(f"beta={beta} must be above 0: it is the temperature at which samples are accepted.")
    if not all(map(math.isfinite, rewards)):
        raise UserError(f"rewards={list(rewards)} must be finite.")
    rng, left = Random(seed), list(range(len(rewards)))
    kept: set[int] = set()
    while left and len(kept) < count:
        best = max(rewards[i] for i in left)
        for i in left:
            if len(kept) < count and rng.random() < math.exp((rewards[i] - best) / beta):
                kept.add(i)
        left = [i for i in left if i not in kept]
    return [i in kept for i in range(len(rewards))]


def pairs_by_correctness(
    prompt: Any, completions: Sequence[Any], correct: Sequence[bool | float], count: int = 1, *, seed: int = 0
) -> list[Row]:
    """Preference rows of one prompt, each a right and a wrong completion drawn at random (Pang et al. 2024, arXiv:2404.19733,
    section 2).

    Args:
        prompt: text or messages.
        completions: samples, likewise; repeated ones count once.
        correct: of each whether it is right; a number of 0.5 or more counts as right.
        count: most rows; fewer where there are no more pairs, none where all samples are alike in being right.
        seed: of the draws.
    """
    if len(completions) != len(correct):
        raise UserError(f"{len(correct)} verdicts for {len(completions)} completions: give one for each.")
    sides: dict[bool, list[Any]] = {True: [], False: []}
    for completion, verdict in zip(completions, correct, strict=True):
        side = sides[verdict >= 0.5]
        if completion not in side:
            side.append(completion)
    pairs = [(right, wrong) for right in sides[True] for wrong in sides[False]]
    chosen = Random(seed).sample(pairs, min(count, len(pairs)))
    return [{"prompt": prompt, "chosen": right, "rejected": wrong} for right, wrong in chosen]
