"""DPO's losses by name, weighted lists of them, and which options each one reads."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from workbench.errors import UserError, check_choice
from workbench.losses import preference
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
DPO_LOSSES = get_args(DPOLoss)

_OF_MARGINS: dict[str, Callable[..., Tensor]] = {
    "sigmoid": preference.sigmoid_loss,
    "hinge": preference.hinge_loss,
    "exo_pair": preference.exo_loss,
    "robust": preference.robust_loss,
    "discopop": preference.discopop_loss,
}
_OF_TOKEN_MARGINS: dict[str, Callable[..., Tensor]] = {
    "ipo": preference.ipo_loss,
    "sigmoid_norm": preference.sigmoid_loss,  # Tulu 3, arXiv:2411.15124
}
_OF_LOGRATIOS: dict[str, Callable[..., Tensor]] = {
    "nca_pair": preference.nca_loss,
    "bco_pair": preference.bco_pair_loss,
    "sppo_hard": preference.sppo_hard_loss,
    "apo_zero": preference.apo_zero_loss,
    "apo_down": preference.apo_down_loss,
    "aot_unpaired": preference.aot_unpaired_loss,
}
_FUNCTIONS = {**_OF_MARGINS, **_OF_TOKEN_MARGINS, **_OF_LOGRATIOS, "aot": preference.aot_loss}


def dpo_loss(
    pairs: Pairs,
    losses: DPOLoss | Mapping[str, float] = "sigmoid",
    *,
    beta: float = 0.1,
    label_smoothing: float | Mapping[str, float] = 0.0,
    divergence: Divergence = "reverse_kl",
    divergence_alpha: float = 0.5,
    tau: float = 0.05,
    reward_shift: Tensor | float = 0.0,
) -> Tensor:
    """One loss by name, or ``sum_i w_i loss_i`` of several, per pair.

    At policy = reference ``sigmoid`` is ln 2. The terms of ``sft`` are per token (`sft.nll_loss` on the chosen tokens); it is
    left out here.

    Args:
        pairs: log-probabilities of policy and reference.
        losses: one of `DPO_LOSSES`, or weights by name.
        beta: strength of the pull towards the reference; the regularisation tau for ``ipo``, 1 / eta for ``sppo_hard``.
        label_smoothing: probability that a label is wrong, for all losses that read it (``sigmoid``, ``sigmoid_norm``,
            ``exo_pair``, ``robust``, ``aot``, ``aot_unpaired``), or by name.
        divergence: f-divergence to the reference; other than ``reverse_kl`` only for losses of the margin, where the
            partition function cancels.
        divergence_alpha: order of the alpha-divergence.
        tau: temperature of DiscoPOP's modulation.
        reward_shift: BCO's delta.

    Returns:
        Losses ``[P]``; zeros where ``sft`` is the only one.
    """
    logratios = pairs.logratios()
    scores = [divergence_scores(r, divergence, alpha=divergence_alpha) for r in logratios]
    total = torch.zeros_like(pairs.chosen)
    for name, weight in {losses: 1.0}.items() if isinstance(losses, str) else losses.items():
        if name == "sft":
            continue
        options = {"beta": beta, "label_smoothing": _smoothing(label_smoothing, name), "tau": tau, "reward_shift": reward_shift}
        options = {key: value for key, value in options.items() if key in options_of(name)}
        total = total + weight * _FUNCTIONS[name](*_arguments(name, pairs, logratios, scores), **options)
    return total


def _arguments(name: str, pairs: Pairs, logratios: Sequence[Tensor], scores: Sequence[Tensor]) -> Sequence[Any]:
    """What the loss is a function of."""
    if name in _OF_LOGRATIOS:
        return logratios
    if name == "aot":
        return pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected
    chosen, rejected = pairs.per_token(*scores) if name in _OF_TOKEN_MARGINS else scores
    return (chosen - rejected,)


def options_of(loss: str) -> frozenset[str]:
    """The options of `dpo_loss` that change the value of ``loss``; none for ``sft``."""
    if loss == "sft":
        return frozenset()
    parameters = inspect.signature(_FUNCTIONS[loss]).parameters.values()
    read = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    return frozenset(read | {"divergence"} if loss in _OF_MARGINS or loss in _OF_TOKEN_MARGINS else read)


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
    beta: float = 0.1,
    label_smoothing: float | Mapping[str, float] = 0.0,
    divergence: Divergence = "reverse_kl",
    weighting: bool = False,
) -> None:
    """Refuses options that have no meaning or no effect with these losses.

    Args:
        losses: weight by name.
        beta: as in `dpo_loss`.
        label_smoothing: as in `dpo_loss`.
        divergence: as in `dpo_loss`.
        weighting: whether pairs are weighted as in WPO.

    Raises:
        UserError: naming the option, the losses and the way out.
    """
    if beta <= 0:
        raise UserError(f"beta={beta} must be above 0; the papers use 0.001 to 0.5.")
    check_choice("divergence", divergence, get_args(Divergence))
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
