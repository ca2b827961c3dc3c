"""Reference models: what a policy is compared with while it learns.

A reference computes log-probabilities and nothing else. It is never a submodule of the method: Lightning would put it in training
mode and write it into every checkpoint. It is built from the policy before that has taken a step or read a checkpoint, so that
at the start both give the same numbers, bit for bit, whatever was handed in.

Which kind stands in for the policy of the start:

- a full model that is trained: a frozen copy of it;
- an adapter whose update is still zero: the same model with the adapter off, no copy at all;
- an adapter that was trained before, or that does not start at zero (PiSSA): a frozen copy of the adapter;
- an adapter that trains biases of the base, which cannot be switched off: a frozen copy of all.
"""

import copy
from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
import xxhash
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.data.batch import MicroBatch
from workbench.errors import UserError
from workbench.models.peft import copy_adapter, single_adapter, use_adapter
from workbench.models.policy import Policy, PolicyOutput, evaluating, shard
from workbench.models.save import merged_state_dict
from workbench.strategies.shards import local, shard_like, whole

COPY = "reference"  # name of a copied adapter
Weights = dict[str, Tensor]


class Reference:
    """Base: log-probabilities of a micro-batch under other weights than the policy's own.

    Args:
        policy: the policy that this one stands beside.
    """

    def __init__(self, policy: Policy) -> None:
        self.beside = policy
        self.policy: Policy | None = None  # its own, where it has one
        self.fingerprint = ""
        self._exact: Weights = {}  # fp32 values of weights that move by shares and are held in less

    def logps(self, batch: MicroBatch, **options: Any) -> Tensor:
        """Log-probabilities ``[T]`` of ``batch.outputs``, nats, no gradient; ``options`` as of `Policy`."""
        return self.outputs(batch, **options).logps

    def outputs(self, batch: MicroBatch, want: Collection[str] = ("logps",), **options: Any) -> PolicyOutput:
        """What `Policy` gives, without gradient."""
        raise NotImplementedError

    def place(self, device: torch.device, precision: Any) -> None:
        """Moves weights of its own to the device, in the precision of the trainer's plugin."""

    def shard(self, mesh: DeviceMesh, **fsdp: Any) -> None:
        """Shards weights of its own as the policy's are."""

    def weights(self) -> Weights:
        """Its parameters by the names of the policy's that they stand for."""
        return {}

    @torch.no_grad()
    def move(self, weights: Mapping[str, Tensor], share: float = 1.0) -> None:
        """``reference <- share * weights + (1 - share) * reference``, on this rank's part of every parameter.

        Args:
            weights: this rank's parts by the policy's names.
            share: of the new weights, in (0, 1].

        Raises:
            UserError: this reference has no weights of its own.
        """
        own = self.weights()
        if unknown := weights.keys() - own.keys():
            raise UserError(f"the reference cannot follow the policy: it has no weights of its own for {sorted(unknown)[0]}.")
        for name, weight in weights.items():
            target = local(own[name])
            exact = target
            if share < 1 and target.dtype != torch.float32:
                exact = self._exact.setdefault(name, target.float())  # a small share would be rounded away
            target.copy_(exact.lerp_(weight.to(target.device, exact.dtype), share))

    def state_dict(self) -> Weights:
        """Whole tensors, on the first rank; every rank must call it."""
        return {name: whole(self._exact.get(name, local(p)), p) for name, p in self.weights().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` gave."""
        self._exact = {}
        for name, parameter in self.weights().items():
            saved = shard_like(state[name], parameter).to(parameter.device)
            local(parameter).copy_(saved)
            if saved.dtype != parameter.dtype:
                self._exact[name] = saved


class FrozenCopy(Reference):
    """A model of its own, in eval mode and without gradients.

    Args:
        policy: the policy that it stands beside; gives the layout.
        model: the transformers model; it is not copied.
    """

    def __init__(self, policy: Policy, model: nn.Module) -> None:
        super().__init__(policy)
        names = ("layout", "pad_to_multiple_of", "chunked_head", "head_dtype", "head_kernel", "torch_compile")
        self.policy = Policy(model, **{name: getattr(policy, name) for name in names})
        self.policy.requires_grad_(False).eval()
        self.fingerprint = fingerprint(model)

    @torch.no_grad()
    def outputs(self, batch: MicroBatch, want: Collection[str] = ("logps",), **options: Any) -> PolicyOutput:
        return self.policy(batch, want, **options)

    def place(self, device: torch.device, precision: Any) -> None:
        self.policy = precision.convert_module(self.policy).to(device)

    def shard(self, mesh: DeviceMesh, **fsdp: Any) -> None:
        shard(self.policy, mesh, **fsdp)

    def weights(self) -> Weights:
        return dict(self.policy.named_parameters())


class MergedCopy(FrozenCopy):
    """A copy of a model with its adapter merged in, which can follow a trained adapter exactly (mixed in the space of the
    weights, where a mixture of adapters' factors would be another update)."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, copy.deepcopy(policy.hf).merge_and_unload())

    def follow(self, share: float) -> None:
        """Moves towards the policy's merged weights."""
        merged = merged_state_dict(self.beside.hf)
        self.move({name: merged[name.removeprefix("hf.")] for name in self.weights()}, share)


class AdapterView(Reference):
    """The policy's own model with another adapter of it, or with none.

    Args:
        policy: the policy.
        name: of the adapter; None computes with the base alone.
    """

    def __init__(self, policy: Policy, name: str | None) -> None:
        super().__init__(policy)
        self.name = name
        trained = {id(p) for p in policy.parameters() if p.requires_grad}
        self.fingerprint = fingerprint(policy.hf, lambda p: id(p) not in trained)

    @torch.no_grad()
    def outputs(self, batch: MicroBatch, want: Collection[str] = ("logps",), **options: Any) -> PolicyOutput:
        with evaluating(self.beside), use_adapter(self.beside.hf, self.name):
            return self.beside(batch, want, **options)

    def weights(self) -> Weights:
        if self.name is None:
            return {}
        trained, mark = single_adapter(self.beside.hf), f".{self.name}"
        named = dict(self.beside.named_parameters())
        own = {name.replace(mark, f".{trained}", 1): p for name, p in named.items() if f"{mark}." in name or name.endswith(mark)}
        return {name: p for name, p in own.items() if name in named and named[name].requires_grad}


def at_start(policy: Policy, *, follows: Literal["policy", "average"] | None = None) -> Reference:
    """A reference with the policy's weights as they are now.

    Args:
        policy: before its first step, not sharded.
        follows: what it will move towards: the ``policy``, by shares, or an ``average`` of its trained parameters; it then needs
            weights of its own. None: nothing.
    """
    if not isinstance(policy.hf, PeftModel):
        return FrozenCopy(policy, copy.deepcopy(policy.hf))
    name = single_adapter(policy.hf)
    if getattr(policy.hf.peft_config[name], "bias", "none") != "none":
        return FrozenCopy(policy, copy.deepcopy(policy.hf))
    if follows == "policy":
        return MergedCopy(policy)
    if follows is None and changes_nothing(policy.hf, name):
        return AdapterView(policy, None)
    copy_adapter(policy.hf, name, COPY)
    return AdapterView(policy, COPY)


def changes_nothing(model: PeftModel, adapter: str) -> bool:
    """Whether the model computes the same with the adapter as without it, bit for bit: every update is zero, and every module
    trained beside it is still as in the base."""
    for module in model.modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            return False
        if isinstance(module, BaseTunerLayer) and adapter in module._all_available_adapter_names():
            if not isinstance(module, LoraLayer) or getattr(module, "use_dora", {}).get(adapter):
                return False
            is_linear = adapter in module.lora_B
            second = list(module.lora_B[adapter].parameters()) if is_linear else [module.lora_embedding_B[adapter]]
            if any(factor.detach().count_nonzero() for factor in second):
                return False
    return True


def fingerprint(model: nn.Module, keep: Any = lambda parameter: True) -> str:
    """Hash of the parameters' names, shapes and exact values."""
    digest = xxhash.xxh3_128()
    for name, parameter in model.named_parameters():
        if keep(parameter):
            data = parameter.detach().cpu().contiguous()
            digest.update(f"{name} {data.dtype} {tuple(data.shape)}".encode())
            digest.update(data.flatten().view(torch.uint8).numpy() if data.numel() else b"")
    return digest.hexdigest()
