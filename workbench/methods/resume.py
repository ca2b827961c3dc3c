"""Resuming by optimizer step, whatever the number of micro-batches or processes was when the checkpoint was written."""

from typing import Any

KEY = "workbench"


def rewrite_position(checkpoint: dict[str, Any], steps_per_epoch: int | None, num_micro: int) -> None:
    """Sets Lightning's loop counters as if the checkpoint had been saved right after its last optimizer step by a run
    with ``num_micro`` micro-batches per step.

    Lightning counts micro-batches, and what it saves differs with the hook that saved (within a step, after a validation, at an
    epoch's end). The number of optimizer steps alone says where the data continues.

    Args:
        checkpoint: a Lightning checkpoint, changed in place.
        steps_per_epoch: optimizer steps in an epoch; None for an endless stream, which has one epoch.
        num_micro: micro-batches per step now.
    """
    step = checkpoint["global_step"]
    if step == 0:
        return
    epoch = 0 if steps_per_epoch is None else (step - 1) // steps_per_epoch
    in_epoch = step - epoch * (steps_per_epoch or 0)
    loop = checkpoint["loops"]["fit_loop"]

    batches = loop["epoch_loop.batch_progress"]
    batches["is_last_batch"] = in_epoch == steps_per_epoch
    _set(batches["current"], in_epoch * num_micro, completed=in_epoch * num_micro - 1)
    _set(batches["total"], step * num_micro, completed=step * num_micro - 1)
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1

    for progress in (loop["epoch_progress"]["current"], loop["epoch_progress"]["total"]):
        progress.update(ready=epoch + 1, started=epoch + 1, processed=epoch, completed=epoch)


def _set(progress: dict[str, int], position: int, *, completed: int) -> None:
    progress.update(ready=position, started=position, processed=position, completed=completed)
