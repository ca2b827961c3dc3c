"""Process reward modelling: whether each step of a solution is right.

Loss of an optimizer step over its T labelled steps: ``sum_t CE(c(x, s_1 .. s_t), y_t) / T``, where c is a two-way head (0
wrong, 1 right) at the last token of step t with the separator that follows it (``data.step_separator``). A label may be a
probability; a step labelled -100 is read and not trained. ``data.train_on=last_step`` trains the last step of each row alone,
which supervises outcomes; evaluation keeps all steps.
"""

import torch
from torch import Tensor

from workbench.data.batch import MicroBatch, Role
from workbench.losses.reward import step_accuracies, step_loss
from workbench.methods.classifier import Classifier
from workbench.methods.completions import Record
from workbench.methods.evaluation import Evaluation, Term
from workbench.models.policy import PolicyOutput


class PRM(Classifier):
    """A process reward model (Uesato et al. 2022, arXiv:2211.14275) on rows of steps.

    ``compute_metrics`` gets for the n labelled steps of each row the outputs (wrong, right) as ``predictions`` ``[n, 2]``, the
    ``labels`` ``[n]`` and their log-probabilities as ``logps`` ``[n]``.

    Args:
        model: hub name, path, `ModelSpec`, or a model that is already built: a language model, or a token classifier of two
            labels.
        seed: of a new head on a model handed in as an object; a `ModelSpec` has its own ``init_seed``.
        options: as in `Method`.
    """

    data_types = ("stepwise_supervision",)
    auto_class = "AutoModelForTokenClassification"
    kind, num_labels = "token", 2

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """The micro-batch's share of the step's loss."""
        out = self.policy(batch, self.want, at=batch.outputs)
        return self.step_loss(self.terms(batch, out, self.record), batch, out)

    def evaluation_step(self, batch: MicroBatch, evaluation: Evaluation) -> None:
        """Adds loss, metrics and outputs of one micro-batch."""
        out = self.policy(batch, ["scores"], at=batch.outputs)
        terms = self.terms(batch, out, evaluation.add)
        evaluation.add_terms(terms)
        if len(batch.trained):
            rows = batch.row[batch.segment[batch.outputs]]
            evaluation.add_entries(rows, out.scores, step_labels(batch), -terms[0].values)

    def terms(self, batch: MicroBatch, out: PolicyOutput, record: Record) -> list[Term]:
        """The loss's term on a micro-batch."""
        labels, weights = step_labels(batch), batch.weights[batch.outputs]
        record("accuracy", step_accuracies(out.scores, labels), weights)
        return [Term(step_loss(out.scores, labels), weights, "tokens")]


def step_labels(batch: MicroBatch) -> Tensor:
    """The labels of the trained steps ``[T]``, in the order of ``batch.outputs``."""
    of_segment = torch.zeros(len(batch.row), device=batch.tokens.device)
    if not batch.is_empty:
        of_segment[batch.segments_of(Role.STEP)] = batch.extras["labels"].float()
    return of_segment[batch.segment[batch.outputs]]
