"""`Unpaired`: what methods that learn from single completions, each labelled as desirable or not, share."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError
from workbench.losses.kto import unpaired_metrics
from workbench.methods.completions import Completions, Record, ones
from workbench.methods.evaluation import Term
from workbench.methods.metrics import Meter
from workbench.methods.precomputed import Precomputed
from workbench.models.load import ModelSpec
from workbench.models.policy import PolicyOutput


@dataclass
class Labelled:
    """The completions of a micro-batch, B rows.

    Args:
        batch: the micro-batch.
        completions: under the policy.
        logratios: ``log p(y) - log ref(y)`` ``[B]``, fp64, nats.
        desirable: labels ``[B]``, boolean.
    """

    batch: MicroBatch
    completions: Completions
    logratios: Tensor
    desirable: Tensor

    @property
    def out(self) -> PolicyOutput:
        """The policy's outputs."""
        return self.completions.out

    @property
    def logps(self) -> Tensor:
        """Log-probabilities under the policy ``[B]``, fp64, nats."""
        return self.completions.sums[self.batch.segments_of(Role.COMPLETION)]

    def trained_where(self, rows: Tensor) -> Tensor:
        """1 for each trained output of the rows chosen by ``rows`` ``[B]``, else 0 ``[T]``."""
        chosen = rows.new_zeros(len(self.batch.row))
        chosen[self.batch.segments_of(Role.COMPLETION)] = rows
        return self.completions.trained_in(Role.COMPLETION) * chosen[self.completions.segment]


class Unpaired(Precomputed):
    """Base of methods on completions with a label.

    Args:
        model: as in `Method`.
        beta: strength of the pull towards the reference.
        options: as in `Precomputed`.
    """

    data_types = ("unpaired_preference",)

    def __init__(self, model: str | ModelSpec | PreTrainedModel, *, beta: float, **options: Any) -> None:
        if not beta > 0:
            raise UserError(f"method.beta={beta} must be above 0.")
        super().__init__(model, **options)
        self.beta = beta
        self.want = self.want_in_training("entropy", "mean_logit")
        self.want_in_evaluation = ["logps", "entropy", "mean_logit", "top1"]

    def row_losses(self, labelled: Labelled) -> Tensor:
        """The loss of each row of a micro-batch in training ``[B]``."""
        raise NotImplementedError

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """The micro-batch's share of the step's loss."""
        labelled = self.compare(batch, self.want)
        losses = self.row_losses(labelled)
        self.record_labelled(labelled, self.record, self._meter)
        if self.scope == "micro_batch":
            self._record_margin(labelled)
        return self.step_loss([Term(losses, ones(losses), "sequences")], batch, labelled.out)

    def compare(self, batch: MicroBatch, want: Collection[str]) -> Labelled:
        """The completions of a micro-batch under the policy, and what the reference says of them."""
        reference = self.reference_sums(batch, self.reference_weights(batch))
        completions = Completions(batch, self.policy(batch, want))
        logratios = (completions.sums - reference)[batch.segments_of(Role.COMPLETION)]
        labels = batch.extras.get("label", torch.zeros(0, dtype=torch.bool, device=logratios.device))
        return Labelled(batch, completions, logratios, labels.bool())

    def record_labelled(self, labelled: Labelled, record: Record, meter: Meter) -> None:
        """Means, sums and counts of each label."""
        rewards, logps = self.beta * labelled.logratios.detach(), labelled.logps.detach()
        record("entropy", labelled.out.entropy, labelled.completions.trained_in(Role.COMPLETION))
        for name, (values, weights) in unpaired_metrics(rewards, labelled.desirable).items():
            record(name, values, weights)
        for side, rows in (("chosen", labelled.desirable), ("rejected", ~labelled.desirable)):
            record(f"logps/{side}", logps, rows.float())
            record(f"logits/{side}", labelled.out.mean_logit, labelled.trained_where(rows))
            meter.add(f"count/{side}", rows.sum(), None)
            meter.add(f"rewards/{side}_sum", rewards[rows].sum(), None)
            meter.add(f"logps/{side}_sum", logps[rows].sum(), None)

    def _record_margin(self, labelled: Labelled) -> None:
        """The margin within this micro-batch, if it holds both labels."""
        rewards, desirable = self.beta * labelled.logratios.detach(), labelled.desirable
        both = desirable.any() & ~desirable.all()
        margin = rewards[desirable].mean() - rewards[~desirable].mean()
        self.record("rewards/margins", margin[None], both[None].float())

    def derived(self, metrics: dict[str, float]) -> dict[str, float]:
        """The margin: the difference of the labels' mean rewards, where there are both."""
        margin, sides = "rewards/margins", ("rewards/chosen", "rewards/rejected")
        if margin in metrics or any(side not in metrics for side in sides):
            return {}
        return {margin: metrics[sides[0]] - metrics[sides[1]]}

    def label_counts(self) -> tuple[int, int] | None:
        """Desirable and undesirable training rows; None where they are not known (a stream)."""
        labels = self.trainer.datamodule.train_column("label")
        return None if labels is None else (int(labels.sum()), int((~labels.astype(bool)).sum()))
