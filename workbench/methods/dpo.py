"""Direct preference optimisation and its family.

Loss of an optimizer step over its P pairs: ``sum_p l(p) / P``, where l is a loss of `workbench.losses.dpo` (or a weighted sum of
several) on the log-ratios of policy and reference. ``sft`` in the list adds the mean negative log-likelihood of the chosen
tokens. A pair goes through the model in one forward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError
from workbench.losses.divergence import Divergence
from workbench.losses.dpo import check_dpo_options, dpo_loss, loss_weights
from workbench.losses.preference import pair_metrics
from workbench.losses.sequences import ld_weights, wpo_weights
from workbench.losses.sft import nll_loss
from workbench.methods.completions import Completions, Record, ones, record_rows, record_sides
from workbench.methods.evaluation import Evaluation, Term
from workbench.methods.precomputed import Precomputed
from workbench.models.load import ModelSpec
from workbench.models.policy import PolicyOutput


class DPO(Precomputed):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, eq. 7) on pairs.

    Args:
        model: hub name, path, `ModelSpec`, or a model that is already built.
        loss: one loss or a list: sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired,
            discopop, apo_zero, apo_down, sigmoid_norm, sft.
        loss_weights: weight of each of several losses; None: 1 each.
        beta: strength of the pull towards the reference.
        label_smoothing: probability that a label is wrong; for losses that read it, or a mapping by loss.
        divergence: f-divergence to the reference (Wang et al. 2023, arXiv:2309.16240): reverse_kl, forward_kl, js_divergence,
            alpha_divergence.
        divergence_alpha: order of the alpha-divergence.
        discopop_tau: temperature of DiscoPOP's modulation.
        ld_alpha: weight of a completion's tokens past the length of its partner (LD-DPO); None: 1.
        use_weighting: weight each pair by how likely the policy is to write it (WPO).
        reference_free: leave the reference out, as if it gave every completion the same probability.
        options: as in `Precomputed` and `Method`.
    """

    data_types = ("preference",)

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        loss: str | Sequence[str] = "sigmoid",
        loss_weights: Sequence[float] | None = None,
        beta: float = 0.1,
        label_smoothing: float | dict[str, float] = 0.0,
        divergence: Divergence = "reverse_kl",
        divergence_alpha: float = 0.5,
        discopop_tau: float = 0.05,
        ld_alpha: float | None = None,
        use_weighting: bool = False,
        reference_free: bool = False,
        **options: Any,
    ) -> None:
        self.losses = named_weights(loss, loss_weights)
        check_dpo_options(self.losses, beta=beta, label_smoothing=label_smoothing, divergence=divergence, weighting=use_weighting)
        _check_effects(self.losses, divergence, divergence_alpha, discopop_tau, ld_alpha)
        self.needs_reference = not reference_free
        super().__init__(model, **options)
        if reference_free:
            self._refuse_reference_options()
        self.beta = beta
        self.ld_alpha = ld_alpha
        self.use_weighting = use_weighting
        self.loss_options = {
            "beta": beta,
            "label_smoothing": label_smoothing,
            "divergence": divergence,
            "divergence_alpha": divergence_alpha,
            "tau": discopop_tau,
        }
        weighting = ["log_collision"] * use_weighting
        self.want = self.want_in_training("entropy", "top1", "mean_logit", read=weighting)
        self.want_in_evaluation = ["logps", "entropy", "top1", "mean_logit", *weighting]

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """The micro-batch's share of the step's loss."""
        reference = self.reference_sums(batch, self.reference_weights(batch))
        out = self.policy(batch, self.want)
        return self.step_loss(self.terms(batch, out, reference, self.record), batch, out)

    def evaluation_step(self, batch: MicroBatch, evaluation: Evaluation) -> None:
        """Adds loss and metrics of one micro-batch."""
        reference = self.reference_sums(batch, self.reference_weights(batch))
        out = self.policy(batch, self.want_in_evaluation)
        evaluation.add_terms(self.terms(batch, out, reference, evaluation.add))
        evaluation.add_predictions(batch, out.top1, out.logps)

    def terms(self, batch: MicroBatch, out: PolicyOutput, reference: Tensor, record: Record) -> list[Term]:
        """The loss's terms on a micro-batch, given the reference's sums ``[S]``."""
        completions = Completions(batch, out, self.reference_weights(batch))
        pairs = completions.pairs(reference)
        losses = dpo_loss(pairs, self.losses, **self.loss_options)
        if self.use_weighting:
            weights = wpo_weights(out.logps, out.log_collision, completions.weights, completions.segment, len(batch.row))
            losses = losses * weights[batch.segments_of(Role.CHOSEN)] * weights[batch.segments_of(Role.REJECTED)]
        terms = [Term(losses, ones(losses), "sequences")]
        if "sft" in self.losses:
            chosen = completions.weights_in(Role.CHOSEN)
            terms.append(Term(nll_loss(out.logps), chosen, "chosen", self.losses["sft"]))
        record("entropy", out.entropy, completions.trained_in(Role.CHOSEN, Role.REJECTED))
        record("mean_token_accuracy", completions.hits(), completions.trained_in(Role.CHOSEN))
        record_rows(record, pair_metrics(*(self.beta * ratio for ratio in pairs.logratios())))
        record_sides(record, completions, pairs)
        return terms

    def reference_weights(self, batch: MicroBatch) -> Tensor:
        """The weights of the outputs in the sums of policy and reference alike ``[T]``."""
        weights = batch.weights[batch.outputs]
        if self.ld_alpha is None:
            return weights
        partner = torch.arange(len(batch.row), device=weights.device)
        chosen, rejected = batch.segments_of(Role.CHOSEN), batch.segments_of(Role.REJECTED)
        partner[chosen], partner[rejected] = rejected, chosen
        return ld_weights(weights, batch.segment[batch.outputs], partner, alpha=self.ld_alpha)

    def reference_depends_on(self) -> dict[str, Any]:
        """`ld_alpha` too."""
        return {**super().reference_depends_on(), "ld_alpha": self.ld_alpha}

    def couplings(self) -> list[str]:
        """AOT sorts the pairs of a micro-batch."""
        sorting = [name for name in self.losses if name.startswith("aot")]
        return super().couplings() + [f"method.loss={name} sorts the pairs of a micro-batch" for name in sorting]

    def _refuse_reference_options(self) -> None:
        for name in ("ref_model", "ref_adapter", "precompute_ref_logps", "sync_ref_model"):
            if getattr(self, name):
                raise UserError(f"method.{name} has no effect with method.reference_free=true; leave one of them out.")


named_weights = loss_weights  # the argument of `DPO` has the function's name


def _check_effects(
    losses: dict[str, float], divergence: str, divergence_alpha: float, discopop_tau: float, ld_alpha: float | None
) -> None:
    """Refuses options that change nothing."""
    if divergence_alpha != 0.5 and divergence != "alpha_divergence":
        raise UserError(
            f"method.divergence_alpha={divergence_alpha} has no effect with method.divergence={divergence}; "
            "set method.divergence=alpha_divergence."
        )
    if discopop_tau != 0.05 and "discopop" not in losses:
        raise UserError(f"method.discopop_tau={discopop_tau} has no effect without method.loss=discopop.")
    if ld_alpha is not None and not 0 <= ld_alpha <= 1:
        raise UserError(f"method.ld_alpha={ld_alpha} must lie in [0, 1]; 1 changes nothing.")
    if ld_alpha is not None and set(losses) == {"sft"}:
        raise UserError("method.ld_alpha has no effect with method.loss=sft, which compares no completions.")
