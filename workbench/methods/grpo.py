"""Group relative policy optimisation and its family.

The advantage of a completion is the distance of its reward from the mean of its group, and every token of it has the same. The
loss of a step is a mean of `workbench.losses.policy` over its tokens or completions, plus ``beta`` times the divergence from the
reference, less ``entropy_coef`` times the entropy.
"""

import logging
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench.data.batch import MicroBatch
from workbench.data.prompts import Ticket
from workbench.errors import UserError, check_choice
from workbench.losses.advantages import Aggregation, Scale, group_advantages
from workbench.losses.entropy import EntropyController, entropy_threshold, top_entropy_mask
from workbench.losses.policy import (
    PolicyOptions,
    check_policy_options,
    clip_metrics,
    kl_estimate,
    log_ratios,
    policy_loss,
    reduction,
)
from workbench.losses.policy_options import Level, Loss
from workbench.losses.policy_ratios import Estimator
from workbench.losses.reduce import reduce
from workbench.losses.sampler import Correction, Mode, importance_correction, off_policy_mask
from workbench.losses.sequences import sequence_sums
from workbench.methods.evaluation import Term
from workbench.methods.online import Online
from workbench.methods.window import Window
from workbench.models.head_kernel import refusal
from workbench.models.load import ModelSpec
from workbench.models.policy import PolicyOutput
from workbench.rewards import RewardResult

log = logging.getLogger(__name__)

KEY = "entropy_control"  # in a checkpoint


class GRPO(Online):
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and its variants.

    Args:
        model: as in `Method`.
        num_generations: completions per prompt.
        loss: grpo, bnpo, dapo, dr_grpo, cispo, sapo, luspo, vespo (see `workbench.losses.policy`).
        epsilon: how far a ratio may fall below 1, and rise above it without ``epsilon_high``.
        epsilon_high: how far it may rise above 1; of cispo the largest ratio itself; None: ``epsilon``.
        delta: largest ratio of completions with a negative advantage; None: no bound.
        importance_sampling_level: ratios of each ``token``, or of a ``sequence`` (GSPO).
        scale_rewards: divide advantages by the standard deviation of the ``group``, of the ``batch``, or by ``none``.
        multi_objective_aggregation: ``sum_then_normalize`` the rewards of several functions, or ``normalize_then_sum`` (GDPO).
        kl_estimator: of the divergence from the reference: k1, k2 or k3.
        use_bias_correction_kl: multiply it by the ratio, which makes it unbiased off policy.
        average_over: what grpo and sapo average over: ``all`` completions, or the ``trained`` ones, without those that
            ``mask_truncated_completions`` leaves out.
        top_entropy_quantile: share of the tokens, those with the highest entropy, that the policy's loss takes.
        top_entropy_scope: among which tokens: those of a ``window``, as it was written, or of a ``micro_batch``.
        entropy_coef: weight of the mean entropy per token, which is taken off the loss.
        use_adaptive_entropy: let that weight follow a target.
        entropy_coef_min: its smallest value.
        entropy_coef_max: its largest.
        entropy_coef_delta: its change per optimizer step.
        entropy_target: nats per token; the weight rises, and acts, while the step before had no more.
        sapo_temperature_pos: of sapo, steepness of the gate where the advantage is positive.
        sapo_temperature_neg: of sapo, the same elsewhere.
        vespo_k_pos: of vespo, power of the weight where the advantage is positive.
        vespo_lambda_pos: of vespo, rate of its decay there.
        vespo_k_neg: of vespo, power elsewhere.
        vespo_lambda_neg: of vespo, rate of the decay elsewhere.
        off_policy_mask_threshold: drift from the sampler, nats per token, above which completions with a negative advantage are
            left out; None: never.
        importance_sampling_mode: correction for a sampler that is not quite the trainer: ``sequence_mask``,
            ``sequence_truncate``, ``token_mask``, ``token_truncate``; None: none.
        importance_sampling_clip_max: largest ratio of that; None: any.
        importance_sampling_clip_min: smallest ratio of that; None: any.
        options: as in `Online`.
    """

    def __init__(
        self,
        model: str | ModelSpec | PreTrainedModel,
        *,
        num_generations: int = 8,
        loss: Loss = "dapo",
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        delta: float | None = None,
        importance_sampling_level: Level = "token",
        scale_rewards: Scale = "group",
        multi_objective_aggregation: Aggregation = "sum_then_normalize",
        kl_estimator: Estimator = "k3",
        use_bias_correction_kl: bool = True,
        average_over: Literal["all", "trained"] = "all",
        top_entropy_quantile: float = 1.0,
        top_entropy_scope: Literal["window", "micro_batch"] = "window",
        entropy_coef: float = 0.0,
        use_adaptive_entropy: bool = False,
        entropy_coef_min: float = 0.0,
        entropy_coef_max: float = 1.0,
        entropy_coef_delta: float = 0.005,
        entropy_target: float = 0.2,
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        off_policy_mask_threshold: float | None = None,
        importance_sampling_mode: Mode | None = "sequence_mask",
        importance_sampling_clip_max: float | None = 3.0,
        importance_sampling_clip_min: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, num_generations=num_generations, **options)
        self.loss: Loss = loss
        self.policy_options = PolicyOptions(
            epsilon=epsilon,
            epsilon_high=epsilon_high,
            delta=delta,
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            vespo_k_pos=vespo_k_pos,
            vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg,
            vespo_lambda_neg=vespo_lambda_neg,
        )
        self.entropy_control = EntropyController(
            entropy_coef, use_adaptive_entropy, entropy_target, entropy_coef_delta, entropy_coef_min, entropy_coef_max
        )
        if self.head_kernel != "torch" and self.entropy_control.active:
            raise refusal("gives no gradient of the entropy: set method.entropy_coef=0 and method.use_adaptive_entropy=false")
        if importance_sampling_mode == "sequence_mask" and loss == "vespo":
            importance_sampling_mode = "token_truncate"  # the default of others, which vespo cannot have
        self._warnings = check_policy_options(
            loss,
            self.policy_options,
            importance_sampling_level=importance_sampling_level,
            off_policy=self.steps_per_generation * self.num_iterations > 1,
            importance_sampling_mode=importance_sampling_mode,
            importance_sampling_clip_min=importance_sampling_clip_min,
            importance_sampling_clip_max=importance_sampling_clip_max,
            off_policy_mask_threshold=off_policy_mask_threshold,
            top_entropy_quantile=top_entropy_quantile,
            entropy_coef=entropy_coef,
            use_adaptive_entropy=use_adaptive_entropy,
            entropy_coef_min=entropy_coef_min,
            entropy_coef_max=entropy_coef_max,
            entropy_coef_delta=entropy_coef_delta,
            entropy_target=entropy_target,
        )
        self._check(
            multi_objective_aggregation, scale_rewards, average_over, top_entropy_scope, kl_estimator, use_bias_correction_kl
        )
        self.level: Level = importance_sampling_level
        self.scale_rewards: Scale = scale_rewards
        self.aggregation: Aggregation = multi_objective_aggregation
        self.kl_estimator: Estimator = kl_estimator
        self.use_bias_correction_kl = use_bias_correction_kl
        self.average_over = average_over
        self.top_entropy_quantile = top_entropy_quantile
        self.top_entropy_scope = top_entropy_scope
        self.off_policy_mask_threshold = off_policy_mask_threshold
        self.correction_mode = importance_sampling_mode
        self.correction_bounds = {"clip_min": importance_sampling_clip_min, "clip_max": importance_sampling_clip_max}
        self.want = self.want_in_training("entropy", read=["entropy"] * (top_entropy_quantile < 1))
        self._entropy_before: float | None = None  # of the step before

    def _check(
        self,
        aggregation: str,
        scale: str,
        average_over: str,
        top_entropy_scope: str,
        kl_estimator: str,
        use_bias_correction_kl: bool,
    ) -> None:
        if self.num_generations < 2:
            raise UserError(
                f"method.num_generations={self.num_generations} leaves nothing to compare a completion with; use 2 or more."
            )
        check_choice("method.scale_rewards", scale, ("group", "batch", "none"))
        check_choice("method.multi_objective_aggregation", aggregation, ("sum_then_normalize", "normalize_then_sum"))
        check_choice("method.average_over", average_over, ("all", "trained"))
        check_choice("method.top_entropy_scope", top_entropy_scope, ("window", "micro_batch"))
        check_choice("method.kl_estimator", kl_estimator, ("k1", "k2", "k3"))
        if not self.needs_reference and (kl_estimator != "k3" or not use_bias_correction_kl):
            name, value = ("kl_estimator", kl_estimator) if kl_estimator != "k3" else ("use_bias_correction_kl", "false")
            raise UserError(f"method.{name}={value} has no effect with method.beta=0, which goes without a divergence; set beta.")
        if aggregation == "normalize_then_sum" and len(self.rewards.names) < 2:
            self._warnings.append(
                f"method.multi_objective_aggregation=normalize_then_sum is for several rewards, and there is one: "
                f"{self.rewards.names[0]}."
            )
        if average_over == "trained" and (self.loss not in ("grpo", "sapo") or not self.mask_truncated_completions):
            raise UserError(
                f"method.average_over=trained has no effect with method.loss={self.loss} and method.mask_truncated_completions="
                f"{str(self.mask_truncated_completions).lower()}: it is for grpo and sapo, with true."
            )

    def on_fit_start(self) -> None:
        """Says which options have no effect."""
        super().on_fit_start()
        for warning in self._warnings:
            log.warning("%s", warning)

    def couplings(self) -> list[str]:
        """What is a mean over micro-batches."""
        found = super().couplings()
        if self.loss == "bnpo":
            found.append("method.loss=bnpo divides by the tokens of a micro-batch")
        if self.top_entropy_quantile < 1 and self.top_entropy_scope == "micro_batch":
            found.append("method.top_entropy_scope=micro_batch ranks the tokens of a micro-batch")
        return found

    # -- a window ---------------------------------------------------------------------------------------------------

    @property
    def keeps_old_entropy(self) -> bool:
        """For a threshold over the window."""
        return self.top_entropy_quantile < 1 and self.top_entropy_scope == "window"

    def compute_advantages(self, result: RewardResult, window: Window) -> np.ndarray:
        """Distances from the group's mean."""
        weights = torch.tensor(result.weights, dtype=torch.float64)
        rewards, group = torch.from_numpy(result.values), torch.from_numpy(window.group)
        return group_advantages(rewards, weights, group, self.scale_rewards, self.aggregation).values.numpy()

    def _window_threshold(self) -> Tensor:
        values = torch.from_numpy(np.concatenate(self.window.old_entropy).astype(np.float64))
        return entropy_threshold(values, torch.ones_like(values), self.top_entropy_quantile)

    # -- a step -----------------------------------------------------------------------------------------------------

    def training_step(self, batch: Ticket, batch_idx: int) -> Tensor:
        """The micro-batch's share of the step's loss."""
        first_sweep, batch = self.in_first_sweep(batch), self.micro_batch(batch)
        bonus = self.entropy_control.active
        out = self.policy(batch, self.want, processing=self.processing(batch), entropy_grad=bonus)
        terms = self.terms(batch, out, first_sweep)
        if bonus:
            self._record_policy_loss(terms, batch)
            terms.append(self._bonus(batch, out))
        return self.step_loss(terms, batch, out)

    def terms(self, batch: MicroBatch, out: PolicyOutput, first_sweep: bool = True) -> list[Term]:
        """The policy's loss on a micro-batch, as one term; its metrics are recorded."""
        weights, segment, size = batch.weights[batch.outputs], batch.segment[batch.outputs], len(batch.row)
        advantages, old = batch.extras["advantages"], batch.extras.get("old_logps", out.logps.detach())
        ratios = log_ratios(out.logps, old, weights, segment, size, self.level)
        correction = self._correction(batch, old, weights, segment, size, first_sweep)
        shared = {"advantages": advantages, "weights": weights, "segment": segment, "options": self.policy_options}
        factor = None if correction is None else correction.ratio
        values = policy_loss(self.loss, logps=out.logps, log_ratio=ratios, correction=factor, **shared)
        if self.top_entropy_quantile < 1:
            values = values * self._top(batch, out.entropy, weights)
        if self.off_policy_mask_threshold is not None:
            behaviour = batch.extras.get("sampler_logps", old)
            options = (advantages, weights, segment, self.off_policy_mask_threshold)
            values = values * off_policy_mask(behaviour, out.logps.detach(), *options)
        if self.needs_reference:
            values = values + self.beta * self._divergence(batch, out.logps, old, weights)
        self._record(batch, out, ratios, factor, shared)
        return [self._term(values, batch, weights, segment, size)]

    def _term(self, values: Tensor, batch: MicroBatch, weights: Tensor, segment: Tensor, size: int) -> Term:
        how = reduction(self.loss)
        weights = how.weights(weights, segment, size)
        if how.per != "sequences":
            return Term(values, weights, how.per, scope=how.scope or "step")
        per = "unmasked" if self.average_over == "trained" else "sequences"
        return Term(sequence_sums(values, weights, segment, size), batch.extras["counted"], per, scope="step")

    def _divergence(self, batch: MicroBatch, logps: Tensor, old: Tensor, weights: Tensor) -> Tensor:
        ratio = logps - old if self.use_bias_correction_kl else None
        kl = kl_estimate(logps, batch.extras["ref_logps"], self.kl_estimator, weights=weights, log_ratio=ratio)
        self.record("kl", kl, weights)
        return kl

    def _correction(
        self, batch: MicroBatch, old: Tensor, weights: Tensor, segment: Tensor, size: int, first_sweep: bool
    ) -> Correction | None:
        if first_sweep:
            self.record_mismatch(batch, old, weights)
        if self.correction_mode is None or "sampler_logps" not in batch.extras:
            return None
        found = importance_correction(
            old, batch.extras["sampler_logps"], weights, segment, size, self.correction_mode, **self.correction_bounds
        )
        if first_sweep:
            name, there = "sampling/importance_sampling_ratio", found.ratio_weights != 0
            self.record(f"{name}/mean", found.ratios, found.ratio_weights)
            self.record_extreme(f"{name}/min", found.ratios[there], "min")
            self.record_extreme(f"{name}/max", found.ratios[there], "max")
        return found

    def _top(self, batch: MicroBatch, entropy: Tensor, weights: Tensor) -> Tensor:
        """Whether each token is among those with the highest entropy."""
        if self.top_entropy_scope == "micro_batch":
            top = top_entropy_mask(entropy.detach(), weights, self.top_entropy_quantile)
        else:
            threshold = self._window_threshold().to(weights.device)
            top = top_entropy_mask(batch.extras["old_entropy"], weights, self.top_entropy_quantile, threshold)
        self.record("top_entropy", entropy, torch.where(top, weights, 0.0))
        return top

    def _record(
        self, batch: MicroBatch, out: PolicyOutput, ratios: Tensor, correction: Tensor | None, shared: dict[str, Any]
    ) -> None:
        self.record("entropy", out.entropy, shared["weights"])
        found = clip_metrics(self.loss, ratios.detach(), level=self.level, correction=correction, **shared)
        for name, (values, weights) in found.means.items():
            self.record(name, values, weights)
        for name, (values, kind) in found.extremes.items():
            self.record_extreme(name, values, kind)

    # -- entropy ----------------------------------------------------------------------------------------------------

    def _bonus(self, batch: MicroBatch, out: PolicyOutput) -> Term:
        """The entropy, with the weight that it has in this step: by the entropy of the step before, which every micro-batch and
        rank knows alike; with ``scope="micro_batch"`` by that of the micro-batch."""
        weights = batch.weights[batch.outputs]
        before = self._entropy_before
        if self.scope == "micro_batch" and bool((weights != 0).any()):
            before = float((out.entropy.detach() * weights).sum() / weights.sum())
        applied = self.entropy_control.applied(float("inf") if before is None else before)
        self._meter.add("entropy_coef", self.entropy_control.coef, 1.0)
        return Term(out.entropy, weights, "tokens", -applied)

    def _record_policy_loss(self, terms: list[Term], batch: MicroBatch) -> None:
        for term in terms:
            value = reduce(term.values.detach(), term.weights, batch.norm, per=term.per, scope=term.scope)
            self._meter.add("policy_loss", term.coefficient * value / batch.norm.scale, None)

    def _finish_step(self, grad_norm: float) -> None:
        super()._finish_step(grad_norm)
        name = "train/top_entropy" if self.top_entropy_quantile < 1 else "train/entropy"
        if name in self.step_metrics:
            self._entropy_before = self.step_metrics[name]
            self.entropy_control.update(self._entropy_before)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the weight of the entropy, and what it goes by."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[KEY] = {**self.entropy_control.state_dict(), "before": self._entropy_before}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on with it."""
        super().on_load_checkpoint(checkpoint)
        if KEY in checkpoint:
            self.entropy_control.load_state_dict(checkpoint[KEY])
            self._entropy_before = checkpoint[KEY]["before"]
