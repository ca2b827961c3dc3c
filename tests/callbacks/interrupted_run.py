"""Trains until a signal comes: ``python interrupted_run.py FOLDER DEVICES WHAT``, run by test_interrupt.py.

WHAT: ``stuck`` sleeps within a step, ``full`` cannot write checkpoints on the first process.
"""

import signal
import sys
import time
from pathlib import Path

import lightning as L
import torch

sys.path.insert(0, str(Path(__file__).parent))
from small_run import SmallModule, trainer

from workbench.callbacks.checkpoint import Checkpoint, resolve_checkpoint
from workbench.callbacks.interrupt import Aborted, GracefulStop
from workbench.errors import UserError


def main(folder: str, devices: int, what: str) -> None:
    marker = Path(folder) / "training"

    def on_batch(module: L.LightningModule, index: int) -> None:
        if module.global_step == 2:
            marker.touch()
        if module.global_step >= 2:
            time.sleep(600 if what == "stuck" else 0.05)

    def full(*args, **kwargs) -> None:
        raise OSError(28, "No space left on device")

    stop = GracefulStop(resume_hint="resume={path}")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    options = {"devices": devices, "strategy": "ddp" if devices > 1 else "auto", "max_epochs": 50, "min_epochs": 50}
    run = trainer(folder, stop, Checkpoint(every_n_steps=3 if what == "full" else 1000), use_distributed_sampler=False, **options)
    module = SmallModule(accumulate=2, steps=1000, on_batch=on_batch)
    if what == "full" and run.is_global_zero:
        torch.save = full
    try:
        run.fit(module, ckpt_path=resolve_checkpoint("auto", folder))
    except Aborted as error:
        print(f"aborted: {error}", flush=True)
    except UserError as error:
        print(f"rank {run.global_rank} failed at step {run.global_step}: {error}", flush=True)
        sys.exit(2)
    restored = before == {number: signal.getsignal(number) for number in before}
    print(f"rank {run.global_rank} step {run.global_step} interrupted {stop.interrupted} restored {restored}", flush=True)
    sys.exit(130 if stop.interrupted else 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
