"""Reward modelling: one score for a prompt with its completion, learnt from pairs.

Loss of an optimizer step over its P pairs: ``sum_p -log sigmoid(r(x, y+) - r(x, y-) - m) / P``, with the margins m of the rows
where they have a ``margin`` column, and ``center_rewards_coefficient`` times the mean of ``(r(x, y+) + r(x, y-))^2``. The score
is the output of a one-dimensional head at the sequence's last token (of a conversation the end of the turn, of a text the end
of sequence). A pair goes through the model in one forward.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError
from workbench.losses.reward import bradley_terry_loss, centring_loss, reward_metrics
from workbench.methods.classifier import Classifier
from workbench.methods.completions import Record, ones
from workbench.methods.evaluation import Evaluation, Term
from workbench.models.load import ModelSpec
from workbench.models.policy import PolicyOutput

log = logging.getLogger(__name__)

RecordExtreme = Callable[[str, Tensor, Literal["min", "max"]], None]


class Reward(Classifier):
    """A Bradley-Terry reward model (Ouyang et al. 2022, arXiv:2203.02155, eq. 1) on pairs.

    ``compute_metrics`` gets for each pair the scores of chosen and rejected as ``predictions`` ``[1, 2]``, 0 (the place of the
    better one) as ``labels`` ``[1]``, and the log-probability that it is preferred as ``logps`` ``[1]``.

    Args:
        model: hub name, path, `ModelSpec`, or a model that is already built: a language model, or a classifier of one label.
        center_rewards_coefficient: weight of the squared sum of a pair's scores (Eisenstein et al. 2023, arXiv:2312.09244),
            which keeps them around 0; None leaves it out.
        seed: of a new head on a model handed in as an object; a `ModelSpec` has its own ``init_seed``.
        options: as in `Method`.
    """

    data_types = ("preference",)
    trains_tokens = False
    auto_class = "AutoModelForSequenceClassification"
    kind, num_labels = "sequence", 1

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        center_rewards_coefficient: float | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(model, seed=seed, **options)
        if center_rewards_coefficient is not None and not center_rewards_coefficient >= 0:
            raise UserError(
                f"method.center_rewards_coefficient={center_rewards_coefficient} must be 0 or more: below, scores run away."
            )
        self.center_rewards_coefficient = center_rewards_coefficient

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """The micro-batch's share of the step's loss."""
        out = self.policy(batch, self.want)
        return self.step_loss(self.terms(batch, out, self.record, self.record_extreme), batch, out)

    def evaluation_step(self, batch: MicroBatch, evaluation: Evaluation) -> None:
        """Adds loss, metrics and scores of one micro-batch."""
        out = self.policy(batch, ["scores"])
        evaluation.add_terms(self.terms(batch, out, evaluation.add, evaluation.extreme))
        chosen, rejected = pair_scores(batch, out)
        rows = batch.row[batch.segments_of(Role.CHOSEN)]
        logps = -bradley_terry_loss(chosen, rejected)
        evaluation.add_entries(rows, torch.stack([chosen, rejected], -1), torch.zeros_like(rows), logps)

    def terms(self, batch: MicroBatch, out: PolicyOutput, record: Record, record_extreme: RecordExtreme) -> list[Term]:
        """The loss's terms on a micro-batch."""
        chosen, rejected = pair_scores(batch, out)
        losses = bradley_terry_loss(chosen, rejected, batch.extras.get("margin", torch.zeros_like(chosen)).float())
        terms = [Term(losses, ones(losses), "sequences")]
        if self.center_rewards_coefficient:
            terms.append(Term(centring_loss(chosen, rejected), ones(losses), "sequences", self.center_rewards_coefficient))
        metrics = reward_metrics(chosen, rejected)
        for kind in ("min", "max"):
            record_extreme(f"{kind}_reward", metrics.pop(f"{kind}_reward"), kind)
        for name, values in metrics.items():
            record(name, values, ones(values))
        return terms


def pair_scores(batch: MicroBatch, out: PolicyOutput) -> tuple[Tensor, Tensor]:
    """Scores of the chosen and of the rejected completions ``[P]``, in the order of the rows."""
    role, scores = batch.role[batch.segment[batch.ends()]], out.scores.squeeze(-1)
    return scores[role == int(Role.CHOSEN)], scores[role == int(Role.REJECTED)]
