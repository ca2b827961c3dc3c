"""Attention over a forest in one kernel on a GPU (FlexAttention, arXiv:2412.05496).

The kernel skips blocks of 128 queries by 128 keys in which nothing is seen, and reads no mask in blocks in which all is. Which
blocks these are follows from the mask itself, evaluated a few rows of blocks at a time, so that no N x N array ever exists.
Grouped heads are not copied, and only the row's end is padded, to whole blocks: the kernel has no business beyond it.

No kernel is trusted unseen: before the first use of each kind, a small forest is computed in both ways, with its gradients.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from workbench.models.gguf import first_line

log = logging.getLogger(__name__)

BLOCK = 128
_PAIRS = 2**24  # queries times keys of which the mask is evaluated at a time
_KERNELS = 64  # by kind, with and without a gradient
_CHECKED = ([190, 70, 135, 40, 33], [-1, 0, 0, 2, -1])  # lengths and parents: a prompt, its continuations, and a document
_TOLERANCE = {torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # fp32 products may round to tf32
Mask = Callable[[Tensor | None, Tensor | None, Tensor, Tensor], Tensor]
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
Otherwise = Callable[[list[int], list[int], int | None], Compute]


@dataclass(frozen=True)
class Kind:
    """What decides which kernel is built.

    Args:
        device: of queries, keys and values.
        dtype: of queries, keys and values.
        heads: of the queries and of the keys.
        widths: of a head's keys and values.
        scaling: of the products; None: one over the root of the width.
        window: tokens that a query sees; None: all before it.
        softcap: bound of the scores.
    """

    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int]
    widths: tuple[int, int]
    scaling: float | None
    window: int | None
    softcap: float | None

    def __str__(self) -> str:
        own = f"{self.heads[0]}/{self.heads[1]} heads of {self.widths[0]} in {str(self.dtype).removeprefix('torch.')}"
        return own + "".join(f", {n} {v}" for n, v in (("window", self.window), ("softcap", self.softcap)) if v is not None)


def visibility(lengths: list[int], parent: list[int], window: int | None, device: torch.device) -> Mask:
    """Which keys a query sees: those of its own segment and of the segments that this one continues, at most ``window - 1``
    positions before it and none after.

    Segments are numbered so that all that continue one, directly or not, follow it at once: a key is in the query's past where
    the query's number lies in the range of the key's.
    """
    count = len(lengths)
    size, before, number, free = [1] * count, [0] * count, [0] * count, [0] * (count + 1)
    for segment in reversed(range(count)):
        if (p := parent[segment]) >= 0:
            size[p] += size[segment]
    for segment in range(count):
        p = parent[segment]  # -1, the place of the roots, is the last of `free`
        number[segment] = free[p]
        free[p] += size[segment]
        free[segment] = number[segment] + 1
        before[segment] = before[p] + lengths[p] if p >= 0 else 0

    def of_tokens(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).repeat_interleave(repeats).to(device)

    repeats = torch.tensor(lengths)
    enter = of_tokens(number)
    leave = of_tokens([n + s for n, s in zip(number, size, strict=True)])
    starts = repeats.cumsum(0) - repeats
    position = (torch.arange(int(repeats.sum())) - (starts - torch.tensor(before)).repeat_interleave(repeats)).int().to(device)

    def sees(batch: Tensor | None, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        return (enter[key] <= enter[query]) & (enter[query] < leave[key]) & (position[key] <= position[query])

    def sees_near(batch: Tensor | None, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        return sees(batch, head, query, key) & (position[query] - position[key] < window)

    return sees if window is None else sees_near


def block_mask(lengths: list[int], parent: list[int], window: int | None, device: torch.device) -> BlockMask:
    """The mask of a row of N tokens, and the blocks of it that have to be computed; padding is a segment of its own."""
    padding = -sum(lengths) % BLOCK
    sees = visibility([*lengths, padding], [*parent, -1], window, device)
    total = sum(lengths) + padding
    blocks = total // BLOCK
    keys = torch.arange(total, device=device)
    rows = max(1, _PAIRS // (total * BLOCK)) * BLOCK
    counts = []
    for queries in keys.split(rows):
        counts.append(sees(None, None, queries[:, None], keys).view(-1, BLOCK, blocks, BLOCK).sum((1, 3)))
    count = torch.cat(counts)
    full = count == BLOCK * BLOCK
    return BlockMask.from_kv_blocks(
        *_listed((count > 0) & ~full), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(total, total)
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are chosen ``[1, 1, R]``, and which, these first ``[1, 1, R, C]``."""
    indices = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1).int()[None, None], indices.int()[None, None].contiguous()


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None, softcap: float | None) -> Tensor:
    """Attention ``[1, heads, N, D]`` of queries ``[1, heads, N, D]`` over keys and values ``[1, kv_heads, N, D]``."""
    tokens, whole = query.shape[2], mask.shape[-1]
    query, key, value = (F.pad(t, (0, 0, 0, whole - tokens)) for t in (query, key, value))
    score_mod = None if softcap is None else _capped(softcap, query.device)
    gqa = query.shape[1] > key.shape[1]
    options = {"BACKEND": "TRITON"}
    with torch._dynamo.config.patch(recompile_limit=_KERNELS):
        out = _kernel()(query, key, value, score_mod, mask, scaling, gqa, kernel_options=options)
    return out[:, :, :tokens]


@functools.cache
def _kernel() -> Callable[..., Tensor]:
    # With fullgraph a kernel too many is an error; without it, it would be the written-out function, with all N x N scores.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@functools.cache
def _capped(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    bound = torch.tensor(softcap, device=device)  # a number would be a symbol to the compiler, which breaks the graph

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return score_mod


_trusted: dict[Kind, bool] = {}


def trusted(kind: Kind, otherwise: Otherwise) -> bool:
    """Whether the kernel of this kind gives what ``otherwise`` gives, told by a small forest once a process; a line in the log
    says where it does not.

    Args:
        kind: of the kernel.
        otherwise: makes the function of queries, keys and values to compare with, from lengths, parents and window.
    """
    if kind not in _trusted:
        log.info("FlexAttention is built and checked for %s", kind)
        # In a thread of its own no hook sees it, which checkpointing and offloading hang on what is saved for a backward pass.
        with ThreadPoolExecutor(1) as thread:
            fault = thread.submit(_fault, kind, otherwise).result()
        _trusted[kind] = fault is None
        if fault is not None:
            log.warning("FlexAttention is not used for %s, but SDPA per segment: %s", kind, fault)
    return _trusted[kind]


def _fault(kind: Kind, otherwise: Otherwise) -> str | None:
    lengths, parent = _CHECKED
    window = None if kind.window is None else min(kind.window, 64)  # a wide one would not close over these few tokens
    generator = torch.Generator().manual_seed(0)
    shapes = [(kind.heads[0], kind.widths[0]), (kind.heads[1], kind.widths[0]), (kind.heads[1], kind.widths[1])]
    inputs = [torch.randn(1, heads, sum(lengths), width, generator=generator) for heads, width in shapes]
    slope = torch.randn(1, kind.heads[0], sum(lengths), kind.widths[1], generator=generator)

    def flex(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = block_mask(lengths, parent, window, kind.device)
        return attend(query, key, value, mask, kind.scaling, kind.softcap)

    try:
        with torch.cuda.device(kind.device) if kind.device.type == "cuda" else contextlib.nullcontext():
            found = [_with_gradients(f, inputs, slope, kind) for f in (otherwise(lengths, parent, window), flex)]
    except Exception as error:  # whatever a compiler or a driver says
        return first_line(error)
    # Each entry is rounded by itself: compared is how far a whole tensor lies off, which no rounding makes large.
    off = torch.stack([(b - a).norm() / a.norm() for a, b in zip(*found, strict=True)]).max().item()  # NaN if one is
    return None if off <= _TOLERANCE[kind.dtype] else f"its numbers are off by {off:.2g} of their size"


def _with_gradients(function: Compute, inputs: list[Tensor], slope: Tensor, kind: Kind) -> list[Tensor]:
    given = [t.to(kind.device, kind.dtype, copy=True).requires_grad_() for t in inputs]
    out = function(*given)
    return [t.detach().float() for t in (out, *torch.autograd.grad(out, given, slope.to(out)))]
