"""Kahneman-Tversky optimisation on completions with a label.

Loss of an optimizer step over its R rows: ``sum_i l(i) / R`` with l of `workbench.losses.kto`. The baseline z, an estimate of
the KL from the reference, comes from rows with exchanged completions (`workbench.data.mismatched`). The paper takes it over the
batch, and here that is the optimizer step, however it is cut: a pass without gradient before the step's first micro-batch gives
the log-ratios, whose sum and count the ranks add up once. An evaluation set has one baseline too, its own.
"""

import logging
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError, check_at_least, check_choice
from workbench.losses.kto import BALANCE, KTOLoss, apo_zero_unpaired_loss, balance, kl_baseline, kto_loss, recommended_weights
from workbench.losses.reduce import Scope
from workbench.methods.completions import Completions
from workbench.methods.evaluation import Evaluation
from workbench.methods.unpaired import Labelled, Unpaired
from workbench.models.load import ModelSpec
from workbench.strategies.info import sum_over_ranks

log = logging.getLogger(__name__)


class KTO(Unpaired):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1) on labelled completions.

    Args:
        model: hub name, path, `ModelSpec`, or a model that is already built.
        loss: ``kto``, or ``apo_zero_unpaired`` without a baseline.
        beta: strength of the pull towards the reference; risk aversion.
        desirable_weight: weight of desirable rows.
        undesirable_weight: weight of undesirable rows.
        kl_scope: rows that the baseline is estimated on: of the ``step``, or of each ``micro_batch`` alone.
        options: as in `Precomputed` and `Method`.
    """

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        loss: KTOLoss = "kto",
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        kl_scope: Scope = "step",
        **options: Any,
    ) -> None:
        check_choice("method.loss", loss, get_args(KTOLoss))
        check_choice("method.kl_scope", kl_scope, get_args(Scope))
        check_at_least(0, method__desirable_weight=desirable_weight, method__undesirable_weight=undesirable_weight)
        if desirable_weight == undesirable_weight == 0:
            raise UserError("method.desirable_weight=0 and method.undesirable_weight=0 leave nothing to learn from; raise one.")
        if loss != "kto" and kl_scope != "step":
            raise UserError(f"method.kl_scope={kl_scope} has no effect with method.loss={loss}, which has no baseline.")
        super().__init__(model, beta=beta, **options)
        self.loss = loss
        self.kl_scope = kl_scope
        self.mismatched = kl_scope if loss == "kto" else None
        self.weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
        self.baseline: Tensor | float = 0.0

    def on_train_batch_start(self, batch: MicroBatch, batch_idx: int) -> None:
        """Estimates the baseline, where the micro-batch carries the rows for it."""
        super().on_train_batch_start(batch, batch_idx)
        if not batch.companions:
            return
        with torch.no_grad(), self.trainer.precision_plugin.forward_context():
            logratios = self._mismatched_logratios(batch.companions)
        totals = torch.stack([logratios.sum(), logratios.new_tensor(len(logratios))])
        self.baseline = kl_baseline(*(sum_over_ranks(totals, self.trainer.strategy) if self.kl_scope == "step" else totals))

    def row_losses(self, labelled: Labelled) -> Tensor:
        """The loss of each row, given the baseline of the step (or micro-batch)."""
        present = labelled.logratios.new_tensor([float(not labelled.batch.is_empty)])
        self.record("kl", self.baseline * torch.ones_like(present), present)
        return self._losses(labelled.logratios, labelled.desirable, self.baseline)

    def _losses(self, logratios: Tensor, desirable: Tensor, baseline: Tensor | float) -> Tensor:
        options = {"beta": self.beta, **self.weights}
        if self.loss == "kto":
            return kto_loss(logratios, desirable, baseline, **options)
        return apo_zero_unpaired_loss(logratios, desirable, **options)

    def _mismatched_logratios(self, batches: list[MicroBatch]) -> Tensor:
        """``log p(y) - log ref(y)`` of completions with other rows' prompts, in nats, fp64."""
        parts = []
        for batch in batches:
            reference = self.computed_reference_sums(batch, self.reference_weights(batch))
            parts.append((Completions(batch, self.policy(batch)).sums - reference)[batch.segments_of(Role.KL)])
        return torch.cat(parts)

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluation_step(self, batch: MicroBatch, evaluation: Evaluation) -> None:
        """Adds metrics of one micro-batch, and keeps what the loss is made of once the set's baseline is known."""
        labelled = self.compare(batch, self.want_in_evaluation)
        self.record_labelled(labelled, evaluation.add, evaluation.meter)
        kl = self._mismatched_logratios(batch.companions) if batch.companions else labelled.logratios[:0]
        evaluation.keep(self._finish, logratios=labelled.logratios, desirable=labelled.desirable, kl=kl)
        evaluation.add_predictions(batch, labelled.out.top1, labelled.out.logps)

    def _finish(self, kept: dict[str, Tensor]) -> dict[str, float]:
        baseline = kl_baseline(kept["kl"].sum(), len(kept["kl"]))
        losses = self._losses(kept["logratios"], kept["desirable"], baseline)
        return {"loss": losses.mean().item(), "kl": baseline.item()}

    # -- the reference and the start --------------------------------------------------------------------------------

    def after_precompute(self) -> None:
        """Keeps the reference for the baseline's rows, which every epoch pairs anew."""
        if self.mismatched is None:
            return super().after_precompute()
        log.info("The reference stays in memory for KTO's baseline, whose rows are paired anew in every epoch.")

    def couplings(self) -> list[str]:
        """A baseline of single micro-batches."""
        micro = ["method.kl_scope=micro_batch: the baseline is that of each micro-batch alone"]
        return super().couplings() + (micro if self.mismatched == "micro_batch" else [])

    def on_fit_start(self) -> None:
        """Checks that completions can be exchanged, and how the labels are balanced."""
        super().on_fit_start()
        data = self.trainer.datamodule
        name = "micro_batch_size" if self.mismatched == "micro_batch" and data.micro_batch_size else "batch_size"
        if self.mismatched and getattr(data, name) == 1:
            raise UserError(
                f"data.{name}=1 leaves no other row to take a completion from, so KTO has no baseline; use 2 or more, or "
                "method.loss=apo_zero_unpaired."
            )
        counts = self.label_counts()
        if counts is not None:
            self._note_balance(*counts)

    def _note_balance(self, desirable: int, undesirable: int) -> None:
        """A warning where the labels weigh otherwise than the paper recommends."""
        if not desirable or not undesirable:
            log.warning(
                "All %d training rows are labelled %s: KTO learns from them, but best from both labels.%s",
                desirable + undesirable,
                str(bool(desirable)).lower(),
                "" if desirable else " Use a low learning rate: it can only make completions less likely.",
            )
            return
        ratio = balance(desirable, undesirable, **self.weights)
        if BALANCE[0] <= ratio <= BALANCE[1]:
            return
        ranges = recommended_weights(desirable, undesirable, **self.weights)
        texts = {name: f"{low:.3g} and {high:.3g}" for name, (low, high) in ranges.items()}
        log.warning(
            "The %d desirable rows weigh %.3g times as much as the %d undesirable ones; between 1 and 1.33 is recommended: "
            "method.desirable_weight between %s, or method.undesirable_weight between %s.",
            desirable,
            ratio,
            undesirable,
            texts["desirable_weight"],
            texts["undesirable_weight"],
        )
