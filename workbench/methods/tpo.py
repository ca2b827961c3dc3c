"""Triple preference optimisation: a pair and a gold completion, without a reference.

Loss of an optimizer step over its P triples: ``sum_p l(p) / P + tpo_alpha * NLL``, where l is a loss of
`workbench.losses.reference_free.tpo_loss` on chosen and rejected, and NLL the mean negative log-likelihood of the step's gold
tokens. A triple goes through the model in one forward.
"""

from typing import Any, get_args

from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError
from workbench.losses.preference import pair_metrics
from workbench.losses.reference_free import PER_TOKEN, TPOLoss, check_pair_options, policy_scores, tpo_loss
from workbench.losses.sft import nll_loss
from workbench.methods.base import Method
from workbench.methods.completions import Completions, Record, ones, record_rows, record_sides
from workbench.methods.evaluation import Evaluation, Term
from workbench.models.load import ModelSpec
from workbench.models.policy import PolicyOutput


class TPO(Method):
    """Triple preference optimisation (Saeidi et al. 2024, arXiv:2405.16681) on triples of prompt, chosen, rejected and gold
    (column ``reference``).

    Args:
        model: hub name, path, `ModelSpec`, or a model that is already built.
        loss: sigmoid, hinge, ipo, or tpo-l; the last two compare log-probabilities per token.
        beta: scale of the implicit reward, which is the log-probability itself.
        label_smoothing: probability that a label is wrong; for sigmoid and tpo-l.
        tpo_alpha: weight of the likelihood of the gold completions; 0 leaves it out (as CPO does, which need not read them).
        tpo_l_gamma: margin between the rewards that tpo-l seeks.
        options: as in `Method`.
    """

    data_types = ("triple_preference",)

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        loss: TPOLoss = "sigmoid",
        beta: float = 0.01,
        label_smoothing: float = 0.0,
        tpo_alpha: float = 1.0,
        tpo_l_gamma: float = 0.5,
        **options: Any,
    ) -> None:
        self.loss_options = {"beta": beta, "label_smoothing": label_smoothing, "gamma": tpo_l_gamma}
        check_pair_options(get_args(TPOLoss), loss, **self.loss_options, gamma_name="tpo_l_gamma")
        if tpo_alpha < 0:
            raise UserError(f"method.tpo_alpha={tpo_alpha} would make the gold completions unlikely; use 0 or more.")
        super().__init__(model, **options)
        self.loss: TPOLoss = loss
        self.beta = beta
        self.tpo_alpha = tpo_alpha
        # whose tokens the loss reads
        self.roles = (Role.CHOSEN, Role.REJECTED) + (Role.GOLD,) * bool(tpo_alpha)
        self.want = self.want_in_training("entropy", "top1", "mean_logit")
        self.want_in_evaluation = ["logps", "entropy", "top1", "mean_logit"]

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """The micro-batch's share of the step's loss."""
        out = self.policy(batch, self.want)
        return self.step_loss(self.terms(batch, out, self.record), batch, out)

    def evaluation_step(self, batch: MicroBatch, evaluation: Evaluation) -> None:
        """Adds loss and metrics of one micro-batch."""
        out = self.policy(batch, self.want_in_evaluation)
        evaluation.add_terms(self.terms(batch, out, evaluation.add))
        evaluation.add_predictions(batch, out.top1, out.logps)

    def terms(self, batch: MicroBatch, out: PolicyOutput, record: Record) -> list[Term]:
        """The loss's terms on a micro-batch."""
        completions = Completions(batch, out)
        pairs = completions.pairs()
        losses = tpo_loss(pairs, self.loss, **self.loss_options)
        terms = [Term(losses, ones(losses), "sequences")]
        if self.tpo_alpha:
            terms.append(Term(nll_loss(out.logps), completions.weights_in(Role.GOLD), "gold", self.tpo_alpha))
        record("entropy", out.entropy, completions.trained_in(*self.roles))
        record("mean_token_accuracy", completions.hits(), completions.trained_in(Role.CHOSEN))
        record_rows(record, pair_metrics(*(self.beta * score for score in policy_scores(pairs, self.loss))))
        record_sides(record, completions, pairs, per_token=self.loss in PER_TOKEN)
        return terms
