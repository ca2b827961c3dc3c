"""Turning a `MicroBatch` into what a transformers model takes."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workbench.data.batch import MicroBatch
from workbench.models.attention import Forest, no_mask

Layout = Literal["padded", "packed", "shared"]


@dataclass
class ModelInputs:
    """Inputs of a backbone and the way back.

    Args:
        input_ids: ``[B, L]``.
        attention_mask: ``[B, L]``; with a forest, which says what each token sees, of no meaning.
        position_ids: ``[B, L]``.
        index: for every token of the micro-batch its place in the flattened ``[B * L]``, ``[N]``.
        tokens: places that hold a token.
        forest: the segments of a row that holds several; None for padded rows.
        real: 1 for tokens, 0 for padding ``[B, L]``; None: no padding.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    index: Tensor
    tokens: int
    forest: Forest | None = None
    real: Tensor | None = None

    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        if self.forest is None:
            rows, length = self.input_ids.shape
            return rows * length * (length + 1) // 2
        lengths = self.forest.lengths
        before = [sum(lengths[s] for s in self.forest.context(segment)) for segment in range(len(lengths))]
        return sum(n * b + n * (n + 1) // 2 for n, b in zip(lengths, before, strict=True))


def sequences(batch: MicroBatch) -> list[list[int]]:
    """Root-to-leaf chains of segments: what a model without any sharing has to read, one list of segment indices each."""
    parent = batch.parent.tolist()
    inner = set(parent)
    chains = []
    for leaf in range(len(parent)):
        if leaf in inner:
            continue
        chain = [leaf]
        while parent[chain[-1]] >= 0:
            chain.append(parent[chain[-1]])
        chains.append(chain[::-1])
    return chains


def to_inputs(batch: MicroBatch, layout: Layout, pad_to_multiple_of: int | None = None) -> ModelInputs:
    """Lays a micro-batch out as ``padded`` rows (on the right), as one ``packed`` row of whole sequences without padding, or as
    one row of segments, each of them once, where completions ``shared`` their prompt."""
    if layout == "shared":
        return _shared(batch, pad_to_multiple_of)
    starts = batch.starts.tolist()
    chains = [
        torch.cat([torch.arange(starts[s], starts[s + 1], device=batch.tokens.device) for s in chain])
        for chain in sequences(batch)
    ]
    return _padded(batch, chains, pad_to_multiple_of) if layout == "padded" else _packed(batch, chains, pad_to_multiple_of)


def _round_up(length: int, multiple: int | None) -> int:
    return -(-length // multiple) * multiple if multiple else length


def _padded(batch: MicroBatch, chains: list[Tensor], multiple: int | None) -> ModelInputs:
    device = batch.tokens.device
    length = _round_up(max(len(c) for c in chains), multiple)
    input_ids = torch.zeros(len(chains), length, dtype=torch.int64, device=device)
    mask = torch.zeros_like(input_ids)
    index = torch.zeros(len(batch.tokens), dtype=torch.int64, device=device)
    for b, chain in enumerate(chains):
        input_ids[b, : len(chain)] = batch.tokens[chain]
        mask[b, : len(chain)] = 1
        index[chain] = torch.arange(len(chain), device=device) + b * length
    positions = torch.arange(length, device=device).expand(len(chains), -1)
    return ModelInputs(input_ids, mask, positions, index, sum(map(len, chains)), real=mask)


def _packed(batch: MicroBatch, chains: list[Tensor], multiple: int | None) -> ModelInputs:
    lengths = [len(chain) for chain in chains]
    return _row(batch, torch.cat(chains), Forest(lengths, [-1] * len(chains), batch.tokens.device), multiple)


def _shared(batch: MicroBatch, multiple: int | None) -> ModelInputs:
    order = torch.arange(len(batch.tokens), device=batch.tokens.device)
    return _row(batch, order, Forest(batch.starts.diff().tolist(), batch.parent.tolist(), order.device), multiple)


def _row(batch: MicroBatch, order: Tensor, forest: Forest, multiple: int | None) -> ModelInputs:
    """One row of the tokens in ``order``; the filler at its end is a segment of its own."""
    device = batch.tokens.device
    total = len(order)
    filler = _round_up(total, multiple) - total
    if filler:
        forest.lengths.append(filler)
        forest.parent.append(-1)
    before = [sum(forest.lengths[s] for s in forest.context(segment)) for segment in range(len(forest.lengths))]
    positions = [torch.arange(start, start + n, device=device) for start, n in zip(before, forest.lengths, strict=True)]
    input_ids = torch.cat([batch.tokens[order], batch.tokens.new_zeros(filler)])
    index = torch.zeros(len(batch.tokens), dtype=torch.int64, device=device)
    index[order] = torch.arange(total, device=device)
    real = (torch.arange(total + filler, device=device) < total)[None].long() if filler else None
    return ModelInputs(input_ids[None], no_mask(device), torch.cat(positions)[None], index, total, forest, real)
