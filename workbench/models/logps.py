"""Log-probabilities of target tokens from hidden states: the LM head and what follows it.

The logits of all tokens together, ``[T, V]``, are what costs the most memory in training, and nothing needs them whole: a token's
log-probability is one logit minus the logarithm of a sum. `token_logps` forms them in pieces and keeps one number a token. For
the backward pass it keeps the slopes of as many pieces as fit a bound, and forms the others again (where the head is frozen it
keeps the gradient of the hidden state, which needs no second pass).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from workbench.errors import UserError
from workbench.models.head_kernel import HeadKernel, kernel_logps, refusal

_PIECE = 2**22  # logits formed at a time: 16 MiB in fp32
_FEW = 2**20  # logits that are formed at once: 4 MiB in fp32
_BLOCK = 128
_KEPT = 2**26  # slopes of logits that may wait for the backward pass: 256 MiB in fp32
Chunked = bool | Literal["auto"]
Support = tuple[Tensor, Tensor]
"""Tokens that could be drawn for each of T outputs: token ids end to end ``[K]``, and how many each has ``[T]``. One with 0
has no restriction; a target always counts as one of its tokens."""


@dataclass
class LogitsProcessing:
    """What turns logits into the distribution that is drawn from: penalty, then temperature, then restriction.

    Args:
        temperature: divides the logits.
        repetition_penalty: divides positive logits (multiplies negative ones) of the tokens before (arXiv:1909.05858, sec. 4.1).
        support: the tokens that could be drawn; None: all.
    """

    temperature: float = 1.0
    repetition_penalty: float = 1.0
    support: Support | None = None


@dataclass
class Seen:
    """The tokens before each of T outputs.

    Args:
        contexts: the sequences that hold the outputs, padded at their ends ``[C, L]``.
        row: which of them each output is in ``[T]``.
        length: how many of its tokens come before the output ``[T]``.
    """

    contexts: Tensor
    row: Tensor
    length: Tensor

    def mask(self, outputs: slice, vocabulary: int) -> Tensor:
        """Which tokens come before each of some outputs ``[n, V]``."""
        tokens = self.contexts[self.row[outputs]]
        before = torch.arange(tokens.shape[1], device=tokens.device) < self.length[outputs, None]
        mask = torch.zeros(len(tokens), vocabulary + 1, dtype=torch.bool, device=tokens.device)
        return mask.scatter_(1, tokens.masked_fill(~before, vocabulary), True)[:, :vocabulary]


@dataclass
class TokenStats:
    """Per trained token.

    Args:
        logps: log-probability of the target ``[T]``, nats.
        entropy: entropy of the distribution ``[T]``, nats; a gradient only where one is asked for.
        top1: most likely token ``[T]``.
        mean_logit: mean of the logits over the vocabulary ``[T]``; no gradient.
        log_collision: ``log sum_v p(v)^2`` ``[T]``, the log-probability that two samples agree; no gradient.
    """

    logps: Tensor
    entropy: Tensor | None = None
    top1: Tensor | None = None
    mean_logit: Tensor | None = None
    log_collision: Tensor | None = None


STATS = tuple(f.name for f in fields(TokenStats))


@dataclass
class Head:
    """An LM head with what some families do to its logits: ``softcap * tanh(scale * head(h) / softcap)``.

    Args:
        module: gives the products of hidden states and head.
        scale: of the products.
        softcap: bound of the logits.
        dtype: in which the products are computed; None: the module's own, or autocast's.
        kernel: what gives `token_logps` its log-probabilities.
    """

    module: nn.Module
    scale: float = 1.0
    softcap: float | None = None
    dtype: torch.dtype | None = None
    kernel: HeadKernel = "torch"

    @classmethod
    def of(cls, hf: PreTrainedModel, dtype: torch.dtype | None = None, kernel: HeadKernel = "torch") -> "Head":
        """The head of a causal language model, computing in ``dtype``.

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
        return cls(module, scale=scale, softcap=getattr(config, "final_logit_softcapping", None), dtype=dtype, kernel=kernel)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., V]`` in fp32.

        Raises:
            UserError: a ``dtype`` is asked of a head that is not one whole matrix.
        """
        if self.dtype is None:
            return self.shape(self.module(hidden).float())
        if not self.is_plain:
            raise UserError(
                f"the head ({type(self.module).__name__}) cannot compute in {str(self.dtype).removeprefix('torch.')}, being an "
                "adapter's, a quantised or a partitioned layer; set method.cast_lm_head_to_fp32=false."
            )
        bias = None if self.module.bias is None else self.module.bias.to(self.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            products = nn.functional.linear(hidden.to(self.dtype), self.module.weight.to(self.dtype), bias)
        return self.shape(products.float())

    def shape(self, logits: Tensor) -> Tensor:
        """What the family does to the products ``[..., V]`` of hidden states and head."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of `shape`, in terms of its result."""
        if self.softcap is None:
            return self.scale
        return self.scale * (1 - (logits / self.softcap) ** 2)

    @property
    def is_plain(self) -> bool:
        """Whether it is one matrix that lies here whole, and not an adapter's, a quantised or a partitioned layer."""
        weight = getattr(self.module, "weight", None)
        hooked = self.module._forward_hooks or self.module._forward_pre_hooks
        plain = type(self.module) is nn.Linear and not hooked and not isinstance(weight, DTensor)
        return plain and weight.is_floating_point() and weight.shape == (self.module.out_features, self.module.in_features)


def token_logps(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    want: Collection[str] = ("logps",),
    chunked: Chunked = "auto",
    entropy_grad: bool = False,
    repetition_penalty: float = 1.0,
    seen: Seen | None = None,
    support: Support | None = None,
) -> TokenStats:
    """Log-probabilities of ``targets`` given the hidden states that predict them.

    Args:
        hidden: ``[T, H]``.
        head: the model's head.
        targets: token ids ``[T]``.
        temperature: divides the logits.
        want: any further fields of `TokenStats`.
        chunked: form the logits in pieces, and again in the backward pass, so that memory does not grow with T x V; False forms
            them at once; ``auto`` does that as long as they are few, and spares the second pass as far as a bound allows.
        entropy_grad: let the entropy carry a gradient, ``d H / d z = -p (log p + H)``.
        repetition_penalty: divides positive logits (multiplies negative ones) of the tokens in ``seen``, before all else.
        seen: the tokens before each target; needed where there is a penalty.
        support: the tokens that each target could have been; the others have no probability. All statistics but ``mean_logit``
            are of this distribution.

    Returns:
        `TokenStats` with ``[T]`` tensors.
    """
    if support is not None or repetition_penalty != 1.0 or entropy_grad:
        if head.kernel != "torch":
            raise refusal(
                "knows no restriction to some tokens, no repetition penalty and no gradient of the entropy: leave out "
                "method.top_k, top_p, min_p, repetition_penalty and entropy_coef, and what restricts the engine"
            )
        processing = LogitsProcessing(temperature, repetition_penalty, support)
        return processed_logps(hidden, head, targets, processing, seen, want=want, entropy_grad=entropy_grad)
    if head.kernel != "torch" and len(hidden):
        # In every call, so that a policy and what it is compared with compute alike; statistics are an addition of torch's.
        stats = TokenStats(kernel_logps(hidden, head, targets, temperature))
        if others := [name for name in STATS if name != "logps" and name in want]:
            plain = replace(head, kernel="torch")
            with torch.no_grad():
                rest = token_logps(hidden, plain, targets, temperature=temperature, want=others, chunked=True)
            stats = replace(rest, logps=stats.logps)
        return stats
    few = len(hidden) * getattr(head.module, "out_features", 2**17) <= _FEW
    if chunked is False or (chunked == "auto" and few):
        return _stats(head(hidden) / temperature if temperature != 1.0 else head(hidden), targets, want)
    if head.is_plain:
        names = [name for name in STATS if name == "logps" or name in want]
        weight, bias = head.module.weight, head.module.bias
        kept = _KEPT if chunked == "auto" else 0
        values = _HeadStats.apply(hidden, weight, bias, targets, head, temperature, tuple(names), kept)
        return TokenStats(**dict(zip(names, values, strict=True)))
    # Some other layer: its own forward, piece by piece, and again in the backward pass.
    rows = max(1, _PIECE // getattr(head.module, "out_features", 2**17))
    parts = []
    for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
        if len(hidden) > rows and torch.is_grad_enabled():
            parts.append(torch.utils.checkpoint.checkpoint(_piece, h, t, head, temperature, want, use_reentrant=False))
        else:
            parts.append(_piece(h, t, head, temperature, want))
    joined = (torch.cat(v) if v[0] is not None else None for v in zip(*parts, strict=True))
    return TokenStats(*joined)


def _piece(hidden: Tensor, targets: Tensor, head: Head, temperature: float, want: Collection[str]) -> tuple[Tensor | None, ...]:
    stats = _stats(head(hidden) / temperature, targets, want)
    return tuple(getattr(stats, name) for name in STATS)


def _stats(logits: Tensor, targets: Tensor, want: Collection[str]) -> TokenStats:
    """Statistics of logits ``[T, V]``."""
    return _stats_and_probs(logits, targets, want)[0]


def _stats_and_probs(
    logits: Tensor,
    targets: Tensor,
    want: Collection[str],
    keep: bool = False,
    spare: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[TokenStats, Tensor | None]:
    """Statistics of logits ``[T, V]`` and, if ``keep``, the probabilities ``[T, V]``, the second of two arrays that are
    ``spare``; without a gradient if these are given."""
    logps = torch.log_softmax(logits, dim=-1, out=spare[0])
    stats = TokenStats(logps.gather(-1, targets.unsqueeze(-1)).squeeze(-1))
    with torch.no_grad():
        stats.top1 = _top1(logps) if "top1" in want else None
        stats.mean_logit = logits.mean(-1) if "mean_logit" in want else None
        stats.log_collision = (2 * logps).logsumexp(-1) if "log_collision" in want else None
        probs = torch.exp(logps, out=spare[1]) if keep or "entropy" in want else None
        stats.entropy = -torch.mul(probs, logps, out=spare[0]).sum(-1) if "entropy" in want else None
    return stats, probs if keep else None


def _top1(values: Tensor) -> Tensor:
    """``values.argmax(-1)`` ``[T]`` of ``[T, V]``. On a CPU a maximum per block of V comes first: an argmax over a long row takes
    several times as long as a maximum."""
    count = values.shape[-1] // _BLOCK
    if values.device.type != "cpu" or count == 0:
        return values.argmax(-1)
    blocks, rest = values[:, : count * _BLOCK].unflatten(-1, (count, _BLOCK)), values[:, count * _BLOCK :]
    best = torch.cat([blocks.amax(-1), rest], dim=-1).argmax(-1)
    block = best.clamp(max=count - 1)
    within = blocks[torch.arange(len(values)), block].argmax(-1)
    return torch.where(best < count, block * _BLOCK + within, best - count + count * _BLOCK)


def processed_logps(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    processing: LogitsProcessing,
    seen: Seen | None = None,
    *,
    want: Collection[str] = ("logps",),
    entropy_grad: bool = False,
) -> TokenStats:
    """`token_logps` under a repetition penalty, over a support, or with the entropy's gradient: piece by piece, and again in the
    backward pass."""
    if processing.repetition_penalty != 1.0 and seen is None:
        raise ValueError("repetition_penalty needs the tokens before each target (seen).")
    rows = max(1, _PIECE // getattr(head.module, "out_features", 2**17))
    options = (head, processing, seen, want, entropy_grad)
    parts = []
    for start in range(0, len(hidden), rows):
        piece = slice(start, min(start + rows, len(hidden)))
        args = (hidden[piece], targets[piece], piece, *options)
        if len(hidden) > rows and torch.is_grad_enabled():
            parts.append(torch.utils.checkpoint.checkpoint(_processed_piece, *args, use_reentrant=False))
        else:
            parts.append(_processed_piece(*args))
    joined = (torch.cat(v) if v[0] is not None else None for v in zip(*parts, strict=True))
    return TokenStats(*joined)


def _processed_piece(
    hidden: Tensor,
    targets: Tensor,
    piece: slice,
    head: Head,
    processing: LogitsProcessing,
    seen: Seen | None,
    want: Collection[str],
    entropy_grad: bool,
) -> tuple[Tensor | None, ...]:
    logits = head(hidden)
    if processing.repetition_penalty != 1.0:
        logits = penalise(logits, seen.mask(piece, logits.shape[-1]), processing.repetition_penalty)
    if processing.temperature != 1.0:
        logits = logits / processing.temperature
    mean_logit = logits.detach().mean(-1) if "mean_logit" in want else None
    if processing.support is not None:
        logits = logits.masked_fill(~_support_mask(processing.support, piece, targets, logits.shape[-1]), float("-inf"))
    stats = _stats(logits, targets, {name for name in want if name not in ("entropy", "mean_logit")})
    stats.mean_logit = mean_logit
    if "entropy" in want:
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            logps = torch.log_softmax(logits, dim=-1)
            finite = logps.masked_fill(logps == float("-inf"), 0.0)  # 0 log 0 = 0, and so is its gradient
            stats.entropy = -(logps.exp() * finite).sum(-1)
    return tuple(getattr(stats, name) for name in STATS)


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits ``[..., V]`` with those of ``seen`` tokens divided by ``penalty`` where positive and multiplied where negative
    (arXiv:1909.05858, sec. 4.1, with the sign minded)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _support_mask(support: Support, piece: slice, targets: Tensor, vocabulary: int) -> Tensor:
    """Which tokens some outputs could be ``[n, V]``."""
    ids, counts = support
    first, stop = counts[: piece.start].sum(), counts[: piece.stop].sum()
    counts = counts[piece]
    row = torch.repeat_interleave(torch.arange(len(counts), device=ids.device), counts)
    mask = (counts == 0)[:, None].repeat(1, vocabulary)
    mask[row, ids[first:stop].long()] = True
    return mask.scatter_(1, targets[:, None], True)


class _HeadStats(torch.autograd.Function):
    """``logps`` and statistics of a plain head, a piece of the logits at a time.

    With logits ``z = shape(W h + b) / T``, ``d log p(y) / d z = onehot(y) - p``; from it follow the gradients of ``h`` and ``W``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        temperature: float,
        names: tuple[str, ...],
        room: int,
    ) -> tuple[Tensor, ...]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        dtype = head.dtype or dtype
        ctx.head, ctx.temperature, ctx.dtype = head, temperature, dtype
        ctx.rows = rows = max(1, _PIECE // len(weight))
        trains_head = weight.requires_grad or (bias is not None and bias.requires_grad)
        keep = hidden.requires_grad and not trains_head
        waiting = min(len(hidden), room // len(weight) // rows * rows) if trains_head else 0
        slopes = torch.empty(waiting, len(weight), dtype=dtype, device=hidden.device)
        kept = torch.empty_like(hidden) if keep else None
        kinds = {name: torch.int64 if name == "top1" else torch.float32 for name in names}
        values = {name: torch.empty(len(hidden), dtype=kind, device=hidden.device) for name, kind in kinds.items()}
        with torch.autocast(device, enabled=False):
            products = _Products(weight.to(dtype), None if bias is None else bias.to(dtype), head, temperature, rows)
            for piece in products.pieces(len(hidden), waiting):
                h, t = hidden[piece].to(dtype), targets[piece]
                waits = piece.stop <= waiting
                logits, scaled = products.logits(h)
                spare = products.spare(slopes[piece] if waits else None, len(h))
                stats, probs = _stats_and_probs(scaled, t, names, keep or waits, spare)
                for name in names:
                    values[name][piece] = getattr(stats, name)
                if keep:
                    kept[piece] = _slope(logits, t, head, temperature, probs).to(dtype) @ products.matrix
                elif waits:
                    slopes[piece] = _slope(logits, t, head, temperature, probs)
        ctx.save_for_backward(hidden if trains_head else None, weight, bias, targets, kept, slopes)
        ctx.mark_non_differentiable(*(v for name, v in values.items() if name != "logps"))
        return tuple(values.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, kept, slopes = ctx.saved_tensors
        if kept is not None:
            return (kept * grad[:, None]).to(kept.dtype), None, None, None, None, None, None, None
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        offset = None if bias is None else bias.to(ctx.dtype)
        products = _Products(weight.to(ctx.dtype), offset, ctx.head, ctx.temperature, ctx.rows)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        grad_bias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if need_bias else None
        for piece in products.pieces(len(hidden), len(slopes)):
            h, factor = hidden[piece], grad[piece, None]
            if piece.stop <= len(slopes):
                slope = slopes[piece]
            else:
                logits, scaled = products.logits(h.to(ctx.dtype))
                probs = torch.softmax(scaled, dim=-1, out=products.spare(None, len(h))[1])
                slope = _slope(logits, targets[piece], ctx.head, ctx.temperature, probs).to(ctx.dtype)
            # The factor of each token goes to the narrow side of the products.
            if need_hidden:
                grad_hidden[piece] = (slope @ products.matrix) * factor
            if need_weight:
                _add_product(grad_weight, slope, (h * factor).to(ctx.dtype))
            if need_bias:
                grad_bias.addmv_(slope.float().T, grad[piece])
        grads = (grad_hidden, *(g if g is None else g.to(weight.dtype) for g in (grad_weight, grad_bias)))
        return (*grads, None, None, None, None, None)


class _Products:
    """Logits of a head, a piece at a time in the same memory: pieces that are allocated and freed one after the other, with
    small results in between, leave holes in a CPU's heap that nothing fills.

    Args:
        matrix: ``[V, H]``.
        bias: ``[V]``.
        head: what shapes the products.
        temperature: divides the logits.
        rows: of a piece.
    """

    def __init__(self, matrix: Tensor, bias: Tensor | None, head: Head, temperature: float, rows: int) -> None:
        self.matrix, self.bias, self.head, self.temperature, self.rows = matrix, bias, head, temperature, rows
        self._memory: dict[str, Tensor] = {}

    def pieces(self, tokens: int, first: int) -> Iterator[slice]:
        """All tokens, none of the pieces on both sides of ``first``."""
        for start, stop in ((0, first), (first, tokens)):
            for begin in range(start, stop, self.rows):
                yield slice(begin, min(begin + self.rows, stop))

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[n, V]`` in fp32 as `Head.slope` reads them, and these by the temperature."""
        out = self._reuse("products", len(hidden), self.matrix.dtype)
        if self.bias is None:
            torch.mm(hidden, self.matrix.T, out=out)
        else:
            torch.addmm(self.bias, hidden, self.matrix.T, out=out)
        logits = self.head.shape(out if out.dtype == torch.float32 else self._reuse("logits", len(hidden)).copy_(out))
        if self.temperature == 1.0:
            return logits, logits
        return logits, logits.div_(self.temperature) if self.head.softcap is None else logits / self.temperature

    def spare(self, last: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
        """Memory for two arrays ``[n, V]`` in fp32, the second of them ``last`` if that is one."""
        fits = last is not None and last.dtype == torch.float32
        return self._reuse("first", rows), last if fits else self._reuse("second", rows)

    def _reuse(self, name: str, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if name not in self._memory or len(self._memory[name]) < rows:
            self._memory[name] = torch.empty(rows, len(self.matrix), dtype=dtype, device=self.matrix.device)
        return self._memory[name][:rows]


def _add_product(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """``total += slope^T hidden`` in fp32."""
    if slope.dtype == torch.float32:
        total.addmm_(slope.T, hidden)
    else:
        total.add_(slope.T @ hidden)


def _slope(logits: Tensor, targets: Tensor, head: Head, temperature: float, probs: Tensor) -> Tensor:
    """Derivative of each target's log-probability by the products of hidden states and head ``[T, V]``; overwrites ``probs``."""
    slope = probs.neg_()
    slope.scatter_add_(-1, targets.unsqueeze(-1), slope.new_ones(len(targets), 1))
    factor = head.slope(logits)
    if temperature != 1.0:
        factor = factor / temperature
    return slope.mul_(factor) if isinstance(factor, Tensor) or factor != 1.0 else slope
