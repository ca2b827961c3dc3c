"""The share of evaluation prompts that the model answers word for word, before, during and after training."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from workbench.errors import UserError
from workbench.methods.generate import to_prompt

METRIC = "val/exact_match"


class ExactMatch(Callback):
    """Answers rows of the first evaluation set greedily and compares with the expected answers (white space around apart).

    Logged as ``val/exact_match`` in every validation; ``before`` and ``after`` are those of the start and the end of training.
    All processes answer all rows, so that none waits for another within a sharded forward.

    Args:
        rows: how many rows, from the first on.
        max_new_tokens: longest answer; null is a little more than the longest expected one.
    """

    generates = True  # needs a model that writes

    def __init__(self, rows: int = 256, max_new_tokens: int | None = None) -> None:
        super().__init__()
        if rows < 1:
            raise UserError(f"exact match over rows={rows} must be over at least 1.")
        self.rows = rows
        self.max_new_tokens = max_new_tokens
        self.before: float | None = None
        self.after: float | None = None
        self._step = -1

    def on_train_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Measures what there is to improve."""
        self.before = self._measure(trainer, pl_module)
        for logger in trainer.loggers:
            logger.log_metrics({METRIC: self.before}, step=trainer.global_step)

    def on_validation_epoch_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Measures beside the validation's own metrics."""
        if trainer.sanity_checking:
            return
        pl_module.log(METRIC, self._measure(trainer, pl_module), batch_size=1)
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._step = -1

    def on_train_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Measures the final weights, which may be an average by now."""
        self._step = -1
        self._measure(trainer, pl_module)

    def _measure(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> float:
        if self._step != trainer.global_step:
            self.after = exact_match(pl_module, trainer.datamodule, self.rows, self.max_new_tokens)
            self._step = trainer.global_step
        return self.after


def exact_match(method: Any, data: Any, rows: int, max_new_tokens: int | None = None) -> float:
    """Share of the first ``rows`` evaluation rows whose expected answer ``method`` generates greedily."""
    asked = [row for row in data.eval_rows(limit=rows) if expected(row) is not None]
    if not asked:
        raise UserError("exact_match needs evaluation rows with an expected answer (data.eval); set exact_match=0.")
    answers = [expected(row).strip() for row in asked]
    if max_new_tokens is None:
        longest = max(len(ids) for ids in method.tokenizer(answers, add_special_tokens=False)["input_ids"])
        max_new_tokens = longest + 4  # room for an end of turn
    texts = method.generate([to_prompt(row) for row in asked], max_new_tokens=max_new_tokens)
    return sum(text.strip() == answer for text, answer in zip(texts, answers, strict=True)) / len(asked)


def expected(row: dict[str, Any]) -> str | None:
    """The answer that a row asks for, if it says."""
    answer = row.get("answer", row.get("reference"))
    return None if answer is None else str(answer)
