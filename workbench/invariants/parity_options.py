"""TRL's options in this project's terms. Imports no torch, so that a mistake in a case shows at once.

Every option of a trainer is one of four: read by a function below, `INERT` (it changes no number here), `FIXED` (other values
than the listed ones are refused by name), or no option of that trainer.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import UserError, check_choice, nearest
from workbench.invariants.parity_cases import Case, Row

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
INERT = frozenset(
    """
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
    """.split()
)
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
}
_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
}
_REFERENCE: dict[str, Any] = {
    "precompute_ref_log_probs": False,
    "precompute_ref_batch_size": None,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
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
            raise UserError(f"{name}={value!r} is no option of TRL's {self.kind} trainer that is known here.{nearest(name, known)}")

    def _check_type(self, name: str, value: Any) -> None:
        default = self.defaults[name]
        if value is None and (default is None or name in _TYPES):
            return
        wanted = _TYPES.get(name, type(default))
        wanted = wanted if isinstance(wanted, tuple) else (list, str) if wanted is list else (wanted,)
        fits = isinstance(value, wanted) or (float in wanted and isinstance(value, int))
        fits = fits or (int in wanted and isinstance(value, float) and (value == int(value) or name == "warmup_steps"))
        if not fits or (isinstance(value, bool) and bool not in wanted):
            form = " or ".join(t.__name__ for t in wanted)
            raise UserError(f"{name}={value!r} of TRL's {self.kind} trainer must be of type {form}.")


@dataclass
class Replay:
    """A case in this project's terms.

    Args:
        target: the method, ``module:class``.
        method: its arguments, besides model, optimizer, schedule and adapter.
        data: arguments of the `DataModule`, besides its rows.
        model: fields of the `ModelSpec`, besides its name.
        optim: name of the optimizer and its arguments.
        schedule: arguments of `workbench.methods.optim.schedule`; ``warmup_steps`` below 1 is a share of all steps.
        trainer: arguments of the trainer.
        rows: turns the fixture's rows into the method's; the second argument reads other rows of the fixture by name.
    """

    target: str
    method: dict[str, Any]
    data: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    optim: tuple[str, dict[str, Any]] = ("adamw", {})
    schedule: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    rows: Callable[[list[Row], Callable[[str], list[Row]]], list[Row]] | None = None


@dataclass(frozen=True)
class Trainer:
    """One of TRL's trainers: the defaults of the options that are read, and what turns them into a method's."""

    target: str
    read: Callable[[Options, Replay], None]
    defaults: dict[str, Any]


def replay(case: Case) -> Replay:
    """What to run for a case.

    Raises:
        UserError: in one line, an unknown kind or option, or one that is not replayed.
    """
    check_choice("kind", case.kind, TRAINERS)
    trainer = TRAINERS[case.kind]
    options = Options(case.kind, trainer.defaults, case.options)
    made = Replay(trainer.target, method={"scope": "micro_batch"}, data=_batches(options))
    made.optim, made.schedule, made.trainer = _optim(options), _schedule(options), _trainer(options)
    made.model = _model(options, case)
    made.method["gradient_checkpointing"] = options["gradient_checkpointing"]
    trainer.read(options, made)
    return made


# -- what all trainers share ----------------------------------------------------------------------------------------


def _batches(options: Options) -> dict[str, Any]:
    micro, accumulation = options["per_device_train_batch_size"], options["gradient_accumulation_steps"]
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if options[name] < 1:
            raise UserError(f"{name}={options[name]} must be at least 1.")
    return {
        "batch_size": int(micro) * int(accumulation),
        "micro_batch_size": int(micro),
        "max_length": None if options["max_length"] is None else int(options["max_length"]),
        "balance": "none",
        "shuffle": False,
        "num_workers": options["dataloader_num_workers"],
        "num_proc": options["dataset_num_proc"],
    }


def _optim(options: Options) -> tuple[str, dict[str, Any]]:
    check_choice("optim", options["optim"], _OPTIMIZERS)
    name = _OPTIMIZERS[options["optim"]]
    arguments = options.pick(lr="learning_rate", weight_decay="weight_decay")
    if name == "adamw":
        arguments |= {"betas": (options["adam_beta1"], options["adam_beta2"]), "eps": options["adam_epsilon"]}
    return name, arguments


def _schedule(options: Options) -> dict[str, Any]:
    name, warmup = options["lr_scheduler_type"], options["warmup_steps"]
    if name == "reduce_lr_on_plateau":
        raise UserError("lr_scheduler_type=reduce_lr_on_plateau is not replayed: rates change with every step here.")
    if not warmup and options["warmup_ratio"]:
        warmup = options["warmup_ratio"]
    # TRL's constant schedule has no warm-up, whatever warmup_steps says.
    return {"name": name, "warmup_steps": 0 if name == "constant" else warmup, "options": options["lr_scheduler_kwargs"] or None}


def warmup_steps(asked: float, total: int) -> int:
    """Steps of warm-up: a number, or below 1 a share of all steps, rounded up."""
    return int(asked) if asked >= 1 else math.ceil(asked * total)


def _trainer(options: Options) -> dict[str, Any]:
    clip = {"gradient_clip_val": options["max_grad_norm"] or None}
    if options["max_steps"] > 0:
        return {"max_steps": int(options["max_steps"]), **clip}
    epochs = options["num_train_epochs"]
    if epochs != int(epochs) or epochs < 1:
        raise UserError(f"num_train_epochs={epochs} is not replayed: give whole epochs, or max_steps.")
    return {"max_epochs": int(epochs), "max_steps": -1, **clip}


def _model(options: Options, case: Case) -> dict[str, Any]:
    given = dict(options["model_init_kwargs"] or {})
    fields = {}
    attention = case.extras.get("attn_implementation", given.pop("attn_implementation", None))
    if attention is not None:
        fields["attn_implementation"] = attention
    if given.pop("dtype", "float32") not in ("float32", "auto") or given:
        raise UserError(f"model_init_kwargs={options['model_init_kwargs']} is not replayed; allowed: attn_implementation.")
    return fields


def _truncation(options: Options, made: Replay) -> None:
    check_choice("truncation_mode", options["truncation_mode"], ("keep_start", "keep_end"))
    made.data["truncation"] = options["truncation_mode"]


def _padding(options: Options, made: Replay) -> None:
    """Padded to a multiple, or not at all; neither changes a number."""
    multiple = options["pad_to_multiple_of"]
    if isinstance(multiple, str):
        multiple = int(multiple) if multiple.isdigit() else None  # auto
    if "padding_free" in options.defaults and options["padding_free"]:
        made.method["layout"] = "packed"
    elif multiple:
        made.method["pad_to_multiple_of"] = int(multiple)


def _reference(options: Options, made: Replay) -> None:
    if options["precompute_ref_log_probs"]:
        made.method["precompute_ref_logps"] = True
        made.method["precompute_ref_micro_batch_size"] = options["precompute_ref_batch_size"]
    if options["sync_ref_model"]:
        made.method["sync_ref_model"] = True
        made.method |= options.pick(ref_model_mixup_alpha="ref_model_mixup_alpha", ref_model_sync_steps="ref_model_sync_steps")


def _pick(options: Options, made: Replay, **names: str) -> None:
    made.method |= options.pick(**names)


# -- one function per trainer ---------------------------------------------------------------------------------------


def _sft(options: Options, made: Replay) -> None:
    losses = {"nll": "nll", "chunked_nll": "nll", "dft": "dft"}
    check_choice("loss_type", options["loss_type"], losses)
    made.method["loss"] = losses[options["loss_type"]]
    if made.method["loss"] == "nll" and options["label_smoothing_factor"]:
        raise UserError(f"label_smoothing_factor={options['label_smoothing_factor']} of TRL's sft trainer is not replayed.")
    if options["packing"]:
        made.data["packing"] = options["packing_strategy"]  # which cuts rows itself, whatever truncation_mode says
    else:
        _truncation(options, made)
    _padding(options, made)
    if options["eos_token"] is not None:
        made.model["eos_token"] = options["eos_token"]
    if options["shuffle_dataset"] and options["packing"]:
        raise UserError("shuffle_dataset=True with packing=True is not replayed: TRL shuffles the packs too.")
    if options["assistant_only_loss"]:
        made.data["train_on"] = "assistant"
    elif options["completion_only_loss"] is False:
        made.data["train_on"] = "all"
    made.rows = lambda rows, _: _sft_rows(options, rows)


def _sft_rows(options: Options, rows: list[Row]) -> list[Row]:
    text, prompted = options["dataset_text_field"], "completion" in rows[0]
    if text != "text" and text in rows[0]:
        rows = [{"text": row[text]} for row in rows]
    if options["completion_only_loss"] is False and options["assistant_only_loss"] and prompted:
        rows = [{"messages": row["prompt"] + row["completion"]} for row in rows]  # turns of the prompt are trained, too
    if options["shuffle_dataset"]:
        from datasets import Dataset

        order = Dataset.from_list([{"i": i} for i in range(len(rows))]).shuffle(seed=options.given.get("seed", 42))["i"]
        rows = [rows[i] for i in order]
    return rows


def _dpo(options: Options, made: Replay) -> None:
    names = [options["loss_type"]] if isinstance(options["loss_type"], str) else list(options["loss_type"])
    given = options["loss_weights"]
    if given is not None and len(given) != len(names):
        raise UserError(f"loss_weights={given} must hold one value for each of loss_type={names}.")
    weights: dict[str, float] = {}
    for name, weight in zip(names, given or [1.0] * len(names), strict=True):
        weights[name] = weights.get(name, 0.0) + weight  # TRL adds up a loss that is named twice
    made.method |= {"loss": list(weights), "loss_weights": list(weights.values()), "beta": options["beta"]}
    smoothed = [name for name in weights if name in ("exo_pair", "robust", "aot", "aot_unpaired")]
    if smoothed and options["label_smoothing"]:  # TRL's other losses do not read it
        made.method["label_smoothing"] = dict.fromkeys(smoothed, options["label_smoothing"])
    if options["f_divergence_type"] != "reverse_kl" and set(weights) != {"sft"}:
        made.method["divergence"] = options["f_divergence_type"]
        if options["f_divergence_type"] == "alpha_divergence":  # of order 1 - alpha in our terms, the paper's
            made.method["divergence_alpha"] = _alpha(options["f_alpha_divergence_coef"])
    if "discopop" in weights:
        made.method["discopop_tau"] = options["discopop_tau"]
    if set(weights) != {"sft"}:
        made.method["ld_alpha"] = options["ld_alpha"]
    made.method["use_weighting"] = options["use_weighting"]
    made.method["disable_dropout"] = options["disable_dropout"]
    _truncation(options, made)
    _padding(options, made)
    _reference(options, made)


def _alpha(coefficient: float) -> float:
    return 0.0 if abs(coefficient - 1.0) < 1e-6 else 1.0 - coefficient


_PREFERENCE: dict[str, Any] = {
    "disable_dropout": True,
    "truncation_mode": "keep_start",
    "pad_to_multiple_of": None,
    "beta": 0.1,
}

TRAINERS: dict[str, Trainer] = {
    "sft": Trainer(
        "workbench.methods.sft:SFT",
        _sft,
        {
            "learning_rate": 2e-5,
            "truncation_mode": "keep_start",
            "pad_to_multiple_of": None,
            "packing": False,
            "packing_strategy": "bfd",
            "padding_free": False,
            "completion_only_loss": None,
            "assistant_only_loss": False,
            "loss_type": "nll",
            "label_smoothing_factor": 0.0,
            "eos_token": None,
            "dataset_text_field": "text",
            "shuffle_dataset": False,
        },
    ),
    "dpo": Trainer(
        "workbench.methods.dpo:DPO",
        _dpo,
        {
            **_PREFERENCE,
            **_REFERENCE,
            "padding_free": False,
            "loss_type": ["sigmoid"],
            "loss_weights": None,
            "label_smoothing": 0.0,
            "f_divergence_type": "reverse_kl",
            "f_alpha_divergence_coef": 0.5,
            "discopop_tau": 0.05,
            "ld_alpha": None,
            "use_weighting": False,
        },
    ),
}
