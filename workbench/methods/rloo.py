"""REINFORCE with a leave-one-out baseline.

A completion is one action: its log-probability is that of all its tokens together, and so is the ratio that is clipped. The
divergence from the reference is part of the reward.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.prompts import Ticket
from workbench.errors import UserError
from workbench.losses.advantages import clip_rewards, combine, leave_one_out
from workbench.losses.sequences import sequence_sums
from workbench.methods.evaluation import Term
from workbench.methods.online import Online
from workbench.methods.window import Window
from workbench.models.load import ModelSpec
from workbench.rewards import RewardResult


class RLOO(Online):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740, section 3.2).

    The loss of a completion is ``-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`` with r the ratio of its probability to
    that when the window was written, and A its reward less the mean of its group's others.

    Args:
        model: as in `Method`.
        beta: weight of ``log p(y) - log ref(y)``, which is taken off the reward.
        num_generations: completions per prompt.
        epsilon: how far a ratio may fall below 1, and rise above it.
        epsilon_high: how far it may rise above 1; None: ``epsilon``.
        normalize_advantages: divide by their standard deviation in the batch, and centre them there (REINFORCE++, Hu 2025,
            arXiv:2501.03262).
        reward_clip_range: smallest and largest reward; None: any.
        options: as in `Online`.
    """

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        beta: float = 0.05,
        num_generations: int = 2,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        normalize_advantages: bool = False,
        reward_clip_range: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, beta=beta, num_generations=num_generations, **options)
        if num_generations < 2:
            raise UserError(
                f"method.num_generations={num_generations} leaves nothing to compare a completion with; use 2 or more."
            )
        high = epsilon if epsilon_high is None else epsilon_high
        if not 0 <= epsilon <= 1 or high < 0:
            raise UserError(f"method.epsilon={epsilon} must lie in [0, 1], and method.epsilon_high={epsilon_high} be at least 0.")
        if reward_clip_range is not None and (len(reward_clip_range) != 2 or not reward_clip_range[0] < reward_clip_range[1]):
            raise UserError(f"method.reward_clip_range={list(reward_clip_range)} must be two numbers, the smaller one first.")
        self.bounds = (1 - epsilon, 1 + high)
        self.normalize_advantages = normalize_advantages
        self.reward_clip_range = reward_clip_range
        self.want = self.want_in_training("entropy")

    def keeps_old_logps(self, steps: int) -> bool:
        """Also for the divergence, which is taken off the rewards before the first step."""
        return super().keeps_old_logps(steps) or self.needs_reference

    def compute_advantages(self, result: RewardResult, window: Window) -> np.ndarray:
        """``r_i - mean of the others' r``, r less the divergence."""
        rewards = combine(torch.from_numpy(result.values), torch.tensor(result.weights))
        if self.reward_clip_range is not None:
            rewards = clip_rewards(rewards, *self.reward_clip_range)
        if self.needs_reference:
            pairs = zip(window.old_logps, window.ref_logps, strict=True)
            divergence = np.array([(old.astype(np.float64) - ref).sum() for old, ref in pairs])
            rewards = rewards - self.beta * torch.from_numpy(divergence)
            self._report_divergence(window)
        return leave_one_out(rewards, torch.from_numpy(window.group), self.normalize_advantages).values.numpy()

    def _report_divergence(self, window: Window) -> None:
        """``kl``: mean over tokens of ``log p - log ref``."""
        old, ref = (np.concatenate(values).astype(np.float64) for values in (window.old_logps, window.ref_logps))
        if len(old):
            self._report_means({"kl": float((old - ref).mean())})

    def training_step(self, batch: Ticket, batch_idx: int) -> Tensor:
        """The micro-batch's share of the step's loss."""
        first_sweep = self.in_first_sweep(batch)
        batch = self.micro_batch(batch)
        out = self.policy(batch, self.want, processing=self.processing(batch))
        size, segment, weights = len(batch.row), batch.segment[batch.outputs], batch.weights[batch.outputs]
        old = batch.extras.get("old_logps", out.logps.detach())
        ratio = sequence_sums(out.logps - old, weights, segment, size).exp()
        advantages, counted = batch.extras["advantages"], batch.extras["counted"]
        clipped = ratio.clamp(*self.bounds)
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
        self._record(batch, out.entropy, weights, ratio.detach(), counted)
        if first_sweep:
            self.record_mismatch(batch, old, weights)
        return self.step_loss([Term(losses, counted, "sequences")], batch, out)

    def _record(self, batch: Any, entropy: Tensor, weights: Tensor, ratio: Tensor, counted: Tensor) -> None:
        advantages = batch.extras["advantages"]
        low = ((ratio < self.bounds[0]) & (advantages < 0)).double()
        high = ((ratio > self.bounds[1]) & (advantages > 0)).double()
        self.record("entropy", entropy, weights)
        for name, values in (("low_mean", low), ("high_mean", high), ("region_mean", low + high)):
            self.record(f"clip_ratio/{name}", values, counted)
        there = counted != 0
        self.record_extreme("clip_ratio/low_min", low[there], "min")
        self.record_extreme("clip_ratio/high_max", high[there], "max")
