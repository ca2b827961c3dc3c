"""Contrastive preference optimisation and its relatives, pairs without a reference.

Loss of an optimizer step over its P pairs: ``sum_p l(p) / P + cpo_alpha * NLL``, where l is a loss of
`workbench.losses.reference_free.cpo_loss` on the policy's log-probabilities, and NLL the mean negative log-likelihood of the
step's chosen tokens. SimPO and AlphaPO go without the second term; CPO-SimPO is SimPO with it.
"""

from typing import Any, get_args

from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError
from workbench.losses.preference import pair_metrics
from workbench.losses.reference_free import PER_TOKEN, CPOLoss, check_pair_options, cpo_loss, policy_scores
from workbench.losses.sft import nll_loss
from workbench.methods.base import Method
from workbench.methods.completions import Completions, Record, ones, record_rows, record_sides
from workbench.methods.evaluation import Evaluation, Term
from workbench.models.load import ModelSpec
from workbench.models.policy import PolicyOutput


class CPO(Method):
    """Contrastive preference optimisation (Xu et al. 2024, arXiv:2401.08417, eq. 5), SimPO (Meng et al. 2024, arXiv:2405.14734,
    eq. 6), CPO-SimPO, AlphaPO (Gupta et al. 2025, arXiv:2501.03884) on pairs.

    Args:
        model: hub name, path, `ModelSpec`, or a model that is already built.
        loss: sigmoid, hinge, ipo, simpo or alphapo; the last three compare log-probabilities per token.
        beta: scale of the implicit reward, which is the log-probability itself.
        label_smoothing: probability that a label is wrong; for sigmoid, simpo and alphapo.
        cpo_alpha: weight of the likelihood of the chosen completions; 0 leaves it out, as SimPO does and AlphaPO has to.
        simpo_gamma: margin between the rewards that simpo and alphapo seek.
        alpha: AlphaPO's shape of the reward, ``(1 - p^-alpha) / alpha`` in place of log p; 0 is log p.
        options: as in `Method`.
    """

    data_types = ("preference",)

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        loss: CPOLoss = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        cpo_alpha: float = 1.0,
        simpo_gamma: float = 0.5,
        alpha: float = 0.0,
        **options: Any,
    ) -> None:
        shared = {"beta": beta, "label_smoothing": label_smoothing, "gamma": simpo_gamma}
        check_pair_options(get_args(CPOLoss), loss, **shared, gamma_name="simpo_gamma")
        _check_alphas(loss, cpo_alpha, alpha)
        super().__init__(model, **options)
        self.loss: CPOLoss = loss
        self.beta = beta
        self.alpha = alpha
        self.cpo_alpha = cpo_alpha
        self.loss_options = {**shared, "alpha": alpha}
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
        pairs, chosen = completions.pairs(), completions.weights_in(Role.CHOSEN)
        losses = cpo_loss(pairs, self.loss, **self.loss_options)
        terms = [Term(losses, ones(losses), "sequences")]
        nll = nll_loss(out.logps)
        if self.cpo_alpha:
            terms.append(Term(nll, chosen, "chosen", self.cpo_alpha))
        record("nll_loss", nll if self.cpo_alpha else nll.new_zeros(nll.shape), chosen)  # that of the loss: 0 if it has none
        scores = policy_scores(pairs, self.loss, alpha=self.alpha)
        record_rows(record, pair_metrics(*(self.beta * score for score in scores)))
        record_sides(record, completions, pairs, per_token=self.loss in PER_TOKEN)
        return terms


def _check_alphas(loss: str, cpo_alpha: float, alpha: float) -> None:
    if cpo_alpha < 0:
        raise UserError(f"method.cpo_alpha={cpo_alpha} would make the chosen completions unlikely; use 0 or more.")
    if loss == "alphapo" and cpo_alpha:
        raise UserError(
            f"method.cpo_alpha={cpo_alpha}: AlphaPO has no likelihood term; set method.cpo_alpha=0, or keep it with "
            "method.loss=simpo and method.alpha."
        )
    if loss == "alphapo" and not alpha:
        raise UserError(
            "method.loss=alphapo is simpo at method.alpha=0; set method.alpha (the paper: 0.25), or method.loss=simpo."
        )
