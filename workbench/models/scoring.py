"""Scores of a trained reward model: rows become tokens as they do in training, and each is read where it was learnt."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.data.batch import MicroBatch, Role
from workbench.data.features import Features, RowPreparer
from workbench.data.formats import detect_type
from workbench.data.spec import PrepareSpec
from workbench.errors import UserError
from workbench.losses.reduce import Normalisers
from workbench.models.heads import classification_head
from workbench.models.policy import Policy, evaluating

Model = PreTrainedModel | Policy
_TEXTS = ("prompt_completion", "language_modeling")
_NORM = Normalisers(1.0, 1.0, 1.0, 1.0)  # nothing is divided here


def score(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, Any]],
    *,
    spec: PrepareSpec | None = None,
    batch_size: int = 32,
) -> list[float]:
    """One score a row, of a model that `workbench.methods.reward.Reward` has trained.

    Args:
        model: the classifier, from `workbench.models.heads.load_classifier` or in training.
        tokenizer: its tokenizer.
        rows: ``prompt`` and ``completion``, or ``messages``, or ``text``; texts or messages.
        spec: how rows become tokens; None: as they stand, of any length.
        batch_size: rows per forward pass; they are sorted by length, so that little is padded.

    Raises:
        UserError: a row of another type, or one that leaves nothing to score; a model with another number of outputs.
    """
    _check_outputs(model, 1)
    found = [0.0] * len(rows)
    for index, batch, policy in _batches(model, tokenizer, rows, _TEXTS, spec, batch_size):
        for i, value in zip(index, policy(batch, ["scores"]).scores.squeeze(-1).tolist(), strict=True):
            found[i] = value
    return found


def score_steps(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, Any]],
    *,
    spec: PrepareSpec | None = None,
    batch_size: int = 32,
) -> list[list[float]]:
    """For each row the probability that each of its steps is right, by a model that `workbench.methods.prm.PRM` has trained.

    Args:
        model: as for `score`.
        tokenizer: its tokenizer.
        rows: ``prompt`` and ``completions``, a list of steps.
        spec: how rows become tokens: ``step_separator`` must be that of the training; None: as they stand, of any length.
        batch_size: as for `score`.

    Raises:
        UserError: as `score`.
    """
    _check_outputs(model, 2)
    rows = [{**row, "labels": [0.0] * len(row.get("completions") or ())} for row in rows]
    found: list[list[float]] = [[] for _ in rows]
    for _, batch, policy in _batches(model, tokenizer, rows, ("stepwise_supervision",), spec, batch_size):
        steps = batch.segments_of(Role.STEP)
        out = policy(batch, ["scores"], at=batch.starts[steps + 1] - 1)
        for i, value in zip(batch.row[steps].tolist(), out.scores.softmax(-1)[:, 1].tolist(), strict=True):
            found[i].append(value)
    return found


def _check_outputs(model: Model, number: int) -> None:
    hf = model.hf if isinstance(model, Policy) else model
    found = next(weight for name, weight in classification_head(hf).named_parameters() if name.endswith("weight")).shape[0]
    if found != number:
        raise UserError(
            f"This model has {found} outputs, not {number}: score is for reward models, score_steps for those of steps."
        )


@torch.no_grad()
def _batches(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, Any]],
    data_types: Sequence[str],
    spec: PrepareSpec | None,
    batch_size: int,
) -> Iterator[tuple[list[int], MicroBatch, Policy]]:
    """Rows in batches of about equal lengths, with their places in ``rows``, for a policy in eval mode."""
    policy = model if isinstance(model, Policy) else Policy(model)
    made = _features(tokenizer, rows, data_types, replace(spec or PrepareSpec(max_length=None), on_bad_row="error"))
    order = sorted(range(len(made)), key=lambda i: len(made[i].ids))
    device = next(policy.parameters()).device
    with evaluating(policy):
        for start in range(0, len(order), batch_size):
            index = order[start : start + batch_size]
            prepared = [
                {"input_ids": f.ids, "weights": f.weights, "lengths": f.lengths, "parents": f.parents, "roles": f.roles}
                for f in (made[i] for i in index)
            ]
            yield index, MicroBatch.from_rows(prepared, index, _NORM).to(device), policy


def _features(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]], data_types: Sequence[str], spec: PrepareSpec
) -> list[Features]:
    kinds: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        kinds.setdefault(detect_type(row, data_types), []).append(i)
    made: dict[int, Features] = {}
    for data_type, index in kinds.items():
        preparer = RowPreparer(tokenizer, spec, data_type)
        made |= zip(index, preparer.features([rows[i] for i in index], index), strict=True)
    for i in range(len(rows)):
        if made[i].reason:
            raise UserError(f"Row {i} leaves nothing to score ({made[i].reason.replace('_', ' ')}).")
    return [made[i] for i in range(len(rows))]
