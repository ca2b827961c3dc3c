"""Stopping a run in good order on Ctrl-C and SIGTERM."""

import logging
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from workbench.callbacks.checkpoint import Checkpoint
from workbench.callbacks.steps import closes_step

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Aborted(BaseException):
    """Raised where training is at when a second signal comes. It is no ``Exception``, so that nothing swallows it, and no
    ``KeyboardInterrupt``, which Lightning turns into an exit of the process, notebook kernels included."""


class GracefulStop(Callback):
    """The first Ctrl-C or SIGTERM ends training after the optimizer step that is under way, with a checkpoint; a second
    one aborts at once with `Aborted`.

    `Checkpoint` writes the checkpoint; a validation that would follow is skipped, one that is under way is finished. With
    several processes, a signal to any of them stops all at the same step. ``interrupted`` tells afterwards; nothing is
    raised. The handlers are those of the time before once training has ended. Off the main thread, where Python allows
    no handlers, this does nothing.

    Args:
        resume_hint: how to continue, printed in the end; ``{path}`` is the checkpoint.
    """

    def __init__(self, resume_hint: str = "resume from {path}") -> None:
        self.resume_hint = resume_hint
        self.interrupted = False
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}
        self._limits: tuple[Any, Any, Any] | None = None
        self._group: Any = None

    def on_train_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Installs the handlers (Lightning's own for SIGTERM, which talks to other processes from within, is put aside)."""
        self.interrupted, self.signum = False, None
        if trainer.world_size > 1:  # Not NCCL, for which every check would wait for the GPU.
            self._group = torch.distributed.new_group(backend="gloo")
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            self._restore_handlers()
            raise Aborted(f"aborted by a second {signal.Signals(number).name}")
        self.signum = number
        # os.write, since a handler may interrupt a print that is under way.
        os.write(2, b"\nStopping after this step, with a checkpoint. Once more aborts at once.\n")

    def on_train_batch_end(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Between optimizer steps: asks all processes for a signal, and has the trainer stop."""
        if self.interrupted or not closes_step(trainer) or not self._signalled(trainer):
            return
        self.interrupted = True
        loop = trainer.fit_loop
        self._limits = (trainer.limit_val_batches, loop.min_epochs, loop.epoch_loop.min_steps)
        trainer.limit_val_batches = 0  # Lightning validates before it stops.
        loop.min_epochs, loop.epoch_loop.min_steps = 0, None  # It would first go on to these.
        trainer.should_stop = True

    def _signalled(self, trainer: "L.Trainer") -> bool:
        if self._group is None:
            return self.signum is not None
        flag = torch.tensor(int(self.signum is not None))
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def on_train_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Puts everything back and says how to go on."""
        self.interrupted |= self._signalled(trainer)  # A signal in a validation after the last step.
        self._restore(trainer)
        if self.interrupted and trainer.is_global_zero:
            print(self._message(trainer), flush=True)

    def on_exception(self, trainer: "L.Trainer", pl_module: "L.LightningModule", exception: BaseException) -> None:
        """Puts everything back; after an abort, processes that this one has started must not wait for it."""
        self._restore(trainer)
        if isinstance(exception, Aborted):
            self.interrupted = True
            kill = getattr(trainer.strategy.launcher, "kill", None)
            if kill is not None:
                kill(signal.SIGKILL)

    def _message(self, trainer: "L.Trainer") -> str:
        done = f"Interrupted after step {trainer.global_step}"
        saved = [c.last_model_path for c in trainer.callbacks if isinstance(c, Checkpoint) and c.last_model_path]
        if not saved:
            return f"{done}; nothing was saved, since there is no checkpoint callback."
        path = os.path.relpath(saved[0]) if Path(saved[0]).is_relative_to(Path.cwd()) else saved[0]
        return f"{done}. To continue: {self.resume_hint.format(path=path)}"

    def _restore(self, trainer: "L.Trainer") -> None:
        self._restore_handlers()
        if self._limits is not None:
            loop = trainer.fit_loop
            trainer.limit_val_batches, loop.min_epochs, loop.epoch_loop.min_steps = self._limits
            self._limits = None
        self._group = None

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
