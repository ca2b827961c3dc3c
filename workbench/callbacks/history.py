"""The metrics of a run in memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
import pandas as pd
from lightning.pytorch.callbacks import Callback

from workbench.callbacks.steps import closes_step, metrics
from workbench.loggers.csv import CSVLogger, read_history

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class History(Callback):
    """Keeps every step's metrics, for runs of a bare ``Trainer`` (`workbench.train` returns the same from its CSV file).

    A resumed run begins with the rows of its CSV file, where it has a `CSVLogger`.
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, float]] = {}

    @property
    def frame(self) -> pd.DataFrame:
        """One row per optimizer step, one column per metric."""
        rows = [{"step": step, **self._rows[step]} for step in sorted(self._rows)]
        return pd.DataFrame(rows if rows else {"step": pd.Series(dtype=int)})

    def plot(self, *names: str) -> "Figure":
        """One panel per metric over optimizer steps; ``train/x`` and ``val/x`` share one. The main ones by default."""
        return plot_history(self.frame, names)

    def on_train_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Starts anew, or where the resumed run was."""
        self._rows = {step: row for step, row in self._rows.items() if step <= trainer.global_step}
        if not trainer.global_step:
            self._rows = {}
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger) and trainer.global_step and not self._rows:
                frame = read_history(logger.path)
                past = frame[frame["step"] <= trainer.global_step].set_index("step")
                self._rows = {int(step): row.dropna().to_dict() for step, row in past.iterrows()}

    def on_train_batch_end(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes the finished step's metrics."""
        if closes_step(trainer):
            self._add(trainer, validated=False)

    def on_validation_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Adds the validation's."""
        if not trainer.sanity_checking:
            self._add(trainer, validated=True)

    def _add(self, trainer: "L.Trainer", *, validated: bool) -> None:
        known = {k: v for k, v in metrics(trainer).items() if k.startswith("train/") != validated}
        self._rows.setdefault(trainer.global_step, {}).update(known)


def plot_history(history: pd.DataFrame, names: Sequence[str] = ()) -> "Figure":
    """See `History.plot`."""
    from workbench.run import plot_history as plot

    return plot(history, names)
