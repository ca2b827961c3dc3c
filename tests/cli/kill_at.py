"""A callback for a test: the process kills itself, without a word, as a batch of the step after ``step`` begins."""

import os
import signal
from typing import Any

import lightning as L


class KillAt(L.Callback):
    """SIGKILL, which nothing can catch, after ``step`` optimizer steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
