"""Log-probabilities of target tokens from hidden states: the LM head and what follows it."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workbench.errors import UserError


@dataclass
class TokenStats:
    """Per trained token.

    Args:
        logps: log-probability of the target ``[T]``, nats.
        entropy: entropy of the distribution ``[T]``, nats; no gradient.
        top1: most likely token ``[T]``.
        mean_logit: mean of the logits over the vocabulary ``[T]``; no gradient.
        log_collision: ``log sum_v p(v)^2`` ``[T]``, the log-probability that two samples agree; no gradient.
    """

    logps: Tensor
    entropy: Tensor | None = None
    top1: Tensor | None = None
    mean_logit: Tensor | None = None
    log_collision: Tensor | None = None


@dataclass
class Head:
    """An LM head with what some families do to its logits: ``softcap * tanh(scale * head(h) / softcap)``."""

    module: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, hf: PreTrainedModel) -> "Head":
        """The head of a causal language model.

        Raises:
            UserError: the model has no output embeddings.
        """
        module = hf.get_output_embeddings()
        if module is None:
            raise UserError(f"{type(hf).__name__} has no LM head; a causal language model is needed.")
        config = hf.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0
        if getattr(config, "logits_scaling", None):
            scale = 1.0 / config.logits_scaling
        return cls(module, scale=scale, softcap=getattr(config, "final_logit_softcapping", None))

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., V]`` in fp32."""
        logits = self.module(hidden).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def token_logps(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    want: Collection[str] = ("logps",),
    chunk: int = 4096,
) -> TokenStats:
    """Log-probabilities of ``targets`` given the hidden states that predict them.

    Args:
        hidden: ``[T, H]``.
        head: the model's head.
        targets: token ids ``[T]``.
        temperature: divides the logits.
        want: any further fields of `TokenStats`.
        chunk: tokens whose logits are formed at a time.

    Returns:
        `TokenStats` with ``[T]`` tensors.
    """
    parts = [
        _chunk_stats(head(h) / temperature if temperature != 1.0 else head(h), t, want)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return TokenStats(
        *(torch.cat(field) if field[0] is not None else None for field in zip(*parts, strict=True)),
    )


def _chunk_stats(logits: Tensor, targets: Tensor, want: Collection[str]) -> tuple[Tensor | None, ...]:
    logps = torch.log_softmax(logits, dim=-1)
    target_logps = logps.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropy = -(logps.exp() * logps).sum(-1) if "entropy" in want else None
        top1 = logps.argmax(-1) if "top1" in want else None
        mean_logit = logits.mean(-1) if "mean_logit" in want else None
        log_collision = (2 * logps).logsumexp(-1) if "log_collision" in want else None
    return target_logps, entropy, top1, mean_logit, log_collision
