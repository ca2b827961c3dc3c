"""Evaluation over a whole set: sums and counts, and predictions for metrics of the user's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from workbench.data.batch import MicroBatch
from workbench.errors import UserError
from workbench.losses.reduce import Scope
from workbench.methods.metrics import Meter
from workbench.strategies.info import data_parallel_group, gather


@dataclass
class Term:
    """One term of a loss, unreduced.

    Args:
        values: losses, per row or per token ``[...]``.
        weights: of the values, the same shape; 0 leaves one out.
        per: the normaliser that divides their sum (see `workbench.losses.reduce.reduce`).
        coefficient: of the term in the loss.
        scope: over what it is divided, if its definition says so; None: as the method's.
    """

    values: Tensor
    weights: Tensor
    per: Literal["tokens", "chosen", "gold", "sequences", "unmasked", "constant"]
    coefficient: float = 1.0
    scope: Scope | None = None


@dataclass
class EvalPredictions:
    """An evaluation set as the model sees it, one entry per row, in the order of the set.

    Methods that score have other entries; they say which.

    Args:
        rows: positions in the evaluation set.
        predictions: most likely token ids at the trained positions.
        labels: the tokens that stand there.
        logps: the labels' log-probabilities, nats.
    """

    rows: list[int]
    predictions: list[np.ndarray]
    labels: list[np.ndarray]
    logps: list[np.ndarray]


_TERM = "loss term "

ComputeMetrics = Callable[[EvalPredictions], dict[str, float]]
Finish = Callable[[dict[str, Tensor]], dict[str, float]]


class Evaluation:
    """One pass over one evaluation set.

    Args:
        compute_metrics: gets the whole set's `EvalPredictions` at the end.
    """

    def __init__(self, compute_metrics: ComputeMetrics | None = None) -> None:
        self.meter = Meter()
        self.compute_metrics = compute_metrics
        self._coefficients: list[float] = []
        self._kept: dict[str, list[Tensor]] = {}
        self._finish: Finish | None = None
        self._rows: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def add(self, name: str, values: Tensor, weights: Tensor) -> None:
        """Adds to the mean of ``values`` under ``weights``."""
        self.meter.add(name, torch.where(weights == 0, 0.0, values.double() * weights).sum(), weights.sum())

    def extreme(self, name: str, values: Tensor, kind: Literal["min", "max"]) -> None:
        """Adds to the smallest or largest value of the set."""
        self.meter.extreme(name, values, kind)

    def add_terms(self, terms: Sequence[Term]) -> None:
        """Adds to the loss, which is the sum of its terms' means over the set; the same terms for every micro-batch."""
        self._coefficients = [term.coefficient for term in terms]
        for i, term in enumerate(terms):
            self.add(f"{_TERM}{i}", term.values.detach(), term.weights)

    def keep(self, finish: Finish, **values: Tensor) -> None:
        """Keeps values ``[n]``, of which ``finish`` makes metrics once it has those of the whole set."""
        self._finish = finish
        for name, part in values.items():
            self._kept.setdefault(name, []).append(part.detach().cpu())

    def add_predictions(self, batch: MicroBatch, top1: Tensor, logps: Tensor) -> None:
        """Keeps the predictions at trained positions, if a metric wants them."""
        index = batch.trained
        if len(index):
            self.add_entries(batch.row[batch.segment[index]], top1, batch.tokens[index], logps)

    def add_entries(self, rows: Tensor, predictions: Tensor, labels: Tensor, logps: Tensor) -> None:
        """Keeps entries ``[n]`` of the rows that ``rows`` names for each, in their order, if a metric wants them."""
        if self.compute_metrics is None:
            return
        of_row, *columns = (t.detach().cpu().numpy() for t in (rows, predictions, labels, logps.float()))
        for row in np.unique(of_row):
            self._rows[int(row)] = tuple(c[of_row == row] for c in columns)

    def compute(self, device: torch.device, strategy: Strategy) -> dict[str, float]:
        """All metrics over all ranks, the same on each."""
        metrics = self.meter.compute(device, data_parallel_group(strategy))
        means = [metrics.pop(f"{_TERM}{i}", 0.0) for i in range(len(self._coefficients))]
        if means:
            metrics = {"loss": sum(c * mean for c, mean in zip(self._coefficients, means, strict=True)), **metrics}
        if self._finish is not None:
            parts = gather({name: torch.cat(values) for name, values in self._kept.items()}, strategy)
            metrics = {**self._finish({name: torch.cat([part[name] for part in parts]) for name in parts[0]}), **metrics}
        if self.compute_metrics is None:
            return metrics
        rows: dict[int, tuple[np.ndarray, ...]] = {}
        for part in gather(self._rows, strategy):
            rows |= part
        order = sorted(rows)
        predictions, labels, logps = ([rows[r][i] for r in order] for i in range(3))
        own = self.compute_metrics(EvalPredictions(order, predictions, labels, logps))
        if not isinstance(own, dict):
            raise UserError(f"compute_metrics must return a dict of numbers, not {type(own).__name__}.")
        return metrics | {name: float(value) for name, value in own.items()}
