"""Advantages of completions from their rewards. Rewards come as ``[N, F]``: N completions of all ranks, F reward functions.

A NaN is a reward that its function did not give: it takes no part in any mean or spread. A completion that no function scored
has no advantage and is left out (`Advantages.valid`). Everything is computed in float64, and spreads in two passes: of rewards
as close as 0 and seven times 0.95, ``E[x^2] - E[x]^2`` leaves rounding alone. Standard deviations are unbiased (n - 1).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workbench.errors import UserError, check_choice

Scale = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
EPS = 1e-4  # beside a standard deviation in the denominator
SAME = 1e-8  # rewards closer than this are the same: what rounding leaves of equal ones


@dataclass(frozen=True)
class Advantages:
    """What each completion's tokens are weighted by.

    Args:
        values: advantages ``[N]``, float64; 0 where ``valid`` is false.
        valid: whether any function scored the completion ``[N]``; the others belong in no mean and no loss.
        zero_spread: whether the rewards of the completion's group are all the same, so that it teaches nothing ``[N]``.
        unscored: number of completions that are not ``valid``.
    """

    values: Tensor
    valid: Tensor
    zero_spread: Tensor
    unscored: int


def combine(rewards: Tensor, weights: Tensor) -> Tensor:
    """``sum_f w_f r_f`` over the functions that scored a completion ``[N]``; NaN where none did."""
    check_rewards(rewards, weights)
    rewards, weights = rewards.double(), weights.double()
    given = ~rewards.isnan()
    total = torch.where(given, rewards * weights, 0.0).sum(-1)
    return torch.where(given.any(-1), total, torch.nan)


def check_rewards(rewards: Tensor, weights: Tensor) -> None:
    """Raises `UserError` unless there is a reward function, and one weight for each."""
    if rewards.ndim != 2 or not rewards.shape[1]:
        raise UserError("There is no reward function: name at least one in method.rewards.")
    if weights.shape != rewards.shape[1:]:
        raise UserError(f"{rewards.shape[1]} reward functions have {weights.numel()} weights; give one for each.")


def group_sizes(rewards: Tensor, group: Tensor) -> Tensor:
    """Number of scored completions in each completion's group ``[N]``."""
    return _sum_in_groups((~rewards.isnan()).double(), group)


def group_mean(rewards: Tensor, group: Tensor) -> Tensor:
    """Mean of the rewards in each completion's group ``[N]``; NaN in a group without any.

    Args:
        rewards: ``[N]``; NaN is not counted.
        group: which prompt each completion answers ``[N]``, any integers in any order.
    """
    return _sum_in_groups(rewards.double().nan_to_num(), group) / group_sizes(rewards, group)


def group_std(rewards: Tensor, group: Tensor) -> Tensor:
    """Unbiased standard deviation of the rewards in each completion's group ``[N]``; 0 in a group with fewer than two."""
    squares = ((rewards.double() - group_mean(rewards, group)) ** 2).nan_to_num()
    return (_sum_in_groups(squares, group) / (group_sizes(rewards, group) - 1).clamp(min=1)).sqrt()


def batch_std(rewards: Tensor) -> Tensor:
    """Unbiased standard deviation of all rewards that are not NaN; 0 of fewer than two."""
    given = rewards[~rewards.isnan()].double()
    return given.std() if given.numel() > 1 else torch.zeros((), dtype=torch.float64, device=rewards.device)


def zero_spread(rewards: Tensor, group: Tensor) -> Tensor:
    """Whether the combined rewards of each completion's group are all the same ``[N]``; so are those of one or none."""
    _, inverse = _groups(group)
    count, given = int(inverse.max()) + 1 if inverse.numel() else 0, ~rewards.isnan()
    values, inverse = rewards[given].double(), inverse[given]
    high = torch.full((count,), -torch.inf, dtype=torch.float64, device=rewards.device).scatter_reduce(0, inverse, values, "amax")
    low = torch.full((count,), torch.inf, dtype=torch.float64, device=rewards.device).scatter_reduce(0, inverse, values, "amin")
    return (high - low <= SAME)[_groups(group)[1]]


def group_advantages(
    rewards: Tensor,
    weights: Tensor,
    group: Tensor,
    scale: Scale = "group",
    aggregation: Aggregation = "sum_then_normalize",
    eps: float = EPS,
) -> Advantages:
    """A reward's distance from its group's mean, over a standard deviation (GRPO: Shao et al. 2024, arXiv:2402.03300, section
    4.1.2).

    Where there is no spread the advantage is 0 and nothing is divided; so it is in a group with one scored completion.

    Args:
        rewards: of each function ``[N, F]``; NaN where it abstained.
        weights: of the functions ``[F]``.
        group: which prompt each completion answers ``[N]``.
        scale: ``group`` divides by the group's standard deviation plus ``eps``; ``batch`` by that of all rewards (Liu et al.
            2025, arXiv:2508.08221); ``none`` does not divide (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
        aggregation: ``sum_then_normalize`` adds the weighted rewards first; ``normalize_then_sum`` (GDPO, Liu et al. 2026,
            arXiv:2601.05242) divides each function's rewards by their own spread in the group, adds these with their
            weights, and divides the sum's distance from the batch's mean by its standard deviation in the batch.
        eps: added to a standard deviation.

    Raises:
        UserError: unknown names, wrong counts, or a scale with ``normalize_then_sum``, which has its own.
    """
    check_choice("method.scale_rewards", scale, ("group", "batch", "none"))
    check_choice("method.multi_objective_aggregation", aggregation, ("sum_then_normalize", "normalize_then_sum"))
    total = combine(rewards, weights)
    if aggregation == "normalize_then_sum":
        if scale != "group":
            raise UserError(f"method.scale_rewards={scale} has no effect with normalize_then_sum; leave it at group.")
        columns = [_within_group(column, group, "group", eps) for column in rewards.double().unbind(-1)]
        values = normalize_advantages(combine(torch.stack(columns, -1), weights), eps)
    else:
        values = _within_group(total, group, scale, eps)
    return _advantages(values, total, group)


def leave_one_out(rewards: Tensor, group: Tensor, normalize: bool = False, eps: float = EPS) -> Advantages:
    """``r_i - mean of the other rewards of its group`` (RLOO: Ahmadian et al. 2024, arXiv:2402.14740).

    Args:
        rewards: combined ones, after clipping and with the KL term ``[N]``; NaN where nobody scored.
        group: which prompt each completion answers ``[N]``.
        normalize: see `normalize_advantages`.
        eps: as in `normalize_advantages`.
    """
    rewards = rewards.double()
    n = group_sizes(rewards, group)
    values = (rewards - group_mean(rewards, group)) * (n / (n - 1).clamp(min=1))
    values = torch.where(zero_spread(rewards, group) & ~rewards.isnan(), 0.0, values)
    return _advantages(normalize_advantages(values, eps) if normalize else values, rewards, group)


def normalize_advantages(advantages: Tensor, eps: float = EPS) -> Tensor:
    """``(A - mean) / (std + eps)`` over the batch (REINFORCE++: Hu 2025, arXiv:2501.03262) ``[N]``; NaN stays NaN and
    counts for nothing. All 0 where there is no spread."""
    advantages = advantages.double()
    std = batch_std(advantages)
    centred = advantages - advantages.nanmean()
    return torch.where(std <= SAME, centred * 0.0, centred / (std + eps))


def clip_rewards(rewards: Tensor, low: float, high: float) -> Tensor:
    """Rewards kept within ``[low, high]``, NaN as it is."""
    if not low < high:
        raise UserError(f"method.reward_clip_range=[{low}, {high}]: the first bound must be below the second.")
    return rewards.clamp(low, high)


def reward_metrics(rewards: Tensor, weights: Tensor, group: Tensor, names: list[str]) -> dict[str, float]:
    """``reward`` and ``reward_std`` (mean and standard deviation over all completions of the weighted sum that is trained on),
    ``rewards/<f>/mean`` and ``/std`` of each function as it is (not weighted), and ``frac_reward_zero_std``, the share of
    completions whose group has no spread.

    Rewards that nobody gave are left out, and so are the metrics that nothing is left for; without any reward there is no spread.
    """
    total = combine(rewards, weights)
    found: dict[str, float] = {}
    for name, column in zip(names, rewards.double().unbind(-1), strict=True):
        if not column.isnan().all():
            found[f"rewards/{name}/mean"] = float(column.nanmean())
            found[f"rewards/{name}/std"] = float(batch_std(column))
    given = ~total.isnan()
    found["frac_reward_zero_std"] = 1.0
    if given.any():
        found["reward"] = float(total.nanmean())
        found["reward_std"] = float(batch_std(total))
        found["frac_reward_zero_std"] = float(zero_spread(total, group)[given].double().mean())
    return found


def _within_group(rewards: Tensor, group: Tensor, scale: Scale, eps: float) -> Tensor:
    """Distance from the group's mean over the spread ``[N]``; NaN where nobody scored."""
    values = rewards - group_mean(rewards, group)
    if scale != "none":
        values = values / ((group_std(rewards, group) if scale == "group" else batch_std(rewards)) + eps)
    return torch.where(zero_spread(rewards, group) & ~rewards.isnan(), 0.0, values)


def _advantages(values: Tensor, total: Tensor, group: Tensor) -> Advantages:
    valid = ~total.isnan()
    return Advantages(torch.where(valid, values, 0.0), valid, zero_spread(total, group), int((~valid).sum()))


def _groups(group: Tensor) -> tuple[Tensor, Tensor]:
    return torch.unique(group, return_inverse=True)


def _sum_in_groups(values: Tensor, group: Tensor) -> Tensor:
    names, inverse = _groups(group)
    sums = torch.zeros(len(names), dtype=torch.float64, device=values.device).index_add(0, inverse, values)
    return sums[inverse]
