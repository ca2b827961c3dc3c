"""Parameter groups and learning-rate schedules."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers import get_scheduler

from workbench.errors import UserError, check_at_least

OptimizerFactory = Callable[[Iterable[dict[str, Any]]], Optimizer]
SchedulerFactory = Callable[..., LRScheduler]


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices, which decay, and norms, biases and other vectors, which never do."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    if not trainable:
        raise UserError("the model has 0 trainable parameters; unfreeze it, or give a trainable adapter (peft=lora).")
    matrices = [p for p in trainable if p.ndim >= 2]
    vectors = [p for p in trainable if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def adamw(
    params: Iterable[dict[str, Any]],
    lr: float = 2e-5,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    fused: bool | None = None,
) -> AdamW:
    """AdamW (Loshchilov & Hutter 2019) with this field's defaults.

    Args:
        params: parameter groups.
        lr: peak learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of matrices (per unit of learning rate); vectors never decay.
        fused: use the fused kernel (null: on a CPU, where torch would loop over the parameters; elsewhere torch decides).
    """
    groups = list(params)
    if fused is None and all(p.device.type == "cpu" and p.is_floating_point() for g in groups for p in g["params"]):
        fused = True
    optimizer = AdamW(groups, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, fused=fused)
    # A fused kernel could undo a gradient scaler's factor itself, and Lightning then refuses to clip; a scaler that is told
    # otherwise does it before the step.
    optimizer._step_supports_amp_scaling = False
    return optimizer


Schedule = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]


def schedule(
    optimizer: Optimizer,
    num_training_steps: int | None = None,
    *,
    name: Schedule = "constant",
    warmup_steps: int = 0,
    warmup_ratio: float = 0.0,
    options: dict[str, Any] | None = None,
) -> LRScheduler:
    """A transformers schedule over optimizer steps.

    Args:
        optimizer: whose learning rates it scales.
        num_training_steps: optimizer steps of the run; filled in by the method.
        name: shape after the warm-up.
        warmup_steps: steps of linear warm-up from 0.
        warmup_ratio: the same as a share of all steps; excludes ``warmup_steps``.
        options: further arguments of the shape (``num_cycles``, ``min_lr``, ``num_decay_steps``, ``power`` ...).
    """
    if warmup_steps and warmup_ratio:
        raise UserError("scheduler.warmup_steps and scheduler.warmup_ratio exclude each other; set one of them to 0.")
    check_at_least(0, scheduler__warmup_steps=warmup_steps, scheduler__warmup_ratio=warmup_ratio)
    needs_total = bool(warmup_ratio) or name not in ("constant", "inverse_sqrt")
    if needs_total and num_training_steps is None:
        raise UserError(f"scheduler name={name} needs the number of steps; set trainer.max_steps, or use scheduler=constant.")
    if warmup_ratio:
        warmup_steps = round(warmup_ratio * num_training_steps)
    if name == "constant" and options:
        raise UserError(f"scheduler.options={options} have no effect with scheduler name=constant: leave them out.")
    if name == "constant" and warmup_steps:
        name = "constant_with_warmup"
    try:
        return get_scheduler(name, optimizer, warmup_steps, num_training_steps, scheduler_specific_kwargs=options or {})
    except (TypeError, ValueError) as error:
        raise UserError(f"scheduler.options={options} do not fit scheduler name={name}: {error}") from error


def build_optimizer(factory: OptimizerFactory, module: nn.Module) -> Optimizer:
    """Calls an optimizer factory, ours or one of torch's, with the groups of trained parameters."""
    groups = parameter_groups(module)
    try:
        return factory(groups)
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"optim refuses its options: {error}.") from error


def build_scheduler(factory: SchedulerFactory, optimizer: Optimizer, num_training_steps: int | None) -> LRScheduler:
    """Calls a scheduler factory, ours or one of torch's, with the number of steps if it takes that."""
    given = {"num_training_steps": num_training_steps}
    takes_steps = "num_training_steps" in inspect.signature(factory).parameters
    scheduler = factory(optimizer, **(given if takes_steps else {}))
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UserError("scheduler ReduceLROnPlateau waits for a measure, but rates change with every step here; use another.")
    return scheduler
