"""What cases of TRL's online trainers come to: their options, and an engine that writes what their record wrote.

A record holds the completions of every generation call and the order in which it took them. Imports no torch before it runs.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, check_at_least, check_choice

if TYPE_CHECKING:
    from workbench.invariants.parity_cases import Case
    from workbench.invariants.parity_options import Options
    from workbench.invariants.parity_trainers import Replay

KINDS = ("grpo", "rloo")
SHARED: dict[str, Any] = {
    "max_length": None,
    "beta": 0.0,
    "num_generations": 8,
    "max_completion_length": 32,  # of the records, which do not say so; TRL has 512
    "shuffle_dataset": True,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "num_iterations": 1,
    "epsilon": 0.2,
    "epsilon_high": None,
    "reward_weights": None,
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "disable_dropout": False,
    "pad_to_multiple_of": "auto",
}
GRPO: dict[str, Any] = {
    **SHARED,
    "delta": None,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "use_bias_correction_kl": True,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "off_policy_mask_threshold": None,
    "cast_lm_head_to_fp32": False,
}
RLOO: dict[str, Any] = {
    **SHARED,
    "beta": 0.05,
    "num_generations": 2,
    "normalize_advantages": False,
    "reward_clip_range": None,
}
# Which losses of GRPO read an option; the others would refuse it.
_READ_BY = {
    "epsilon": ("grpo", "bnpo", "dapo", "dr_grpo", "luspo"),
    "epsilon_high": ("grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo"),
    "delta": ("grpo", "bnpo", "dapo", "dr_grpo", "luspo"),
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    "vespo_k_pos": ("vespo",),
    "vespo_lambda_pos": ("vespo",),
    "vespo_k_neg": ("vespo",),
    "vespo_lambda_neg": ("vespo",),
}
_SCALES = {True: "group", "True": "group", "group": "group", "batch": "batch", False: "none", "False": "none", "none": "none"}


def read_grpo(options: "Options", made: "Replay") -> None:
    """GRPO's options."""
    loss = options["loss_type"]
    check_choice("loss_type", loss, ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"))
    made.method |= {name: options[name] for name, losses in _READ_BY.items() if loss in losses}
    made.method |= options.pick(
        loss="loss_type",
        importance_sampling_level="importance_sampling_level",
        multi_objective_aggregation="multi_objective_aggregation",
        top_entropy_quantile="top_entropy_quantile",
        off_policy_mask_threshold="off_policy_mask_threshold",
        cast_lm_head_to_fp32="cast_lm_head_to_fp32",
    )
    if options["scale_rewards"] not in _SCALES:
        raise UserError(f"scale_rewards={options['scale_rewards']!r} is not known; allowed: group, batch, none.")
    made.method["scale_rewards"] = _SCALES[options["scale_rewards"]]
    made.method["importance_sampling_mode"] = None  # a record has no log-probabilities of its sampler
    if options["top_entropy_quantile"] < 1:
        made.method["top_entropy_scope"] = "micro_batch"
    if options["beta"]:
        made.method["use_bias_correction_kl"] = options["use_bias_correction_kl"]
    if options["use_adaptive_entropy"]:
        names = ("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
        made.method |= {name: options[name] for name in names}
    made.method["entropy_coef"] = options["entropy_coef"]
    _read(options, made)


def read_rloo(options: "Options", made: "Replay") -> None:
    """RLOO's options."""
    made.method |= options.pick(epsilon="epsilon", epsilon_high="epsilon_high", normalize_advantages="normalize_advantages")
    made.method["reward_clip_range"] = options["reward_clip_range"]
    _read(options, made)


def _read(options: "Options", made: "Replay") -> None:
    """What both have."""
    if options["shuffle_dataset"] and "shuffle_dataset" in options.given:
        raise UserError("shuffle_dataset=True is not replayed: the record's completions belong to prompts in their order.")
    micro, accumulation = options["per_device_train_batch_size"], options["gradient_accumulation_steps"]
    given = options["generation_batch_size"], options["steps_per_generation"]
    if all(given):
        raise UserError("generation_batch_size and steps_per_generation exclude each other.")
    per_window = given[0] // micro if given[0] else given[1] or accumulation  # TRL counts micro-batches
    check_at_least(1, steps_per_generation=per_window)
    if per_window % accumulation:
        raise UserError(
            f"steps_per_generation={per_window} micro-batches are no whole number of optimizer steps of {accumulation}; that is "
            "not replayed."
        )
    made.method |= options.pick(
        beta="beta",
        num_generations="num_generations",
        num_iterations="num_iterations",
        max_completion_length="max_completion_length",
        temperature="temperature",
        reward_weights="reward_weights",
        mask_truncated_completions="mask_truncated_completions",
        disable_dropout="disable_dropout",
    )
    made.method["steps_per_generation"] = per_window // accumulation
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", None), ("repetition_penalty", 1.0)):
        if options[name] != off:
            raise UserError(f"{name}={options[name]} of a sampler is not replayed: the record has its completions alone.")
    if options["sync_ref_model"]:
        made.method |= options.pick(
            sync_ref_model="sync_ref_model",
            ref_model_mixup_alpha="ref_model_mixup_alpha",
            ref_model_sync_steps="ref_model_sync_steps",
        )
    made.method["log_completions_every_n_steps"] = 0
    made.online = True


# -- running --------------------------------------------------------------------------------------------------------


def reward_len(completions: Sequence[Any], **columns: Any) -> list[float]:
    """The first reward of the records."""
    return [len(text) / 40 + 0.5 * text.count("the") for text in map(_text, completions)]


def reward_vowels(completions: Sequence[Any], **columns: Any) -> list[float]:
    """The second one."""
    return [sum(text.count(vowel) for vowel in "aeiou") / 20 for text in map(_text, completions)]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


class Recorded:
    """An engine that answers with a record's completions, one generation call after the other."""

    context = None

    def __init__(self, rollouts: Sequence[dict[str, Any]], end: int) -> None:
        self.rollouts = list(rollouts)
        self.end = end
        self.calls = 0

    def start(self, policy: Any, tokenizer: Any) -> None:
        """Nothing to start."""

    def generate(self, requests: Sequence[Any], sampling: Any) -> list[Any]:
        """The record's next call."""
        from workbench.rollouts.types import Rollout

        if self.calls == len(self.rollouts):
            raise UserError(f"the record has {len(self.rollouts)} generation calls, and one more is asked for.")
        call, self.calls = self.rollouts[self.calls], self.calls + 1
        asked, recorded = [list(r.prompt_ids) for r in requests], [list(ids) for ids in call["prompt_ids"]]
        if asked != recorded:
            raise UserError(f"generation call {self.calls}: the record answered other prompts than those that come next here.")
        written = [list(ids) for ids in call["completion_ids"]]
        return [Rollout(ids, None, "stop" if ids and ids[-1] == self.end else "length") for ids in written]

    def sync_weights(self, policy: Any, version: int) -> None:
        """Nothing to give it."""

    sleep = wake = close = lambda self: None


def arguments(case: "Case", tokenizer: Any) -> dict[str, Any]:
    """The method's arguments that replay a record's completions and rewards."""
    if "rollouts" not in case.extras:
        raise UserError(f"{case.path}: rollouts is missing: the completions of every generation call.")
    return {"engine": Recorded(case.extras["rollouts"], tokenizer.eos_token_id), "rewards": [reward_len, reward_vowels]}


def follow_orders(method: Any, orders: Sequence[Sequence[int]]) -> None:
    """Makes a method take its windows' completions in the record's orders."""
    left = iter(orders)
    take: Callable[[int], list[int]] = lambda size: list(next(left))  # noqa: E731
    method.completion_order = take
