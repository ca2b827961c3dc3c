"""The trainer's counts of batches, as counts of optimizer steps.

Lightning counts micro-batches and takes shares of them, so that a share can end within a step. Here every count and every
share is of optimizer steps.
"""

from typing import Any

from workbench.errors import UserError


def limited(trainer: Any, steps: int | None) -> int | None:
    """Steps per epoch under ``limit_train_batches``; ``steps`` of the whole epoch, None for a stream (and then maybe None).

    Raises:
        UserError: the share is less than a step.
    """
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        limit //= getattr(trainer, "_batches_per_step", 1)
        return limit if steps is None else min(steps, limit)
    if steps is None:
        if limit < 1.0:
            raise UserError(f"trainer.limit_train_batches={limit:g}: a stream has no length to take a share of; give a number.")
        return None
    if int(steps * limit) < 1:
        raise UserError(f"trainer.limit_train_batches={limit:g} is less than one of an epoch's {steps} optimizer steps.")
    return int(steps * limit)


def accumulate(trainer: Any, num_micro: int, steps_per_epoch: int | None) -> None:
    """Tells Lightning to step after every ``num_micro`` micro-batches, and turns counts and shares of steps into its own.

    Args:
        trainer: changed in place; doing it again changes nothing.
        num_micro: micro-batches per step.
        steps_per_epoch: optimizer steps of an epoch, None for an endless one.

    Raises:
        UserError: ``accumulate_grad_batches`` is set to something else, or an interval cannot be met.
    """
    before = getattr(trainer, "_batches_per_step", 1)
    if trainer.accumulate_grad_batches not in (1, before, num_micro):
        raise UserError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} is derived here (data.batch_size over "
            f"data.micro_batch_size and processes gives {num_micro}); leave it out and set data.micro_batch_size."
        )
    if getattr(trainer, "overfit_batches", 0):
        raise UserError(
            f"trainer.overfit_batches={trainer.overfit_batches} replaces the order of the rows; use trainer.limit_train_batches "
            "with data.shuffle=false instead."
        )
    every = evaluation_interval(trainer, steps_per_epoch)
    trainer.accumulate_grad_batches = num_micro
    if isinstance(trainer.limit_train_batches, int):
        trainer.limit_train_batches = trainer.limit_train_batches // before * num_micro
    elif trainer.limit_train_batches < 1.0:
        trainer.limit_train_batches = steps_per_epoch * num_micro
    if every is not None:
        trainer.val_check_interval = every * num_micro
    trainer._batches_per_step = num_micro


def refuse_batch_size_search(trainer: Any) -> None:
    """Raises `UserError` where Lightning would try batch sizes: the rows of an optimizer step are part of what is trained."""
    from lightning.pytorch.callbacks import BatchSizeFinder

    if any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):
        raise UserError(
            "BatchSizeFinder changes data.batch_size, the rows of an optimizer step, and with it the run; lower "
            "data.micro_batch_size (or set data.micro_batch_tokens) until a step fits, which changes no number."
        )


def evaluation_interval(trainer: Any, steps_per_epoch: int | None) -> int | None:
    """Optimizer steps between evaluations within an epoch, or None where one follows each epoch.

    Raises:
        UserError: the interval is longer than the epoch, a share of a stream, or a time.
    """
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise UserError("trainer.val_check_interval is a time, which may end within an optimizer step; give a number of steps.")
    interval = trainer.val_check_interval
    if interval is None or (interval == 1.0 and not isinstance(interval, int)):
        return None
    if not isinstance(interval, int):
        if steps_per_epoch is None:
            raise UserError(f"trainer.val_check_interval={interval:g}: a stream has no length to take a share of; give a number.")
        return max(1, int(steps_per_epoch * interval))
    interval //= getattr(trainer, "_batches_per_step", 1)
    within_epochs = getattr(trainer, "check_val_every_n_epoch", 1) is not None and steps_per_epoch
    if within_epochs and interval > steps_per_epoch and getattr(trainer, "limit_val_batches", 1.0):
        raise UserError(
            f"trainer.val_check_interval={interval} is more than the {steps_per_epoch} optimizer steps of an epoch; set at most "
            f"{steps_per_epoch}, or trainer.check_val_every_n_epoch=null to count over epochs."
        )
    return interval


def first_evaluation(trainer: Any, steps_per_epoch: int | None) -> int | None:
    """The optimizer step after which the first evaluation comes, None for never; after `accumulate`."""
    every, epochs = evaluation_interval(trainer, steps_per_epoch), trainer.check_val_every_n_epoch
    if steps_per_epoch is None or epochs is None:
        return every
    return (epochs - 1) * steps_per_epoch + (every or steps_per_epoch)
