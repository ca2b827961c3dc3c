"""`Method`: what every training method shares, so that each one is little more than its loss."""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.data.batch import MicroBatch
from workbench.data.chat import ChatRenderer
from workbench.data.prompts import Geometry
from workbench.errors import UserError, check_at_least
from workbench.losses.reduce import Scope, reduce
from workbench.methods import checkpoint as ckpt
from workbench.methods.evaluation import ComputeMetrics, Evaluation, Term
from workbench.methods.generate import Prompt, generate_texts
from workbench.methods.metrics import Meter
from workbench.methods.optim import OptimizerFactory, SchedulerFactory, adamw, build_optimizer, build_scheduler
from workbench.methods.resume import KEY, rewrite_position
from workbench.models.compiling import check_compile, check_compiler
from workbench.models.head_kernel import HeadKernel, check_device, check_head_kernel, check_precision
from workbench.models.layouts import Layout
from workbench.models.load import ModelSpec, load_model, unwrap
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.policy import Policy, PolicyOutput, disable_dropout, set_gradient_checkpointing, shard
from workbench.models.probe import check_head, choose_layout
from workbench.models.save import save_pretrained
from workbench.models.tokenizer import fit_vocabulary, load_tokenizer
from workbench.strategies.info import data_parallel_group, data_parallel_mesh, is_deepspeed

log = logging.getLogger(__name__)

_METRICS_OF = {"entropy": "train/entropy", "top1": "train/mean_token_accuracy", "mean_logit": "train/logits/*"}


class Method(L.LightningModule):
    """Base of all methods: the model's life, the optimizer, metrics per optimizer step, evaluation, checkpoints.

    A subclass names the data it takes and defines `training_step` and `evaluation_step`.

    Args:
        model: hub name, path, `ModelSpec`, or a model that is already built.
        tokenizer: for a model handed in as an object; otherwise the model's own.
        peft: adapter to train instead of the whole model.
        optim: called with parameter groups, returns the optimizer; None: AdamW at its defaults.
        scheduler: called with the optimizer (and ``num_training_steps``); None: constant.
        gradient_checkpointing: recompute activations in the backward pass; ``selective`` keeps attention outputs.
        activation_offloading: let what the layers keep for the backward pass wait in the host's memory; with
            ``gradient_checkpointing`` that is each layer's input.
        torch_compile: compile each layer: True, or arguments of ``torch.compile`` (``backend``, ``mode``, ``options``).
        disable_dropout: set every dropout probability to 0; without it a run depends on how it was executed.
        layout: ``padded`` rows; ``packed`` into one row without padding; ``shared``, which computes a prompt once for all of its
            completions; ``auto``, the best of them that models of this kind pass a test for.
        pad_to_multiple_of: round row lengths up to a multiple.
        chunked_head: form the logits in pieces, so that memory does not grow with tokens times vocabulary; ``auto`` does so
            where they are many.
        head_kernel: what computes the log-probabilities: ``torch``, or on CUDA in half precision the kernel of the package
            ``cut_cross_entropy``, which holds no logits. It gives nothing else: training steps log no entropy, accuracy or
            logits then, and where a loss or an evaluation set reads these, torch forms the logits once more.
        scope: ``step`` divides once per optimizer step; ``micro_batch`` averages means of micro-batches.
        router_aux_loss_coef: weight of the load-balancing loss of a mixture of experts; None leaves it out.
        compute_metrics: ``f(EvalPredictions) -> dict`` over an evaluation set.
    """

    data_types: ClassVar[tuple[str, ...]] = ()
    mismatched: Scope | None = None  # whether micro-batches carry rows with exchanged completions, and among which rows
    trains_prompts: ClassVar[bool] = False  # of pairs, with data.train_on=all
    trains_tokens: ClassVar[bool] = True  # whether the loss reads the tokens that data.train_on chooses
    generates: ClassVar[bool] = True  # whether the model writes text; one that scores cannot be asked
    trains_lm_head: ClassVar[bool] = True  # whether the loss reads log-probabilities of tokens
    auto_class: ClassVar[str] = "AutoModelForCausalLM"  # of transformers, for what `save_pretrained` writes

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        peft: PeftSpec | None = None,
        optim: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        gradient_checkpointing: bool | Literal["selective"] = False,
        activation_offloading: bool = False,
        torch_compile: bool | dict[str, Any] = False,
        disable_dropout: bool = True,
        layout: Layout | Literal["auto"] = "auto",
        pad_to_multiple_of: int | None = None,
        chunked_head: bool | Literal["auto"] = "auto",
        head_kernel: HeadKernel = "torch",
        scope: Scope = "step",
        router_aux_loss_coef: float | None = None,
        compute_metrics: ComputeMetrics | None = None,
    ) -> None:
        super().__init__()
        # past nn.Module, which would make an object a submodule beside the policy and write it to checkpoints a second time
        object.__setattr__(self, "model_spec", ModelSpec(model) if isinstance(model, str) else model)
        self.peft_spec = peft
        self.optim = optim or adamw
        self.scheduler = scheduler
        self.gradient_checkpointing = gradient_checkpointing
        self.activation_offloading = activation_offloading
        self.torch_compile = torch_compile
        self.disable_dropout = disable_dropout
        self.layout = layout
        self.pad_to_multiple_of = pad_to_multiple_of
        self.chunked_head = chunked_head
        self.head_kernel: HeadKernel = head_kernel
        self._left_out: list[str] = []  # statistics that training steps do not log
        self.scope: Scope = scope
        self.router_aux_loss_coef = router_aux_loss_coef
        self.compute_metrics = compute_metrics
        self.policy: Policy | None = None
        self.step_metrics: dict[str, float] = {}
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._meter = Meter()
        self._evaluations: list[Evaluation] = []
        self._closing = False
        self._last_time: float | None = None
        check_at_least(1, method__pad_to_multiple_of=pad_to_multiple_of)
        check_compile(torch_compile, layout, gradient_checkpointing, activation_offloading)
        check_head_kernel(head_kernel, self.trains_lm_head)
        if activation_offloading and gradient_checkpointing == "selective":
            raise UserError(
                "method.activation_offloading=true does not reach what gradient_checkpointing=selective keeps; set "
                "method.gradient_checkpointing to true or false."
            )
        if disable_dropout and getattr(peft, "dropout", 0.0):
            raise UserError(
                f"peft.dropout={peft.dropout} has no effect with method.disable_dropout=true; set one of peft.dropout=0 and "
                "method.disable_dropout=false."
            )

    # -- model ------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, loaded on first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.model_spec)
        return self._tokenizer

    def configure_model(self) -> None:
        """Builds the model, adapts it, and shards it where the strategy does that."""
        if self.policy is not None:
            return
        if self._trainer is not None:
            check_compiler(self.trainer.strategy.root_device, self.torch_compile)
            if self.head_kernel != "torch":
                check_device(self.trainer.strategy.root_device)
        self.policy = self.build_policy()
        if self._trainer is not None and self.head_kernel != "torch":
            check_precision(self.trainer.precision, self.policy.causal_lm.get_output_embeddings().weight.dtype)
        self.build_beside()
        mesh = data_parallel_mesh(self.trainer.strategy) if self._trainer is not None else None
        if mesh is not None:
            shard(self.policy, mesh, **getattr(self.trainer.strategy, "fsdp_kwargs", {}))

    def build_beside(self) -> None:
        """Builds what stands beside the policy (a reference), while that is as it was handed in, on the CPU and whole."""

    def load_network(self) -> PreTrainedModel:
        """The transformers model before any adapter."""
        return load_model(self.model_spec)

    def build_policy(self) -> Policy:
        """The policy in training mode, on the CPU, not sharded."""
        model = self.load_network()
        if isinstance(self.model_spec, ModelSpec):
            fit_vocabulary(model, self.tokenizer, self.model_spec)
        base = unwrap(model)
        check_head(base)
        self.layout = choose_layout(base, self.layout)
        check_compile(self.torch_compile, self.layout, self.gradient_checkpointing, self.activation_offloading)
        hf = apply_peft(model, self.peft_spec)
        if self.disable_dropout:
            disable_dropout(hf)
        set_gradient_checkpointing(base, self.gradient_checkpointing)
        return Policy(hf, **self.policy_arguments()).train()

    def policy_arguments(self) -> dict[str, Any]:
        """Arguments of `Policy` besides the model."""
        return {
            "layout": self.layout,
            "pad_to_multiple_of": self.pad_to_multiple_of,
            "chunked_head": self.chunked_head,
            "head_kernel": self.head_kernel,
            "activation_offloading": self.activation_offloading,
            "torch_compile": self.torch_compile,
        }

    def configure_optimizers(self) -> dict[str, Any] | Optimizer:
        """The optimizer over trained parameters, and the schedule per optimizer step."""
        optimizer = build_optimizer(self.optim, self)
        if self.scheduler is None:
            return optimizer
        scheduler = build_scheduler(self.scheduler, optimizer, self.trainer.datamodule.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # -- training ---------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: MicroBatch, batch_idx: int) -> None:
        """Notes whether this micro-batch closes the step."""
        self._closing = batch.closes_step
        self._last_time = self._last_time or time.perf_counter()

    def want_in_training(self, *logged: str, read: Sequence[str] = ()) -> list[str]:
        """What a training step asks of the policy besides log-probabilities.

        Args:
            logged: statistics for the logs alone, left out where the head's kernel does not give them.
            read: statistics that the loss reads.
        """
        if self.head_kernel != "torch":
            self._left_out = [name for name in logged if name not in read]
        kept = [name for name in (*logged, *read) if name not in self._left_out]
        return ["logps", *dict.fromkeys(kept)] + ["aux_loss"] * (self.router_aux_loss_coef is not None)

    def record(self, name: str, values: Tensor | None, weights: Tensor) -> None:
        """Adds a per-token or per-row metric of this micro-batch: the mean of ``values`` under ``weights``, over the step, or
        over micro-batches' means with ``scope="micro_batch"``; None, a statistic that was left out, is none."""
        if values is None:
            return
        total = torch.where(weights == 0, 0.0, values.detach().double() * weights).sum()
        count = weights.sum()
        if self.scope == "micro_batch":
            total, count = total / count.clamp(min=1e-30), (count > 0).float()
        self._meter.add(name, total, count)

    def step_loss(self, terms: Sequence[Term], batch: MicroBatch, out: PolicyOutput) -> Tensor:
        """The micro-batch's share of the step's loss: its terms, each divided once, and the experts' balance; recorded."""
        loss = sum(
            term.coefficient * reduce(term.values, term.weights, batch.norm, per=term.per, scope=term.scope or self.scope)
            for term in terms
        )
        loss = self.with_aux_loss(loss, out, batch)
        self.record_step(loss, batch)
        return loss

    def with_aux_loss(self, loss: Tensor, out: PolicyOutput, batch: MicroBatch) -> Tensor:
        """Adds ``router_aux_loss_coef`` times the load-balancing loss, where a method has asked for it."""
        if out.aux_loss is None:
            return loss
        # Balance is a property of a micro-batch's routing: the mean over micro-batches is the only step-wide value.
        share = 0.0 if batch.is_empty else batch.norm.scale / batch.norm.micro_batches
        self._meter.add("aux_loss", out.aux_loss * (not batch.is_empty), float(not batch.is_empty))
        return loss + self.router_aux_loss_coef * out.aux_loss * share

    def on_fit_start(self) -> None:
        """Names what makes this run depend on how it is cut into micro-batches."""
        if self.activation_offloading and self.device.type == "cpu":
            log.warning("method.activation_offloading=true frees nothing on a CPU, where it copies every activation once more.")
        if self._left_out:
            names = ", ".join(_METRICS_OF[name] for name in self._left_out)
            log.info("method.head_kernel=%s gives log-probabilities alone: no step logs %s.", self.head_kernel, names)
        for reason in self.couplings():
            log.warning("%s, so this run's numbers depend on data.micro_batch_size and on the number of devices.", reason)

    def geometry(self, batch_size: int) -> Geometry | None:
        """How completions of prompts fill optimizer steps, for a method that writes them; None: rows are trained as they are."""
        return None

    def couplings(self) -> list[str]:
        """What couples the rows of a micro-batch."""
        if self.router_aux_loss_coef is None:
            return []
        return ["method.router_aux_loss_coef: the balance of experts is a mean over micro-batches"]

    def record_extreme(self, name: str, values: Tensor, kind: Literal["min", "max"]) -> None:
        """Adds to the smallest or largest value of the step; with ``scope="micro_batch"`` to the mean of micro-batches' own."""
        if self.scope == "step":
            self._meter.extreme(name, values, kind)
        elif len(values):
            self._meter.add(name, values.amin() if kind == "min" else values.amax(), 1.0)
        else:
            self._meter.add(name, 0.0, 0.0)

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics that are formed of others once those are whole, of a step or of an evaluation set."""
        return {}

    def record_step(self, loss: Tensor, batch: MicroBatch) -> None:
        """Adds a micro-batch's share of the step's loss, and its tokens."""
        self._meter.add("loss", loss.detach() / batch.norm.scale, None)
        self._meter.add("num_tokens", self.tokens_in(batch), None)

    def tokens_in(self, batch: MicroBatch) -> int:
        """What a micro-batch adds to ``num_tokens``."""
        return batch.num_tokens

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Finishes the step's metrics; the gradient norm is that before clipping."""
        if self._closing and not is_deepspeed(self.trainer.strategy):
            self._finish_step(ckpt.total_norm(self).item())
            self._log_step(self.trainer.global_step + 1)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's, and gradients go at once: Lightning would keep them until after the next forward pass. DeepSpeed, which
        calls it for every micro-batch, knows the norm only after its own step."""
        super().optimizer_step(*args, **kwargs)
        if not is_deepspeed(self.trainer.strategy):
            self.trainer.optimizers[0].zero_grad()
        if self._closing and is_deepspeed(self.trainer.strategy):
            norm = self.trainer.strategy.deepspeed_engine.get_global_grad_norm()
            self._finish_step(float("nan") if norm is None else float(norm))

    def on_train_batch_end(self, outputs: Any, batch: MicroBatch, batch_idx: int) -> None:
        """Logs what `optimizer_step` may not."""
        if self._closing and is_deepspeed(self.trainer.strategy):
            self._log_step(self.trainer.global_step)

    def _finish_step(self, grad_norm: float) -> None:
        metrics = self._meter.compute(self.device, data_parallel_group(self.trainer.strategy))
        metrics |= self.derived(metrics)
        now = time.perf_counter()
        tokens = metrics.pop("num_tokens", 0.0)
        self.num_tokens += int(tokens)
        metrics |= {
            "grad_norm": grad_norm,
            "lr": self.trainer.optimizers[0].param_groups[0]["lr"],
            "num_tokens": float(self.num_tokens),
            "tokens_per_second": tokens / max(now - self._last_time, 1e-9),
        }
        self._last_time = now
        self._check_finite(metrics)
        self.step_metrics = {f"train/{name}": value for name, value in metrics.items()}

    def _log_step(self, step: int) -> None:
        for item in (self.trainer._results or {}).values():
            # A metric that this step has no value for: Lightning would log that of an earlier step again.
            if item.meta.name.startswith("train/") and item.meta.name not in self.step_metrics:
                item.reset()
        self.log_dict({**self.step_metrics, "step": float(step)}, on_step=True, on_epoch=False, batch_size=1)

    def _check_finite(self, metrics: dict[str, float]) -> None:
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        bad = [name for name in ("loss", "grad_norm") if metrics.get(name, 0.0) - metrics.get(name, 0.0) != 0.0]
        if bad and not scaled and not is_deepspeed(self.trainer.strategy):
            raise UserError(
                f"{' and '.join(bad)} is not finite at step {self.trainer.global_step + 1}; the weights are still those of the "
                "step before. Lower optim.lr, set trainer.gradient_clip_val, or check the data with 'workbench inspect'."
            )

    # -- evaluation -------------------------------------------------------------------------------------------------

    def before_evaluation_data(self) -> None:
        """Called before evaluation rows are dealt out, while columns can still be added to them."""

    def evaluation_step(self, batch: MicroBatch, evaluation: Evaluation) -> None:
        """Adds one micro-batch of an evaluation set to ``evaluation``."""
        raise NotImplementedError

    def on_validation_epoch_start(self) -> None:
        """Starts an `Evaluation` per evaluation set."""
        self._evaluations = [Evaluation(self.compute_metrics) for _ in self.trainer.datamodule.eval_names]

    def validation_step(self, batch: MicroBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """One micro-batch of one evaluation set."""
        self.evaluation_step(batch, self._evaluations[dataloader_idx])

    def on_validation_epoch_end(self) -> None:
        """Logs each set's metrics as ``val/<metric>`` or, with several sets, ``val/<set>/<metric>``."""
        names = self.trainer.datamodule.eval_names
        for name, evaluation in zip(names, self._evaluations, strict=True):
            prefix = f"val/{name}/" if len(names) > 1 else "val/"
            metrics = self.finish_evaluation(name, evaluation)
            metrics = {prefix + key: value for key, value in metrics.items()}
            self.log_dict({**metrics, "step": float(self.trainer.global_step)}, on_epoch=True, batch_size=1)
        self._last_time = None

    def finish_evaluation(self, name: str, evaluation: Evaluation) -> dict[str, float]:
        """The metrics of a whole evaluation set, the same on every rank."""
        metrics = evaluation.compute(self.device, self.trainer.strategy)
        return metrics | self.derived(metrics)

    def generate(self, prompts: Sequence[Prompt], **options: Any) -> list[str]:
        """Continues prompts (texts, conversations, or rows with ``prompt`` and ``tools``) with the current weights, rendered
        as the training rows are; see `generate_texts`."""
        spec = getattr(getattr(self._trainer, "datamodule", None), "spec", None)
        asked = {} if spec is None else {"chat_template_kwargs": spec.chat_template_kwargs, "fold_system": spec.fold_system}
        precision = self.trainer.precision_plugin.forward_context() if self._trainer is not None else nullcontext()
        with precision:
            return generate_texts(self.policy, self.tokenizer, prompts, renderer=ChatRenderer(self.tokenizer, **asked), **options)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def strict_loading(self) -> bool:
        """False where the checkpoint leaves out frozen weights; `on_load_checkpoint` is strict about the others."""
        return not ckpt.has_frozen(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps trained weights only, names optimizer states by parameter, and notes what the position refers to."""
        if not is_deepspeed(self.trainer.strategy):  # its engine writes and reads weights and optimizer itself
            checkpoint["state_dict"] = ckpt.keep_trained(checkpoint["state_dict"], self)
            states = checkpoint.get("optimizer_states", [])
            checkpoint["optimizer_states"] = [s if not s or ckpt.is_named(s) else ckpt.ids_to_names(s, self) for s in states]
        checkpoint[KEY] = {"num_tokens": self.num_tokens, "data": self.trainer.datamodule.identity()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Checks a checkpoint against this run and moves its position to this run's micro-batches."""
        if not is_deepspeed(self.trainer.strategy):
            if "state_dict" in checkpoint:  # FSDP2 has loaded it before
                ckpt.check_trained(checkpoint["state_dict"], self)
            if checkpoint.get("optimizer_states") and data_parallel_mesh(self.trainer.strategy) is None:
                checkpoint["optimizer_states"] = [ckpt.names_to_ids(s, self) for s in checkpoint["optimizer_states"]]
        saved = checkpoint.get(KEY, {})
        self.num_tokens = saved.get("num_tokens", 0)
        if self.trainer.state.fn == "fit":
            data = self.trainer.datamodule
            data.check_identity(saved.get("data", {}))
            rewrite_position(checkpoint, data.steps_per_epoch, data.num_micro)

    def save_pretrained(self, directory: str | Path, **options: Any) -> None:
        """Writes a directory that ``from_pretrained`` of transformers (or peft, for an adapter) loads; a call for every rank."""
        state_dict = None
        if self._trainer is not None and data_parallel_mesh(self.trainer.strategy) is not None:
            state_dict = self.trainer.strategy.gather(self.policy.hf)
        if self._trainer is None or self.trainer.is_global_zero:
            save_pretrained(self.policy.hf, self.tokenizer, directory, state_dict=state_dict, **options)
        if self._trainer is not None:
            self.trainer.strategy.barrier("save_pretrained")
