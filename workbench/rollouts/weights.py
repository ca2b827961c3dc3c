"""The policy's weights as an engine wants them: whole tensors by the names of a checkpoint, adapters merged or apart.

A tied head is always sent by its own name as well: an engine that packs its head keeps the old one otherwise, silently.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError
from workbench.losses.reduce import Normalisers
from workbench.models.peft import single_adapter
from workbench.models.policy import Policy, evaluating
from workbench.models.save import _export_config, _merged_module, _outermost_wrappers, save_pretrained
from workbench.rollouts.types import Request, RolloutEngine, Sampling

Named = Iterator[tuple[str, Tensor]]
Shapes = dict[str, tuple[int, ...]]
_LISTED = 4  # names that an error tells
PROBE = Sampling(max_new_tokens=12, temperature=0.7)  # not 1: raw and processed log-probabilities differ there
_PROBE_KEY = 2**32  # beyond the windows of training and evaluation


def named_weights(policy: Policy, *, merge: bool = True) -> Named:
    """The policy's weights, one whole tensor at a time; under FSDP2 every rank must read all of them.

    Args:
        policy: left as it is, a merged adapter too.
        merge: add the adapter to the weights; False gives the base's alone.

    Raises:
        UserError: an adapter on a base of few bits, or one that cannot be merged.
    """
    check_mergeable(policy)
    model = policy.causal_lm
    plain = _plain(policy, merge)
    if not _converts(model):
        return plain
    return iter(revert_weight_conversion(model, dict(plain)).items())


def weight_shapes(policy: Policy) -> Shapes:
    """Names and shapes of what `named_weights` gives, without reading a weight."""
    model = policy.causal_lm
    wrappers = _outermost_wrappers(model)
    inside = tuple(f"{path}." for path, _ in wrappers)
    found = {name: value for name, value in model.state_dict().items() if not name.startswith(inside)}
    for path, module in wrappers:
        found |= {f"{path}.{name}": value for name, value in _unwrapped(module, policy).state_dict().items()}
    shapes = {name: torch.empty(value.shape, device="meta") for name, value in found.items()}
    if _converts(model):
        shapes = revert_weight_conversion(model, shapes)
    return {name: tuple(value.shape) for name, value in shapes.items()}


def check_names(sent: Mapping[str, tuple[int, ...]], held: Mapping[str, tuple[int, ...]], engine: str) -> None:
    """Raises `UserError` unless the names and shapes ``sent`` are those that the engine holds.

    A tied head may be sent to an engine whose checkpoint leaves it out.
    """
    missing = sorted(held.keys() - sent.keys())
    unexpected = sorted(name for name in sent.keys() - held.keys() if not name.endswith("lm_head.weight"))
    other = [f"{n} {list(sent[n])} (there {list(held[n])})" for n in sorted(sent.keys() & held.keys()) if sent[n] != held[n]]
    faults = [("missing", missing), ("unexpected", unexpected), ("of another shape", other)]
    told = "; ".join(f"{what}: {_first(names)}" for what, names in faults if names)
    if told:
        raise UserError(f"the policy's weights are not those of the model in {engine} ({told}); start it with the same model.")


def check_mergeable(policy: Policy) -> None:
    """Raises `UserError` where weights cannot be given as full tensors."""
    if getattr(policy.causal_lm, "is_quantized", False):
        raise UserError(
            "a quantized model has no full weights to send, and merging would round the adapter to its few bits; "
            "set method.engine.sync=adapter with the base as the engine's model, or model.quantization=null."
        )


def check_adapter(policy: Policy) -> str:
    """Name of the adapter that ``sync=adapter`` sends.

    Raises:
        UserError: no adapter, or one of a kind that vLLM does not serve beside a base.
    """
    model = policy.hf
    if not isinstance(model, PeftModel):
        raise UserError("method.engine.sync=adapter needs an adapter (peft=lora); set method.engine.sync=merged.")
    name = single_adapter(model)
    config = model.peft_config[name]
    wrong = {
        "peft type " + config.peft_type.value: config.peft_type.value != "LORA",
        "peft.use_dora=true": getattr(config, "use_dora", False),
        "peft.modules_to_save": bool(getattr(config, "modules_to_save", None)),
        "peft.trainable_token_indices": bool(getattr(config, "trainable_token_indices", None)),
        "peft.target_parameters": bool(getattr(config, "target_parameters", None)),
        f"peft.bias={getattr(config, 'bias', 'none')}": getattr(config, "bias", "none") != "none",
    }
    if found := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise UserError(f"vLLM serves no adapter with {', '.join(found)}; set method.engine.sync=merged.")
    return name


def adapter_rank(policy: Policy) -> int:
    """The largest rank of the active LoRA adapter."""
    name = check_adapter(policy)
    return max(module.r[name] for module in policy.hf.modules() if isinstance(module, LoraLayer) and name in module.r)


def write_adapter(policy: Policy, folder: Path, *, first: bool = True) -> None:
    """Writes the active adapter as peft does; under FSDP2 every rank calls it and only the ``first`` writes."""
    name = check_adapter(policy)
    tensors = {key: whole_tensor(value) for key, value in policy.hf.state_dict().items() if f".{name}." in key}
    if first:
        save_pretrained(policy.hf, None, folder, state_dict=tensors, adapter=name)


def write_checkpoint(policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path, weights: Named | None) -> None:
    """Writes a folder that vLLM loads: config, tokenizer and, unless None, weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _export_config(policy.causal_lm, tokenizer)
    config.dtype = next(p.dtype for p in policy.causal_lm.parameters() if p.is_floating_point())
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if weights is not None:
        save_file({name: value.detach().cpu().contiguous().clone() for name, value in weights}, folder / "model.safetensors")


def checkpoint_shapes(folder: Path) -> Shapes:
    """Names and shapes of the weights in a folder, read from the files' heads."""
    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes


def fingerprint(weights: Named) -> str:
    """A hash of names, shapes and values, for telling whether two sets of weights are the same, bit for bit."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(weights):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def whole_tensor(value: Tensor) -> Tensor:
    """The whole tensor of a sharded one (a collective), any other as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_in_step(engine: RolloutEngine, policy: Policy, version: int, end_ids: tuple[int, ...], tolerance: float) -> float:
    """Lets the engine write a few tokens, and compares its log-probabilities with the policy's own.

    This finds weights that did not arrive, a head left behind, and a server that gives log-probabilities before temperature.
    Every rank calls it.

    Returns:
        The mean difference, nats.

    Raises:
        UserError: it is above ``tolerance``.
    """
    prompt = [int(i) for i in np.arange(6) * 7 % policy.config.get_text_config().vocab_size]
    sampling = Sampling(max_new_tokens=PROBE.max_new_tokens, temperature=PROBE.temperature, end_ids=end_ids)
    regex, engine.regex = getattr(engine, "regex", None), None  # with it the engine draws from another distribution
    try:
        rollout = engine.generate([Request(prompt, (_PROBE_KEY, version))], sampling)[0]
    finally:
        engine.regex = regex
    ours = policy_logps(policy, prompt, rollout.token_ids, temperature=sampling.temperature).cpu().numpy()
    known = ~np.isnan(rollout.logps)
    difference = float(np.abs(ours - rollout.logps)[known].mean()) if known.any() else 0.0
    if not difference <= tolerance:
        raise UserError(
            f"after weights of step {version} were sent, the engine's log-probabilities are {difference:.3g} nats per token off "
            f"the policy's (at most {tolerance}): it computes with other weights, another dtype, or gives them before "
            "temperature (a server needs --logprobs-mode processed_logprobs); method.engine.check_sync=null does not look."
        )
    return difference


@torch.no_grad()
def policy_logps(policy: Policy, prompt: list[int], completion: list[int], **options: object) -> Tensor:
    """The policy's log-probabilities of a completion ``[n]``; options as in `Policy.forward`."""
    device = next(policy.parameters()).device
    size = len(prompt) + len(completion)
    batch = MicroBatch(
        tokens=torch.tensor([*prompt, *completion]),
        weights=torch.tensor([0.0] * len(prompt) + [1.0] * len(completion)),
        starts=torch.tensor([0, len(prompt), size]),
        parent=torch.tensor([-1, 0]),
        row=torch.tensor([0, 0]),
        role=torch.tensor([int(Role.PROMPT), int(Role.COMPLETION)]),
        norm=Normalisers(len(completion), 1, 1, 1),
    ).to(device)
    with evaluating(policy):
        return policy(batch, ("logps",), **options).logps.float()


def _plain(policy: Policy, merge: bool) -> Named:
    """Whole tensors by the names of the model without its adapter."""
    model = policy.causal_lm
    wrappers = _outermost_wrappers(model)
    inside = tuple(f"{path}." for path, _ in wrappers)
    name = single_adapter(policy.hf) if wrappers else ""
    state = model.state_dict()
    for key, value in state.items():
        if not key.startswith(inside):
            yield key, whole_tensor(value.detach())
    for path, module in wrappers:
        if merge:
            here = {key: whole_tensor(value) for key, value in state.items() if key.startswith(f"{path}.")}
            merged = _merged_module(module, path, here, name)
        else:
            merged = {key: whole_tensor(value) for key, value in _base_of(module).state_dict().items()}
        for key, value in merged.items():
            yield f"{path}.{key}", value.detach()


def _unwrapped(module: nn.Module, policy: Policy) -> nn.Module:
    """The module whose tensors `_plain` gives for a wrapper."""
    name = single_adapter(policy.hf)
    if isinstance(module, ModulesToSaveWrapper) and name in module.modules_to_save:
        return module.modules_to_save[name]
    return _base_of(module)


def _base_of(module: nn.Module) -> nn.Module:
    if isinstance(module, TrainableTokensWrapper):
        module = module.token_adapter
    if isinstance(module, ModulesToSaveWrapper):
        return module.original_module
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def _converts(model: nn.Module) -> bool:
    """Whether the model's parameters are held in another form than its checkpoints' (experts in one tensor)."""
    if getattr(model, "_weight_conversions", None) is not None:
        return bool(model._weight_conversions)
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def _first(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
