"""`Referenced`: what methods that compare the policy with a reference share."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch
from workbench.errors import UserError, check_at_least, nearest
from workbench.losses.sequences import sequence_sums
from workbench.methods.base import Method
from workbench.models.load import ModelSpec, as_spec, load_model
from workbench.models.peft import add_frozen_adapter
from workbench.models.policy import Policy, disable_dropout
from workbench.models.reference import AdapterView, FrozenCopy, MergedCopy, Reference, at_start
from workbench.strategies.info import data_parallel_mesh, is_deepspeed
from workbench.strategies.shards import local

log = logging.getLogger(__name__)

KEY = "reference"  # of its state in a checkpoint
REF_ADAPTER = "reference"
MIXUP_ALPHA, SYNC_STEPS = 0.6, 512


class Referenced(Method):
    """Base of methods with a reference: by default the model as it was handed in.

    Args:
        model: as in `Method`.
        ref_model: another model as the reference: a name, or fields of a `ModelSpec` (such as ``quantization``); None: the
            model as it was handed in, adapters included.
        model_adapter: which adapter is trained, where the model carries several; None: the active one.
        ref_adapter: adapter that is the reference: its name on the model, or the path of a saved one.
        sync_ref_model: let the reference follow the policy (TR-DPO, Gorbatovski et al. 2024, arXiv:2404.09656, eqs. 4 and 5).
        ref_model_mixup_alpha: share of the policy in the reference at each update; 1 replaces it.
        ref_model_sync_steps: optimizer steps between two updates.
        options: as in `Method`.
    """

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        ref_model: str | dict[str, Any] | ModelSpec | PreTrainedModel | None = None,
        model_adapter: str | None = None,
        ref_adapter: str | None = None,
        sync_ref_model: bool = False,
        ref_model_mixup_alpha: float = MIXUP_ALPHA,
        ref_model_sync_steps: int = SYNC_STEPS,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        object.__setattr__(self, "ref_model", ref_model)  # past nn.Module: never a submodule
        self.model_adapter = model_adapter
        self.ref_adapter = ref_adapter
        self.sync_ref_model = sync_ref_model
        self.ref_model_mixup_alpha = ref_model_mixup_alpha
        self.ref_model_sync_steps = ref_model_sync_steps
        self.reference: Reference | None = None
        self.reference_fingerprint: str | None = None
        self._placed = False
        self._check_reference_options()

    needs_reference: bool = True

    def _check_reference_options(self) -> None:
        check_at_least(1, method__ref_model_sync_steps=self.ref_model_sync_steps)
        if not 0 < self.ref_model_mixup_alpha <= 1:
            raise UserError(f"method.ref_model_mixup_alpha={self.ref_model_mixup_alpha} must lie above 0 and be at most 1.")
        kinds = {
            "ref_model": self.ref_model is not None,
            "ref_adapter": self.ref_adapter is not None,
            "sync_ref_model": self.sync_ref_model,
        }
        asked = [name for name, is_set in kinds.items() if is_set]
        if len(asked) > 1:
            raise UserError(f"method.{asked[0]} and method.{asked[1]} exclude each other: there is one reference; leave one out.")
        if not self.sync_ref_model and (self.ref_model_mixup_alpha, self.ref_model_sync_steps) != (MIXUP_ALPHA, SYNC_STEPS):
            raise UserError(
                f"method.ref_model_mixup_alpha={self.ref_model_mixup_alpha} and method.ref_model_sync_steps="
                f"{self.ref_model_sync_steps} have no effect with method.sync_ref_model=false; set it to true."
            )

    # -- building ---------------------------------------------------------------------------------------------------

    def build_policy(self) -> Policy:
        """As `Method`'s, with ``model_adapter`` active."""
        policy = super().build_policy()
        if self.model_adapter is not None:
            self._check_adapter("model_adapter", policy)
            policy.hf.set_adapter(self.model_adapter)
        return policy

    def build_beside(self) -> None:
        """The reference, of the policy as it was handed in."""
        if not self.needs_reference:
            return
        strategy = self.trainer.strategy if self._trainer is not None else None
        self.reference = self._build_reference()
        self.reference_fingerprint = self.reference.fingerprint
        owns_weights = isinstance(self.reference, FrozenCopy)
        if strategy is not None and is_deepspeed(strategy) and strategy.zero_stage_3 and owns_weights:
            raise UserError(
                "strategy=deepspeed_stage_3 cannot hold a second model as the reference; use strategy=fsdp2 or "
                "deepspeed_stage_2, or train an adapter (peft=lora)."
            )
        mesh = data_parallel_mesh(strategy) if strategy is not None else None
        if mesh is not None:
            if self.sync_ref_model and isinstance(self.reference, MergedCopy):
                raise UserError(
                    "method.sync_ref_model cannot merge an adapter whose base is sharded; use strategy=ddp, or peft=none."
                )
            self.reference.shard(mesh, **getattr(strategy, "fsdp_kwargs", {}))

    def _build_reference(self) -> Reference:
        if self.ref_model is not None:
            return FrozenCopy(self.policy, self._load_ref_model())
        if self.ref_adapter is not None:
            return AdapterView(self.policy, self._adapter_to_compare_with())
        callbacks = self.trainer.callbacks if self._trainer is not None else []
        averaged = any(getattr(callback, "update_ref_model", False) for callback in callbacks)
        if averaged and self.sync_ref_model:
            raise UserError(
                "method.sync_ref_model and a callback's update_ref_model both move the reference; turn one of them off."
            )
        return at_start(self.policy, follows="policy" if self.sync_ref_model else "average" if averaged else None)

    def _load_ref_model(self) -> PreTrainedModel:
        given = self.ref_model if isinstance(self.ref_model, torch.nn.Module) else as_spec(self.ref_model)
        model = load_model(given)
        sizes = [m.config.get_text_config().vocab_size for m in (model, self.policy.causal_lm)]
        if sizes[0] != sizes[1]:
            raise UserError(
                f"method.ref_model has a vocabulary of {sizes[0]} tokens and the model one of {sizes[1]}: their "
                "log-probabilities cannot be compared; use a reference with the same tokenizer."
            )
        disable_dropout(model)
        return model

    def _adapter_to_compare_with(self) -> str:
        if not isinstance(self.policy.hf, PeftModel):
            raise UserError(f"method.ref_adapter={self.ref_adapter!r} needs a model with adapters; set peft, or use ref_model.")
        if self.ref_adapter in self.policy.hf.peft_config:
            return self.ref_adapter
        if Path(self.ref_adapter).expanduser().exists():
            add_frozen_adapter(self.policy.hf, self.ref_adapter, REF_ADAPTER)
            return REF_ADAPTER
        self._check_adapter("ref_adapter", self.policy)
        return self.ref_adapter

    def _check_adapter(self, option: str, policy: Policy) -> None:
        name, there = getattr(self, option), getattr(policy.hf, "peft_config", {})
        if name not in there:
            raise UserError(
                f"method.{option}={name!r} is no adapter of the model.{nearest(name, there)} "
                f"It has: {', '.join(there) or 'none'}."
            )

    # -- use --------------------------------------------------------------------------------------------------------

    def reference_sums(self, batch: MicroBatch, weights: Tensor) -> Tensor:
        """The reference's log-probability of each segment's trained tokens ``[S]``, fp64, nats, without gradient.

        Args:
            batch: the micro-batch.
            weights: of its `outputs` in the sums ``[T]``.
        """
        if self.needs_reference:
            return self.computed_reference_sums(batch, weights)
        return torch.zeros(len(batch.row), dtype=torch.float64, device=self.device)

    def computed_reference_sums(self, batch: MicroBatch, weights: Tensor) -> Tensor:
        """The same of rows that nothing is stored of; under FSDP2 every rank must call it as often."""
        return sequence_sums(self.reference.logps(batch), weights, batch.segment[batch.outputs], len(batch.row))

    def reference_weights(self, batch: MicroBatch) -> Tensor:
        """Weights of the outputs in the reference's sums ``[T]``."""
        return batch.weights[batch.outputs]

    def on_fit_start(self) -> None:
        """Places the reference."""
        super().on_fit_start()
        self._ready_reference()

    def before_evaluation_data(self) -> None:
        """As `on_fit_start`, for evaluation without training."""
        if self.trainer.state.fn != "fit":
            self._ready_reference()

    def _ready_reference(self) -> None:
        if self.reference is None or self._placed:
            return
        self.reference.place(self.device, self.trainer.precision_plugin)
        self._placed = True
        self.reference_placed()

    def reference_placed(self) -> None:
        """Called once the reference is on its device."""
        self.reference_ready()

    def reference_ready(self) -> None:
        """Called once the reference is in its place, and before it may be freed."""

    # -- a reference that moves -------------------------------------------------------------------------------------

    @property
    def reference_moves(self) -> bool:
        """Whether the reference is another one than at the start of training."""
        return self.sync_ref_model or self._moved

    _moved = False

    def move_reference(self, weights: Mapping[str, Tensor], share: float = 1.0) -> None:
        """Moves the reference by ``share`` towards ``weights`` (this rank's parts, named as in ``policy``)."""
        if self.reference is None:
            raise UserError("there is no reference to move: the method goes without one, or it was precomputed.")
        self._moved = True
        self.reference.move(weights, share)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Moves the reference where that is due: here, as callbacks write checkpoints before `on_train_batch_end`."""
        super().optimizer_step(*args, **kwargs)
        step = self.trainer.global_step + 1  # the trainer counts it after this
        if self.sync_ref_model and self._closing and step % self.ref_model_sync_steps == 0:
            if isinstance(self.reference, MergedCopy):
                self.reference.follow(self.ref_model_mixup_alpha)
            else:
                weights = {name: local(p) for name, p in self.policy.named_parameters()}
                self.reference.move(weights, self.ref_model_mixup_alpha)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps a reference that has moved; of one that has not, what it is known by."""
        super().on_save_checkpoint(checkpoint)
        if not self.needs_reference:
            return
        state = {"fingerprint": self.reference_fingerprint}
        if self.reference_moves:
            state["weights"] = self.reference.state_dict()
        checkpoint[KEY] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes over a moved reference; refuses another one than the run began with."""
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get(KEY)
        if saved is None or not self.needs_reference:
            return
        if saved["fingerprint"] != self.reference_fingerprint:
            raise UserError(
                "the checkpoint was trained against another reference than this run's; resume with the same model, peft and "
                "ref_* settings, and hand in the model as it was before training."
            )
        if "weights" in saved:
            self._moved = True
            self.reference.load_state_dict(saved["weights"])
