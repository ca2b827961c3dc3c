"""Answers to a few evaluation prompts while the model trains."""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng

from workbench.callbacks.progress import phase
from workbench.callbacks.steps import closes_step
from workbench.errors import UserError
from workbench.loggers.tables import log_table, print_table
from workbench.methods.generate import to_prompt

log = logging.getLogger(__name__)

Metric = Callable[..., Sequence[float | None]]
TABLE = "val/samples"


class GenerationSamples(Callback):
    """Generates answers to evaluation prompts at every validation (or every so many steps) and keeps them as a table: in
    ``<run folder>/tables/val/samples``, in the loggers, and a few on the terminal.

    Each metric gets a column, and its mean is logged as ``val/<name>``, by which checkpoints can be ranked.

    Args:
        num_prompts: how many rows of the evaluation set, from the first on.
        max_new_tokens: longest answer.
        every_n_steps: generate after every so many optimizer steps; null: at every validation.
        metrics: by name, or one alone (named after the function): ``f(prompts, completions, **columns) -> list of
            numbers`` like a reward, as a function or as ``module:function``; ``columns`` are the rows' other columns, and
            None in the result leaves a row out.
        eval_set: which evaluation set, of several; null is the first.
        prompts: rows (``prompt`` and any other columns) or texts to use instead of the evaluation set.
        generation: further options of the method's ``generate`` (``do_sample``, ``temperature``).
        print_rows: how many answers are printed.
    """

    generates = True  # needs a model that writes

    def __init__(
        self,
        num_prompts: int = 8,
        max_new_tokens: int = 128,
        every_n_steps: int | None = None,
        metrics: dict[str, str | Metric] | str | Metric | None = None,
        eval_set: str | None = None,
        prompts: list[str | dict[str, Any]] | None = None,
        generation: dict[str, Any] | None = None,
        print_rows: int = 3,
    ) -> None:
        if num_prompts < 1 or (every_n_steps is not None and every_n_steps < 1):
            raise UserError(f"num_prompts={num_prompts} and every_n_steps={every_n_steps} must be at least 1.")
        self.num_prompts = num_prompts
        self.max_new_tokens = max_new_tokens
        self.every_n_steps = every_n_steps
        self.metrics = _named(metrics)
        self.eval_set = eval_set
        self.prompts = prompts
        self.generation = dict(generation or {})
        self.print_rows = print_rows

    def on_validation_epoch_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Generates beside a validation."""
        if trainer.sanity_checking or (self.every_n_steps is not None and trainer.state.fn == TrainerFn.FITTING):
            return
        for name, value in self.generate(trainer, pl_module).items():
            pl_module.log(name, value, batch_size=1)

    def on_train_batch_end(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Generates after every n-th optimizer step."""
        if self.every_n_steps is None or not closes_step(trainer) or trainer.global_step % self.every_n_steps:
            return
        means = self.generate(trainer, pl_module)
        for name, value in means.items():
            pl_module.log(name, value, logger=False, batch_size=1)
        for logger in trainer.loggers if means else []:  # Whatever log_every_n_steps says.
            logger.log_metrics(means, step=trainer.global_step)

    @torch.no_grad()
    def generate(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> dict[str, float]:
        """Generates, keeps the table, and returns the metrics' means. Every process generates all answers, so that none
        waits for another within a sharded forward; the numbers are those of rank 0."""
        rows = self._rows(trainer)
        prompts = [row["prompt"] for row in rows]
        with phase(trainer, f"generating {len(rows)} answers"), isolate_rng(), trainer.precision_plugin.forward_context():
            torch.manual_seed(trainer.global_step)  # The same answers on every process and after a resume.
            texts = pl_module.generate([to_prompt(row) for row in rows], max_new_tokens=self.max_new_tokens, **self.generation)
        scores = trainer.strategy.broadcast({n: _score(n, f, rows, texts) for n, f in self.metrics.items()})
        columns = ["step", "prompt", "completion", "reference", *scores]
        cells = [prompts, texts, [row.get("reference") for row in rows], *scores.values()]
        table = [[trainer.global_step, *values] for values in zip(*cells, strict=True)]
        log_table(trainer, TABLE, columns, table)
        if trainer.is_global_zero and self.print_rows:
            print_table(f"step {trainer.global_step}", columns[1:], [row[1:] for row in table[: self.print_rows]])
        return {f"val/{name}": _mean(values) for name, values in scores.items()}

    def _rows(self, trainer: "L.Trainer") -> list[dict[str, Any]]:
        if self.prompts is not None:
            return [{"prompt": row} if isinstance(row, str) else dict(row) for row in self.prompts[: self.num_prompts]]
        source = getattr(trainer.datamodule, "eval_rows", None)
        rows = source(self.eval_set, self.num_prompts) if source is not None else []
        if not rows:
            raise UserError("generation samples need an evaluation set (data.eval) or their own prompts.")
        return rows


def _named(metrics: Mapping[str, str | Metric] | str | Metric | None) -> dict[str, Metric]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        function = _resolve(metrics)
        inner = function.func if isinstance(function, functools.partial) else function
        return {getattr(inner, "__name__", type(inner).__name__): function}
    return {name: _resolve(metric) for name, metric in metrics.items()}


def _resolve(metric: str | Metric) -> Metric:
    if not isinstance(metric, str):
        return metric
    module, _, name = metric.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"metric {metric!r} cannot be imported ({error}); give it as module:function.") from error


def _score(name: str, metric: Metric, rows: list[dict[str, Any]], texts: list[str]) -> list[float | None]:
    """Calls a metric as a reward is called: conversations get their answers as messages."""
    prompts = [row["prompt"] for row in rows]
    answers = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    columns = {key: [row.get(key) for row in rows] for key in rows[0] if key != "prompt"}
    try:
        inspect.signature(metric).bind(prompts, answers, **columns)
    except TypeError as error:
        raise UserError(f"metric {name!r} cannot be called as f(prompts, completions, {', '.join(columns)}): {error}.") from None
    except ValueError:  # A function without a signature.
        pass
    values = list(metric(prompts, answers, **columns))
    if len(values) != len(rows):
        raise UserError(f"metric {name!r} returned {len(values)} values for {len(rows)} completions.")
    return [None if value is None else float(value) for value in values]


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")
