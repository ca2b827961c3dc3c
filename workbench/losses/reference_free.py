"""Preference losses without a reference model: CPO, SimPO, AlphaPO, TPO and ORPO, per pair ``[P]``.

Each method adds a multiple of the negative log-likelihood of the chosen (TPO: gold) tokens, which is `sft.nll_loss`.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.errors import UserError, check_choice
from workbench.losses.divergence import box_cox
from workbench.losses.preference import Pairs, hinge_loss, ipo_loss, sigmoid_loss, simpo_loss

CPOLoss = Literal["sigmoid", "hinge", "ipo", "simpo", "alphapo"]
TPOLoss = Literal["sigmoid", "hinge", "ipo", "tpo-l"]

PER_TOKEN = ("ipo", "simpo", "alphapo", "tpo-l")
"""The losses that compare log-probabilities per token."""

READS: dict[str, frozenset[str]] = {
    "sigmoid": frozenset({"beta", "label_smoothing"}),
    "hinge": frozenset({"beta"}),
    "ipo": frozenset({"beta"}),
    "simpo": frozenset({"beta", "label_smoothing", "gamma"}),
    "alphapo": frozenset({"beta", "label_smoothing", "gamma"}),
    "tpo-l": frozenset({"beta", "label_smoothing", "gamma"}),
}
"""The options that change the value of each loss (``alpha``, in `cpo_loss`, changes them all)."""


def policy_scores(pairs: Pairs, loss: CPOLoss | TPOLoss = "sigmoid", *, alpha: float = 0.0) -> tuple[Tensor, Tensor]:
    """What `cpo_loss` and `tpo_loss` compare, chosen and rejected ``[P]``; times beta it is the implicit reward.

    Log-probabilities, per token for ``ipo``, ``simpo``, ``alphapo`` and ``tpo-l``; with ``alpha`` AlphaPO's
    ``(1 - p^-alpha) / alpha`` of them (Gupta et al. 2025, arXiv:2501.03884), which is log p at alpha = 0.
    """
    chosen, rejected = pairs.chosen, pairs.rejected
    if loss in PER_TOKEN:
        chosen, rejected = pairs.per_token(chosen, rejected)
    return box_cox(chosen, alpha=alpha), box_cox(rejected, alpha=alpha)


def cpo_loss(
    pairs: Pairs,
    loss: CPOLoss = "sigmoid",
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    gamma: float = 0.5,
    alpha: float = 0.0,
) -> Tensor:
    """CPO's preference term and its relatives, per pair (Xu et al. 2024, arXiv:2401.08417, eq. 3).

    The method adds ``cpo_alpha`` times the NLL of the chosen tokens: 0 for SimPO and AlphaPO, above 0 for CPO-SimPO.

    Args:
        pairs: log-probabilities of the policy; the reference is not read.
        loss: ``sigmoid``, ``hinge``, ``ipo``, ``simpo`` or ``alphapo``.
        beta: scale of the implicit reward.
        label_smoothing: as in `sigmoid_loss`; read by ``sigmoid``, ``simpo`` and ``alphapo``.
        gamma: reward margin sought by ``simpo`` and ``alphapo``.
        alpha: shape of the reward; see `policy_scores`.

    Returns:
        Losses ``[P]``.
    """
    chosen, rejected = policy_scores(pairs, loss, alpha=alpha)
    margins = chosen - rejected
    if loss == "hinge":
        return hinge_loss(margins, beta=beta)
    if loss == "ipo":
        return ipo_loss(margins, beta=beta)
    if loss == "sigmoid":
        return sigmoid_loss(margins, beta=beta, label_smoothing=label_smoothing)
    return simpo_loss(margins, beta=beta, gamma=gamma, label_smoothing=label_smoothing)


def tpo_loss(
    pairs: Pairs, loss: TPOLoss = "sigmoid", *, beta: float = 0.01, label_smoothing: float = 0.0, gamma: float = 0.5
) -> Tensor:
    """TPO's preference term, per pair (Saeidi et al. 2024, arXiv:2405.16681).

    The method adds ``tpo_alpha`` times the NLL of the gold completion's tokens.

    Args:
        pairs: log-probabilities of the policy; the reference is not read.
        loss: ``sigmoid``, ``hinge``, ``ipo``, or ``tpo-l`` (per token, with a reward margin).
        beta: scale of the implicit reward.
        label_smoothing: as in `sigmoid_loss`; read by ``sigmoid`` and ``tpo-l``.
        gamma: reward margin sought by ``tpo-l``.

    Returns:
        Losses ``[P]``.
    """
    return cpo_loss(pairs, "simpo" if loss == "tpo-l" else loss, beta=beta, label_smoothing=label_smoothing, gamma=gamma)


def log_odds_margins(chosen: Tensor, rejected: Tensor) -> Tensor:
    """``log odds(y+) - log odds(y-)`` with ``odds = p / (1 - p)`` (Hong et al. 2024, arXiv:2403.07691, eqs. 4 and 5).

    Args:
        chosen: log-probability per token of the chosen completions ``[P]``.
        rejected: the same of the rejected ones.
    """
    return (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))


def orpo_loss(log_odds: Tensor, *, beta: float) -> Tensor:
    """ORPO's odds-ratio term ``-beta log sigmoid(log odds margin)`` (Hong et al. 2024, arXiv:2403.07691, eqs. 6 and 7, with
    beta for lambda). The method adds the NLL of the chosen tokens."""
    return -beta * F.logsigmoid(log_odds)


def _log1mexp(logps: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for x < 0, accurate near 0 and far from it."""
    logps = logps.clamp(max=-torch.finfo(logps.dtype).eps)
    near = logps > -0.6931
    # Each branch sees only its own side, so that neither puts a NaN into the other's gradient.
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, logps, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, logps))),
    )


def check_pair_options(
    losses: tuple[str, ...], loss: str, *, beta: float, label_smoothing: float, gamma: float, gamma_name: str
) -> None:
    """Refuses options of CPO and TPO that have no meaning or no effect.

    Args:
        losses: those of the method.
        loss: the one asked for.
        beta: as in `cpo_loss`.
        label_smoothing: as in `cpo_loss`.
        gamma: as in `cpo_loss`.
        gamma_name: what the method calls it.

    Raises:
        UserError: naming the option, the loss and the way out.
    """
    check_choice("method.loss", loss, losses)
    if beta <= 0:
        raise UserError(f"method.beta={beta} must be above 0.")
    if not 0.0 <= label_smoothing < 0.5:
        raise UserError(
            f"method.label_smoothing={label_smoothing} must lie in [0, 0.5): it is the share of labels that are wrong."
        )
    for option, name, value, default in (
        ("label_smoothing", "label_smoothing", label_smoothing, 0.0),
        ("gamma", gamma_name, gamma, 0.5),
    ):
        if value != default and option not in READS[loss]:
            readers = ", ".join(other for other in losses if option in READS[other])
            raise UserError(
                f"method.{name}={value} has no effect with method.loss={loss}; set it to {default}, or use {readers}."
            )
