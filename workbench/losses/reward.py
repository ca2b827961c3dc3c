"""Losses of reward models: on pairs of completions, and on the steps of a solution."""

import torch
import torch.nn.functional as F
from torch import Tensor


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margins: Tensor | float = 0.0) -> Tensor:
    """``-log sigmoid(r(y+) - r(y-) - m)`` (Ouyang et al. 2022, arXiv:2203.02155, eq. 1; the margin: Llama 2, arXiv:2307.09288,
    eq. 2).

    Args:
        chosen: scores of the chosen completions ``[P]``.
        rejected: scores of the rejected ones ``[P]``.
        margins: by how much the score of the chosen one should be higher ``[P]``.

    Returns:
        Losses ``[P]``.
    """
    return -F.logsigmoid(chosen - rejected - margins)


def centring_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """``(r(y+) + r(y-))^2``, which keeps scores around 0 (Eisenstein et al. 2023, arXiv:2312.09244). Losses ``[P]``; the method
    weights them by ``center_rewards_coefficient``."""
    return (chosen + rejected) ** 2


def reward_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Per pair ``[P]`` and without gradient: mean, smallest and largest score, margin, and whether the chosen one is higher.

    ``min_reward`` and ``max_reward`` are reduced by minimum and maximum, the others by the mean.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "mean_reward": (chosen + rejected) / 2,
        "min_reward": torch.minimum(chosen, rejected),
        "max_reward": torch.maximum(chosen, rejected),
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "margin": chosen - rejected,
    }


def step_loss(logits: Tensor, correct: Tensor) -> Tensor:
    """Process reward model: cross-entropy of each step's label (Uesato et al. 2022, arXiv:2211.14275).

    Args:
        logits: of the two classes wrong (0) and right (1), at the last token of each step ``[T, 2]``.
        correct: labels ``[T]``: booleans, or the probability that the step is right.

    Returns:
        Losses ``[T]``.
    """
    logps = logits.log_softmax(-1)
    correct = correct.to(logps.dtype)
    return -(correct * logps[..., 1] + (1 - correct) * logps[..., 0])


def step_accuracies(logits: Tensor, correct: Tensor) -> Tensor:
    """1 where the likelier class is the label (of a probability: at least 1/2 counts as right), else 0 ``[T]``."""
    return (logits.argmax(-1) == (correct.float() >= 0.5)).float()
