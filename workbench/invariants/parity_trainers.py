"""What a case of one of TRL's trainers comes to in this project's terms. Imports no torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workbench.errors import UserError, check_at_least, check_choice, nearest
from workbench.invariants import parity_online, parity_rows
from workbench.invariants.parity_cases import Case
from workbench.invariants.parity_options import Options

_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
}
_ONLINE = ("distillation",)  # known, and nothing like a trainer below
_SCHEDULES = (  # those whose rates change with every step
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)


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
        rows: functions that turn the fixture's rows into the method's, one after the other.
        head: kind and outputs of the classification head, for a method that scores.
        matched_prompts: whether the weights of undesirable rows match the desirable ones' prompts.
        per_label: whether metrics of a label are means over all its rows of a step.
        online: whether the record's completions are replayed.
    """

    target: str
    method: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    optim: tuple[str, dict[str, Any]] = ("adamw", {})
    schedule: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    rows: list[parity_rows.Change] = field(default_factory=list)
    head: tuple[str, int] | None = None
    matched_prompts: bool = False
    per_label: bool = False
    online: bool = False


class Trainer(NamedTuple):
    """One of TRL's trainers: the method, what turns options into its arguments, and the defaults of the options it reads."""

    target: str
    read: Callable[[Options, Replay], None]
    defaults: dict[str, Any]


def replay(case: Case) -> Replay:
    """What to run for a case.

    Raises:
        UserError: in one line, an unknown kind or option, or one that is not replayed.
    """
    if case.kind not in TRAINERS:
        hint = "" if case.kind in _ONLINE else nearest(case.kind, TRAINERS)
        raise UserError(f"kind={case.kind!r} is not replayed.{hint} Allowed: {', '.join(TRAINERS)}.")
    trainer = TRAINERS[case.kind]
    options = Options(case.kind, trainer.defaults, case.options)
    made = Replay(trainer.target, method={"scope": "micro_batch", "layout": "padded"}, data=_batches(options))
    made.optim, made.schedule, made.trainer = _optim(options), _schedule(options), _trainer(options)
    made.model, made.matched_prompts = _model(options, case), "udm" in case.extras
    made.method["gradient_checkpointing"] = options["gradient_checkpointing"]
    trainer.read(options, made)
    return made


def option_of(case: Case, name: str) -> Any:
    """An option of a case, given or by default; None where its trainer has no such option."""
    return Options(case.kind, TRAINERS[case.kind].defaults, case.options).get(name)


# -- what all trainers share ----------------------------------------------------------------------------------------


def _batches(options: Options) -> dict[str, Any]:
    micro, accumulation = options["per_device_train_batch_size"], options["gradient_accumulation_steps"]
    check_at_least(1, per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation)
    check_at_least(0, **{name: options[name] for name in ("learning_rate", "max_grad_norm", "warmup_steps", "warmup_ratio")})
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
    check_choice("lr_scheduler_type", name, _SCHEDULES)
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
    if "eos_token" in options.defaults and options["eos_token"] is not None:
        fields["eos_token"] = options["eos_token"]
    return fields


def _shared(options: Options, made: Replay) -> None:
    """Options that several trainers have, each where it is one."""
    if "disable_dropout" in options.defaults:
        made.method["disable_dropout"] = options["disable_dropout"]
    if "truncation_mode" in options.defaults:
        check_choice("truncation_mode", options["truncation_mode"], ("keep_start", "keep_end"))
        made.data["truncation"] = options["truncation_mode"]
    if "sync_ref_model" in options.defaults and options["sync_ref_model"]:
        made.method["sync_ref_model"] = True
        made.method |= options.pick(ref_model_mixup_alpha="ref_model_mixup_alpha", ref_model_sync_steps="ref_model_sync_steps")
    if "precompute_ref_log_probs" in options.defaults and options["precompute_ref_log_probs"]:
        made.method["precompute_ref_logps"] = True
        if "precompute_ref_batch_size" in options.defaults:
            made.method["precompute_ref_micro_batch_size"] = options["precompute_ref_batch_size"]
    _padding(options, made)


def _padding(options: Options, made: Replay) -> None:
    """Rows padded to a multiple, or not padded at all; neither changes a number (beyond rounding, which a first step against
    values computed in other batches would show: policy and reference are no longer equal bit for bit)."""
    multiple = options["pad_to_multiple_of"] if "pad_to_multiple_of" in options.defaults else None
    if isinstance(multiple, str):
        multiple = int(multiple) if multiple.isdigit() else None  # auto
    if "padding_free" in options.defaults and options["padding_free"] and "precompute_ref_logps" not in made.method:
        made.method["layout"] = "packed"
    elif multiple:
        made.method["pad_to_multiple_of"] = int(multiple)


# -- one function per trainer ---------------------------------------------------------------------------------------


def _sft(options: Options, made: Replay) -> None:
    losses = {"nll": "nll", "chunked_nll": "nll", "dft": "dft"}
    check_choice("loss_type", options["loss_type"], losses)
    made.method["loss"] = losses[options["loss_type"]]
    if made.method["loss"] == "nll" and options["label_smoothing_factor"]:
        raise UserError(f"label_smoothing_factor={options['label_smoothing_factor']} of TRL's sft trainer is not replayed.")
    _shared(options, made)
    if options["packing"]:  # which cuts rows itself, whatever truncation_mode says
        made.data |= {"packing": options["packing_strategy"], "truncation": "keep_start"}
    if options["shuffle_dataset"] and options["packing"]:
        raise UserError("shuffle_dataset=True with packing=True is not replayed: TRL shuffles the packs too.")
    everything = options["completion_only_loss"] is False
    if options["assistant_only_loss"]:
        made.data["train_on"] = "assistant"
    elif everything:
        made.data["train_on"] = "all"
    made.rows.append(parity_rows.text_column(options["dataset_text_field"]))
    if everything and options["assistant_only_loss"]:
        made.rows.append(parity_rows.one_conversation)
    if options["shuffle_dataset"]:
        made.rows.append(parity_rows.shuffled(int(options.given.get("seed", 42))))


def _dpo(options: Options, made: Replay) -> None:
    weights = _weighted(options["loss_type"], options["loss_weights"])
    compares = set(weights) != {"sft"}  # which no option below has a say in
    made.method |= {"loss": list(weights), "loss_weights": list(weights.values()), "beta": options["beta"]}
    smoothed = [name for name in weights if name in ("exo_pair", "robust", "aot", "aot_unpaired")]
    if smoothed and options["label_smoothing"]:  # TRL's other losses do not read it
        made.method["label_smoothing"] = dict.fromkeys(smoothed, options["label_smoothing"])
    if options["f_divergence_type"] != "reverse_kl" and compares:
        made.method["divergence"] = options["f_divergence_type"]
        if options["f_divergence_type"] == "alpha_divergence":
            coefficient = options["f_alpha_divergence_coef"]  # the paper's alpha, ours, is 1 minus it
            made.method["divergence_alpha"] = 0.0 if abs(coefficient - 1.0) < 1e-6 else 1.0 - coefficient
    if "discopop" in weights:
        made.method["discopop_tau"] = options["discopop_tau"]
    if compares:
        made.method["ld_alpha"] = options["ld_alpha"]
    made.method["use_weighting"] = options["use_weighting"]
    _shared(options, made)


def _weighted(loss: str | Sequence[str], given: Sequence[float] | None) -> dict[str, float]:
    """Weight of each loss by name; TRL adds up one that is named twice."""
    names = [loss] if isinstance(loss, str) else list(loss)
    if given is not None and len(given) != len(names):
        raise UserError(f"loss_weights={given} must hold one value for each of loss_type={names}.")
    weights: dict[str, float] = {}
    for name, weight in zip(names, given or [1.0] * len(names), strict=True):
        weights[name] = weights.get(name, 0.0) + weight
    return weights


def _kto(options: Options, made: Replay) -> None:
    made.method |= options.pick(
        loss="loss_type", beta="beta", desirable_weight="desirable_weight", undesirable_weight="undesirable_weight"
    )
    if options["loss_type"] == "kto":
        made.method["kl_scope"] = "micro_batch"
    made.rows.append(parity_rows.unpaired)
    _shared(options, made)


def _reward(options: Options, made: Replay) -> None:
    made.method["center_rewards_coefficient"] = options["center_rewards_coefficient"]
    made.data["truncation"] = "drop"
    made.head = ("sequence", 1)
    _shared(options, made)


def _cpo(options: Options, made: Replay) -> None:
    loss, cpo_alpha = options["loss_type"], options["cpo_alpha"]
    if loss == "alphapo":  # simpo without a likelihood term
        loss, cpo_alpha = "alphapo" if options["alpha"] else "simpo", 0.0
    made.method |= {"loss": loss, "cpo_alpha": cpo_alpha, **options.pick(beta="beta", alpha="alpha")}
    if loss in ("sigmoid", "simpo", "alphapo"):
        made.method["label_smoothing"] = options["label_smoothing"]
    if loss in ("simpo", "alphapo"):
        made.method["simpo_gamma"] = options["simpo_gamma"]
    _rendered(options, made)


def _orpo(options: Options, made: Replay) -> None:
    made.method["beta"] = options["beta"]
    made.data["train_on"] = "all"  # the likelihood runs over the prompts as well
    _rendered(options, made)


def _rendered(options: Options, made: Replay) -> None:
    """CPO, ORPO and BCO tokenise rendered text, and put an end token behind the one that the template prints."""
    made.rows.append(parity_rows.rendered)
    if options["max_length"] is None:
        made.data["max_length"] = 512
    _shared(options, made)


def _tpo(options: Options, made: Replay) -> None:
    made.method |= options.pick(loss="loss_type", beta="beta", tpo_alpha="tpo_alpha")
    if options["loss_type"] in ("sigmoid", "tpo-l"):
        made.method["label_smoothing"] = options["label_smoothing"]
    if options["loss_type"] == "tpo-l":
        made.method["tpo_l_gamma"] = options["tpo_l_gamma"]
    made.rows.append(parity_rows.with_gold)
    _shared(options, made)


def _bco(options: Options, made: Replay) -> None:
    made.method |= {"beta": options["beta"], "shift_scope": "micro_batch"}
    made.per_label = True
    if made.matched_prompts:
        made.method |= {"use_udm": True} | options.pick(
            prompt_sample_size="prompt_sample_size", min_density_ratio="min_density_ratio", max_density_ratio="max_density_ratio"
        )
    made.rows.append(parity_rows.unpaired)
    _rendered(options, made)


def _prm(options: Options, made: Replay) -> None:
    if options["label_smoothing_factor"]:
        raise UserError(f"label_smoothing_factor={options['label_smoothing_factor']} of TRL's prm trainer is not replayed.")
    if options["max_completion_length"] is not None:
        raise UserError(
            f"max_completion_length={options['max_completion_length']} of TRL's prm trainer is not replayed: use null."
        )
    made.data["step_separator"] = options["step_separator"]
    if options["train_on_last_step_only"]:
        made.data["train_on"] = "last_step"
    made.head = ("token", 2)
    _shared(options, made)


_PAIRS: dict[str, Any] = {"disable_dropout": True, "beta": 0.1}
_MULTIPLE: dict[str, Any] = {"pad_to_multiple_of": None}
_CUT: dict[str, Any] = {"truncation_mode": "keep_start"}
_REFERENCE: dict[str, Any] = {
    "precompute_ref_log_probs": False,
    "precompute_ref_batch_size": None,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
}
_SFT: dict[str, Any] = {
    "learning_rate": 2e-5,
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
}
_DPO: dict[str, Any] = {
    "padding_free": False,
    "loss_type": ["sigmoid"],
    "loss_weights": None,
    "label_smoothing": 0.0,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "discopop_tau": 0.05,
    "ld_alpha": None,
    "use_weighting": False,
}
_KTO: dict[str, Any] = {"loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0}
_REWARD: dict[str, Any] = {
    "learning_rate": 1e-4,
    "disable_dropout": True,
    "center_rewards_coefficient": None,
    "eos_token": None,
}
_CPO: dict[str, Any] = {"loss_type": "sigmoid", "label_smoothing": 0.0, "cpo_alpha": 1.0, "simpo_gamma": 0.5, "alpha": 0.0}
_DECODER: dict[str, Any] = {"max_completion_length": None}  # read of encoder-decoders alone
_BCO: dict[str, Any] = {
    "learning_rate": 5e-7,
    "precompute_ref_log_probs": False,
    "prompt_sample_size": 1024,
    "min_density_ratio": 0.5,
    "max_density_ratio": 10.0,
}
_PRM: dict[str, Any] = {
    "learning_rate": 1e-5,
    "disable_dropout": True,
    "max_completion_length": None,
    "step_separator": "\n",
    "train_on_last_step_only": False,
    "label_smoothing_factor": 0.0,
}
_TPO: dict[str, Any] = {
    "learning_rate": 5e-7,
    "beta": 0.01,
    "loss_type": "sigmoid",
    "label_smoothing": 0.0,
    "tpo_alpha": 1.0,
    "tpo_l_gamma": 0.5,
}

TRAINERS: dict[str, Trainer] = {
    "sft": Trainer("workbench.methods.sft:SFT", _sft, {**_CUT, **_MULTIPLE, **_SFT}),
    "dpo": Trainer("workbench.methods.dpo:DPO", _dpo, {**_PAIRS, **_CUT, **_MULTIPLE, **_REFERENCE, **_DPO}),
    "kto": Trainer("workbench.methods.kto:KTO", _kto, {**_PAIRS, **_MULTIPLE, **_REFERENCE, **_KTO}),
    "reward": Trainer("workbench.methods.reward:Reward", _reward, {**_MULTIPLE, **_REWARD}),
    "cpo": Trainer("workbench.methods.cpo:CPO", _cpo, {**_PAIRS, **_DECODER, **_CPO}),
    "orpo": Trainer("workbench.methods.orpo:ORPO", _orpo, {**_PAIRS, **_DECODER}),
    "tpo": Trainer("workbench.methods.tpo:TPO", _tpo, {**_PAIRS, **_CUT, **_MULTIPLE, **_TPO}),
    "grpo": Trainer("workbench.methods.grpo:GRPO", parity_online.read_grpo, parity_online.GRPO),
    "rloo": Trainer("workbench.methods.rloo:RLOO", parity_online.read_rloo, parity_online.RLOO),
    # of TRL 1.13, the last one to have them
    "bco": Trainer("workbench.methods.bco:BCO", _bco, {**_PAIRS, **_DECODER, **_BCO}),
    "prm": Trainer("workbench.methods.prm:PRM", _prm, _PRM),
}
