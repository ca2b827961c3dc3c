"""Turning a `MicroBatch` into what a transformers model takes."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workbench.data.batch import MicroBatch

Layout = Literal["padded", "packed"]


@dataclass
class ModelInputs:
    """Inputs of a backbone and the way back.

    Args:
        input_ids: ``[B, L]``.
        attention_mask: ``[B, L]``, or None where positions alone tell the documents apart.
        position_ids: ``[B, L]``.
        index: for every token of the micro-batch its place in the flattened ``[B * L]``, ``[N]``.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor
    index: Tensor


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
    """Lays a micro-batch out as ``padded`` rows (on the right) or as one ``packed`` row whose positions restart."""
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
    return ModelInputs(input_ids, mask, positions, index)


def _packed(batch: MicroBatch, chains: list[Tensor], multiple: int | None) -> ModelInputs:
    device = batch.tokens.device
    total = sum(len(c) for c in chains)
    filler = _round_up(total, multiple) - total
    flat = torch.cat(chains)
    positions = [torch.arange(len(c), device=device) for c in chains] + [torch.arange(filler, device=device)] * bool(filler)
    input_ids = torch.cat([batch.tokens[flat], batch.tokens.new_zeros(filler)])
    index = torch.zeros(len(batch.tokens), dtype=torch.int64, device=device)
    index[flat] = torch.arange(total, device=device)
    return ModelInputs(input_ids[None], None, torch.cat(positions)[None], index)
