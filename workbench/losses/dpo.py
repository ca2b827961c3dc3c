"""DPO's losses by name, weighted lists of them, and which options each one reads."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from workbench.errors import UserError, check_choice
from workbench.losses import preference as p
from workbench.losses.divergence import Divergence, divergence_scores
from workbench.losses.preference import Pairs

DPOLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "discopop",
    "apo_zero",
    "apo_down",
    "sigmoid_norm",
    "sft",
]
_OF_MARGINS: dict[str, Callable[..., Tensor]] = {
    "sigmoid": p.sigmoid_loss,
    "hinge": p.hinge_loss,
    "exo_pair": p.exo_loss,
    "robust": p.robust_loss,
    "discopop": p.discopop_loss,
}
_OF_TOKEN_MARGINS: dict[str, Callable[..., Tensor]] = {"ipo": p.ipo_loss, "sigmoid_norm": p.sigmoid_loss}
_OF_LOGRATIOS: dict[str, Callable[..., Tensor]] = {
    "nca_pair": p.nca_loss,
    "bco_pair": p.bco_pair_loss,
    "sppo_hard": p.sppo_hard_loss,
    "apo_zero": p.apo_zero_loss,
    "apo_down": p.apo_down_loss,
    "aot_unpaired": p.aot_unpaired_loss,
}
_PAIR_LOSSES = {**_OF_MARGINS, **_OF_TOKEN_MARGINS, **_OF_LOGRATIOS, "aot": p.aot_loss}
DPO_LOSSES = get_args(DPOLoss)


def options_of(loss: str) -> frozenset[str]:
    """The options of `dpo_loss` that change the value of ``loss``; none for ``sft``, whose terms are per token."""
    if loss == "sft":
        return frozenset()
    parameters = inspect.signature(_PAIR_LOSSES[loss]).parameters.values()
    read = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    return frozenset(read | {"divergence"} if loss in _OF_MARGINS or loss in _OF_TOKEN_MARGINS else read)


def dpo_loss(
    pairs: Pairs,
    loss: DPOLoss = "sigmoid",
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    divergence: Divergence = "reverse_kl",
    divergence_alpha: float = 0.5,
    tau: float = 0.05,
    reward_shift: Tensor | float = 0.0,
) -> Tensor:
    """A preference loss by name, per pair; at policy = reference ``sigmoid`` is ln 2.

    Args:
        pairs: log-probabilities of policy and reference.
        loss: any of `DPO_LOSSES` but ``sft`` (which is `sft.nll_loss` on the chosen tokens).
        beta: strength of the pull towards the reference; the regularisation tau for ``ipo``, 1 / eta for ``sppo_hard``.
        label_smoothing: probability that a label is wrong; read by ``sigmoid``, ``sigmoid_norm``, ``exo_pair``,
            ``robust`` and ``aot*``.
        divergence: f-divergence to the reference; other than ``reverse_kl`` only for losses of the margin, where the
            partition function cancels.
        divergence_alpha: order of the alpha-divergence.
        tau: temperature of DiscoPOP's modulation.
        reward_shift: BCO's delta.

    Returns:
        Losses ``[P]``.
    """
    options = {"beta": beta, "label_smoothing": label_smoothing, "tau": tau, "reward_shift": reward_shift}
    function, read = _PAIR_LOSSES[loss], options_of(loss)
    options = {name: value for name, value in options.items() if name in read}
    if loss == "aot":
        return function(pairs.chosen - pairs.rejected, torch.as_tensor(pairs.ref_chosen) - pairs.ref_rejected, **options)
    chosen, rejected = pairs.logratios()
    if loss in _OF_LOGRATIOS:
        return function(chosen, rejected, **options)
    chosen = divergence_scores(chosen, divergence, alpha=divergence_alpha)
    rejected = divergence_scores(rejected, divergence, alpha=divergence_alpha)
    if loss in _OF_TOKEN_MARGINS:
        chosen, rejected = pairs.per_token(chosen, rejected)
    return function(chosen - rejected, **options)


def weighted_dpo_loss(
    pairs: Pairs,
    losses: Mapping[str, float],
    *,
    beta: float = 0.1,
    label_smoothing: float | Mapping[str, float] = 0.0,
    divergence: Divergence = "reverse_kl",
    divergence_alpha: float = 0.5,
    tau: float = 0.05,
    reward_shift: Tensor | float = 0.0,
) -> Tensor:
    """``sum_i w_i loss_i`` per pair (MPO, arXiv:2411.10442, eq. 1), without ``sft``, whose terms are per token.

    Args:
        pairs: log-probabilities of policy and reference.
        losses: weight by name; ``sft`` is left out.
        beta: as in `dpo_loss`.
        label_smoothing: one for all that read it, or by name (absent: 0).
        divergence: as in `dpo_loss`.
        divergence_alpha: as in `dpo_loss`.
        tau: as in `dpo_loss`.
        reward_shift: as in `dpo_loss`.

    Returns:
        Losses ``[P]``; zeros where ``sft`` is the only one.
    """
    total = torch.zeros_like(pairs.chosen)
    for name, weight in losses.items():
        if name == "sft":
            continue
        total = total + weight * dpo_loss(
            pairs,
            name,
            beta=beta,
            label_smoothing=_smoothing(label_smoothing, name),
            divergence=divergence,
            divergence_alpha=divergence_alpha,
            tau=tau,
            reward_shift=reward_shift,
        )
    return total


def loss_weights(loss: str | Sequence[str], weights: Sequence[float] | None = None) -> dict[str, float]:
    """Names and weights as one mapping; without weights each counts 1.

    Raises:
        UserError: an unknown or repeated name, or another number of weights.
    """
    names = [loss] if isinstance(loss, str) else list(loss)
    for name in names:
        check_choice("loss", name, DPO_LOSSES)
    if not names or len(set(names)) < len(names):
        raise UserError(f"loss={names} must name at least one loss, and none twice; use loss_weights to make one count more.")
    weights = [1.0] * len(names) if weights is None else list(weights)
    if len(weights) != len(names):
        raise UserError(f"loss_weights={weights} must hold one value for each of the {len(names)} losses {', '.join(names)}.")
    return dict(zip(names, weights, strict=True))


def check_dpo_options(
    losses: Mapping[str, float],
    *,
    label_smoothing: float | Mapping[str, float] = 0.0,
    divergence: Divergence = "reverse_kl",
    weighting: bool = False,
) -> None:
    """Refuses options that have no meaning or no effect with these losses.

    Args:
        losses: weight by name.
        label_smoothing: as in `weighted_dpo_loss`.
        divergence: as in `dpo_loss`.
        weighting: whether pairs are weighted as in WPO.

    Raises:
        UserError: naming the option, the losses and the way out.
    """
    listed, on_pairs = ", ".join(losses), [name for name in losses if name != "sft"]
    rates = label_smoothing if isinstance(label_smoothing, Mapping) else dict.fromkeys(losses, label_smoothing)
    readers = [name for name in losses if "label_smoothing" in options_of(name)]
    if not all(0.0 <= rate < 0.5 for rate in rates.values()):
        raise UserError(f"label_smoothing={label_smoothing} must lie in [0, 0.5): it is the share of labels that are wrong.")
    unread = set(rates) - set(readers) if isinstance(label_smoothing, Mapping) else not readers
    if unread and any(rates.values()):
        raise UserError(
            f"label_smoothing={label_smoothing} has no effect on loss {listed}; set it to 0, or use losses among "
            f"{_readers('label_smoothing')}."
        )
    if "exo_pair" in losses and not _smoothing(label_smoothing, "exo_pair"):
        raise UserError("loss=exo_pair needs label_smoothing above 0, the log of which is its target; the paper uses 1e-3.")
    if divergence != "reverse_kl" and (not on_pairs or any("divergence" not in options_of(name) for name in on_pairs)):
        raise UserError(
            f"divergence={divergence!r} does not go with loss {listed}: the partition function cancels only in differences; "
            f"use reverse_kl, or losses among {_readers('divergence')}."
        )
    if weighting and (not on_pairs or any(name.startswith("aot") for name in on_pairs)):
        raise UserError(f"WPO weights belong to pairs, which loss {listed} does not keep apart; turn the weighting off.")


def _smoothing(label_smoothing: float | Mapping[str, float], name: str) -> float:
    return label_smoothing.get(name, 0.0) if isinstance(label_smoothing, Mapping) else label_smoothing


def _readers(option: str) -> str:
    return ", ".join(name for name in DPO_LOSSES if option in options_of(name))
