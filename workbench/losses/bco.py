"""Binary Classifier Optimization on single completions (Jung et al. 2024, arXiv:2404.04656).

A classifier with the implicit reward as its logit: its cross-entropy bounds DPO's loss from above, most tightly when the rewards
are shifted to lie around 0. `preference.bco_pair_loss` is the same on pairs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def bco_loss(
    logratios: Tensor,
    desirable: Tensor,
    reward_shift: Tensor | float,
    *,
    beta: float,
    undesirable_weights: Tensor | float = 1.0,
) -> Tensor:
    """``-log sigmoid(r - d)`` for a desirable completion, ``-w(x) log sigmoid(d - r)`` for another, per completion.

    Args:
        logratios: ``log p(y) - log ref(y)`` ``[B]``, nats; the reward is ``r = beta`` times it.
        desirable: labels ``[B]``, boolean.
        reward_shift: ``d``, a constant; see `reward_shift`.
        beta: scale of the reward.
        undesirable_weights: ``w(x)`` per completion ``[B]``, read where not desirable; see `distribution_weights`.

    Returns:
        Losses ``[B]``.
    """
    rewards = beta * logratios - reward_shift
    weights = torch.as_tensor(undesirable_weights, dtype=rewards.dtype, device=rewards.device)
    return -torch.where(desirable, F.logsigmoid(rewards), weights * F.logsigmoid(-rewards))


def reward_shift(
    desirable_total: Tensor, desirable_count: Tensor | float, undesirable_total: Tensor, undesirable_count: Tensor | float
) -> Tensor:
    """``d = (E[r | desirable] + E[r | undesirable]) / 2`` from sums and counts, without gradient.

    With rows of one label only it is their mean; without any it is 0. The paper takes a moving average: give sums that run over
    the steps so far.
    """
    totals = torch.stack([desirable_total, undesirable_total]).detach()
    counts = torch.stack([totals.new_ones(()) * desirable_count, totals.new_ones(()) * undesirable_count])
    means = totals / counts.clamp(min=1)
    return means.sum() / counts.gt(0).sum().clamp(min=1)


def distribution_weights(desirable_probability: Tensor, *, minimum: float = 0.5, maximum: float = 10.0) -> Tensor:
    """Underlying distribution matching: ``p(desirable | x) / p(undesirable | x)``, clipped.

    Weights undesirable rows as if their prompts came from the distribution of the desirable ones (density ratio).

    Args:
        desirable_probability: a classifier's probability that the prompt belongs to a desirable row ``[B]``.
        minimum: smallest weight.
        maximum: largest weight.
    """
    odds = desirable_probability / (1 - desirable_probability)
    return odds.clamp(minimum, maximum).detach()
