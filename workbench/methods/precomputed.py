"""`Precomputed`: what offline methods share whose reference can be asked once, before training."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch
from workbench.errors import UserError, check_at_least
from workbench.methods.precompute import COLUMN, with_reference
from workbench.methods.referenced import Referenced
from workbench.models.load import ModelSpec


class Precomputed(Referenced):
    """Base of methods on fixed rows with a reference, whose log-probabilities of them can be stored.

    Args:
        model: as in `Method`.
        precompute_ref_logps: compute the reference's log-probabilities once, before training, keep them on disk, and free it.
        precompute_ref_micro_batch_size: most rows in one forward of that; None: as in training.
        options: as in `Referenced`.
    """

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        precompute_ref_logps: bool = False,
        precompute_ref_micro_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.precompute_ref_logps = precompute_ref_logps
        self.precompute_ref_micro_batch_size = precompute_ref_micro_batch_size
        self._stored = False  # whether rows carry its log-probabilities
        check_at_least(1, method__precompute_ref_micro_batch_size=precompute_ref_micro_batch_size)
        if precompute_ref_logps and self.sync_ref_model:
            raise UserError(
                "method.precompute_ref_logps holds the reference still, method.sync_ref_model moves it; turn one of them off."
            )
        if precompute_ref_micro_batch_size is not None and not precompute_ref_logps:
            raise UserError("method.precompute_ref_micro_batch_size has no effect with method.precompute_ref_logps=false.")

    def reference_sums(self, batch: MicroBatch, weights: Tensor) -> Tensor:
        """As `Referenced`'s; the stored sums, where there are any."""
        if not self._stored:
            return super().reference_sums(batch, weights)
        sums = torch.zeros(len(batch.row), dtype=torch.float64, device=self.device)
        if not batch.is_empty:
            sums[self.completions_of(batch)] = batch.extras[COLUMN]
        return sums

    def completions_of(self, batch: MicroBatch) -> Tensor:
        """Segments that no other continues: the completions, in order."""
        inner = set(batch.parent.tolist())
        return torch.tensor([s for s in range(len(batch.row)) if s not in inner], device=batch.row.device)

    def reference_depends_on(self) -> dict[str, Any]:
        """What precomputed numbers depend on besides rows, weights and the libraries."""
        attention = self.policy.config._attn_implementation
        kernel = {} if self.head_kernel == "torch" else {"head_kernel": self.head_kernel}
        return {"attention": attention, "precision": str(self.trainer.precision), "layout": self.layout, **kernel}

    def reference_placed(self) -> None:
        """Computes and stores the log-probabilities, or reads those of an earlier run, and frees the reference."""
        if self.precompute_ref_logps:
            self._precompute()
            self._stored = True
        self.reference_ready()
        if self.precompute_ref_logps:
            self.after_precompute()

    def _precompute(self) -> None:
        data, strategy = self.trainer.datamodule, self.trainer.strategy
        depends_on = {"reference": self.reference_fingerprint, "method": self.reference_depends_on()}
        size = self.precompute_ref_micro_batch_size or data.micro_batch_size or min(data.batch_size, 64)

        def compute(batch: MicroBatch) -> Tensor:
            with self.trainer.precision_plugin.forward_context():
                sums = self.reference_sums(batch, self.reference_weights(batch))
            return sums[self.completions_of(batch)]

        options = {"strategy": strategy, "device": self.device, "micro_batch_size": size, "directory": data.reference_dir}
        data.map_prepared(lambda rows, name: with_reference(rows, compute, depends_on, **options, name=name))

    def after_precompute(self) -> None:
        """Frees the reference, which nothing reads any more."""
        self.reference = None
