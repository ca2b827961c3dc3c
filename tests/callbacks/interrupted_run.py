"""Trains until a signal comes: ``python interrupted_run.py FOLDER [devices] [what]``, run by test_interrupt.py."""

import signal
import sys
import time
from pathlib import Path

import lightning as L

sys.path.insert(0, str(Path(__file__).parent))
from small_run import SmallModule, trainer

from workbench.callbacks.checkpoint import Checkpoint, resolve_checkpoint
from workbench.callbacks.interrupt import Aborted, GracefulStop


def main(folder: str, devices: int, what: str) -> None:
    marker = Path(folder) / "training"

    def on_batch(module: L.LightningModule, index: int) -> None:
        if module.global_step == 2:
            marker.touch()
        if module.global_step >= 2:
            time.sleep(60 if what == "stuck" else 0.05)

    stop = GracefulStop(resume_hint="resume={path}")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    options = {"devices": devices, "strategy": "ddp" if devices > 1 else "auto", "max_epochs": 50, "min_epochs": 50}
    run = trainer(folder, stop, Checkpoint(every_n_steps=1000), use_distributed_sampler=False, **options)
    module = SmallModule(accumulate=2, steps=1000, on_batch=on_batch)
    try:
        run.fit(module, ckpt_path=resolve_checkpoint("auto", folder))
    except Aborted as error:
        print(f"aborted: {error}", flush=True)
    restored = before == {number: signal.getsignal(number) for number in before}
    print(f"rank {run.global_rank} step {run.global_step} interrupted {stop.interrupted} restored {restored}", flush=True)
    sys.exit(130 if stop.interrupted else 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
