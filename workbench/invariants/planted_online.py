"""The planted bugs of methods that learn from their own completions, by the layer they lie in."""

from collections.abc import Callable

Bug = tuple[str, str, str, str, str, str]
"""Layer, name, target, what is replaced, what stands there instead, and who must reject it."""

BUGS: list[Bug] = []


def _of(layer: str) -> Callable[[str, str, str, str, str], None]:
    return lambda name, target, old, new, killer: BUGS.append((layer, name, target, old, new, killer))


_losses, _terms, _reference = _of("losses"), _of("terms"), _of("reference")
_rollouts, _rewards, _windows = _of("rollouts"), _of("rewards"), _of("windows")
_resume, _processes, _normalisation = _of("resume"), _of("processes"), _of("normalisation")

# -- losses -------------------------------------------------------------------------------------------------------------

_losses("ratio_clip_off", "losses.policy:clipped_loss", "torch.clamp(log_ratio, low, high).exp()", "log_ratio.exp()", "grpo")
_losses(
    "upper_clip_is_the_lower_one", "losses.policy:clipped_loss", "math.log1p(options.high)", "math.log1p(options.epsilon)", "grpo"
)
_losses("clip_of_the_other_sign", "losses.policy:clipped_loss", "advantages < 0, floor", "advantages > 0, floor", "grpo")
_losses(
    "policy_kl_sign",
    "losses.policy_ratios:kl_estimate",
    "kept(logps - ref_logps, weights)",
    "kept(ref_logps - logps, weights)",
    "grpo",
)
_losses("estimator_k1_for_k3", "losses.policy_ratios:kl_estimate", '"k3": lambda: torch.expm1(-d) + d', '"k3": lambda: d', "grpo")
_losses("estimator_k3_for_k2", "losses.policy_ratios:kl_estimate", "d**2 / 2", "torch.expm1(-d) + d", "grpo_sequence")
_losses(
    "divergence_not_corrected",
    "losses.policy_ratios:kl_estimate",
    "if log_ratio is None:",
    "if True:",
    "gmpo",
)
_losses(
    "sequence_ratio_is_a_sum",
    "losses.policy_ratios:log_ratios",
    "sequence_means(ratios, weights, segment, num_rows)",
    "sequence_sums(ratios, weights, segment, num_rows)",
    "grpo_sequence",
)
_losses("cispo_clips_at_one_more", "losses.policy:cispo_loss", "math.log(epsilon_high)", "math.log1p(epsilon_high)", "grpo_cispo")
_losses("cispo_weight_has_a_gradient", "losses.policy:cispo_loss", "log_ratio.detach().clamp", "log_ratio.clamp", "grpo_cispo")
_losses("sapo_gates_swapped", "losses.policy:sapo_loss", "advantages > 0", "advantages < 0", "grpo_sapo")
_losses(
    "vespo_powers_swapped",
    "losses.policy_ratios:vespo_weights",
    "positive = advantages > 0",
    "positive = advantages < 0",
    "grpo_vespo",
)
_losses("geometric_mean_of_unclipped_ratios", "losses.policy:gmpo_loss", "torch.clamp(log_ratio, low, high)", "log_ratio", "gmpo")
_losses(
    "top_tokens_are_the_lowest", "losses.entropy:top_entropy_mask", "entropy >= threshold", "entropy <= threshold", "grpo_cispo"
)
_losses("off_policy_mask_of_good_ones", "losses.sampler:off_policy_mask", "advantages < 0", "advantages > 0", "grpo_sapo")
_losses(
    "sampler_ratio_inverted",
    "losses.sampler:importance_correction",
    "difference = old_logps - sampler_logps",
    "difference = sampler_logps - old_logps - 0.01",
    "grpo_sequence",
)

# -- advantages and rewards ---------------------------------------------------------------------------------------------

_rewards(
    "baseline_includes_the_completion",
    "losses.advantages:leave_one_out",
    "(n / (n - 1).clamp(min=1))",
    "1.0",
    "rloo",
)
_rewards(
    "spread_of_the_batch",
    "losses.advantages:_within_group",
    'if scale == "group" else',
    "if False else",
    "grpo",
)
_rewards(
    "spread_of_the_group",
    "losses.advantages:_within_group",
    'if scale == "group" else',
    "if True else",
    "grpo_sequence",
)
_rewards(
    "advantages_not_centred",
    "losses.advantages:_within_group",
    "rewards - group_mean(rewards, group)",
    "rewards.double()",
    "grpo",
)
_rewards(
    "advantages_centred_on_the_batch",
    "losses.advantages:group_mean",
    "_sum_in_groups(rewards.double().nan_to_num(), group) / group_sizes(rewards, group)",
    "rewards.double().nanmean().expand_as(rewards)",
    "grpo_sapo",
)
_rewards(
    "spread_of_all_not_n_minus_1",
    "losses.advantages:group_std",
    "(group_sizes(rewards, group) - 1)",
    "group_sizes(rewards, group)",
    "grpo",
)
_rewards("weights_of_rewards_ignored", "losses.advantages:combine", "rewards * weights", "rewards", "grpo")
_rewards(
    "reward_of_a_neighbour",
    "methods.generating:Generating.score",
    "self.rewards(**arguments,",
    "self.rewards(**{**arguments, 'completions': [*arguments['completions'][1:], *arguments['completions'][:1]]},",
    "grpo",
)
_rewards(
    "column_of_the_first_row",
    "methods.rollouts:as_arguments",
    "[group.row[name] for group, _ in each]",
    "[groups[0].row[name] for group, _ in each]",
    "grpo",
)
_rewards(
    "reward_not_clipped", "methods.rloo:RLOO.compute_advantages", "if self.reward_clip_range is not None:", "if False:", "rloo"
)
_rewards(
    "divergence_added_to_the_reward", "methods.rloo:RLOO.compute_advantages", "rewards - self.beta", "rewards + self.beta", "rloo"
)
_rewards(
    "advantages_not_normalised",
    "losses.advantages:leave_one_out",
    "if normalize else values",
    "if False else values",
    "rloo_normalized",
)
_rewards(
    "rewards_added_before_they_are_normalised",
    "losses.advantages:group_advantages",
    'if aggregation == "normalize_then_sum":',
    "if False:",
    "grpo_cispo",
)
_rewards("dull_groups_kept", "methods.online:Online._collect", "groups[slot], parts[slot] = group, part", "pass", "grpo_sequence")
_rewards(
    "replacements_are_drawn_again",
    "data.prompts:PromptPlanner.replacements",
    "[self.seed, number, attempt, 1]",
    "[self.seed, 0, attempt, 1]",
    "grpo_sequence",
)

# -- what a method makes of them ----------------------------------------------------------------------------------------

_terms(
    "old_is_the_present",
    "methods.grpo:GRPO.terms",
    'batch.extras.get("old_logps", out.logps.detach())',
    "out.logps.detach()",
    "grpo",
)
_terms(
    "old_of_every_sweep",
    "methods.online:Online.on_train_batch_start",
    "    elif self.window is None",
    "    elif batch.k == 0 and batch.offset % len(self.window.plans) == 0:\n        with torch.no_grad():\n"
    "            self._add_logps(self.window)\n    elif self.window is None",
    "grpo",
)
_terms("clip_of_a_completion_off", "methods.rloo:RLOO.training_step", "ratio.clamp(*self.bounds)", "ratio", "rloo")
_terms(
    "upper_bound_of_a_completion_ignored",
    "methods.rloo:RLOO.__init__",
    "self.bounds = (1 - epsilon, 1 + high)",
    "self.bounds = (1 - epsilon, 1 + epsilon)",
    "rloo",
)
_terms("entropy_weight_stands_still", "losses.entropy:EntropyController.update", "if self.adaptive:", "if False:", "grpo_cispo")
_terms(
    "bonus_above_the_target",
    "losses.entropy:EntropyController.applied",
    "entropy <= self.target",
    "entropy > self.target",
    "grpo_cispo",
)
_terms(
    "temperature_ignored_by_the_trainer",
    "methods.online:Online.processing",
    "temperature=self.sampling.temperature",
    "temperature=1.0",
    "grpo",
)
_terms(
    "penalty_ignored_by_the_trainer",
    "methods.online:Online.processing",
    "repetition_penalty=self.sampling.repetition_penalty",
    "repetition_penalty=1.0",
    "grpo",
)
_terms("support_ignored", "methods.online:Online.processing", "None if support is None else", "None if True else", "grpo")
_terms(
    "truncated_completions_trained",
    "methods.online:Online._window_of",
    "scored & ~truncated if self.mask_truncated_completions else scored",
    "scored",
    "grpo",
)
_terms(
    "masked_completions_not_counted", "methods.online:Online._window_of", "counted=scored", "counted=scored & ~truncated", "gmpo"
)

# -- windows, normalisers, the reference --------------------------------------------------------------------------------

_normalisation(
    "tokens_of_a_window_counted",
    "data.prompts:PromptPlanner.plan_step",
    "tokens=float(sizes.sum())",
    "tokens=float(sum(weight))",
    "grpo",
)
_normalisation("masked_tokens_counted", "methods.window:Window.plan", "np.where(self.trained, lengths, 0)", "lengths", "grpo")
_normalisation(
    "completions_of_a_full_step_counted",
    "data.prompts:PromptPlanner.plan_step",
    "float(np.asarray(counted)[list(rows)].sum())",
    "float(self.geometry.batch_size)",
    "rloo",
)
_normalisation(
    "micro_batches_of_a_window_not_undone",
    "data.prompts:PromptPlanner.__init__",
    "self.scale = self.num_micro * world_size",
    "self.scale = world_size",
    "grpo/micro_batch_1",
)
_reference(
    "policy_is_its_own_reference",
    "models.reference:FrozenCopy.outputs",
    "self.policy(batch, want",
    "self.beside(batch, want",
    "rloo",
)
_windows("prompts_of_the_first_epoch", "data.prompts:PromptPlanner.window", "self._order(epoch)", "self._order(0)", "grpo")
_windows("last_window_dropped", "data.prompts:PromptPlanner.__init__", "whole + bool(rest and not drop_last)", "whole", "grpo")
_windows("second_step_trains_the_first", "methods.window:Window.micro_batch", "offset % len(self.plans)", "0", "grpo")
_windows("old_logps_of_other_completions", "methods.online:_keep", "zip(rows, parts", "zip(rows[::-1], parts", "grpo")
_resume(
    "window_lost", "methods.online:Online.on_save_checkpoint", "if self.window is not None:", "if False:", "grpo/resumed_at_1"
)
_resume(
    "window_drawn_again",
    "methods.online:Online.on_train_batch_start",
    "    if batch.rows is not None:",
    "    if batch.rows is None and self.window is not None and not hasattr(self, 'begun'):\n"
    "        batch.rows = self.trainer.datamodule.train_rows(batch.plan.prompts)\n"
    "    self.begun = True\n    if batch.rows is not None:",
    "grpo/resumed_at_7",
)
_resume(
    "old_logps_not_saved",
    "methods.window:Window.state_dict",
    '("prompt_ids", "token_ids", *self._known())',
    '("prompt_ids", "token_ids", *(n for n in self._known() if n != "old_logps"))',
    "grpo/resumed_at_1",
)
_resume(
    "entropy_weight_starts_again",
    "methods.grpo:GRPO.on_load_checkpoint",
    "if KEY in checkpoint:",
    "if False:",
    "grpo_cispo/resumed_at_7",
)
_resume(
    "position_in_the_window_lost",
    "methods.window:Window.from_state",
    '("number", "first", "version", "order")}',
    '("number", "first", "version", "order")}; fields["first"] = 0; fields["number"] = 0',
    "grpo/resumed_at_7",
)

# -- sampling -----------------------------------------------------------------------------------------------------------

_rollouts(
    "same_draws_in_every_window", "methods.online:Online._round", '"key": (self.seed, number)', '"key": (self.seed, 0)', "grpo"
)
_rollouts(
    "same_draws_for_every_sample",
    "methods.rollouts:answer",
    "(*key, number, attempt, sample)",
    "(*key, number, attempt, 0)",
    "grpo",
)
_rollouts(
    "draws_without_the_prompt", "methods.rollouts:answer", "(*key, number, attempt, sample)", "(*key, attempt, sample)", "grpo"
)
_rollouts(
    "draws_by_place_in_the_call",
    "methods.rollouts:answer",
    "for row, number in zip(rows, index, strict=True)\n        for sample",
    "for number, row in enumerate(rows)\n        for sample",
    "rloo/ddp",
)
_rollouts(
    "draws_of_an_order",
    "rollouts.torch_engine:TorchEngine._row",
    "uniforms(request.key, bound)",
    "uniforms((*request.key, index % self.batch_size), bound)",
    "rloo/engine_batches",
)
_rollouts("temperature_ignored_by_the_sampler", "rollouts.sampling:process", "logits / sampling.temperature", "logits", "grpo")
_rollouts(
    "support_without_its_last_token",
    "rollouts.sampling:keep_most_likely",
    "before >= top_p - _SLACK",
    "before + probs >= top_p - _SLACK",
    "grpo",
)
_rollouts(
    "stop_texts_ignored",
    "rollouts.torch_engine:TorchEngine._write",
    "sampling.stop and self._stops(row.tokens, sampling.stop)",
    "False",
    "grpo",
)
_rollouts(
    "stale_rollouts",
    "methods.generating:Generating.sync",
    "if self._synced != version:",
    "if self._synced is None:",
    "grpo/separate_engine",
)
_rollouts(
    "first_window_unsynced",
    "methods.generating:Generating.sync",
    "if self._synced != version:",
    "if self._synced != version and version:",
    "grpo/separate_engine",
)

# -- processes ----------------------------------------------------------------------------------------------------------

_processes(
    "rank_in_the_key",
    "methods.online:Online._round",
    '"key": (self.seed, number)',
    '"key": (self.seed, number + 100 * rank)',
    "grpo/ddp",
)
_processes(
    "completions_in_the_order_of_ranks",
    "methods.online:Online._round",
    "key=lambda item: item[0])",
    "key=lambda item: item[0] % world_size)",
    "grpo/ddp",
)
_processes(
    "old_logps_of_one_rank",
    "methods.online:Online._add_logps",
    "for part in gather(own, strategy):",
    "for part in [own]:",
    "rloo/ddp",
)
_processes("rewards_of_one_rank", "methods.online:Online._round", "gather(both, strategy)", "[both] * world_size", "rloo/ddp")
