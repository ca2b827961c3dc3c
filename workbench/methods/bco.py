"""Binary Classifier Optimisation on completions with a label.

Loss of an optimizer step over its R rows: ``sum_i l(i) / R`` with l of `workbench.losses.bco`: the implicit reward, shifted by d,
is the logit of a classifier of the labels. The paper shifts by the mean of the two labels' mean rewards, which moves in training.
Here a step is shifted by the rewards of the steps before it, so that all its micro-batches see the same shift at no cost; that of
the first step is 0, as all rewards are. ``shift_scope=micro_batch`` takes the mean of all rewards so far, with those of the
micro-batch itself.

With ``use_udm`` an undesirable row counts as often as its prompt would come up among the desirable ones
(`workbench.methods.density_ratio`).
"""

import logging
from collections.abc import Callable
from typing import Any, get_args

import torch
from datasets import Dataset
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch
from workbench.errors import UserError, check_at_least, check_choice
from workbench.losses.bco import bco_loss, reward_shift
from workbench.losses.reduce import Scope
from workbench.methods import density_ratio
from workbench.methods.completions import ones
from workbench.methods.evaluation import Evaluation, Term
from workbench.methods.precompute import per_row
from workbench.methods.unpaired import Labelled, Unpaired
from workbench.models.load import ModelSpec
from workbench.strategies.info import sum_over_ranks

log = logging.getLogger(__name__)

KEY = "bco"  # of its state in a checkpoint
SAMPLE_SIZE, MIN_RATIO, MAX_RATIO = 1024, 0.5, 10.0


class BCO(Unpaired):
    """Binary Classifier Optimisation (Jung et al. 2024, arXiv:2404.04656) on labelled completions.

    Args:
        model: hub name, path, `ModelSpec`, or a model that is already built.
        beta: scale of the reward.
        shift_scope: rewards that the shift is estimated on: of the ``step`` before and all earlier ones, or all up to each
            ``micro_batch``.
        use_udm: weight undesirable rows by the density ratio of their prompts (underlying distribution matching).
        embedding_model: embeds prompts for that: the name of an encoder, fields of a `ModelSpec`, or a function from texts to
            vectors; None: the mean hidden state of the reference.
        prompt_sample_size: most rows of each label that the prompts' classifier learns from.
        min_density_ratio: smallest weight.
        max_density_ratio: largest weight.
        options: as in `Precomputed` and `Method`.
    """

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        beta: float = 0.1,
        shift_scope: Scope = "step",
        use_udm: bool = False,
        embedding_model: str | dict[str, Any] | ModelSpec | Callable[[list[str]], Tensor] | None = None,
        prompt_sample_size: int = SAMPLE_SIZE,
        min_density_ratio: float = MIN_RATIO,
        max_density_ratio: float = MAX_RATIO,
        **options: Any,
    ) -> None:
        check_choice("method.shift_scope", shift_scope, get_args(Scope))
        check_at_least(1, method__prompt_sample_size=prompt_sample_size)
        if not 0 <= min_density_ratio <= max_density_ratio:
            raise UserError(
                f"method.min_density_ratio={min_density_ratio} must lie between 0 and method.max_density_ratio="
                f"{max_density_ratio}."
            )
        super().__init__(model, beta=beta, **options)
        self.shift_scope = shift_scope
        self.use_udm = use_udm
        object.__setattr__(self, "embedding_model", embedding_model)  # past nn.Module: never a submodule
        self.prompt_sample_size = prompt_sample_size
        self.ratio_range = {"minimum": min_density_ratio, "maximum": max_density_ratio}
        self.classifier: tuple[Tensor, Tensor] | None = None
        # Sum and count of the desirable rows' rewards, then of the undesirable ones': of the steps so far, and of this one.
        self.rewards_seen = torch.zeros(4, dtype=torch.float64)
        self._rewards_of_step: Tensor | None = None
        self._check_udm_options(prompt_sample_size, min_density_ratio, max_density_ratio)

    def _check_udm_options(self, *values: float) -> None:
        changed = {
            "embedding_model": self.embedding_model is not None,
            "prompt_sample_size": values[0] != SAMPLE_SIZE,
            "min_density_ratio": values[1] != MIN_RATIO,
            "max_density_ratio": values[2] != MAX_RATIO,
        }
        for name, is_changed in changed.items():
            if is_changed and not self.use_udm:
                raise UserError(f"method.{name} has no effect with method.use_udm=false; set it to true.")

    # -- the shift --------------------------------------------------------------------------------------------------

    @property
    def shift(self) -> float:
        """What rewards are shifted by."""
        seen = self.rewards_seen
        if self.shift_scope == "micro_batch":
            return (seen[0::2].sum() / seen[1::2].sum().clamp(min=1)).item()
        return reward_shift(*seen).item()

    def row_losses(self, labelled: Labelled) -> Tensor:
        """The loss of each row, given the shift of the step (or micro-batch)."""
        rewards = self.beta * labelled.logratios.detach()
        sides = [rewards[rows] for rows in (labelled.desirable, ~labelled.desirable)]
        sums = torch.stack([value for side in sides for value in (side.sum(), side.new_tensor(len(side)))])
        if self.shift_scope == "micro_batch":
            self.rewards_seen += sum_over_ranks(sums, self.trainer.strategy).cpu()
        else:
            self._rewards_of_step = sums if self._rewards_of_step is None else self._rewards_of_step + sums
        present = rewards.new_tensor([float(not labelled.batch.is_empty)])
        self.record("delta", self.shift * torch.ones_like(present), present)
        return self._losses(labelled)

    def _losses(self, labelled: Labelled) -> Tensor:
        ratios = labelled.batch.extras.get(density_ratio.COLUMN, 1.0)
        return bco_loss(labelled.logratios, labelled.desirable, self.shift, beta=self.beta, undesirable_weights=ratios)

    def evaluation_step(self, batch: MicroBatch, evaluation: Evaluation) -> None:
        """Adds loss and metrics of one micro-batch, under the shift that training has come to."""
        labelled = self.compare(batch, self.want_in_evaluation)
        losses = self._losses(labelled)
        evaluation.add_terms([Term(losses, ones(losses), "sequences")])
        self.record_labelled(labelled, evaluation.add, evaluation.meter)
        evaluation.add_predictions(batch, labelled.out.top1, labelled.out.logps)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Adds the step's rewards to those seen, once its last micro-batch is in."""
        super().on_before_optimizer_step(optimizer)
        if self._closing and self._rewards_of_step is not None:
            self.rewards_seen += sum_over_ranks(self._rewards_of_step, self.trainer.strategy).cpu()
            self._rewards_of_step = None

    def couplings(self) -> list[str]:
        """A shift that moves within a step."""
        micro = ["method.shift_scope=micro_batch: the shift moves from one micro-batch to the next"]
        return super().couplings() + (micro if self.shift_scope == "micro_batch" else [])

    # -- distribution matching --------------------------------------------------------------------------------------

    def reference_ready(self) -> None:
        """Weighs the rows' prompts, while the reference is there."""
        if not self.use_udm:
            return
        data, device = self.trainer.datamodule, self.device
        embed = self._embedding()
        size = data.micro_batch_size or min(data.batch_size, 64)

        def numbers(rows: Dataset, compute: density_ratio.Embed) -> Any:
            def run(batch: MicroBatch) -> Tensor:
                with self.trainer.precision_plugin.forward_context():
                    return compute(batch)

            return per_row(rows, run, self.trainer.strategy, device, size, "Prompts")

        def weigh(rows: Dataset, name: str) -> Dataset:
            if name == "train" and self.classifier is None:
                options = {"sample_size": self.prompt_sample_size, "seed": data.seed}
                self.classifier = density_ratio.fit(rows, embed, numbers, **options)
            if self.classifier is None:
                log.warning("%s: there are no training rows to match prompts with, so method.use_udm weighs all alike.", name)
                return rows
            return density_ratio.with_ratios(rows, embed, numbers, self.classifier, **self.ratio_range)

        data.map_prepared(weigh)

    def _embedding(self) -> density_ratio.Embed:
        if self.trainer.datamodule.streaming:
            raise UserError("method.use_udm compares the prompts of all rows before training: set data.streaming=false.")
        if (counts := self.label_counts()) is not None and not all(counts):
            raise UserError("method.use_udm needs rows of both labels, and one of them is missing; set method.use_udm=false.")
        if self.embedding_model is not None:
            return density_ratio.text_embedding(self.embedding_model, self.tokenizer, self.device)
        moves = self.sync_ref_model or any(getattr(c, "update_ref_model", False) for c in self.trainer.callbacks)
        if moves:
            raise UserError(
                "method.use_udm embeds prompts by the reference, which moves here, so that a resumed run would weigh rows "
                "otherwise; name a method.embedding_model, or hold the reference still."
            )
        return density_ratio.hidden_embedding(self.reference)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the rewards seen and the prompts' classifier."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[KEY] = {"rewards": self.rewards_seen.clone(), "classifier": self.classifier}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes them over."""
        super().on_load_checkpoint(checkpoint)
        if KEY in checkpoint:
            self.rewards_seen = checkpoint[KEY]["rewards"].clone()
            self.classifier = checkpoint[KEY]["classifier"]
