"""Losses on pairs of completions, per pair ``[P]``. They see one of two things:

- ``margins [P]``: ``(log p(y+) - log ref(y+)) - (log p(y-) - log ref(y-))``, by how much the policy prefers the chosen
  completion more than the reference does. Without a reference the ``ref`` terms are 0.
- ``chosen [P]``, ``rejected [P]``: the two log-ratios themselves, for losses that are no function of their difference.

`dpo.dpo_loss`, `reference_free.cpo_loss` and `reference_free.tpo_loss` pick one by name and compute what it needs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Pairs(NamedTuple):
    """P pairs of completions, each tensor ``[P]``.

    Args:
        chosen: log-probability of the chosen completion, summed over its tokens, nats.
        rejected: the same of the rejected one.
        chosen_lengths: trained tokens of the chosen completion.
        rejected_lengths: the same of the rejected one.
        ref_chosen: the reference's log-probability of the chosen completion; 0 where there is no reference.
        ref_rejected: the same of the rejected one.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    ref_chosen: Tensor | float = 0.0
    ref_rejected: Tensor | float = 0.0

    def logratios(self) -> tuple[Tensor, Tensor]:
        """``log p - log ref`` of the chosen and of the rejected completions."""
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected

    def per_token(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        """Both divided by the number of tokens of their completion."""
        return chosen / self.chosen_lengths.clamp(min=1), rejected / self.rejected_lengths.clamp(min=1)


# -- functions of the margin ----------------------------------------------------------------------------------------


def sigmoid_loss(margins: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO: ``-log sigmoid(beta m)`` (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

    Conservative DPO, for labels that are wrong with probability e: ``-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)``
    (Mitchell 2023, "A note on DPO with noisy preferences & relationship to IPO").
    """
    logits = beta * margins
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def hinge_loss(margins: Tensor, *, beta: float) -> Tensor:
    """``max(0, 1 - beta m)``, the hinge-norm loss of RSO (Liu et al. 2023, arXiv:2309.06657) after SLiC (arXiv:2305.10425).

    The margin sought is ``1 / beta``.
    """
    return F.relu(1 - beta * margins)


def ipo_loss(margins: Tensor, *, beta: float) -> Tensor:
    """IPO: ``(m - 1 / (2 beta))^2`` (Azar et al. 2023, arXiv:2310.12036, eq. 17, with beta for tau).

    ``m`` is the margin of log-ratios per token, so that the target does not depend on length.
    """
    return (margins - 1 / (2 * beta)) ** 2


def exo_loss(margins: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """EXO on pairs (Ji et al. 2024, arXiv:2402.00856, eq. 16).

    ``KL(q || p)`` with ``q = (s, 1 - s)``, ``s = sigmoid(beta m)`` and ``p = (1 - e, e)``; ``label_smoothing`` e is above 0.
    """
    logits = beta * margins
    target = logits.new_tensor([1 - label_smoothing, label_smoothing]).log()
    chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - target[0])
    return chosen + torch.sigmoid(-logits) * (F.logsigmoid(-logits) - target[1])


def robust_loss(margins: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Robust DPO: unbiased where labels are flipped with probability e (Chowdhury et al. 2024, arXiv:2403.00409).

    ``(-(1 - e) log sigmoid(beta m) + e log sigmoid(-beta m)) / (1 - 2 e)``; ``label_smoothing`` e is below 1/2. It is not
    bounded below.
    """
    logits = beta * margins
    flipped = label_smoothing * F.logsigmoid(-logits)
    return (flipped - (1 - label_smoothing) * F.logsigmoid(logits)) / (1 - 2 * label_smoothing)


def discopop_loss(margins: Tensor, *, beta: float, tau: float = 0.05) -> Tensor:
    """DiscoPOP, the log-ratio modulated loss (Lu et al. 2024, arXiv:2406.08414, eq. 5).

    ``-(1 - w) log sigmoid(z) + w exp(-z)`` with ``z = beta m`` and ``w = sigmoid(z / tau)``.
    """
    logits = beta * margins
    # w exp(-z) in log space: exp(-z) alone overflows where w is 0.
    exponential = torch.exp(F.logsigmoid(logits / tau) - logits)
    return exponential - torch.sigmoid(-logits / tau) * F.logsigmoid(logits)


def simpo_loss(margins: Tensor, *, beta: float, gamma: float, label_smoothing: float = 0.0) -> Tensor:
    """SimPO: ``-log sigmoid(beta m - gamma)`` (Meng et al. 2024, arXiv:2405.14734, eq. 6), label smoothing as in `sigmoid_loss`.

    ``m`` is the margin of log-probabilities per token. TPO-L is the same loss, AlphaPO the same on other rewards.
    """
    return sigmoid_loss(beta * margins - gamma, beta=1.0, label_smoothing=label_smoothing)


# -- functions of both log-ratios -----------------------------------------------------------------------------------


def nca_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """NCA for preferences, two completions (Chen et al. 2024, arXiv:2402.05369).

    ``-log sigmoid(r+) - log sigmoid(-r+) / 2 - log sigmoid(-r-) / 2`` with ``r = beta * log-ratio``.
    """
    chosen, rejected = beta * chosen, beta * rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair_loss(chosen: Tensor, rejected: Tensor, *, beta: float, reward_shift: Tensor | float = 0.0) -> Tensor:
    """BCO on pairs (Jung et al. 2024, arXiv:2404.04656): a classifier that sends chosen to 1 and rejected to 0.

    ``-log sigmoid(r+ - d) - log sigmoid(d - r-)`` with ``r = beta * log-ratio`` and the constant ``reward_shift`` d (see
    `bco.reward_shift`); d = 0 is the plain cross-entropy.
    """
    return -F.logsigmoid(beta * chosen - reward_shift) - F.logsigmoid(reward_shift - beta * rejected)


def sppo_hard_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """SPPO where the winner wins for sure (Wu et al. 2024, arXiv:2405.00675, eq. 4.7 with P in {1, 0}, eta = 1 / beta).

    ``(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2`` on the log-ratios.
    """
    return (chosen - 1 / (2 * beta)) ** 2 + (rejected + 1 / (2 * beta)) ** 2


def apo_zero_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """APO-zero, chosen up and rejected down: ``1 - sigmoid(beta c) + sigmoid(beta r)`` (D'Oosterlinck et al. 2024,
    arXiv:2408.06266, eq. 7, plus 1)."""
    return torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)


def apo_down_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """APO-down, both down and rejected more: ``sigmoid(beta c) + 1 - sigmoid(beta (c - r))`` (D'Oosterlinck et al. 2024,
    arXiv:2408.06266, eq. 8, plus 1)."""
    return torch.sigmoid(beta * chosen) + torch.sigmoid(beta * (rejected - chosen))


def aot_loss(margins: Tensor, ref_margins: Tensor | float, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """AOT for paired data: `sigmoid_loss` on the sorted margins of the policy minus the sorted ones of the reference (Melnyk et
    al. 2024, arXiv:2406.05882). It couples the pairs that it is given.

    Args:
        margins: ``log p(y+) - log p(y-)`` ``[P]``.
        ref_margins: the same of the reference ``[P]``.
        beta: scale of the difference.
        label_smoothing: as in `sigmoid_loss`.

    Returns:
        Losses ``[P]``, one per quantile, not per pair.
    """
    ref_margins = torch.as_tensor(ref_margins, dtype=margins.dtype, device=margins.device).expand_as(margins)
    return sigmoid_loss(margins.sort().values - ref_margins.sort().values, beta=beta, label_smoothing=label_smoothing)


def aot_unpaired_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """AOT for unpaired data: `sigmoid_loss` on the sorted log-ratios of the chosen minus the sorted ones of the rejected
    completions (Melnyk et al. 2024, arXiv:2406.05882); one loss per quantile ``[P]``."""
    return sigmoid_loss(chosen.sort().values - rejected.sort().values, beta=beta, label_smoothing=label_smoothing)


def pair_metrics(chosen_rewards: Tensor, rejected_rewards: Tensor) -> dict[str, Tensor]:
    """Per pair ``[P]`` and without gradient: both implicit rewards, their margin, and whether the chosen one is higher.

    Args:
        chosen_rewards: ``beta`` times the log-ratio of the chosen completions (without a reference: times
            `reference_free.policy_scores`).
        rejected_rewards: the same of the rejected ones.
    """
    chosen, rejected = chosen_rewards.detach(), rejected_rewards.detach()
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
        "rewards/margins": chosen - rejected,
    }
