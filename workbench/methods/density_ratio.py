"""Underlying distribution matching: how much likelier a prompt is among desirable rows than among undesirable ones.

A linear classifier (`workbench.losses.bco.fit_density_ratio`) on embeddings of prompts tells the two apart (Jung et al. 2024,
arXiv:2404.04656, on distribution shift). Everything here is computed once, before training, on whole data sets, and depends on
rows, embeddings and seed alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModel, PreTrainedTokenizerBase

from workbench.data.batch import MicroBatch, Role
from workbench.losses.bco import distribution_weights, fit_density_ratio
from workbench.models.load import ModelSpec, as_spec, load_model, locate_spec, read_checkpoint
from workbench.models.reference import Reference
from workbench.models.tokenizer import load_tokenizer

COLUMN = "density_ratio"
_BESIDE = ("pooler", "lm_head", "cls.", "score.")  # parts of a checkpoint that an encoder's hidden states do not read

Encoder = str | Mapping[str, Any] | ModelSpec | Callable[[list[str]], Tensor]
Embed = Callable[[MicroBatch], Tensor]
"""Embeddings of the prompts of a micro-batch's rows ``[R, D]``; zeros for a row without one."""
PerRow = Callable[[Dataset, Embed], np.ndarray]
"""``per_row(rows, compute)``: numbers of every row ``[rows, n]``, over all ranks."""


def hidden_embedding(reference: Reference) -> Embed:
    """The reference's last hidden state, averaged over the prompt."""

    def embed(batch: MicroBatch) -> Tensor:
        prompts = prompts_of(batch)
        hidden = reference.outputs(prompts, ["hidden"]).hidden.double()
        row = prompts.row[prompts.segment[prompts.outputs]]
        kept = row >= 0
        sums = hidden.new_zeros(batch.num_rows, hidden.shape[1]).index_add(0, row[kept], hidden[kept])
        return sums / torch.bincount(row[kept], minlength=batch.num_rows).clamp(min=1).unsqueeze(1)

    return embed


def text_embedding(model: Encoder, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> Embed:
    """Embeds the prompts' text, special tokens included.

    Args:
        model: an encoder (its last hidden state is averaged over the text), or a function from texts to ``[n, D]``.
        tokenizer: that of the policy.
        device: for the encoder.
    """
    embed_texts = model if callable(model) else _encoder(as_spec(model), device)

    def embed(batch: MicroBatch) -> Tensor:
        texts = [""] * batch.num_rows
        prompts = prompts_of(batch)
        if not prompts.is_empty:
            pieces = prompts.tokens.split(prompts.starts.diff().tolist())
            for row, ids in zip(prompts.row.tolist(), pieces, strict=True):
                texts[row] = tokenizer.decode(ids[:-1])
        # an empty micro-batch embeds a text too, and keeps nothing of it
        return embed_texts(texts or [""])[: len(texts)].to(device, torch.float64)

    return embed


def _encoder(spec: ModelSpec, device: torch.device) -> Callable[[list[str]], Tensor]:
    location = locate_spec(spec)
    if location.kind in ("tiny", "adapter"):
        model = load_model(spec).base_model
    else:
        model, _ = read_checkpoint(spec, location, AutoModel, may_differ=_is_beside)
    tokenizer, model = load_tokenizer(spec), model.to(device).eval()
    tokenizer.padding_side = "right"

    @torch.no_grad()
    def embed(texts: list[str]) -> Tensor:
        inputs = tokenizer([text or "\n" for text in texts], return_tensors="pt", padding=True).to(device)
        hidden = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).last_hidden_state.double()
        mask = inputs.attention_mask.unsqueeze(-1).double()
        return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)

    return embed


def _is_beside(key: str) -> bool:
    return any(part in key for part in _BESIDE)


def prompts_of(batch: MicroBatch) -> MicroBatch:
    """The prompts of a micro-batch alone, ``row`` counting its rows, each with its last token twice, so that the outputs are
    predicted at every token of the prompt."""
    order = torch.unique_consecutive(batch.row, return_inverse=True)[1].tolist()
    starts = batch.starts.tolist()
    segments = batch.segments_of(Role.PROMPT).tolist()
    if not segments:
        return MicroBatch.empty(batch.norm).to(batch.tokens.device)
    ids = [batch.tokens[starts[s] : starts[s + 1]].tolist() for s in segments]
    rows = [
        {
            "input_ids": [*prompt, prompt[-1]],
            "weights": [1.0] * (len(prompt) + 1),
            "lengths": [len(prompt) + 1],
            "parents": [-1],
            "roles": [int(Role.PROMPT)],
        }
        for prompt in ids
    ]
    return MicroBatch.from_rows(rows, [order[s] for s in segments], batch.norm).to(batch.tokens.device)


def fit(rows: Dataset, embed: Embed, per_row: PerRow, *, sample_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """The classifier of the training rows' prompts.

    Args:
        rows: prepared rows of both labels.
        embed: embeds prompts.
        per_row: computes it over rows.
        sample_size: most rows of each label that it sees.
        seed: of their choice.
    """
    labels = _labels(rows)
    generator = np.random.default_rng([seed, sample_size])
    chosen = []
    for label in (True, False):
        index = np.flatnonzero(labels == label)
        chosen.append(index if len(index) <= sample_size else np.sort(generator.choice(index, sample_size, replace=False)))
    index = np.concatenate(chosen)
    return fit_density_ratio(torch.from_numpy(per_row(rows.select(index), embed)), torch.from_numpy(labels[index]))


def with_ratios(
    rows: Dataset, embed: Embed, per_row: PerRow, classifier: tuple[Tensor, Tensor], *, minimum: float, maximum: float
) -> Dataset:
    """``rows`` with the column ``density_ratio``: `distribution_weights` of undesirable rows, 1 for others."""
    index = np.flatnonzero(~_labels(rows))
    ratios = np.ones(len(rows))

    def probability(batch: MicroBatch) -> Tensor:
        weight, bias = (value.to(batch.tokens.device) for value in classifier)
        return torch.sigmoid(embed(batch) @ weight + bias)

    if len(index):
        probabilities = torch.from_numpy(per_row(rows.select(index), probability)[:, 0])
        ratios[index] = distribution_weights(probabilities, minimum=minimum, maximum=maximum).numpy()
    if COLUMN in rows.column_names:
        rows = rows.remove_columns(COLUMN)
    return rows.add_column(COLUMN, list(ratios))


def _labels(rows: Dataset) -> np.ndarray:
    return rows.select_columns(["label"]).with_format("numpy")[:]["label"].astype(bool)
