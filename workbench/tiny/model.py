"""Nano transformers of the embedded world: standard `transformers` architectures, randomly initialised from a seed.

Each architecture's own feature binds on rows of a few dozen tokens: windows of 16, soft caps near the logits' scale,
grouped keys, multipliers other than 1. The head dimension is 32, the smallest that vLLM's CPU kernels take.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from workbench.errors import UserError, check_choice, nearest
from workbench.tiny.tokenizer import MAX_LENGTH, tiny_tokenizer

SIZES: dict[str, dict[str, int]] = {
    "nano": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    "pico": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
}
# Set where an architecture's config knows the name.
COMMON: dict[str, Any] = {"head_dim": 32, "max_position_embeddings": MAX_LENGTH, "initializer_range": 0.05}
WINDOW = {"sliding_window": 16}
# Suits rows of dozens of tokens. With the usual 10,000 most rotations hardly move over such a row, and 300 steps of SFT
# on `sums` reach 0.8 exact match on some seeds and 0.1 on others.
ROPE_THETA = 20.0
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
LINEAR_HEADS = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": WINDOW,
    "gemma2": WINDOW | {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": 32, "sliding_window_pattern": 2},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "phi3": {},
    "granite": {
        "embedding_multiplier": 4.0,
        "attention_multiplier": 0.125,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 128},
    "mixtral": EXPERTS | {"intermediate_size": 128},
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 384, "dropout": 0.0, "init_std": 0.05},
    "gpt_oss": WINDOW | EXPERTS | {"intermediate_size": 128, "rope_parameters": {"rope_type": "default"}},
    "falcon": {"multi_query": False, "alibi": True},
    "bloom": {},
    "mamba": {"time_step_rank": 8, "expand": 3},
    "qwen3_next": EXPERTS
    | LINEAR_HEADS
    | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "full_attention_interval": 2},
}


def tiny_model(
    architecture: str = "llama",
    *,
    size: Literal["nano", "pico"] = "nano",
    vocab_size: int | None = None,
    seed: int = 0,
    **config_overrides: Any,
) -> PreTrainedModel:
    """A causal language model in float32 on the CPU, in train mode, whose weights depend on its config and ``seed`` alone.

    The process's random state is left as it was. Pad and EOS ids, also of the generation config, are `tiny_tokenizer`'s.

    Args:
        architecture: a ``model_type`` of `ARCHITECTURES`.
        size: ``nano`` is 3 layers of width 128, ``pico`` 2 layers of width 64.
        vocab_size: rows of the embedding; the tokenizer's length if None.
        seed: of the initial weights.
        config_overrides: any key of the architecture's config.

    Raises:
        UserError: an unknown architecture, size or config key.
    """
    config = tiny_config(architecture, size=size, vocab_size=vocab_size, **config_overrides)
    with local_seed(seed), torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    return model.train()


def tiny_config(
    architecture: str = "llama",
    *,
    size: Literal["nano", "pico"] = "nano",
    vocab_size: int | None = None,
    **config_overrides: Any,
) -> PreTrainedConfig:
    """The config behind `tiny_model`, for building another head on the same backbone."""
    check_choice("architecture", architecture, ARCHITECTURES)
    check_choice("size", size, SIZES)
    known = AutoConfig.for_model(architecture)
    for key in config_overrides:
        if not hasattr(known, key):
            raise UserError(f"{key!r} is not a config key of {architecture}.{nearest(key, known.to_dict())}")
    settings = _general(known, size) | ARCHITECTURES[architecture]
    rope = settings.get("rope_parameters") or getattr(known, "rope_parameters", None) or {}
    if "rope_type" in rope:
        settings["rope_parameters"] = rope | {"rope_theta": ROPE_THETA}
    try:
        return AutoConfig.for_model(architecture, **settings | _tokens(vocab_size) | config_overrides)
    except (TypeError, ValueError, StrictDataclassError) as error:  # transformers checks that sizes go together
        reason = " ".join(str(error).split())
        raise UserError(f"{architecture} cannot be built with {config_overrides}: {reason}") from error


def _general(known: PreTrainedConfig, size: str) -> dict[str, Any]:
    settings = COMMON | SIZES[size] | {"intermediate_size": 3 * SIZES[size]["hidden_size"]}
    names = known.to_dict().keys() | known.attribute_map
    return {key: value for key, value in settings.items() if key in names}


def _tokens(vocab_size: int | None) -> dict[str, int | None]:
    tokenizer = tiny_tokenizer()
    return {
        "vocab_size": len(tokenizer) if vocab_size is None else vocab_size,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


@contextmanager
def local_seed(seed: int) -> Iterator[None]:
    """Seeds torch's CPU generator for the block and puts its state back after it."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
