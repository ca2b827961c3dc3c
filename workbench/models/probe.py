"""Checks that a model computes what we take it to compute, on a handful of tokens, before it is trained."""

import copy
import logging

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError
from workbench.losses.reduce import Normalisers
from workbench.models.heads import classification_head, is_classifier
from workbench.models.layouts import Layout
from workbench.models.logps import Head
from workbench.models.policy import Policy, evaluating
from workbench.models.seeding import local_rng

log = logging.getLogger(__name__)


def _tolerance(dtype: torch.dtype) -> float:
    """Largest mean difference in nats that rounding explains."""
    return 1e-4 if dtype == torch.float32 else 0.1


def _exact_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself if it computes in fp32, else a shallow one of the same config that does: rounding of half precision would
    hide what a wrong mask does."""
    if model.dtype == torch.float32:
        return model
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_hidden_layers = min(text.num_hidden_layers, 4)
    if vars(text).get("layer_types"):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    text.vocab_size, text.pad_token_id = 256, 0
    with local_rng(0):
        return type(model)._from_config(config, dtype=torch.float32, attn_implementation=model.config._attn_implementation)


def _documents(vocab_size: int) -> MicroBatch:
    """Two unequal documents of random tokens, all trained."""
    rng = np.random.default_rng(0)
    lengths = (7, 12)
    rows = [
        {
            "input_ids": rng.integers(0, vocab_size, n),
            "weights": np.ones(n, dtype=np.float32),
            "lengths": [n],
            "parents": [-1],
            "roles": [int(Role.TEXT)],
        }
        for n in lengths
    ]
    return MicroBatch.from_rows(rows, range(len(rows)), Normalisers(17.0, 2.0, 2.0, 1.0))


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Compares the model's own logits (a classifier's outputs) with those formed from its hidden states and head.

    Raises:
        UserError: they differ, so the model does something to its logits that `Head` does not know.
    """
    config = model.config.get_text_config()
    tokens = [i % config.vocab_size for i in range(1, 10) if i != config.pad_token_id]  # sequence classifiers skip padding
    ids = torch.tensor([tokens[:8]], device=model.device)
    with evaluating(model):
        expected = model(input_ids=ids, use_cache=False).logits.float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        if is_classifier(model):
            actual = classification_head(model)(hidden).float()
            actual = actual if expected.dim() == actual.dim() else actual[:, -1]
            difference = relative_difference(expected, actual)
        else:
            actual = Head.of(model)(hidden)
            difference = (expected.log_softmax(-1) - actual.log_softmax(-1)).abs().mean().item()
    if not difference <= _tolerance(model.dtype):
        raise UserError(
            f"{type(model).__name__} changes its logits in a way that is not known here (mean difference {difference:.3g}); "
            "this model family is not supported."
        )


@torch.no_grad()
def layout_difference(model: PreTrainedModel, layout: Layout) -> float:
    """Mean difference between what the model computes under ``layout`` and under ``padded``: of log-probabilities in nats, of a
    classifier's hidden states (whose head may still be anything) relative to their size."""
    model = _exact_copy(model)
    batch = _documents(model.config.get_text_config().vocab_size).to(model.device)
    wanted = "hidden" if is_classifier(model) else "logps"
    with evaluating(model):
        padded, other = (getattr(Policy(model, layout=name)(batch, [wanted]), wanted) for name in ("padded", layout))
    return relative_difference(padded, other) if wanted == "hidden" else (padded - other).abs().mean().item()


def relative_difference(expected: Tensor, actual: Tensor) -> float:
    """Mean difference divided by the mean size."""
    return ((expected - actual).abs().mean() / expected.abs().mean().clamp(min=torch.finfo(torch.float32).tiny)).item()


def check_layout(model: PreTrainedModel, layout: Layout) -> None:
    """Raises `UserError` if the model sees across documents, or loses track of positions, in ``layout``."""
    if layout == "padded":
        return
    difference = layout_difference(model, layout)
    if not difference <= _tolerance(torch.float32):
        what = "hidden states differ by" if is_classifier(model) else "log-probabilities in nats differ by"
        raise UserError(
            f"method.layout={layout}: {type(model).__name__} does not keep packed documents apart ({what} {difference:.3g}); "
            "set method.layout=padded."
        )
    log.info("layout %s: the numbers equal the padded ones to %.1e", layout, difference)
