"""Optimizer steps as callbacks see them; Lightning's hooks and counters are per micro-batch."""

from typing import Any

import lightning as L
import torch


def closes_step(trainer: "L.Trainer") -> bool:
    """In ``on_train_batch_end``: whether this micro-batch ended an optimizer step."""
    return not trainer.fit_loop._should_accumulate()


def is_last_step(trainer: "L.Trainer") -> bool:
    """In ``on_train_batch_end`` of a closed step: whether training ends with it."""
    loop = trainer.fit_loop
    if trainer.should_stop and loop._can_stop_early:
        return True
    if 0 <= loop.max_steps <= trainer.global_step:
        return True
    last_epoch = loop.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= loop.max_epochs
    return last_epoch and ends_epoch(trainer)


def ends_epoch(trainer: "L.Trainer") -> bool:
    """In ``on_train_batch_end``: whether this micro-batch is the epoch's last."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def validation_follows(trainer: "L.Trainer") -> bool:
    """In ``on_train_batch_end``: whether validation runs right after it."""
    loop = trainer.fit_loop
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def metrics(trainer: "L.Trainer") -> dict[str, float]:
    """The latest value of every metric by the name it is printed with: those of the last step and of the last validation."""
    logged = {name: value for name, value in trainer.callback_metrics.items() if name not in ("step", "epoch")}
    if own := getattr(trainer.lightning_module, "step_metrics", None):  # what it lacks, the last step has no value for
        logged = {name: value for name, value in logged.items() if not name.startswith("train/")} | own
    return {name: _number(value) for name, value in logged.items()}


def gather(value: Any, trainer: "L.Trainer") -> list[Any]:
    """``value`` of every process; also a barrier."""
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def _number(value: Any) -> float:
    return value.item() if isinstance(value, torch.Tensor) else float(value)
