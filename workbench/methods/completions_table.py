"""The completions of an online method, as a table per logging step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np

from workbench.loggers.tables import log_table, print_table

if TYPE_CHECKING:
    from workbench.methods.rollouts import Group
    from workbench.rewards import RewardResult

TABLE = "train/completions"


class CompletionsTable:
    """Keeps every completion of a window with its rewards and advantage, and prints a few.

    Args:
        every_n_steps: optimizer steps between two tables; 0: none.
        num_printed: how many completions are printed with each.
    """

    def __init__(self, every_n_steps: int, num_printed: int) -> None:
        self.every_n_steps = every_n_steps
        self.num_printed = num_printed

    def add(
        self, trainer: "L.Trainer", groups: Sequence["Group"], result: "RewardResult", advantages: np.ndarray, steps: int
    ) -> None:
        """Takes a window in, if a table is due in one of its ``steps`` steps; the first window has one."""
        every, before = self.every_n_steps, trainer.global_step
        due = every and (before == 0 or before // every != (before + steps) // every)
        if not due or not trainer.is_global_zero:
            return
        columns = ["step", "prompt", "completion", *result.names, *result.extras, "advantage"]
        rows = self._rows(before + 1, groups, result, advantages)
        log_table(trainer, TABLE, columns, rows, step=before + 1)
        if self.num_printed:
            shown = [row[1:] for row in rows[: self.num_printed]]
            print_table(f"completions, step {before + 1}", columns[1:], shown)

    def _rows(self, step: int, groups: Sequence["Group"], result: "RewardResult", advantages: np.ndarray) -> list[list[Any]]:
        each = [(group.row["prompt"], text) for group in groups for text in group.texts]
        rewards = [[None if np.isnan(value) else float(value) for value in row] for row in result.values]
        extras = list(zip(*result.extras.values(), strict=True)) or [()] * len(each)
        return [
            [step, prompt, text, *values, *extra, float(advantage)]
            for (prompt, text), values, extra, advantage in zip(each, rewards, extras, advantages, strict=True)
        ]
