"""Losses on single completions with a label, per completion ``[B]``."""

from typing import Literal

import torch
from torch import Tensor

KTOLoss = Literal["kto", "apo_zero_unpaired"]

# Recommended total weight of the desirable rows, relative to the undesirable ones' (Ethayarajh et al. 2024, arXiv:2402.01306).
BALANCE = (1.0, 4.0 / 3.0)


def kto_loss(
    logratios: Tensor,
    desirable: Tensor,
    baseline: Tensor | float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO: ``lambda_y - v(x, y)`` (Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1).

    ``lambda_D (1 - sigmoid(beta (r - z)))`` for a desirable completion, ``lambda_U (1 - sigmoid(beta (z - r)))`` for another.

    Args:
        logratios: ``r = log p(y) - log ref(y)`` ``[B]``, nats.
        desirable: labels ``[B]``, boolean.
        baseline: ``z``, the estimate of the KL to the reference, a constant; see `kl_baseline`.
        beta: risk aversion.
        desirable_weight: lambda_D.
        undesirable_weight: lambda_U.

    Returns:
        Losses ``[B]``.
    """
    gains = torch.where(desirable, logratios - baseline, baseline - logratios)
    return _lambdas(logratios, desirable, desirable_weight, undesirable_weight) * torch.sigmoid(-beta * gains)


def apo_zero_unpaired_loss(
    logratios: Tensor,
    desirable: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """APO-zero on single completions (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7 apart): `kto_loss` with baseline 0."""
    return kto_loss(
        logratios,
        desirable,
        0.0,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )


def kl_baseline(total: Tensor, count: Tensor | float) -> Tensor:
    """KTO's z: ``max(0, mean log-ratio)`` of completions paired with other rows' prompts, without gradient.

    Args:
        total: sum of their log-ratios, over all that share the baseline.
        count: how many they are; 0 gives 0.
    """
    count = torch.as_tensor(count, dtype=total.dtype, device=total.device)
    return (total.detach() / count.clamp(min=1)).clamp(min=0)


def balance(desirable: int, undesirable: int, desirable_weight: float, undesirable_weight: float) -> float:
    """``lambda_D n_D / (lambda_U n_U)``, which should lie within `BALANCE`; infinite without undesirable rows."""
    weight = undesirable_weight * undesirable
    return desirable_weight * desirable / weight if weight else float("inf")


def recommended_weights(
    desirable: int, undesirable: int, desirable_weight: float, undesirable_weight: float
) -> dict[str, tuple[float, float]]:
    """For each weight the range that brings the rows into `BALANCE` with the other one as it is.

    Args:
        desirable: number of desirable rows, at least 1.
        undesirable: number of undesirable rows, at least 1.
        desirable_weight: lambda_D.
        undesirable_weight: lambda_U.
    """
    low, high = BALANCE
    unit = undesirable_weight * undesirable / desirable
    other = desirable_weight * desirable / undesirable
    return {"desirable_weight": (low * unit, high * unit), "undesirable_weight": (other / high, other / low)}


def unpaired_metrics(rewards: Tensor, desirable: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Values and weights ``[B]`` of the mean reward of each label, without gradient.

    ``rewards/margins`` is the difference of the two means, so it is formed after they are.

    Args:
        rewards: ``beta`` times the log-ratio ``[B]``.
        desirable: labels ``[B]``, boolean.
    """
    rewards = rewards.detach()
    return {"rewards/chosen": (rewards, desirable.float()), "rewards/rejected": (rewards, (~desirable).float())}


def _lambdas(like: Tensor, desirable: Tensor, desirable_weight: float, undesirable_weight: float) -> Tensor:
    return torch.where(desirable, like.new_tensor(desirable_weight), like.new_tensor(undesirable_weight))
