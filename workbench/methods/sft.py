"""Supervised fine-tuning: maximise the likelihood of chosen tokens.

Loss of an optimizer step, over its trained tokens t with weights w_t: ``sum_t w_t l_t / sum_t w_t``, where l_t is the
negative log-likelihood (``nll``) or, for dynamic fine-tuning (``dft``, Wu et al. 2025, arXiv:2508.05629, eq. 9), the same
times the token's own probability, held constant. The sums run over all micro-batches and ranks, so the step does not depend on
how it was cut.
"""

from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch
from workbench.losses.reduce import reduce
from workbench.losses.sft import SFT_LOSSES
from workbench.methods.base import Method
from workbench.methods.evaluation import Evaluation
from workbench.models.load import ModelSpec
from workbench.models.policy import PolicyOutput


class SFT(Method):
    """Supervised fine-tuning on texts, conversations or prompt-completion rows.

    Args:
        model: hub name, path, `ModelSpec`, or a model that is already built.
        loss: ``nll``, or ``dft`` (dynamic fine-tuning).
        options: as in `Method`.
    """

    data_types = ("language_modeling", "prompt_completion")

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        loss: Literal["nll", "dft"] = "nll",
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.loss = loss
        self.want = self.want_in_training("entropy", "top1")

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """The micro-batch's share of the step's loss."""
        out = self.policy(batch, self.want)
        weights = self.policy.weights_of(batch)
        loss = reduce(SFT_LOSSES[self.loss](out.logps), weights, batch.norm, per="tokens")
        loss = self.with_aux_loss(loss, out, batch)
        trained = weights.ne(0).float()
        self.record("entropy", out.entropy, trained)
        self.record("mean_token_accuracy", self._hits(batch, out), trained)
        self.record_step(loss, batch)
        return loss

    def evaluation_step(self, batch: MicroBatch, evaluation: Evaluation) -> None:
        """Adds loss, entropy and accuracy of one micro-batch."""
        out = self.policy(batch, ["logps", "entropy", "top1"])
        weights = self.policy.weights_of(batch)
        trained = weights.ne(0).float()
        evaluation.add("loss", SFT_LOSSES[self.loss](out.logps), weights)
        evaluation.add("entropy", out.entropy, trained)
        evaluation.add("mean_token_accuracy", self._hits(batch, out), trained)
        evaluation.add_predictions(batch, out.top1, out.logps)

    def _hits(self, batch: MicroBatch, out: PolicyOutput) -> Tensor | None:
        return None if out.top1 is None else (out.top1 == batch.tokens[batch.outputs]).float()
