"""Odds-ratio preference optimisation: fine-tuning and preferences in one, without a reference.

Loss of an optimizer step over its P pairs: ``NLL + sum_p l(p) / P``, where l is `workbench.losses.reference_free.orpo_loss` on
the odds of both completions, and NLL the mean negative log-likelihood of the step's chosen tokens. With ``data.train_on=all``
the NLL covers the prompts as well (each once); the odds read the completions alone either way.
"""

from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError
from workbench.losses.preference import pair_metrics
from workbench.losses.reference_free import log_odds_margins, orpo_loss
from workbench.losses.sft import nll_loss
from workbench.methods.base import Method
from workbench.methods.completions import Completions, Record, ones, record_rows, record_sides
from workbench.methods.evaluation import Evaluation, Term
from workbench.models.load import ModelSpec
from workbench.models.policy import PolicyOutput


class ORPO(Method):
    """Odds-ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691, eq. 6) on pairs.

    Args:
        model: hub name, path, `ModelSpec`, or a model that is already built.
        beta: weight of the odds-ratio term (the paper's lambda).
        options: as in `Method`.
    """

    data_types = ("preference",)
    trains_prompts: ClassVar[bool] = True

    def __init__(self, model: str | ModelSpec | PreTrainedModel, *, beta: float = 0.1, **options: Any) -> None:
        if beta < 0:
            raise UserError(f"method.beta={beta} would prefer the rejected completions; use 0 or more.")
        super().__init__(model, **options)
        self.beta = beta
        self.want = self.want_in_training("mean_logit")

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """The micro-batch's share of the step's loss."""
        out = self.policy(batch, self.want)
        return self.step_loss(self.terms(batch, out, self.record), batch, out)

    def evaluation_step(self, batch: MicroBatch, evaluation: Evaluation) -> None:
        """Adds loss and metrics of one micro-batch."""
        out = self.policy(batch, ["logps", "mean_logit", "top1"])
        evaluation.add_terms(self.terms(batch, out, evaluation.add))
        evaluation.add_predictions(batch, out.top1, out.logps)

    def terms(self, batch: MicroBatch, out: PolicyOutput, record: Record) -> list[Term]:
        """The loss's terms on a micro-batch."""
        completions = Completions(batch, out)
        pairs = completions.pairs()
        logps = pairs.per_token(pairs.chosen, pairs.rejected)
        log_odds = log_odds_margins(*logps)
        losses = orpo_loss(log_odds, beta=self.beta)
        nll = nll_loss(out.logps)
        chosen = completions.weights_in(Role.PROMPT) + completions.weights_in(Role.CHOSEN)  # prompts only if they are trained
        record("nll_loss", nll, chosen)
        record("log_odds_chosen", log_odds, ones(log_odds))
        record("log_odds_ratio", -orpo_loss(log_odds, beta=1.0), ones(log_odds))
        record_rows(record, pair_metrics(*(self.beta * side for side in logps)))
        record_sides(record, completions, pairs, per_token=True)
        return [Term(nll, chosen, "chosen"), Term(losses, ones(losses), "sequences")]
