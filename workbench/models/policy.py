"""`Policy`: the one module through which anything computes."""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch
from workbench.errors import UserError
from workbench.models import attention
from workbench.models.compiling import Compile, compile_layers, uncompiled
from workbench.models.head_kernel import HeadKernel, check_head
from workbench.models.heads import classification_head, is_classifier
from workbench.models.layouts import Layout, ModelInputs, to_inputs
from workbench.models.load import record_of
from workbench.models.logps import Chunked, Head, LogitsProcessing, Seen, token_logps
from workbench.models.offload import Offload
from workbench.models.work import Work

log = logging.getLogger(__name__)

TOKEN_STATS = {"logps", "entropy", "top1", "mean_logit", "log_collision", "hidden"}  # read where a token is predicted
# What a selective checkpoint keeps: the outputs of attention, the dearest thing to recompute per byte (arXiv:2205.05198).
ATTENTION_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_attention_math.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
}


@dataclass
class PolicyOutput:
    """What was asked of a forward pass, trained positions only, in the order of ``batch.outputs``.

    Args:
        logps: log-probabilities ``[T]``, nats.
        entropy: ``[T]``, nats; a gradient only where one is asked for.
        top1: most likely token ids ``[T]``.
        mean_logit: mean logit over the vocabulary ``[T]``, no gradient.
        log_collision: ``log sum_v p(v)^2`` ``[T]``, no gradient.
        hidden: hidden states that predict the trained tokens ``[T, H]``.
        scores: outputs of a classifier's head ``[P, num_labels]`` in fp32.
        aux_loss: load-balancing loss of a mixture of experts, a scalar over this micro-batch.
    """

    logps: Tensor | None = None
    entropy: Tensor | None = None
    top1: Tensor | None = None
    mean_logit: Tensor | None = None
    log_collision: Tensor | None = None
    hidden: Tensor | None = None
    scores: Tensor | None = None
    aux_loss: Tensor | None = None


class Policy(nn.Module):
    """A causal language model, or a classifier on one, behind one ``forward(batch, want)``.

    Under FSDP2 this module is the root of the sharding, so that backbone and head are gathered together.

    Args:
        hf: the model, plain or wrapped by PEFT.
        layout: how a micro-batch is laid out.
        pad_to_multiple_of: rounds the length of rows up (static shapes for compilers, tensor cores).
        chunked_head: whether logits are formed in pieces (see `token_logps`).
        head_dtype: in which the head's products are computed; None: the weights' own, or autocast's.
        head_kernel: what computes the log-probabilities in training (see `workbench.models.head_kernel`).
        activation_offloading: whether what the layers keep for the backward pass waits on the host.
        torch_compile: whether the layers are compiled: True, or arguments of ``torch.compile``.
    """

    def __init__(
        self,
        hf: nn.Module,
        *,
        layout: Layout = "padded",
        pad_to_multiple_of: int | None = None,
        chunked_head: Chunked = "auto",
        head_dtype: torch.dtype | None = None,
        head_kernel: HeadKernel = "torch",
        activation_offloading: bool = False,
        torch_compile: Compile = False,
    ) -> None:
        super().__init__()
        self.torch_compile = torch_compile
        self.activation_offloading = activation_offloading
        self.head_dtype = head_dtype
        self.head_kernel = head_kernel
        self.chunked_head = chunked_head
        self.hf = hf
        self.layout = layout
        self.pad_to_multiple_of = pad_to_multiple_of
        self.work = Work()
        _check_supported(hf, self.causal_lm)
        attention.keep_softcap(self.causal_lm)
        if head_kernel != "torch":
            check_head(Head.of(self.causal_lm))
        self.takes_forest = layout != "padded" and attention.install(self.causal_lm)
        record = record_of(hf)
        self.kernels = record is None or record.spec.attn_implementation != "eager"  # who asks for it wants it written out
        if layout == "shared" and not self.takes_forest:
            raise UserError(
                f"method.layout=shared does not go with model.attn_implementation={self.config._attn_implementation}; allowed: "
                f"{', '.join(attention.OURS)}."
            )
        compile_layers(self.causal_lm, torch_compile)

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model itself, under any adapter."""
        return self.hf.get_base_model() if hasattr(self.hf, "get_base_model") else self.hf

    @property
    def config(self) -> Any:
        """The transformers config."""
        return self.causal_lm.config

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Policy":
        # `.to(bfloat16)`, which Lightning's bf16-true calls, would round the frequencies of rotary embeddings as well.
        frequencies = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module._buffers.items()
            if name in module._non_persistent_buffers_set and buffer is not None and buffer.is_floating_point()
        ]
        super()._apply(fn, recurse)
        for module, name, buffer in frequencies:
            if (moved := module._buffers[name]).dtype != buffer.dtype:
                module._buffers[name] = buffer.to(moved.device)
        return self

    def forward(
        self,
        batch: MicroBatch,
        want: Collection[str] = ("logps",),
        *,
        temperature: float = 1.0,
        at: Tensor | None = None,
        processing: LogitsProcessing | None = None,
        entropy_grad: bool = False,
    ) -> PolicyOutput:
        """Runs the micro-batch.

        Args:
            batch: the micro-batch.
            want: fields of `PolicyOutput`.
            temperature: divides the logits.
            at: tokens whose ``scores`` are read ``[P]``, indices into ``batch.tokens``; None: the last of every sequence.
            processing: what a sampler did to the logits, its own temperature in place of ``temperature``.
            entropy_grad: let ``entropy`` carry a gradient.
        """
        inputs = to_inputs(batch, self.layout, self.pad_to_multiple_of)
        offloading = self.activation_offloading and torch.is_grad_enabled()
        with Offload(self.causal_lm.base_model) if offloading else contextlib.nullcontext():
            hidden, router_logits = self._backbone(inputs, with_router="aux_loss" in want)
        hidden = hidden.flatten(0, 1)
        out = PolicyOutput()
        if "scores" in want:
            out.scores = self._scores(hidden[inputs.index[batch.ends() if at is None else at]])
        outputs = 0
        if TOKEN_STATS & set(want):
            predicting = hidden[inputs.index[batch.predictors()]]
            outputs = len(predicting)  # `batch.outputs` would make the host wait for the device once more
            out.hidden = predicting if "hidden" in want else None
        if not batch.is_empty:
            self.work.count(inputs, outputs)
        if TOKEN_STATS & set(want) - {"hidden"}:
            targets = batch.tokens[batch.outputs]
            options = {"temperature": temperature, "want": want, "chunked": self.chunked_head, "entropy_grad": entropy_grad}
            if processing is not None:
                options |= vars(processing)
                options["seen"] = seen_before(batch) if processing.repetition_penalty != 1.0 else None
            head = Head.of(self.causal_lm, self.head_dtype, self.head_kernel)
            stats = token_logps(predicting, head, targets, **options)
            for name, values in vars(stats).items():
                setattr(out, name, values)
        if "aux_loss" in want:
            out.aux_loss = self._aux_loss(router_logits, inputs.real)
        return out

    def weights_of(self, batch: MicroBatch) -> Tensor:
        """Weights that belong to the outputs of `forward` ``[T]``; one zero where nothing is trained."""
        return batch.weights[batch.outputs]

    def _scores(self, hidden: Tensor) -> Tensor:
        head, dropout = classification_head(self.hf), getattr(self.causal_lm, "dropout", None)
        hidden = dropout(hidden) if isinstance(dropout, nn.Dropout) else hidden  # that of token classifiers
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(next(head.parameters()).dtype)  # an adapter trains the head in fp32
        return head(hidden).float()

    def _backbone(self, inputs: ModelInputs, *, with_router: bool) -> tuple[Tensor, Any]:
        kwargs = {"output_router_logits": True} if with_router else {}
        mask = inputs.attention_mask
        if inputs.forest is not None and self.takes_forest:
            kwargs["forest"] = inputs.forest
            inputs.forest.kernels = self.kernels
        elif inputs.forest is not None:
            mask = None  # positions that start again tell the documents apart
        out = self.causal_lm.base_model(
            input_ids=inputs.input_ids,
            attention_mask=mask,
            position_ids=inputs.position_ids,
            use_cache=False,
            **kwargs,
        )
        return out.last_hidden_state, getattr(out, "router_logits", None)

    def _aux_loss(self, router_logits: Any, real: Tensor | None) -> Tensor:
        """The family's own load-balancing loss (Switch Transformer, arXiv:2101.03961, eqs. 4-6)."""
        model = self.causal_lm
        loss = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
        if loss is None or router_logits is None:
            raise UserError(
                f"router_aux_loss_coef: {type(model).__name__} has no router to balance; set method.router_aux_loss_coef=null."
            )
        if hasattr(model, "num_experts"):
            return loss(router_logits, model.num_experts, model.num_experts_per_tok, real)
        config = model.config.get_text_config()  # classifiers know no numbers
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        return loss(router_logits, experts, config.num_experts_per_tok, real)

    @torch.no_grad()
    def decode(
        self, input_ids: Tensor, cache: Any, *, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Logits that follow the tokens in ``cache`` and ``input_ids``, which join it; in the mode that the modules are in.

        Args:
            input_ids: further tokens, padded on the left, ``[B, L]``.
            cache: keys and values of the tokens before them, of the kind that transformers' models take.
            attention_mask: 1 for tokens, 0 for padding, those in the cache included ``[B, K]``; None: no padding.
            position_ids: of ``input_ids`` ``[B, L]``.

        Returns:
            Logits after the last of ``input_ids``, fp32 ``[B, V]``.
        """
        with uncompiled(self):
            out = self.causal_lm.base_model(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache, use_cache=True
            )
        return Head.of(self.causal_lm, self.head_dtype)(out.last_hidden_state[:, -1])

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> Tensor:
        """``generate`` of transformers, in eval mode and with the cache on, whatever state training is in.

        Args:
            input_ids: prompts, padded on the left, ``[B, L]``.
            attention_mask: ``[B, L]``.
            kwargs: as in ``GenerationConfig``.

        Returns:
            New tokens alone ``[B, n]``.
        """
        with evaluating(self), uncompiled(self):
            out = self.hf.generate(input_ids=input_ids, attention_mask=attention_mask, use_cache=True, **kwargs)
        return out[:, input_ids.shape[1] :]


def seen_before(batch: MicroBatch) -> Seen:
    """The tokens before each of ``batch.outputs``, those of the segments that its own continues included."""
    outputs, starts, parent = batch.outputs, batch.starts.tolist(), batch.parent.tolist()
    own = batch.segment[outputs]
    segments, row = torch.unique(own, return_inverse=True)
    contexts, before = [], []
    for segment in segments.tolist():
        chain = [segment]
        while parent[chain[-1]] >= 0:
            chain.append(parent[chain[-1]])
        contexts.append(torch.cat([batch.tokens[starts[s] : starts[s + 1]] for s in reversed(chain)]))
        before.append(len(contexts[-1]) - (starts[segment + 1] - starts[segment]))
    length = torch.tensor(before, device=row.device)[row] + outputs - batch.starts[own]
    return Seen(nn.utils.rnn.pad_sequence(contexts, batch_first=True), row, length)


def _check_supported(hf: nn.Module, model: PreTrainedModel) -> None:
    if getattr(hf, "active_peft_config", None) is not None and hf.active_peft_config.is_prompt_learning:
        raise UserError(
            f"peft type {hf.active_peft_config.peft_type.value} adds virtual tokens, which the masks do not know; "
            "use an adapter that changes weights (LoRA, DoRA, IA3, ...)."
        )
    if model.config.is_encoder_decoder:
        raise UserError(f"{type(model).__name__} is an encoder-decoder model; a causal language model is needed.")
    if not is_classifier(model):
        Head.of(model)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode inside, every module's own mode restored after."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout probability to 0, modules and the numbers that attention functions read alike."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def set_gradient_checkpointing(model: PreTrainedModel, mode: bool | Literal["selective"]) -> None:
    """Turns activation checkpointing on.

    Args:
        model: the model.
        mode: True recomputes whole layers; ``selective`` keeps the attention outputs.
    """
    if not mode:
        return
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{type(model).__name__} has no gradient checkpointing; set method.gradient_checkpointing=false.")
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_attention)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(kwargs)


def _keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in ATTENTION_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def shard(policy: Policy, mesh: DeviceMesh, *, extra_entry_points: Sequence[str] = ("generate", "decode"), **fsdp: Any) -> None:
    """FSDP2: shards each layer, then the rest together at `Policy`.

    Args:
        policy: the policy, not yet sharded.
        mesh: one-dimensional data-parallel mesh.
        extra_entry_points: methods besides ``forward`` that gather the root's parameters.
        fsdp: further arguments of ``fully_shard``.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    blocks = set(policy.causal_lm._no_split_modules or ())
    for module in policy.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, **fsdp)
    fully_shard(policy, mesh=mesh, **fsdp)
    for name in extra_entry_points:
        register_fsdp_forward_method(policy, name)
