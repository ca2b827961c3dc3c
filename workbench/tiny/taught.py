"""A nano model that has had a short SFT: what methods that refine a model start from where no other is at hand.

It answers about half of a task's held-out problems, so that there is something to gain. It is made on first use (about half a
minute on two cores) by ``workbench train``, and kept in the cache.
"""

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock
from safetensors.torch import load_file
from torch import Tensor

from workbench.cache import cache_home
from workbench.errors import UserError

log = logging.getLogger(__name__)

NAME = "tiny-sft"
VERSION = 1  # of the recipe below: raise it with every change of what comes out
SHARE = 0.5  # of the held-out problems that it answers when its training stops


def taught_weights(task: str = "sums", seed: int = 0) -> dict[str, Tensor]:
    """Weights of `tiny_model` after SFT on a task of the embedded world, by name.

    Args:
        task: of `workbench.tiny.tasks.TASKS`.
        seed: of its initial weights and of the order of its rows.
    """
    folder = cache_home() / "tiny-sft" / f"{task}-{seed}-v{VERSION}"
    if not (folder / "model.safetensors").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # other processes of the run wait for the first
            if not (folder / "model.safetensors").is_file():
                _teach(task, seed, folder)
    return load_file(folder / "model.safetensors")


def _teach(task: str, seed: int, folder: Path) -> None:
    log.warning("model.name=%s: a nano model learns %s first (half a minute, once; kept in %s).", NAME, task, folder)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        command = [
            *(sys.executable, "-m", "workbench", "train", "method=sft", "model=tiny", f"seed={seed}"),
            *(f"data.train.path=tiny:{task}", f"data.eval=tiny:{task}", "trainer=cpu", "trainer.devices=1"),
            *("callbacks=early_stopping", "callbacks.early_stopping.monitor=val/exact_match"),
            *("callbacks.early_stopping.mode=max", f"callbacks.early_stopping.stopping_threshold={SHARE}"),
            *("callbacks.early_stopping.patience=1000", "callbacks.samples=null", "callbacks.checkpoint=null"),
            *("trainer.val_check_interval=10", "trainer.check_val_every_n_epoch=null", "logger=none"),
            *("trainer.enable_model_summary=false", f"paths.run_dir={work}/run"),
        ]
        alone = {k: v for k, v in os.environ.items() if k not in _OF_ANOTHER_RUN}
        done = subprocess.run(command, env=alone, capture_output=True, text=True, cwd=work, check=False)
        made = Path(work, "run", "model", "model.safetensors")
        if done.returncode or not made.is_file():
            raise UserError(f"model.name={NAME}: its SFT failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
        made.parent.rename(folder)


# What tells a process that it belongs to a run of several.
_OF_ANOTHER_RUN = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
