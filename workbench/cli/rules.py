"""Combinations of options that cannot work, each with the way out. Only what the configuration alone can tell is here."""

import os
import pathlib
from collections.abc import Callable

from workbench.errors import UserError

Rule = Callable[[dict], str | None]
_RULES: list[tuple[tuple[str, ...], Rule]] = []


def rule(*commands: str) -> Callable[[Rule], Rule]:
    """Registers a function that returns what is wrong with a plain configuration, or None."""

    def register(function: Rule) -> Rule:
        _RULES.append((commands, function))
        return function

    return register


def check(cfg: dict, command: str) -> None:
    """Raises `UserError` for the first combination in ``cfg`` that cannot work."""
    for commands, function in _RULES:
        if command in commands and (problem := function(cfg)):
            raise UserError(problem)


def _get(cfg: dict, path: str) -> object:
    node: object = cfg
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _evaluates(cfg: dict) -> bool:
    return _get(cfg, "data.eval") is not None or bool(_get(cfg, "data.eval_size"))


TRAINING = ("train", "inspect", "evaluate")


@rule(*TRAINING, "generate")
def _quantized_without_adapter(cfg: dict) -> str | None:
    if "peft" not in cfg or _get(cfg, "model.quantization") is None or cfg["peft"] is not None:
        return None
    return "model.quantization freezes the weights, so that nothing would be trained: choose peft=lora (or peft=qlora)."


# Smallest and largest values of what other packages take unchecked, or refuse late.
_BOUNDS: dict[str, tuple[float, float | None]] = {
    "seed": (0, 2**32 - 1),
    "trainer.max_epochs": (-1, None),
    "trainer.max_steps": (-1, None),
    "trainer.min_epochs": (0, None),
    "trainer.min_steps": (0, None),
    "trainer.num_nodes": (1, None),
    "trainer.gradient_clip_val": (0, None),
    "trainer.check_val_every_n_epoch": (1, None),
    "trainer.log_every_n_steps": (0, None),
    "trainer.num_sanity_val_steps": (-1, None),
}
_FEW = 8  # processes that any machine may be asked for, to try things out


@rule(*TRAINING)
def _bounds(cfg: dict) -> str | None:
    for path, (low, high) in _BOUNDS.items():
        value = _get(cfg, path)
        if value is not None and not (low <= value and (high is None or value <= high)):
            return f"{path}={value} must be at least {low}." if high is None else f"{path}={value} must lie in {low} to {high}."
    if _get(cfg, "trainer.val_check_interval") == 0:
        return "trainer.val_check_interval=0 would never evaluate: use a number of steps, a share of an epoch, or null."
    return None


@rule(*TRAINING)
def _least_above_most(cfg: dict) -> str | None:
    for unit in ("steps", "epochs"):
        least, most = _get(cfg, f"trainer.min_{unit}"), _get(cfg, f"trainer.max_{unit}")
        if least is not None and most is not None and 0 <= most < least:
            return f"trainer.min_{unit}={least} is above trainer.max_{unit}={most}: set it to {most} at most, or null."
    return None


@rule(*TRAINING)
def _more_processes_than_cores(cfg: dict) -> str | None:
    devices, cores = _get(cfg, "trainer.devices"), os.cpu_count() or 1
    most = max(_FEW, cores)
    if _get(cfg, "trainer.accelerator") != "cpu" or not isinstance(devices, int) or devices <= most:
        return None
    return f"trainer.devices={devices} starts as many processes, and this machine has {cores} cores: use {most} at most."


@rule(*TRAINING)
def _half_precision_on_cpu(cfg: dict) -> str | None:
    if _get(cfg, "trainer.accelerator") == "cpu" and _get(cfg, "trainer.precision") in ("16-mixed", "16"):
        return "trainer.precision=16-mixed needs a GPU; on a CPU use trainer.precision=bf16-mixed or 32-true."
    return None


@rule("train")
def _barebones(cfg: dict) -> str | None:
    if not _get(cfg, "trainer.barebones"):
        return None
    extra = [f"{g}.{name}=null" for g in ("callbacks", "logger") for name, node in (cfg.get(g) or {}).items() if node is not None]
    extra += ["trainer.log_every_n_steps=null"] if _get(cfg, "trainer.log_every_n_steps") is not None else []
    return f"trainer.barebones=true goes without callbacks and logs: add {' '.join(extra)}." if extra else None


@rule("train")
def _name_is_a_folder(cfg: dict) -> str | None:
    name = cfg["name"]
    if name is None or (name and not pathlib.PurePath(name).is_absolute() and ".." not in pathlib.PurePath(name).parts):
        return None
    return f"name={name!r} is a folder below paths.root: give a word; another place is paths.root=... or paths.run_dir=..."


@rule(*TRAINING)
def _micro_batch_larger_than_batch(cfg: dict) -> str | None:
    batch, micro = _get(cfg, "data.batch_size"), _get(cfg, "data.micro_batch_size")
    if batch is None or micro is None or micro <= batch:
        return None
    return (
        f"data.micro_batch_size={micro} is larger than data.batch_size={batch}, the rows of a whole optimizer step: "
        f"set data.batch_size={micro} or a smaller micro-batch."
    )


@rule(*TRAINING)
def _two_warmups(cfg: dict) -> str | None:
    if _get(cfg, "scheduler.warmup_steps") and _get(cfg, "scheduler.warmup_ratio"):
        return "scheduler.warmup_steps and scheduler.warmup_ratio exclude each other: set one of them to 0."
    return None


@rule(*TRAINING)
def _warmup_ratio_is_a_share(cfg: dict) -> str | None:
    ratio = _get(cfg, "scheduler.warmup_ratio")
    if ratio is None or 0 <= ratio <= 1:
        return None
    return f"scheduler.warmup_ratio={ratio:g} must lie between 0 and 1; a number of steps is scheduler.warmup_steps."


@rule(*TRAINING)
def _stream_without_end(cfg: dict) -> str | None:
    if _get(cfg, "data.streaming") and (_get(cfg, "trainer.max_steps") or -1) < 0:
        return "data.streaming=true has no known length: set trainer.max_steps to the number of optimizer steps."
    return None


@rule(*TRAINING)
def _packing(cfg: dict) -> str | None:
    packing = _get(cfg, "data.packing")
    if packing is None:
        return None
    if _get(cfg, "data.max_length") is None:
        return f"data.packing={packing} fills packs of data.max_length tokens: set data.max_length."
    truncation = _get(cfg, "data.truncation")
    if packing in ("bfd_split", "wrapped") and truncation not in (None, "keep_start"):
        return f"data.truncation={truncation} has no effect with data.packing={packing}, which cuts nothing off: leave it out."
    return None


@rule(*TRAINING)
def _eval_packing_alone(cfg: dict) -> str | None:
    if _get(cfg, "data.eval_packing") and _get(cfg, "data.packing") is None:
        return "data.eval_packing=true has no effect without data.packing: set data.packing, which says how."
    return None


@rule("train")
def _endless_training(cfg: dict) -> str | None:
    bounds = [_get(cfg, f"trainer.{key}") for key in ("max_epochs", "max_steps")]
    if any(isinstance(b, int) and b >= 0 for b in bounds) or _get(cfg, "trainer.max_time") is not None:
        return None
    return "training would never end: set trainer.max_epochs, trainer.max_steps or trainer.max_time."


@rule("train")
def _saving_options_without_effect(cfg: dict) -> str | None:
    if cfg["merge_adapter"] and cfg.get("peft") is None:
        return "merge_adapter=true has no effect without an adapter: choose peft=lora, or leave it out."
    for key in ("merge_adapter", "push_to_hub"):
        if cfg[key] and not cfg["save_model"]:
            return f"{key}={cfg[key]} has no effect with save_model=false: set save_model=true."
    if cfg["hub_private"] is not None and not cfg["push_to_hub"]:
        return "hub_private has no effect without push_to_hub: name a repository, or leave it out."
    return None


@rule("train")
def _monitor_without_evaluation(cfg: dict) -> str | None:
    if _evaluates(cfg):
        return None
    for name, node in (cfg.get("callbacks") or {}).items():
        monitor = node.get("monitor") if isinstance(node, dict) else None
        if isinstance(monitor, str) and monitor.startswith("val/"):
            return f"callbacks.{name}.monitor={monitor} is never measured without evaluation data: set data.eval."
    return None


@rule(*TRAINING)
def _exact_match_without_evaluation(cfg: dict) -> str | None:
    if cfg["exact_match"] and not _evaluates(cfg):
        return f"exact_match={cfg['exact_match']} needs evaluation data: set data.eval, or exact_match=0."
    if cfg["exact_match"] < 0:
        return f"exact_match={cfg['exact_match']} must be a number of rows, or 0."
    return None


@rule(*TRAINING)
def _deepspeed_on_cpu(cfg: dict) -> str | None:
    strategy = cfg["strategy"]
    name = strategy if isinstance(strategy, str) else strategy.get("_target_", "")
    if "deepspeed" in name.lower() and _get(cfg, "trainer.accelerator") == "cpu":
        return "strategy=deepspeed_* needs CUDA: use strategy=fsdp2 or strategy=ddp with trainer=cpu."
    return None


@rule(*TRAINING)
def _bad_layout_for_padding(cfg: dict) -> str | None:
    if _get(cfg, "method.layout") == "packed" and _get(cfg, "method.pad_to_multiple_of") is not None:
        return "method.pad_to_multiple_of has no effect with method.layout=packed, which pads nothing: set it to null."
    return None


@rule("generate")
def _sampling_options_at_zero_temperature(cfg: dict) -> str | None:
    if cfg["temperature"] < 0:
        return f"temperature={cfg['temperature']:g} must be 0 or more."
    if cfg["temperature"] > 0:
        return None
    for key, off in (("top_p", 1.0), ("top_k", 0), ("num_samples", 1)):
        if cfg[key] != off:
            return f"{key}={cfg[key]} has no effect at temperature=0: set temperature above 0."
    return None
