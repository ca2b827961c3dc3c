"""What can be asked of the policy-gradient losses, and what cannot."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from workbench.errors import UserError, check_choice

Loss = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]
Level = Literal["token", "sequence"]
CLIPPED = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")  # losses that are the clipped surrogate
LOSSES = (*CLIPPED, "cispo", "sapo", "vespo")
MODES = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")


@dataclass(frozen=True)
class PolicyOptions:
    """What the losses read; `check_policy_options` checks it.

    Args:
        epsilon: how far a ratio may fall below 1, and rise above it without ``epsilon_high``.
        epsilon_high: how far it may rise above 1; None: ``epsilon``. Of CISPO: the largest ratio itself.
        delta: the largest ratio of completions with a negative advantage; None: no bound.
        sapo_temperature_pos: steepness of SAPO's gate where the advantage is positive.
        sapo_temperature_neg: the same elsewhere.
        vespo_k_pos: power of VESPO's weight where the advantage is positive.
        vespo_lambda_pos: rate of its decay there.
        vespo_k_neg: power elsewhere.
        vespo_lambda_neg: rate of the decay elsewhere.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    @property
    def high(self) -> float:
        """How far a ratio may rise above 1."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


_READ_BY = {
    "epsilon": CLIPPED,
    "epsilon_high": (*CLIPPED, "cispo"),
    "delta": CLIPPED,
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    "vespo_k_pos": ("vespo",),
    "vespo_lambda_pos": ("vespo",),
    "vespo_k_neg": ("vespo",),
    "vespo_lambda_neg": ("vespo",),
}


def check_policy_options(
    loss: Loss,
    options: PolicyOptions,
    *,
    importance_sampling_level: Level = "token",
    off_policy: bool = True,
    importance_sampling_mode: str | None = None,
    importance_sampling_clip_min: float | None = None,
    importance_sampling_clip_max: float | None = None,
    off_policy_mask_threshold: float | None = None,
    top_entropy_quantile: float = 1.0,
    entropy_coef: float = 0.0,
    use_adaptive_entropy: bool = False,
    entropy_coef_min: float = 0.0,
    entropy_coef_max: float = 1.0,
    entropy_coef_delta: float = 0.005,
    entropy_target: float = 0.2,
) -> list[str]:
    """Checks the options of GRPO's family, each under its name in the config.

    Args:
        loss: which one.
        options: of the losses.
        off_policy: whether a window of completions serves more than one optimizer step, so that ratios leave 1.
        importance_sampling_mode: of the correction of sampler against trainer; None: none.

    Returns:
        Warnings: what is allowed, and has no effect as things are.

    Raises:
        UserError: an option that cannot be, or that the loss does not read.
    """
    check_choice("method.loss", loss, LOSSES)
    check_choice("method.importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    _check_read(loss, options)
    _check_values(loss, options)
    _check_level(loss, importance_sampling_level)
    _check_correction(loss, importance_sampling_mode, importance_sampling_clip_min, importance_sampling_clip_max)
    if off_policy_mask_threshold is not None and not off_policy_mask_threshold > 0:
        raise UserError(f"method.off_policy_mask_threshold={off_policy_mask_threshold} must be above 0; null leaves nothing out.")
    if not 0 < top_entropy_quantile <= 1:
        raise UserError(
            f"method.top_entropy_quantile={top_entropy_quantile} must lie above 0 and be at most 1; 1 takes all tokens."
        )
    if not 0 <= entropy_coef < math.inf:
        raise UserError(f"method.entropy_coef={entropy_coef} must be a number of at least 0; 0 goes without a bonus.")
    adaptive = {"low": entropy_coef_min, "high": entropy_coef_max, "delta": entropy_coef_delta, "target": entropy_target}
    if use_adaptive_entropy:
        _check_adaptive(entropy_coef, **adaptive)
    elif tuple(adaptive.values()) != (0.0, 1.0, 0.005, 0.2):
        raise UserError(
            "method.entropy_coef_min, entropy_coef_max, entropy_coef_delta and entropy_target have no effect with "
            "method.use_adaptive_entropy=false; set it to true."
        )
    warnings = []
    if importance_sampling_level == "sequence" and not off_policy:
        warnings.append(
            "method.importance_sampling_level=sequence has no effect: each window of completions serves one optimizer step, so "
            "that all ratios are 1. Set method.steps_per_generation or method.num_iterations above 1."
        )
    return warnings


def check_gmpo_options(epsilon: float) -> None:
    """Raises `UserError` unless ``epsilon``, the bound of the log-ratios, is above 0."""
    if not epsilon > 0:
        raise UserError(f"method.epsilon={epsilon} must be above 0: it bounds the logarithm of a ratio. The paper has 0.4.")


def _check_read(loss: str, options: PolicyOptions) -> None:
    for field in fields(PolicyOptions):
        value = getattr(options, field.name)
        if value != field.default and loss not in _READ_BY[field.name]:
            readers = ", ".join(_READ_BY[field.name])
            raise UserError(
                f"method.{field.name}={value} has no effect with method.loss={loss}; leave it out, or take a loss that reads it: "
                f"{readers}."
            )


def _check_values(loss: str, options: PolicyOptions) -> None:
    if loss == "cispo" and options.epsilon_high is None:
        raise UserError("method.loss=cispo needs method.epsilon_high, the largest ratio itself; ScaleRL has 5.0.")
    if not options.epsilon >= 0:  # from 1 on there is no lower bound: DeepSeek-R1 has 10
        raise UserError(f"method.epsilon={options.epsilon} must be at least 0: a ratio may fall that far below 1.")
    low = 0 if loss != "cispo" else 1
    if options.epsilon_high is not None and not options.epsilon_high >= low:
        why = "cispo's largest ratio itself" if loss == "cispo" else "a ratio may rise that far above 1"
        raise UserError(f"method.epsilon_high={options.epsilon_high} must be at least {low}: it is {why}.")
    if options.delta is not None and not 1 + options.high < options.delta < math.inf:
        raise UserError(
            f"method.delta={options.delta} must be above 1 + epsilon_high = {1 + options.high:g}, the bound where advantages are "
            "positive; INTELLECT-2 has 4."
        )
    for name in ("sapo_temperature_pos", "sapo_temperature_neg", "vespo_lambda_pos", "vespo_lambda_neg"):
        if not getattr(options, name) > 0:
            raise UserError(f"method.{name}={getattr(options, name)} must be above 0.")
    for name in ("vespo_k_pos", "vespo_k_neg"):
        if not getattr(options, name) >= 0:
            raise UserError(f"method.{name}={getattr(options, name)} must be at least 0.")


def _check_level(loss: str, level: str) -> None:
    if loss == "luspo" and level != "sequence":
        raise UserError("method.loss=luspo is defined on ratios of sequences; set method.importance_sampling_level=sequence.")
    if loss == "vespo" and level != "token":
        raise UserError(
            "method.importance_sampling_level=sequence has no effect with method.loss=vespo, which weighs whole sequences; "
            "leave it out."
        )


def _check_correction(loss: str, mode: str | None, clip_min: float | None, clip_max: float | None) -> None:
    if mode is None:
        return
    check_choice("method.importance_sampling_mode", mode, MODES)
    bounds = f"method.importance_sampling_clip_min={clip_min} and method.importance_sampling_clip_max={clip_max}"
    if clip_min is None and clip_max is None:
        raise UserError(
            f"method.importance_sampling_mode={mode} has no bound to keep: set method.importance_sampling_clip_max=3.0."
        )
    if clip_min is not None and clip_max is not None and not clip_min < clip_max:
        raise UserError(f"{bounds}: the first must be below the second.")
    if clip_min is not None and not clip_min > 0:
        raise UserError(f"method.importance_sampling_clip_min={clip_min} must be above 0, as ratios are; null is no bound.")
    if clip_max is not None and not 0 < clip_max < math.inf:
        raise UserError(
            f"method.importance_sampling_clip_max={clip_max} must be a number above 0, as ratios are; null is no bound."
        )
    if loss == "vespo" and mode.startswith("sequence"):
        raise UserError(
            f"method.importance_sampling_mode={mode} cannot go with method.loss=vespo, whose weight of a sequence holds its "
            "tokens' ratios; set token_truncate or token_mask, or null for none."
        )


def _check_adaptive(coef: float, *, low: float, high: float, delta: float, target: float) -> None:
    if not low < high:
        raise UserError(f"method.entropy_coef_min={low} must be below method.entropy_coef_max={high}.")
    if not low <= coef <= high:
        raise UserError(
            f"method.entropy_coef={coef} must lie in [method.entropy_coef_min, method.entropy_coef_max] = [{low}, {high}]."
        )
    if not delta > 0:
        raise UserError(f"method.entropy_coef_delta={delta} must be above 0.")
    if not target > 0:
        raise UserError(f"method.entropy_target={target} must be above 0, as entropies are.")
