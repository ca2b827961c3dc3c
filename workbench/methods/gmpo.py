"""Geometric-mean policy optimisation: GRPO's advantages on the geometric mean of a completion's ratios.

Each token's ratio is clipped by itself, in log space, before the mean is taken; GSPO clips the mean.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch
from workbench.data.prompts import Ticket
from workbench.errors import UserError, check_choice
from workbench.losses.advantages import Scale, group_advantages
from workbench.losses.policy import check_gmpo_options, gmpo_clip_metrics, gmpo_loss, kl_estimate
from workbench.losses.policy_ratios import Estimator
from workbench.losses.sequences import sequence_lengths, sequence_means
from workbench.methods.evaluation import Term
from workbench.methods.online import Online
from workbench.methods.window import Window
from workbench.models.load import ModelSpec
from workbench.models.policy import PolicyOutput
from workbench.rewards import RewardResult


class GMPO(Online):
    """Geometric-mean policy optimisation (Zhao et al. 2025, arXiv:2507.20673, equation 4).

    The loss of a completion is ``-A exp(mean_t log r_t)``, with r_t the ratio of its token's probability to that when the window
    was written, ``log r_t`` at most ``epsilon`` where A > 0 and at least ``-epsilon`` where A < 0. Completions are averaged.

    Args:
        model: as in `Method`.
        num_generations: completions per prompt.
        epsilon: how far the logarithm of a token's ratio may move, nats.
        scale_rewards: divide advantages by the standard deviation of the ``group``, of the ``batch``, or by ``none``.
        kl_estimator: of the divergence from the reference: k1, k2 or k3.
        use_bias_correction_kl: multiply it by the ratio, which makes it unbiased off policy.
        options: as in `Online`.
    """

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        num_generations: int = 8,
        epsilon: float = 0.4,
        scale_rewards: Scale = "group",
        kl_estimator: Estimator = "k3",
        use_bias_correction_kl: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, num_generations=num_generations, **options)
        if num_generations < 2:
            raise UserError(
                f"method.num_generations={num_generations} leaves nothing to compare a completion with; use 2 or more."
            )
        check_gmpo_options(epsilon)
        check_choice("method.scale_rewards", scale_rewards, ("group", "batch", "none"))
        check_choice("method.kl_estimator", kl_estimator, ("k1", "k2", "k3"))
        self.epsilon = epsilon
        self.scale_rewards: Scale = scale_rewards
        self.kl_estimator: Estimator = kl_estimator
        self.use_bias_correction_kl = use_bias_correction_kl
        self.want = self.want_in_training("entropy")

    def compute_advantages(self, result: RewardResult, window: Window) -> np.ndarray:
        """Distances from the group's mean."""
        weights = torch.tensor(result.weights, dtype=torch.float64)
        rewards, group = torch.from_numpy(result.values), torch.from_numpy(window.group)
        return group_advantages(rewards, weights, group, self.scale_rewards).values.numpy()

    def training_step(self, batch: Ticket, batch_idx: int) -> Tensor:
        """The micro-batch's share of the step's loss."""
        first_sweep, batch = self.in_first_sweep(batch), self.micro_batch(batch)
        out = self.policy(batch, self.want, processing=self.processing(batch))
        return self.step_loss(self.terms(batch, out, first_sweep), batch, out)

    def terms(self, batch: MicroBatch, out: PolicyOutput, first_sweep: bool = True) -> list[Term]:
        """The losses of a micro-batch's completions, and their divergence; metrics are recorded."""
        weights, segment, size = batch.weights[batch.outputs], batch.segment[batch.outputs], len(batch.row)
        advantages, old = batch.extras["advantages"], batch.extras.get("old_logps", out.logps.detach())
        log_ratio = out.logps - old
        losses = gmpo_loss(log_ratio, advantages, weights, segment, self.epsilon)
        # A completion that is left out has a value, -A, but no token to learn it from; it counts in the mean like GRPO's.
        present = batch.extras["counted"] * (sequence_lengths(weights, segment, size) != 0)
        terms = [Term(losses, present, "sequences")]
        if self.needs_reference:
            ratio = log_ratio if self.use_bias_correction_kl else None
            kl = kl_estimate(out.logps, batch.extras["ref_logps"], self.kl_estimator, weights=weights, log_ratio=ratio)
            self.record("kl", kl, weights)
            terms.append(Term(sequence_means(kl, weights, segment, size), present, "sequences", self.beta))
        self._record(batch, out, log_ratio.detach(), weights, segment)
        if first_sweep:
            self.record_mismatch(batch, old, weights)
        return terms

    def _record(self, batch: MicroBatch, out: PolicyOutput, log_ratio: Tensor, weights: Tensor, segment: Tensor) -> None:
        self.record("entropy", out.entropy, weights)
        found = gmpo_clip_metrics(log_ratio, batch.extras["advantages"], weights, segment, self.epsilon)
        for name, (values, where) in found.means.items():
            self.record(name, values, where)
        for name, (values, kind) in found.extremes.items():
            self.record_extreme(name, values, kind)
