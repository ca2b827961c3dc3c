"""Steps, micro-batches and padding that a plan gives on the configured devices."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from datasets import Dataset

from workbench.data.inspection_counts import Sequences
from workbench.data.inspection_rows import spread
from workbench.data.loader import row_sizes
from workbench.data.module import DataModule
from workbench.data.plan import Planner
from workbench.data.prompts import Geometry

_STEPS = 200  # steps of the first epoch that are looked at


@dataclass(frozen=True)
class Execution:
    """What steps depend on besides the data; the trainer's words, as configured.

    Args:
        world_size: data-parallel processes.
        max_epochs: passes over the data; None or -1 is no limit.
        max_steps: optimizer steps; -1 is no limit.
        limit_train_batches: optimizer steps per epoch, or a share of them.
        layout: of the model's input, which decides about padding.
        pad_to_multiple_of: lengths are rounded up to a multiple.
        windows: of an online method: ``num_generations``, ``steps_per_generation``, ``num_iterations``.
        longest: of an online method, most tokens of a completion.
    """

    world_size: int = 1
    max_epochs: int | None = None
    max_steps: int = -1
    limit_train_batches: int | float | None = None
    layout: str = "padded"
    pad_to_multiple_of: int | None = None
    windows: Mapping[str, int] | None = None
    longest: int = 0

    def geometry(self, batch_size: int) -> Geometry | None:
        """As the method's."""
        return None if self.windows is None else Geometry(batch_size, **self.windows)

    def trainer(self) -> Any:
        """Stands in for a trainer where a plan is made: no device is touched."""
        strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": self.world_size, "rank": 0})
        limit = 1.0 if self.limit_train_batches is None else self.limit_train_batches
        return SimpleNamespace(
            strategy=strategy,
            lightning_module=self,
            max_epochs=self.max_epochs,
            max_steps=self.max_steps,
            limit_train_batches=limit,
            val_check_interval=None,
            accumulate_grad_batches=1,
        )


@dataclass
class Steps:
    """A run in optimizer steps, and its forward passes. A micro-batch is what one device computes at once.

    Args:
        world_size: data-parallel devices.
        batch_size: rows per step over all devices.
        num_micro: micro-batches per step and device (K).
        steps_per_epoch: None for a stream.
        total_steps: None if nothing bounds the run.
        tokens_per_epoch: tokens read in an epoch, padding apart; None for a stream.
        tokens_per_step: mean over the steps looked at.
        computed_per_step: the same with padding, a shared prompt counted in each sequence.
        mean_length: mean tokens of a sequence.
        trained_per_step: least, mean and most trained weight of a step.
        real: tokens of all micro-batches looked at, a shared prompt counted in each sequence.
        computed: the same with padding.
        largest: most tokens of a micro-batch with padding.
        micro_batches: number of micro-batches looked at that hold a row.
        empty: those that hold none.
        completions: most tokens of a completion, of an online method, whose completions are all counted as that long.
    """

    world_size: int
    batch_size: int
    num_micro: int
    steps_per_epoch: int | None
    total_steps: int | None
    tokens_per_epoch: int | None
    tokens_per_step: float
    computed_per_step: float
    mean_length: float
    trained_per_step: tuple[float, float, float]
    real: int
    computed: int
    largest: int
    micro_batches: int
    empty: int
    completions: int = 0

    @property
    def padding(self) -> float:
        """Share of the computed tokens that are padding."""
        return 1 - self.real / self.computed if self.computed else 0.0

    @property
    def total_tokens(self) -> float | None:
        """Tokens read in the whole run, padding apart."""
        return None if self.total_steps is None else self.total_steps * self.tokens_per_step


def plan_steps(data: DataModule, rows: Dataset, execution: Execution) -> Steps:
    """The steps of a run on ``rows``, prepared and packed; of a stream, those of the rows at hand.

    Raises:
        UserError: the sizes cannot go together, as in training.
    """
    data = copy.copy(data)
    data.trainer, data._train = execution.trainer(), rows
    data._plan(data.trainer)
    if data.geometry is not None:
        return _look_ahead(data, row_sizes(rows).tokens, execution)
    planner = data._planner(row_sizes(rows), shuffle=False) if data.streaming else data.planner
    return _look(data, planner, Sequences.of(rows), execution)


def _look(data: DataModule, planner: Planner, sequences: Sequences, execution: Execution) -> Steps:
    sizes, looked_at = planner.sizes, spread(planner.steps_per_epoch, _STEPS)
    real, computed, empty, tokens, trained = [], [], 0, [], []
    for step in looked_at:
        plan = planner.step(0, step)
        tokens.append(int(sizes.tokens[plan.rows].sum()))
        trained.append(plan.norm.tokens)
        for micro in (micro for rank in plan.micro for micro in rank):
            if not micro:
                empty += 1
                continue
            real.append(int(sequences.tokens[micro].sum()))
            computed.append(_computed(sequences, micro, execution))
    epoch = None if data.streaming else _epoch_tokens(data, planner, tokens, looked_at)
    return Steps(
        world_size=execution.world_size,
        batch_size=data.batch_size,
        num_micro=data.num_micro,
        steps_per_epoch=data.steps_per_epoch,
        total_steps=data.total_steps,
        tokens_per_epoch=epoch,
        tokens_per_step=float(np.mean(tokens)),
        computed_per_step=sum(computed) / len(looked_at),
        mean_length=float(sequences.tokens.sum() / sequences.count.sum()),
        trained_per_step=(min(trained), float(np.mean(trained)), max(trained)),
        real=sum(real),
        computed=sum(computed),
        largest=max(computed),
        micro_batches=len(real),
        empty=empty,
    )


def _look_ahead(data: DataModule, prompts: np.ndarray, execution: Execution) -> Steps:
    """Steps on completions that are yet to be written: each as long as it may be."""
    geometry, planner, longest = data.geometry, data.planner, execution.longest
    asked = geometry.batch_size / geometry.num_generations  # prompts per step
    grouped = execution.layout == "shared" and planner.max_rows % geometry.num_generations == 0
    copies = asked if grouped else geometry.batch_size
    mean, most = float(prompts.mean()), int(prompts.max())
    rows, micro_prompts = planner.max_rows, planner.max_rows / (geometry.num_generations if grouped else 1)
    real = round(micro_prompts * mean + rows * longest)
    padded = execution.layout == "padded"
    computed = rows * _round_up(most + longest, execution.pad_to_multiple_of) if padded else real
    largest = computed if padded else round(micro_prompts * most + rows * longest)
    micro_batches = planner.num_micro * planner.world_size
    per_step = copies * mean + geometry.batch_size * longest
    epoch = None if data.steps_per_epoch is None else round(per_step * data.steps_per_epoch)
    trained = float(geometry.batch_size * longest)
    return Steps(
        world_size=execution.world_size,
        batch_size=geometry.batch_size,
        num_micro=planner.num_micro,
        steps_per_epoch=data.steps_per_epoch,
        total_steps=data.total_steps,
        tokens_per_epoch=epoch,
        tokens_per_step=per_step,
        computed_per_step=float(computed * micro_batches),
        mean_length=mean + longest,
        trained_per_step=(trained, trained, trained),
        real=real * micro_batches,
        computed=computed * micro_batches,
        largest=largest,
        micro_batches=micro_batches,
        empty=0,
        completions=longest,
    )


def _epoch_tokens(data: DataModule, planner: Planner, tokens: list[int], looked_at: list[int]) -> int:
    """Tokens of an epoch: exact unless a limit or ``drop_last`` leaves rows out of it."""
    if data.steps_per_epoch * data.batch_size >= len(planner.sizes):
        return int(planner.sizes.tokens.sum())
    return round(sum(tokens) / len(looked_at) * data.steps_per_epoch)


def _computed(sequences: Sequences, rows: list[int], execution: Execution) -> int:
    """Tokens that a micro-batch of ``rows`` makes the model compute."""
    if execution.layout != "padded":
        return _round_up(int(sequences.tokens[rows].sum()), execution.pad_to_multiple_of)
    return int(sequences.count[rows].sum()) * _round_up(int(sequences.longest[rows].max()), execution.pad_to_multiple_of)


def _round_up(length: int, multiple: int | None) -> int:
    return -(-length // multiple) * multiple if multiple else length
