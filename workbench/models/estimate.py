"""How many parameters a run would train and about how much memory it would take, without reading a weight."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import PeftConfig
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from workbench.models.checkpoint import quiet
from workbench.models.heads import Kind, classifier_class
from workbench.models.load import ModelSpec, as_spec, causal_class, load_config, locate_spec
from workbench.models.peft import PeftSpec, apply_peft

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# 4-bit weights with a float32 constant per 64 of them (8-bit ones per 64 and a float32 per 16384 if nested), and 8-bit ones.
_QUANTIZED_BYTES = {("4bit", False): 0.5 + 4 / 64, ("4bit", True): 0.5 + 1 / 64 + 4 / 16384, ("8bit", False): 1.0}


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters; a tied one counts once.

    Args:
        total: with the adapter.
        trainable: that receive gradients.
        linear: of the linear layers but the head: what quantisation shrinks.
    """

    total: int
    trainable: int
    linear: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device at the peak of a training step.

    Args:
        weights: of the model, its adapter and its frozen copies.
        gradients: of what is trained.
        optimizer: states.
        activations: kept for the backward pass.
        logits: of the tokens whose logits are formed together.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def count_parameters(
    spec: str | ModelSpec | PreTrainedModel,
    peft: PeftSpec | PeftConfig | None = None,
    classifier: tuple[Kind, int] | None = None,
) -> ParameterCount:
    """Parameters of a model and of the adapter it would get.

    Args:
        spec: as for `workbench.models.load.load_model`; a model object is counted as it is.
        peft: as for `workbench.models.peft.apply_peft`; None trains everything.
        classifier: kind and number of labels of the head that takes the place of the language model's.
    """
    model = spec if isinstance(spec, nn.Module) else _on_meta(as_spec(spec), peft, classifier)
    head = model.get_output_embeddings()
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
    parameters = list(model.parameters())
    return ParameterCount(
        total=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        linear=linear,
    )


def estimate_memory(
    spec: str | ModelSpec | Mapping[str, Any],
    peft: PeftSpec | PeftConfig | None = None,
    *,
    micro_batch_tokens: int,
    mixed_precision: bool = False,
    optimizer_states: int = 2,
    gradient_checkpointing: bool | Literal["selective"] = False,
    activation_offloading: bool = False,
    frozen_copies: int = 0,
    shards: int = 1,
    logit_tokens: int = 4096,
    classifier: tuple[Kind, int] | None = None,
) -> MemoryEstimate:
    """A rough estimate, by this sum (N parameters, n trained ones, T tokens, L layers, b bytes of the dtype):

    - weights ``b N (1 + frozen_copies) / shards``, quantised linear layers at 0.56 bytes (4 bits) or 1 byte;
    - gradients ``b' n / shards`` and optimizer ``optimizer_states`` times that, in the trained parameters' dtype;
    - activations ``a T L e``: a layer keeps ``e = 6 H + 2 Q + 2 KV + 4 F`` numbers of ``a`` bytes per token (hidden width,
      queries, keys and values, feed-forward width; fused attention), at 16 bits ``4 H`` more for norms in float32 and ``2
      (5 H + Q + F)`` more for the inputs of a float32 adapter; ``a T (L H + e)`` where layers are recomputed, ``a T e`` where
      they wait on the host;
    - logits: three float32 copies of ``min(T, logit_tokens)`` rows of the vocabulary; none of a classifier.

    Workspaces, fragmentation and communication come on top: allow a fifth more.

    Args:
        spec: the model.
        peft: the adapter; None trains everything.
        micro_batch_tokens: tokens in one forward on one device, padding included.
        mixed_precision: activations of 2 bytes whatever the weights'.
        optimizer_states: per trained parameter: 2 for Adam, 1 for SGD with momentum, 0 for SGD.
        gradient_checkpointing: as in the method; ``selective`` keeps the attention outputs too.
        activation_offloading: as in the method.
        frozen_copies: references and teachers of the same size held beside the model.
        shards: devices that weights, gradients and states are spread over.
        logit_tokens: tokens whose logits are formed together.
        classifier: as for `count_parameters`.
    """
    spec = as_spec(spec)
    config = load_config(spec)
    count, base = count_parameters(spec, peft, classifier), count_parameters(spec, classifier=classifier)
    width = _BYTES[_dtype_of(spec, config)]
    base_bytes = base.total * width
    if spec.quantization is not None:
        per_weight = _QUANTIZED_BYTES[spec.quantization, bool(spec.quant_nested)]
        base_bytes = (base.total - base.linear) * width + base.linear * per_weight
    adapter_width = 4 if peft is not None and getattr(peft, "adapter_dtype", "float32") == "float32" else width
    added, compute_width = count.total - base.total, 2 if mixed_precision else width
    text, half = config.get_text_config(), compute_width == 2
    cast = half and added > 0 and adapter_width == 4
    kept = _kept_per_token(text, gradient_checkpointing, activation_offloading, half, cast_inputs=cast)
    return MemoryEstimate(
        weights=round((base_bytes * (1 + frozen_copies) + added * adapter_width) / shards),
        gradients=round(count.trainable * adapter_width / shards),
        optimizer=round(count.trainable * adapter_width * optimizer_states / shards),
        activations=micro_batch_tokens * compute_width * kept,
        logits=0 if classifier else 3 * 4 * min(micro_batch_tokens, logit_tokens) * text.vocab_size,
    )


def _on_meta(spec: ModelSpec, peft: PeftSpec | PeftConfig | None, classifier: tuple[Kind, int] | None) -> nn.Module:
    config, location = load_config(spec), locate_spec(spec)
    if location.kind == "adapter" and peft is None:
        peft = PeftSpec(adapter=location.path)
    with torch.device("meta"), quiet():
        if classifier is None:
            model = causal_class(config).from_config(config, trust_remote_code=spec.trust_remote_code)
        else:
            config.num_labels = classifier[1]
            model = classifier_class(config, classifier[0])(config)
        if isinstance(peft, PeftSpec) and peft.adapter is not None:
            peft = PeftConfig.from_pretrained(peft.adapter)
            peft.inference_mode, peft.base_model_name_or_path = False, None
        if hasattr(peft, "init_lora_weights"):  # there are no weights to take one from
            peft = copy.copy(peft)
            peft.init_lora_weights = False
        return model if peft is None else apply_peft(model, peft)


def _dtype_of(spec: ModelSpec, config: PreTrainedConfig) -> str:
    if spec.dtype != "auto":
        return spec.dtype
    return str(config.dtype or "float32").removeprefix("torch.")


def _kept_per_token(
    config: PreTrainedConfig, gradient_checkpointing: bool | str, offloading: bool, half: bool, cast_inputs: bool
) -> int:
    """Numbers kept for the backward pass, per token, over all layers."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads = getattr(config, "num_attention_heads", 1)
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * head_dim, (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    width = _feed_forward_width(config)
    layer = 6 * hidden + 2 * queries + 2 * keys + 4 * width
    layer += (4 * hidden if half else 0) + (2 * (5 * hidden + queries + width) if cast_inputs else 0)
    if offloading:
        return layer
    if not gradient_checkpointing:
        return layers * layer
    return layers * (hidden + (queries if gradient_checkpointing == "selective" else 0)) + layer


def _feed_forward_width(config: PreTrainedConfig) -> int:
    """Width that one token passes through: of its experts in a mixture."""
    experts = getattr(config, "num_experts_per_tok", None) or 1
    width = getattr(config, "moe_intermediate_size", None) if experts > 1 else None
    names = ("intermediate_size", "ffn_dim", "n_inner")
    width = width or next((getattr(config, n) for n in names if getattr(config, n, None)), 4 * config.hidden_size)
    return experts * width
