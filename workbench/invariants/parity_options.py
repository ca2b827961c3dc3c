"""The options of TRL's trainers: which ones are read, which change no number, and which are refused.

Every option that a case gives is one of four: read by `parity_trainers` (of every trainer, `TRAINING`, or of this one), `INERT`,
`FIXED` (other values than the listed ones are refused by name), or no option of that trainer, which is refused too.
"""

from collections.abc import Mapping
from typing import Any

from workbench.errors import UserError, nearest

# Read for every trainer, with the defaults of TRL's configurations.
TRAINING: dict[str, Any] = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "warmup_ratio": None,
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_steps": -1,
    "num_train_epochs": 3.0,
    "max_length": 1024,
    "gradient_checkpointing": True,
    "dataset_num_proc": None,
    "dataloader_num_workers": 0,
    "model_init_kwargs": None,
}
# Change no number: where logs and checkpoints go, how the work is done, what belongs to evaluation or other devices, and what
# these trainers do not read (the factor of label smoothing, where their loss is their own).
_INERT = """
    output_dir run_name project report_to disable_tqdm log_level log_level_replica log_on_each_node logging_dir logging_strategy
    logging_steps logging_first_step logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second
    trackio_space_id trackio_bucket_id trackio_static_space_id skip_memory_metrics debug
    save_strategy save_steps save_total_limit save_only_model save_on_each_node save_safetensors enable_jit_checkpoint
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    restore_callback_states_from_checkpoint overwrite_output_dir
    do_train do_eval do_predict eval_strategy eval_steps eval_delay eval_on_start per_device_eval_batch_size prediction_loss_only
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
    load_best_model_at_end metric_for_best_model greater_is_better label_names bf16_full_eval fp16_full_eval eval_packing
    generate_during_eval
    seed data_seed full_determinism use_cpu no_cuda use_mps_device local_rank
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
    dataloader_in_order remove_unused_columns length_column_name torch_empty_cache_steps use_cache ignore_data_skip
    average_tokens_across_devices torch_compile torch_compile_backend torch_compile_mode
    gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs activation_offloading
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
    trust_remote_code router_aux_loss_coef pad_token padding_value label_smoothing_factor
"""
INERT = frozenset(_INERT.split())
# Would change numbers, and are not replayed: the values that leave them as they are.
FIXED: dict[str, tuple[Any, ...]] = {
    "bf16": (False, None),
    "fp16": (False, None),
    "tf32": (False, None),
    "train_sampling_strategy": ("sequential",),
    "group_by_length": (False,),
    "dataloader_drop_last": (False,),
    "neftune_noise_alpha": (None,),
    "use_liger_kernel": (False,),
    "liger_kernel_config": (None,),
    "optim_args": (None,),
    "optim_target_modules": (None,),
    "auto_find_batch_size": (False,),
    "accelerator_config": (None,),
    "parallelism_config": (None,),
    "deepspeed": (None,),
    "fsdp": (None, "", False, []),
    "fsdp_config": (None, {}),
    "resume_from_checkpoint": (None, False),
    "is_encoder_decoder": (None, False),
    "chat_template_path": (None,),
    "dataset_kwargs": (None, {}),
}
# Types of the options whose default says none; all of them may be null.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "lr_scheduler_kwargs": dict,
    "warmup_ratio": float,
    "max_length": int,
    "dataset_num_proc": int,
    "model_init_kwargs": dict,
    "pad_to_multiple_of": (int, str),
    "completion_only_loss": bool,
    "eos_token": str,
    "precompute_ref_batch_size": int,
    "loss_weights": list,
    "ld_alpha": float,
    "center_rewards_coefficient": float,
    "max_completion_length": int,
    "epsilon_high": float,
    "delta": float,
    "min_p": float,
    "steps_per_generation": int,
    "generation_batch_size": int,
    "reward_weights": list,
    "reward_clip_range": list,
    "off_policy_mask_threshold": float,
}


_FORMS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


class Options:
    """The options of one run, given or by default; notes which ones are read."""

    def __init__(self, kind: str, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self.kind = kind
        self.defaults = {**TRAINING, **defaults}
        self.given = given
        for name, value in given.items():
            self._check(name, value)

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, self.defaults[name])

    def get(self, name: str) -> Any:
        """The value of an option, or None where there is no such option."""
        return self.given.get(name, self.defaults.get(name))

    def pick(self, **names: str) -> dict[str, Any]:
        """``{ours: value of theirs}``."""
        return {ours: self[theirs] for ours, theirs in names.items()}

    def _check(self, name: str, value: Any) -> None:
        if name in self.defaults:
            self._check_type(name, value)
        elif name in FIXED:
            if value not in FIXED[name]:
                listed = ", ".join(repr(v) for v in FIXED[name])
                raise UserError(f"{name}={value!r} of TRL's {self.kind} trainer is not replayed; allowed: {listed}.")
        elif name not in INERT:
            known = [*self.defaults, *FIXED, *INERT]
            raise UserError(
                f"{name}={value!r} is no option of TRL's {self.kind} trainer that is known here.{nearest(name, known)}"
            )

    def _check_type(self, name: str, value: Any) -> None:
        default = self.defaults[name]
        if value is None and (default is None or name in _TYPES):
            return
        wanted = _TYPES.get(name, type(default))
        wanted = wanted if isinstance(wanted, tuple) else (list, str) if wanted is list else (wanted,)
        fits = isinstance(value, wanted) or (float in wanted and isinstance(value, int))
        fits = fits or (int in wanted and isinstance(value, float) and (value == int(value) or name == "warmup_steps"))
        if not fits or (isinstance(value, bool) and bool not in wanted):
            form = " or ".join(_FORMS[kind] for kind in wanted)
            raise UserError(f"{name}={value!r} of TRL's {self.kind} trainer must be {form}.")
