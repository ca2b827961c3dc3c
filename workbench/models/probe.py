"""Checks that a model computes what we take it to compute, on a handful of tokens, before it is trained."""

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError
from workbench.losses.reduce import Normalisers
from workbench.models.attention import PREFIX
from workbench.models.gguf import first_line
from workbench.models.heads import classification_head, is_classifier
from workbench.models.layouts import Layout
from workbench.models.logps import Head
from workbench.models.policy import Policy, evaluating
from workbench.models.seeding import local_rng

log = logging.getLogger(__name__)

_VOCABULARY = 256
_WINDOW = 8


def _tolerance(dtype: torch.dtype) -> float:
    """Largest mean difference in nats that rounding explains."""
    return 1e-4 if dtype == torch.float32 else 0.1


def _shallow_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same config in fp32 with random weights, two layers (one of each kind), few tokens and narrow windows: half
    precision would hide what a wrong mask does, and a wide window never closes over a handful of tokens."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    layers = text.num_hidden_layers
    kinds = list(getattr(text, "layer_types", None) or [None] * layers)
    kept = sorted({kinds.index(kind) for kind in kinds} | set(range(min(2, layers))))
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == layers:  # per layer
            setattr(text, name, [value[i] for i in kept])
    text.num_hidden_layers = len(kept)
    text.vocab_size, text.pad_token_id = _VOCABULARY, 0
    if getattr(text, "sliding_window", None):
        text.sliding_window = min(text.sliding_window, _WINDOW)
    if getattr(text, "intermediate_size", None):
        text.intermediate_size = min(text.intermediate_size, 64)
    implementation = model.config._attn_implementation.removeprefix(PREFIX)
    with local_rng(0):
        return type(model)._from_config(config, dtype=torch.float32, attn_implementation=implementation).to(model.device)


def _documents() -> MicroBatch:
    """A prompt with two unequal completions, and a document, all trained but the prompt; both longer than the window."""
    rng = np.random.default_rng(0)
    rows = []
    for lengths, parents in (((12, 9, 5), (-1, 0, 0)), ((17,), (-1,))):
        weights = np.ones(sum(lengths), dtype=np.float32)
        weights[: lengths[0] * (len(lengths) > 1)] = 0.0
        ids = rng.integers(1, _VOCABULARY, sum(lengths))
        roles = [int(Role.PROMPT), int(Role.CHOSEN), int(Role.REJECTED)] if len(lengths) > 1 else [int(Role.TEXT)]
        rows.append({"input_ids": ids, "weights": weights, "lengths": lengths, "parents": parents, "roles": roles})
    return MicroBatch.from_rows(rows, range(len(rows)), Normalisers(30.0, 2.0, 2.0, 1.0))


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


def layout_difference(model: PreTrainedModel, layout: Layout) -> float:
    """Mean difference, relative to their size, between the hidden states and gradients of the model's kind under ``layout`` and
    under ``padded``, in full precision and without kernels, which are checked by themselves."""
    model = _shallow_copy(model)
    batch = _documents().to(model.device)
    found = []
    with evaluating(model), _full_precision():
        for name in ("padded", layout):
            policy = Policy(model, layout=name)
            policy.kernels = False
            hidden = policy(batch, ["hidden"]).hidden
            model.zero_grad()
            (hidden * torch.linspace(-1, 1, hidden.shape[-1], device=hidden.device)).sum().backward()
            found.append((hidden.detach(), model.get_input_embeddings().weight.grad.clone()))
    return max(relative_difference(a, b) for a, b in zip(*found, strict=True))


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def relative_difference(expected: Tensor, actual: Tensor) -> float:
    """Mean difference divided by the mean size."""
    return ((expected - actual).abs().mean() / expected.abs().mean().clamp(min=torch.finfo(torch.float32).tiny)).item()


def choose_layout(model: PreTrainedModel, layout: Layout | Literal["auto"]) -> Layout:
    """The layout to compute in: the one asked for or, for ``auto``, the first of ``shared``, ``packed`` and ``padded`` in which
    models of this kind compute what they do in padded rows.

    Raises:
        UserError: the layout asked for is not one of them.
    """
    if layout == "padded":
        return layout
    for name in ("shared", "packed") if layout == "auto" else (layout,):
        fault = _fault(model, name)
        if fault is None:
            return name
        if layout != "auto":
            raise UserError(f"method.layout={layout}: {fault}; set method.layout=padded, or auto.")
        log.info("layout auto: not %s, since %s", name, fault)
    return "padded"


def _fault(model: PreTrainedModel, layout: Layout) -> str | None:
    """Why models of this kind cannot be computed in ``layout``; None if they can."""
    kind = type(model).__name__
    try:
        difference = layout_difference(model, layout)
    except Exception as error:  # whatever a family does with arguments that it does not know
        return f"{kind} cannot be computed so ({first_line(error)})"
    if difference <= _tolerance(torch.float32):
        log.info("layout %s: the numbers equal the padded ones to %.1e", layout, difference)
        return None
    return f"{kind} does not keep {layout} segments apart (its numbers differ by {difference:.3g} from the padded ones)"
