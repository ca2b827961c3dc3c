"""The planted bugs, by the layer they lie in. Each is a piece of one function's source and what stands there instead."""

from workbench.invariants.mutants import CANONICAL, Mutant
from workbench.invariants.planted_online import BUGS

MUTANTS: dict[str, Mutant] = {}


def _bug(layer: str, name: str, target: str, old: str, new: str, killer: str) -> None:
    """Adds a bug; ``killer`` is ``class`` or ``class/member``."""
    cls, _, member = killer.partition("/")
    assert name not in MUTANTS, name
    MUTANTS[name] = Mutant(name, layer, f"workbench.{target}", old, new, cls, member or CANONICAL)


def _losses(name: str, target: str, old: str, new: str, killer: str) -> None:
    _bug("losses", name, f"losses.{target}", old, new, killer)


_losses("nll_sign", "sft:nll_loss", "return -logps", "return logps", "sft")
_losses("dft_weight_has_a_gradient", "sft:dft_loss", "logps.detach().exp()", "logps.exp()", "sft_packing")
_losses(
    "chosen_and_rejected_swapped",
    "preference:Pairs.logratios",
    "self.chosen - self.ref_chosen, self.rejected - self.ref_rejected",
    "self.rejected - self.ref_rejected, self.chosen - self.ref_chosen",
    "dpo",
)
_losses(
    "label_smoothing_lost",
    "preference:sigmoid_loss",
    "-(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)",
    "-F.logsigmoid(logits)",
    "dpo",
)
_losses("hinge_margin_without_beta", "preference:hinge_loss", "1 - beta * margins", "1 - margins", "dpo_losses")
_losses("ipo_target_doubled", "preference:ipo_loss", "1 / (2 * beta)) ** 2", "1 / beta) ** 2", "dpo_losses")
_losses(
    "exo_target_swapped",
    "preference:exo_loss",
    "[1 - label_smoothing, label_smoothing]",
    "[label_smoothing, 1 - label_smoothing]",
    "dpo_losses",
)
_losses("robust_not_rescaled", "preference:robust_loss", "/ (1 - 2 * label_smoothing)", "/ 1", "dpo_losses")
_losses("nca_lost_a_term", "preference:nca_loss", " - 0.5 * F.logsigmoid(-chosen)", "", "dpo_losses")
_losses(
    "bco_pair_sign", "preference:bco_pair_loss", "reward_shift - beta * rejected", "reward_shift + beta * rejected", "dpo_losses"
)
_losses(
    "sppo_target_sign", "preference:sppo_hard_loss", "(rejected + 1 / (2 * beta))", "(rejected - 1 / (2 * beta))", "dpo_losses"
)
_losses(
    "apo_zero_rejected_up",
    "preference:apo_zero_loss",
    "torch.sigmoid(beta * rejected)",
    "torch.sigmoid(-beta * rejected)",
    "dpo_losses",
)
_losses("apo_down_margin_sign", "preference:apo_down_loss", "(rejected - chosen)", "(chosen - rejected)", "dpo_losses")
_losses("discopop_modulation", "preference:discopop_loss", "torch.sigmoid(-logits / tau)", "torch.sigmoid(-logits)", "dpo_losses")
_losses(
    "length_normalisation_lost",
    "preference:Pairs.per_token",
    "chosen / self.chosen_lengths.clamp(min=1)",
    "chosen",
    "dpo_losses",
)
_losses("aot_reference_unsorted", "preference:aot_loss", "ref_margins.sort().values", "ref_margins.flip(0)", "dpo_aot")
_losses("aot_unpaired_order", "preference:aot_unpaired_loss", "rejected.sort()", "rejected.sort(descending=True)", "dpo_aot")
_losses("kl_direction", "divergence:divergence_scores", "box_cox(logratios, alpha=1.0)", "logratios", "dpo_lora")
_losses(
    "jensen_shannon_sign", "divergence:divergence_scores", "F.logsigmoid(logratios)", "-F.logsigmoid(-logratios)", "dpo_moving"
)
_losses(
    "alpha_divergence_not_rescaled",
    "divergence:box_cox",
    "(max=_LARGEST_EXPONENT)) / alpha",
    "(max=_LARGEST_EXPONENT))",
    "dpo_weighted",
)
_losses("simpo_margin_sign", "preference:simpo_loss", "margins - gamma", "margins + gamma", "simpo")
_losses("odds_are_probabilities", "reference_free:log_odds_margins", " - (_log1mexp(chosen) - _log1mexp(rejected))", "", "orpo")
_losses("odds_ratio_unweighted", "reference_free:orpo_loss", "-beta * F", "-F", "orpo")
_losses(
    "ld_cut_a_token_early", "sequences:ld_weights", "position > shared[segment]", "position >= shared[segment]", "dpo_weighted"
)
_losses("wpo_collision_sign", "sequences:wpo_weights", "logps - log_collisions", "logps + log_collisions", "dpo_weighted")
_losses(
    "wpo_weight_has_a_gradient",
    "sequences:wpo_weights",
    "(logps - log_collisions).detach()",
    "(logps - log_collisions)",
    "dpo_weighted",
)
_losses("sums_without_weights", "sequences:sequence_sums", "values.to(dtype) * weights", "values.to(dtype)", "dpo_weighted")

_losses(
    "kl_sign", "kto:kto_loss", "logratios - baseline, baseline - logratios", "logratios + baseline, -baseline - logratios", "kto"
)
_losses("kl_not_clamped", "kto:kl_baseline", ".clamp(min=0)", "", "kto")
_losses(
    "label_weights_swapped",
    "kto:_lambdas",
    "like.new_tensor(desirable_weight), like.new_tensor(undesirable_weight)",
    "like.new_tensor(undesirable_weight), like.new_tensor(desirable_weight)",
    "kto",
)
_losses(
    "apo_zero_has_a_baseline", "kto:apo_zero_unpaired_loss", "desirable,\n        0.0,", "desirable,\n        0.1,", "kto_apo"
)
_losses("margin_of_sums", "kto:unpaired_metrics", "(~desirable).float()", "torch.ones_like(rewards)", "kto")
_losses("shift_of_one_label", "bco:reward_shift", "means.sum() / counts", "means[0] / counts", "bco")
_losses("undesirable_rows_unweighted", "bco:bco_loss", "weights * F.logsigmoid(-rewards)", "F.logsigmoid(-rewards)", "bco")
_losses(
    "odds_inverted",
    "bco:distribution_weights",
    "desirable_probability / (1 - desirable_probability)",
    "(1 - desirable_probability) / desirable_probability",
    "bco",
)
_losses("margin_of_rewards_ignored", "reward:bradley_terry_loss", "rejected - margins", "rejected", "reward")
_losses("scores_centred_on_their_difference", "reward:centring_loss", "chosen + rejected", "chosen - rejected", "reward")
_losses(
    "step_labels_inverted",
    "reward:step_loss",
    "correct * logps[..., 1] + (1 - correct) * logps[..., 0]",
    "correct * logps[..., 0] + (1 - correct) * logps[..., 1]",
    "prm",
)


def _terms(name: str, target: str, old: str, new: str, killer: str) -> None:
    _bug("terms", name, f"methods.{target}", old, new, killer)


_terms("likelihood_unweighted", "cpo:CPO.terms", '"chosen", self.cpo_alpha', '"chosen"', "cpo")
_terms(
    "likelihood_of_the_rejected",
    "cpo:CPO.terms",
    "completions.weights_in(Role.CHOSEN)",
    "completions.weights_in(Role.REJECTED)",
    "cpo",
)
_terms("likelihood_without_prompts", "orpo:ORPO.terms", "completions.weights_in(Role.PROMPT) + ", "", "orpo")
_terms("gold_is_the_chosen", "tpo:TPO.terms", "completions.weights_in(Role.GOLD)", "completions.weights_in(Role.CHOSEN)", "tpo")
_terms(
    "step_labels_of_the_next_row",
    "prm:step_labels",
    'batch.extras["labels"].float()',
    'batch.extras["labels"].float().roll(1)',
    "prm",
)
_terms("shift_of_this_step", "bco:BCO.row_losses", 'if self.shift_scope == "micro_batch":', "if True:", "bco")


def _masks(name: str, target: str, old: str, new: str, killer: str) -> None:
    _bug("masks", name, target, old, new, killer)


_masks("label_shift_by_one", "data.batch:MicroBatch.predictors", "parent_last, index - 1)", "parent_last, index)", "sft")
_masks("completion_after_the_last_but_one", "data.batch:MicroBatch.predictors", "+ 1] - 1", "+ 1] - 2", "dpo")
_masks(
    "eos_of_texts_masked",
    "data.features:RowPreparer._tokens",
    "np.full(len(after), ends_trained[0], np.float32)",
    "np.zeros(len(after), np.float32)",
    "sft_packing",
)
_masks(
    "end_of_turn_masked",
    "data.targets:Targets._message",
    "(turn.start, turn.end, weight)",
    "(turn.start, turn.end - 10, weight)",
    "sft",
)
_masks(
    "message_weight_ignored",
    "data.targets:Targets._flagged",
    'return weight * float(message.get("weight", 1.0))',
    "return weight",
    "sft",
)
_masks("user_turns_trained", "data.targets:Targets._weight", 'else roles[i] == "assistant")', 'else roles[i] == "user")', "sft")
_masks(
    "system_prompt_trained",
    "data.targets:Targets._weight",
    'else roles[i] == "assistant")',
    'else roles[i] != "user")',
    "sft",
)
_masks("cut_a_token_short", "data.features:RowPreparer._finish", "s.cut(limit, keep_end)", "s.cut(limit - 1, keep_end)", "sft")
_masks("cut_at_the_wrong_end", "data.features:RowPreparer._finish", 'truncation == "keep_end"', 'truncation != "keep_end"', "sft")


def _collators(name: str, target: str, old: str, new: str, killer: str) -> None:
    _bug("collators", name, target, old, new, killer)


_collators(
    "pair_roles_swapped",
    "data.features:_pair",
    "(Role.CHOSEN, Role.REJECTED)",
    "(Role.REJECTED, Role.CHOSEN)",
    "dpo",
)
_collators("packs_attend_across_rows", "data.packing:pack", 'strategy == "wrapped")', "True)", "sft_packing")
_collators(
    "pieces_lose_their_last_token",
    "data.packing:_split",
    "np.minimum(starts + max_length, lengths[rows])",
    "np.minimum(starts + max_length - 1, lengths[rows])",
    "sft_packing",
)
_collators(
    "first_token_of_a_piece_counted",
    "data.packing:gather",
    "out_weights[segment_ends - segment_lengths] = 0.0",
    "pass",
    "sft_packing",
)
_collators("margins_lost", "data.drafts:Drafter._preference", 'float(row["margin"])', "0.0", "reward")

_collators("own_completion_for_the_baseline", "data.mismatched:Mismatch.batches", "[*order[-1:], *order[:-1]]", "order", "kto")
_collators(
    "baseline_of_a_micro_batch", "data.mismatched:Mismatch.companions", 'self.scope == "micro_batch"', "True", "kto/micro_batch_2"
)
_collators("unlabelled_steps_trained", "data.features:_mark_steps", "float(label != -100)", "1.0", "prm")


def _layouts(name: str, target: str, old: str, new: str, killer: str) -> None:
    _bug("layouts", name, f"models.{target}", old, new, killer)


_layouts(
    "pad_attended",
    "layouts:_padded",
    "input_ids[b, : len(chain)] = batch.tokens[chain]\n        mask[b, : len(chain)] = 1\n"
    "        index[chain] = torch.arange(len(chain), device=device) + b * length",
    "input_ids[b, length - len(chain) :] = batch.tokens[chain]\n        mask[b] = 1\n"
    "        index[chain] = torch.arange(length - len(chain), length, device=device) + b * length",
    "sft",
)
_layouts(
    "completions_start_at_position_0", "layouts:_row", "for s in forest.context(segment)", "for s in ()", "dpo/layout_shared"
)
_CONTEXTS = "[self.context(segment) for segment in range(len(self.lengths))]"
_layouts(
    "packed_rows_see_each_other",
    "attention:Forest.buckets",
    _CONTEXTS,
    "[list(range(s)) for s in range(len(self.lengths))]",
    "sft/layout_packed",
)
_layouts(
    "packed_rows_see_the_future",
    "attention:_compute",
    "causal = mask is None and query.shape[2] > 1",
    "causal = False",
    "sft/layout_packed",
)
_layouts(
    "completions_blind_to_their_prompt", "attention:Forest.buckets", _CONTEXTS, "[[] for _ in self.lengths]", "dpo/layout_shared"
)
_layouts(
    "score_of_the_last_but_one",
    "policy:Policy.forward",
    "batch.ends() if at is None else at",
    "batch.ends() - 1 if at is None else at",
    "reward",
)
_layouts("dropout_left_on", "policy:disable_dropout", "setattr(module, name, 0.0)", "pass", "sft")
_layouts("entropy_sign", "logps:_stats_and_probs", "-torch.mul(probs", "torch.mul(probs", "sft")
_layouts("mean_logit_of_probabilities", "logps:_stats_and_probs", "logits.mean(-1)", "logps.mean(-1)", "dpo")
_layouts(
    "head_forgets_its_gradient",
    "logps:_HeadStats.backward",
    "_add_product(grad_weight, slope, (h * factor)",
    "_add_product(grad_weight, slope, 0.5 * (h * factor)",
    "sft/chunked_head",
)


def _plan(name: str, target: str, old: str, new: str, killer: str) -> None:
    _bug("plan", name, f"data.plan:{target}", old, new, killer)


_plan("same_order_every_epoch", "epoch_order", "[seed, epoch]", "[seed, 0]", "sft")
_plan("seed_ignored", "epoch_order", "[seed, epoch]", "[0, epoch]", "sft")
_plan("short_step_dropped", "Planner.__init__", "full + bool(rest and not drop_last)", "full", "sft")
_plan("step_of_an_epoch_overlaps", "Planner.rows", "(step + 1) * self.batch_size]", "(step + 1) * self.batch_size + 1]", "sft")
_plan(
    "a_row_lost_in_dealing",
    "Planner.plan_rows",
    "[rows[i] for i in b] for b in bins",
    "[rows[i] for i in b[:3]] for b in bins",
    "sft",
)
_plan("ranks_get_the_same_rows", "to_ranks", "per_rank[rank].append(rows)", "per_rank[rank].append(group[0])", "sft/world_sizes")


def _normalisation(name: str, target: str, old: str, new: str, killer: str) -> None:
    _bug("normalisation", name, target, old, new, killer)


_normalisation(
    "all_tokens_counted",
    "data.plan:Planner.plan_rows",
    "tokens=float(sizes.weight[rows].sum())",
    "tokens=float(sizes.tokens[rows].sum())",
    "sft",
)
_normalisation("rows_of_a_full_step_counted", "data.plan:Planner.plan_rows", "float(len(rows))", "float(self.batch_size)", "dpo")
_normalisation("mean_of_means", "losses.reduce:reduce", 'if scope == "micro_batch":', "if True:", "sft/micro_batch_2")
_normalisation("mean_of_means_of_pairs", "losses.reduce:reduce", 'if scope == "micro_batch":', "if True:", "dpo/micro_batch_2")
_normalisation(
    "accumulation_counted_twice",
    "data.plan:Planner.__init__",
    "self.num_micro * world_size * extra_scale",
    "self.num_micro * self.num_micro * world_size * extra_scale",
    "sft/micro_batch_1",
)
_normalisation(
    "accumulation_not_undone", "data.plan:Planner.__init__", "self.num_micro * world_size", "world_size", "sft/micro_batch_1"
)
_normalisation("ranks_not_undone", "data.plan:Planner.__init__", "self.num_micro * world_size", "self.num_micro", "sft/ddp")
_normalisation(
    "chosen_tokens_counted_as_all",
    "losses.reduce:reduce",
    "getattr(norm, per)",
    'getattr(norm, "tokens" if per == "chosen" else per)',
    "dpo",
)
_normalisation("deepspeed_divides_twice", "strategies.info:backward_divisor", "float(num_micro) if", "1.0 if", "sft/deepspeed_1")


def _reference(name: str, target: str, old: str, new: str, killer: str) -> None:
    _bug("reference", name, target, old, new, killer)


_reference(
    "reference_is_the_policy",
    "models.reference:FrozenCopy.outputs",
    "self.policy(batch, want",
    "self.beside(batch, want",
    "dpo",
)
_reference(
    "adapter_reference_is_the_policy",
    "models.reference:AdapterView.outputs",
    ", use_adapter(self.beside.hf, self.name)",
    "",
    "dpo_lora",
)
_reference(
    "adapter_reference_is_the_base",
    "models.reference:at_start",
    "return AdapterView(policy, COPY)",
    "return AdapterView(policy, None)",
    "dpo_lora",
)
_reference(
    "reference_drifts",
    "methods.referenced:Referenced.optimizer_step",
    "if self.sync_ref_model and self._closing and step % self.ref_model_sync_steps == 0:",
    "if True:",
    "dpo",
)
_reference(
    "reference_mixes_the_wrong_way",
    "models.reference:Reference.move",
    "exact.dtype), share)",
    "exact.dtype), 1 - share)",
    "dpo_moving",
)
_reference(
    "reference_follows_every_step",
    "methods.referenced:Referenced.optimizer_step",
    "step % self.ref_model_sync_steps == 0",
    "True",
    "dpo_moving",
)
_reference(
    "reference_moves_before_the_step",
    "methods.referenced:Referenced.optimizer_step",
    "self.trainer.global_step + 1",
    "self.trainer.global_step",
    "dpo_moving",
)
_reference(
    "precomputed_rows_out_of_order", "methods.precompute:per_row", "zip(index,", "zip(index[::-1],", "dpo/precomputed_reference"
)
_reference(
    "precomputed_sides_swapped",
    "methods.precomputed:Precomputed.reference_sums",
    "= batch.extras[COLUMN]",
    "= batch.extras[COLUMN].view(-1, 2).flip(1).flatten()",
    "dpo/precomputed_reference",
)
_reference(
    "reference_reads_other_tokens",
    "methods.dpo:DPO.training_step",
    "self.reference_weights(batch)",
    "batch.weights[batch.outputs]",
    "dpo_weighted",
)
_reference("beta_of_the_reference_lost", "methods.dpo:DPO.terms", "(self.beta * ratio for ratio", "(ratio for ratio", "dpo")


def _optimiser(name: str, target: str, old: str, new: str, killer: str) -> None:
    _bug("optimiser", name, target, old, new, killer)


_optimiser("rate_1_percent_up", "methods.optim:adamw", "lr=lr,", "lr=1.01 * lr,", "sft")
_optimiser("weight_decay_lost", "methods.optim:adamw", "weight_decay=weight_decay,", "weight_decay=0.0,", "sft")
_optimiser("beta1_changed", "methods.optim:adamw", "betas=tuple(betas)", "betas=(0.9, betas[1])", "sft")
_optimiser("beta2_changed", "methods.optim:adamw", "betas=tuple(betas)", "betas=(betas[0], 0.999)", "sft")
_optimiser("epsilon_changed", "methods.optim:adamw", "eps=eps", "eps=1e-8", "sft")
_optimiser("norms_decay", "methods.optim:parameter_groups", '"params": vectors, "weight_decay": 0.0', '"params": vectors', "sft")
_optimiser(
    "norms_not_trained", "methods.optim:parameter_groups", 'if g["params"]]', 'if g["params"] and g["params"][0].ndim > 1]', "sft"
)
_optimiser(
    "clip_off",
    "run:build_trainer",
    'instantiate(node["trainer"], ',
    'instantiate({**node["trainer"], "gradient_clip_val": None}, ',
    "sft",
)
_optimiser(
    "clip_by_value",
    "run:build_trainer",
    'instantiate(node["trainer"], ',
    'instantiate({**node["trainer"], "gradient_clip_algorithm": "value"}, ',
    "sft",
)
_optimiser(
    "clip_of_every_parameter",
    "methods.checkpoint:total_norm",
    "get_total_norm(grads, norm_type)",
    "get_total_norm(grads[:1], norm_type)",
    "sft",
)
_optimiser(
    "norm_of_a_shard",
    "methods.checkpoint:total_norm",
    "[p.grad for p in",
    "[getattr(p.grad, '_local_tensor', p.grad) for p in",
    "sft/fsdp2",
)


def _schedule(name: str, target: str, old: str, new: str, killer: str) -> None:
    _bug("schedule", name, target, old, new, killer)


_schedule(
    "warm_up_lost",
    "methods.optim:schedule",
    "optimizer, warmup_steps, num_training_steps",
    "optimizer, 0, num_training_steps",
    "sft",
)
_schedule(
    "schedule_a_step_longer",
    "methods.optim:schedule",
    "optimizer, warmup_steps, num_training_steps",
    "optimizer, warmup_steps, num_training_steps + 1",
    "sft",
)
_schedule("schedule_by_epochs", "methods.base:Method.configure_optimizers", '"interval": "step"', '"interval": "epoch"', "sft")
_schedule(
    "schedule_counts_micro_batches",
    "methods.base:Method.configure_optimizers",
    "self.trainer.datamodule.total_steps)",
    "self.trainer.datamodule.total_steps * self.trainer.datamodule.num_micro)",
    "sft/micro_batch_1",
)


def _resume(name: str, target: str, old: str, new: str, killer: str) -> None:
    _bug("resume", name, target, old, new, killer)


_resume(
    "moments_lost",
    "methods.checkpoint:names_to_ids",
    '{ids[name]: value for name, value in state["state"].items()}',
    "{}",
    "sft/resumed_at_4",
)
_resume(
    "schedule_restarts",
    "methods.base:Method.on_load_checkpoint",
    "saved = checkpoint.get(KEY, {})",
    'saved = checkpoint.get(KEY, {}); checkpoint["lr_schedulers"] = []',
    "sft/resumed_at_4",
)
_resume(
    "epoch_starts_again",
    "data.loader:StepSampler.__iter__",
    "range(first, self.steps_per_epoch)",
    "range(self.steps_per_epoch)",
    "sft/resumed_at_7",
)
_resume("epoch_counted_from_0", "data.loader:StepSampler.__iter__", "yield epoch, step, k", "yield 0, step, k", "sft")
_resume(
    "position_a_micro_batch_late",
    "methods.base:Method.on_load_checkpoint",
    "data.num_micro)",
    "data.num_micro + 1)",
    "sft/resumed_at_1",
)
_resume("tokens_counted_anew", "methods.base:Method.on_load_checkpoint", 'saved.get("num_tokens", 0)', "0", "sft/resumed_at_4")
_resume(
    "moved_reference_not_saved",
    "methods.referenced:Referenced.on_save_checkpoint",
    "if self.reference_moves:",
    "if False:",
    "dpo_moving/resumed_at_7",
)

_resume(
    "rewards_seen_forgotten",
    "methods.bco:BCO.on_load_checkpoint",
    'checkpoint[KEY]["rewards"].clone()',
    "torch.zeros(4, dtype=torch.float64)",
    "bco/resumed_at_4",
)


def _processes(name: str, target: str, old: str, new: str, killer: str) -> None:
    _bug("processes", name, target, old, new, killer)


_processes("rank_0_everywhere", "strategies.info:data_parallel", 'kwargs["rank"])', "0)", "sft/ddp")
_processes(
    "baseline_of_one_rank",
    "strategies.info:sum_over_ranks",
    "torch.distributed.all_reduce(value, group=data_parallel_group(strategy))",
    "pass",
    "kto/ddp",
)
_processes("metrics_of_one_rank", "methods.metrics:_of_all_ranks", "return torch.stack(parts)", "return values[None]", "sft/ddp")
_processes(
    "stream_loses_its_start",
    "data.loader:StreamDataset.__iter__",
    "if step < self.skip:",
    "if step <= self.skip:",
    "sft/streaming",
)
_processes(
    "stream_loses_its_end", "data.loader:StreamDataset.windows", "if window and not self.drop_last:", "if False:", "sft/streaming"
)


def _metrics(name: str, target: str, old: str, new: str, killer: str) -> None:
    _bug("metrics", name, target, old, new, killer)


_metrics(
    "count_of_the_first_micro_batch",
    "methods.metrics:Meter._keep",
    "self._counts[name] + count",
    "self._counts[name]",
    "sft/micro_batch_1",
)
_metrics(
    "evaluation_enters_training",
    "methods.base:Method.validation_step",
    "self.evaluation_step(batch,",
    'self._meter.add("loss", 0.01, None); self.evaluation_step(batch,',
    "sft/evaluated",
)
_metrics(
    "accuracy_of_the_rejected",
    "methods.dpo:DPO.terms",
    "completions.hits(), completions.trained_in(Role.CHOSEN)",
    "completions.hits(), completions.trained_in(Role.REJECTED)",
    "dpo",
)

for _entry in BUGS:
    _bug(*_entry)
