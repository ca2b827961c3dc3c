"""What a run would cost: parameters, memory of one device, tokens and operations. Rough, and no weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from workbench.data.inspection_steps import Steps
from workbench.models.estimate import MemoryEstimate, ParameterCount, count_parameters, estimate_memory
from workbench.models.load import ModelSpec, load_config

# Numbers that an optimizer keeps per trained parameter; other optimizers are taken for Adam.
_STATES = {"sgd": 0, "asgd": 1, "adagrad": 1, "rmsprop": 1, "lion": 1, "muon": 1, "adafactor": 0, "rprop": 2}
_WEIGHTS = {"bf16-true": "bfloat16", "16-true": "float16", "transformer-engine": "bfloat16"}


@dataclass(frozen=True)
class Sharding:
    """Devices that each part of the memory is spread over."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1


@dataclass(frozen=True)
class Cost:
    """The estimates.

    Args:
        parameters: of the model with its adapter.
        memory: at the peak of a step, per device; None for a model object.
        micro_batch_tokens: tokens of the largest micro-batch, padding included, that ``memory`` is for.
        flops_per_token: forward and backward.
        flops_per_epoch: over all devices, padding included; None for a stream.
        flops: of the whole run; None if nothing bounds it.
        counts_all_experts: a mixture whose experts are all counted, though a token passes through a few.
    """

    parameters: ParameterCount
    memory: MemoryEstimate | None
    micro_batch_tokens: int
    flops_per_token: float
    flops_per_epoch: float | None
    flops: float | None
    counts_all_experts: bool = False


def estimate_cost(model: ModelSpec | PreTrainedModel, node: Mapping[str, Any], peft: Any, steps: Steps) -> Cost:
    """The cost of a run.

    A token takes ``2 N`` operations forward, ``2 N`` backward to the activations and ``2 n`` to the weights (N parameters but
    the input embedding, n trained ones), and ``6 L Q T`` in the causal attention of L layers of width Q over T tokens; once more
    the forward where activations are recomputed, and another one of a reference.

    Args:
        model: of the run.
        node: the plain configuration.
        peft: its adapter's spec, or None.
        steps: its plan.
    """
    scores = classifier_of(node)
    parameters, config = count_parameters(model, peft, scores), load_config(model)
    text = config.get_text_config()
    recompute = bool(node["method"].get("gradient_checkpointing")) if node.get("method") else False
    shared = getattr(config, "tie_word_embeddings", False) and scores is None  # the embedding is the head, too
    embedding = 0 if shared else text.vocab_size * text.hidden_size
    used = parameters.total - embedding
    attention = 2 * text.num_hidden_layers * _attention_width(text) * steps.mean_length
    passes = 1 + recompute + reference_of(node)[1]  # forward
    per_token = 2 * used * (passes + 1) + 2 * min(parameters.trainable, used) + attention * (passes + 2)
    return Cost(
        parameters=parameters,
        memory=_memory(model, node, peft, steps) if isinstance(model, ModelSpec) else None,
        micro_batch_tokens=steps.largest,
        flops_per_token=per_token,
        flops_per_epoch=None if steps.steps_per_epoch is None else per_token * steps.computed_per_step * steps.steps_per_epoch,
        flops=None if steps.total_steps is None else per_token * steps.computed_per_step * steps.total_steps,
        counts_all_experts=getattr(text, "num_experts_per_tok", None) is not None,
    )


def reference_of(node: Mapping[str, Any]) -> tuple[int, int]:
    """Whole models held as the configured method's reference, and its forward passes per training step.

    An adapter's reference is mostly the base under it, which costs no memory.
    """
    from workbench.methods.referenced import Referenced
    from workbench.run import locate

    method = node.get("method") or {}
    target = locate(method["_target_"]) if method else None
    if not isinstance(target, type) or not issubclass(target, Referenced) or method.get("reference_free"):
        return 0, 0
    if method.get("precompute_ref_logps"):
        return 0, 0
    own = not node.get("peft") or method.get("ref_model") is not None or bool(method.get("sync_ref_model"))
    return int(own), 1


def classifier_of(node: Mapping[str, Any]) -> tuple[Any, int] | None:
    """Kind and number of labels of the configured method's head, if it scores."""
    from workbench.run import locate

    method = locate(node["method"]["_target_"]) if node.get("method") else None
    return None if getattr(method, "generates", True) else (method.kind, method.num_labels)


def _attention_width(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", 1)
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)


def _memory(spec: ModelSpec, node: Mapping[str, Any], peft: Any, steps: Steps) -> MemoryEstimate:
    precision = str(node["trainer"].get("precision") or "32-true")
    if precision in _WEIGHTS:
        spec = replace(spec, dtype=_WEIGHTS[precision])
    whole = estimate_memory(
        spec,
        peft,
        micro_batch_tokens=steps.largest,
        mixed_precision=precision.endswith("-mixed"),
        optimizer_states=optimizer_states(node.get("optim")),
        gradient_checkpointing=(node.get("method") or {}).get("gradient_checkpointing") or False,
        activation_offloading=(node.get("method") or {}).get("activation_offloading") or False,
        frozen_copies=reference_of(node)[0],
        classifier=classifier_of(node),
    )
    shards = sharding(node.get("strategy"), steps.world_size)
    return replace(
        whole,
        weights=whole.weights // shards.weights,
        gradients=whole.gradients // shards.gradients,
        optimizer=whole.optimizer // shards.optimizer,
    )


def optimizer_states(optim: Mapping[str, Any] | None) -> int:
    """Numbers per trained parameter that the configured optimizer keeps."""
    if not optim:
        return 2
    name = optim["_target_"].rsplit(".", 1)[-1].lower()
    return 1 if name == "sgd" and optim.get("momentum") else _STATES.get(name, 2)


def sharding(strategy: Any, world_size: int) -> Sharding:
    """How a configured strategy spreads weights, gradients and optimizer states over ``world_size`` devices."""
    name = strategy if isinstance(strategy, str) else (strategy or {}).get("_target_", "")
    options = strategy if isinstance(strategy, Mapping) else {}
    name = name.lower().replace("_", "")
    if "deepspeed" in name:
        stage = options.get("stage") or next((int(c) for c in reversed(name) if c.isdigit()), 2)
        return Sharding(*(world_size if stage >= least else 1 for least in (3, 2, 1)))
    if "fsdp" in name or "modelparallel" in name:
        size = world_size * tensor_parallel(strategy)
        return Sharding(size, size, size)
    return Sharding()


def tensor_parallel(strategy: Any) -> int:
    """Devices that split each layer, and share their rows, under a configured strategy."""
    size = strategy.get("tensor_parallel_size", 1) if isinstance(strategy, Mapping) else 1
    return size if isinstance(size, int) else 1


def to_dict(cost: Cost) -> dict[str, Any]:
    """The numbers, for JSON."""
    memory = cost.memory
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "total")
    return {
        "parameters": cost.parameters.total,
        "trainable_parameters": cost.parameters.trainable,
        "memory_bytes": None if memory is None else {name: getattr(memory, name) for name in parts},
        "micro_batch_tokens": cost.micro_batch_tokens,
        "flops_per_token": cost.flops_per_token,
        "flops_per_epoch": cost.flops_per_epoch,
        "flops": cost.flops,
    }
