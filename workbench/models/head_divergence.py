"""Divergence of a model's next-token distribution from a teacher's, a piece of their logits at a time."""

from typing import Literal, get_args

import torch
from torch import Tensor

from workbench.errors import UserError, check_choice
from workbench.models.logps import Head

_PIECE = 2**22  # logits of each model that are formed at a time: 16 MiB in fp32
Divergence = Literal["forward_kl", "reverse_kl", "jsd"]


def head_divergence(
    hidden: Tensor,
    head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    *,
    kind: Divergence = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """Divergence per token. Logits are formed again in the backward pass; no memory grows with tokens times vocabulary.

    With the teacher's distribution p and the model's own q: ``KL(p || q)`` for ``forward_kl``, ``KL(q || p)`` for ``reverse_kl``,
    and ``beta KL(p || m) + (1 - beta) KL(q || m)`` with ``m = beta p + (1 - beta) q`` for ``jsd`` (Agarwal et al. 2024,
    arXiv:2306.13649, section 2). The teacher gets no gradient.

    Args:
        hidden: ``[T, H]``.
        head: the model's own.
        teacher_hidden: ``[T, H']``.
        teacher_head: of the same vocabulary.
        kind: which divergence.
        beta: share of the teacher in the mixture, in (0, 1); read by ``jsd`` alone.
        temperature: divides the logits of both.

    Returns:
        ``[T]``, nats, fp32.

    Raises:
        UserError: ``kind`` is not known, ``beta`` lies outside (0, 1), or the vocabularies differ in size.
    """
    check_choice("kind", kind, get_args(Divergence))
    if kind == "jsd" and not 0 < beta < 1:
        raise UserError(f"beta={beta} of jsd must lie between 0 and 1; its limits are forward_kl and reverse_kl.")
    rows = max(1, _PIECE // getattr(head.module, "out_features", 2**17))
    pieces = zip(hidden.split(rows), teacher_hidden.detach().split(rows), strict=True)
    options = (head, teacher_head, kind, beta, temperature)
    keep = torch.is_grad_enabled() and len(hidden) > rows
    return torch.cat([_checkpointed(*piece, *options) if keep else _piece(*piece, *options) for piece in pieces])


def _checkpointed(*arguments: object) -> Tensor:
    return torch.utils.checkpoint.checkpoint(_piece, *arguments, use_reentrant=False)


def _piece(
    hidden: Tensor, teacher_hidden: Tensor, head: Head, teacher_head: Head, kind: Divergence, beta: float, temperature: float
) -> Tensor:
    with torch.no_grad():
        teacher = teacher_head(teacher_hidden)
        log_p = torch.log_softmax(teacher / temperature, dim=-1)
    logits = head(hidden)
    if logits.shape != teacher.shape:
        raise UserError(
            f"the teacher's head gives {teacher.shape[-1]} logits and the model's {logits.shape[-1]}; they need one vocabulary."
        )
    log_q = torch.log_softmax(logits / temperature, dim=-1)
    if kind == "forward_kl":
        return kl(log_p, log_q)
    if kind == "reverse_kl":
        return kl(log_q, log_p)
    weights = log_p.new_tensor([beta, 1 - beta]).log()
    log_m = torch.logaddexp(weights[0] + log_p, weights[1] + log_q)
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """``KL(a || b)`` of log-probabilities ``[..., V]``."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)
