"""f-divergences between policy and reference, as the scores that take the place of log-ratios in DPO."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

# exp() of more than this leaves fp32 or squares to infinity; scores stop growing there, with no gradient.
_LARGEST_EXPONENT = 80.0


def divergence_scores(logratios: Tensor, divergence: Divergence = "reverse_kl", *, alpha: float = 0.5) -> Tensor:
    """``f'(u) - f'(1)`` at ``u = policy / reference`` (Wang et al. 2023, arXiv:2309.16240, table 1 and eq. 9).

    ``reverse_kl``: log u. ``forward_kl``: 1 - 1/u. ``js_divergence``: log(2u / (1 + u)).
    ``alpha_divergence``: (1 - u^-alpha) / alpha, which is ``reverse_kl`` at alpha -> 0 and ``forward_kl`` at alpha = 1. All are 0
    with slope 1 in log u (JS: 1/2) at u = 1; the constant ``f'(1)`` cancels between the two completions of a pair.

    Args:
        logratios: log u, any shape.
        divergence: which one.
        alpha: order of the alpha-divergence, in [0, 1].
    """
    if divergence == "reverse_kl":
        return logratios
    if divergence == "forward_kl":
        return box_cox(logratios, alpha=1.0)
    if divergence == "alpha_divergence":
        return box_cox(logratios, alpha=alpha)
    if divergence == "js_divergence":
        return F.logsigmoid(logratios) + torch.log(logratios.new_tensor(2.0))
    raise ValueError(f"unknown divergence {divergence!r}")


def box_cox(logs: Tensor, *, alpha: float) -> Tensor:
    """``(1 - u^-alpha) / alpha`` from log u; log u itself at alpha = 0."""
    if alpha == 0.0:
        return logs
    return -torch.expm1((-alpha * logs).clamp(max=_LARGEST_EXPONENT)) / alpha
