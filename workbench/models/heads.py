"""Classifiers on a causal language model: reward models (one score a sequence), step rewards and values (one a token).

A new head is drawn under a seed of its own, so that what a reward model starts from does not depend on what was drawn
before it, nor on the dtype or device it is loaded to.
"""

import copy
import logging
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)

from workbench.errors import UserError, check_choice
from workbench.models.load import (
    ModelSpec,
    as_spec,
    base_spec,
    load_config,
    load_model,
    locate_spec,
    read_checkpoint,
    read_json,
    record_of,
    stamp,
    unwrap,
)
from workbench.models.seeding import local_rng

log = logging.getLogger(__name__)

Kind = Literal["sequence", "token"]
HEADS = ("score", "classifier")  # what transformers calls the last layer, by architecture
_LM_HEADS = ("lm_head", "embed_out", "output")
_MAPPINGS = {"sequence": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "token": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING}
_GENERIC = {"sequence": GenericForSequenceClassification, "token": GenericForTokenClassification}


def load_classifier(
    spec: str | ModelSpec | PreTrainedModel,
    *,
    kind: Kind = "sequence",
    num_labels: int = 1,
    seed: int | None = None,
) -> PreTrainedModel:
    """A sequence or token classifier on the model that ``spec`` names, in eval mode.

    The head is read from the checkpoint where that is a classifier of this kind already. Otherwise it is new: weights from
    a normal distribution of the config's ``initializer_range``, no bias.

    Args:
        spec: as for `load_model`; of a language-model object the backbone is taken over, not copied.
        kind: one output per sequence (read at its last token) or per token.
        num_labels: outputs.
        seed: of a new head; None is the spec's ``init_seed``.

    Raises:
        UserError: as `load_model`; or a head of another size in the checkpoint.
    """
    check_choice("kind", kind, ("sequence", "token"))
    if isinstance(spec, nn.Module):
        return _from_object(spec, kind, num_labels, seed or 0)
    spec = as_spec(spec)
    seed = spec.init_seed if seed is None else seed
    location = locate_spec(spec)
    if location.kind == "adapter":
        from workbench.models.peft import PeftSpec, apply_peft

        if not set(HEADS) & set(read_json(Path(location.path, "adapter_config.json")).get("modules_to_save") or ()):
            raise UserError(
                f"The adapter in {location.path} holds no classification head: it is that of a language model. Merge it "
                "(merge_adapter=true in its run) and name the merged model."
            )
        base = load_classifier(base_spec(spec, location.path), kind=kind, num_labels=num_labels, seed=seed)
        return apply_peft(base, PeftSpec(adapter=location.path)).eval()
    if location.kind == "tiny" or spec.init == "random":
        return stamp(_from_object(load_model(spec), kind, num_labels, seed), spec)
    model_class = classifier_class(load_config(spec), kind)
    model, missing = read_checkpoint(spec, location, model_class, may_differ=_is_head, num_labels=num_labels)
    if missing:
        draw_head(model, seed)
    return stamp(model, spec)


def classifier_class(config: PreTrainedConfig, kind: Kind) -> Any:
    """The transformers class for ``config``, or one built like its generic classifiers where it has none.

    Directories saved from the latter are read back by `load_classifier`, not by transformers' auto classes.
    """
    if type(config) in _MAPPINGS[kind]:
        return _MAPPINGS[kind][type(config)]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{config.model_type!r} models have no {kind} classifier and no causal language model to build on.")
    causal = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    family = next(c for c in causal.__mro__ if issubclass(c, PreTrainedModel) and c.__name__.endswith("PreTrainedModel"))
    name = f"{causal.__name__.removesuffix('ForCausalLM')}For{kind.capitalize()}Classification"
    log.info("transformers has no %s; load it again with workbench.models.heads.load_classifier.", name)
    return type(name, (_GENERIC[kind], family), {"base_model_prefix": causal.base_model_prefix, "config_class": type(config)})


def is_classifier(model: nn.Module) -> bool:
    """Whether the model, under any adapter, scores sequences or tokens."""
    return type(unwrap(model)).__name__.endswith(("ForSequenceClassification", "ForTokenClassification"))


def classification_head(model: nn.Module) -> nn.Module:
    """The layer from hidden states ``[..., H]`` to outputs ``[..., num_labels]``, with the adapter's version of it if any.

    Raises:
        UserError: the model is no classifier.
    """
    base = unwrap(model)
    for name in HEADS:
        if isinstance(getattr(base, name, None), nn.Module):
            return getattr(base, name)
    raise UserError(f"{type(base).__name__} has no classification head; load it with load_classifier.")


@torch.no_grad()
def draw_head(model: PreTrainedModel, seed: int) -> None:
    """Draws the head's weights under ``seed``, in float32 on the CPU whatever they are then stored in."""
    config = model.config.get_text_config()
    std = getattr(config, "initializer_range", None) or getattr(config, "init_std", None) or 0.02
    generator = torch.Generator().manual_seed(seed)
    head = classification_head(model)
    head.weight.copy_(torch.empty(head.weight.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))
    if head.bias is not None:
        head.bias.zero_()


def _from_object(model: PreTrainedModel, kind: Kind, num_labels: int, seed: int) -> PreTrainedModel:
    if unwrap(model) is not model and not is_classifier(model):
        raise UserError("The model given carries an adapter of a language model, which no classifier takes over; merge it first.")
    if type(model).__name__.endswith(f"For{kind.capitalize()}Classification"):
        if model.config.num_labels != num_labels:
            raise UserError(f"num_labels={num_labels}: the classifier given has {model.config.num_labels}.")
        return model
    config = copy.deepcopy(model.config)
    config.num_labels = num_labels
    backbone = model.base_model
    with torch.device("meta"), local_rng(seed):  # the backbone is there already
        classifier = classifier_class(config, kind)(config)
    setattr(classifier, classifier.base_model_prefix, backbone)
    head = classification_head(classifier).to_empty(device=backbone.device).to(backbone.dtype)
    head.requires_grad_(True)
    draw_head(classifier, seed)
    if record := record_of(model):
        stamp(classifier, record.spec)
    return classifier.train(model.training)


def _is_head(key: str) -> bool:
    return key.split(".")[0] in (*HEADS, *_LM_HEADS)
