"""As `members.py`, for online methods: ``online_members.py <folder> <jobs.json>``.

Beside a job's steps, its completions go to ``<folder>/<name>-completions.json``, by window, prompt and sample. A job with
``kill_at`` ends there without a word, as a machine that is switched off.
"""

import json
import os
import signal
import sys
from pathlib import Path

import lightning as L
import torch
from members import run


class Completions(L.Callback):
    """Keeps the tokens of every window: ``"window prompt sample" -> ids``."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        size, window = module.num_generations, module.window
        rows = [(batch.plan.prompts[group], i % size) for i, group in enumerate(window.group)]
        for (row, sample), tokens in zip(rows, window.token_ids, strict=True):
            self.seen[f"{window.number} {row} {sample}"] = tokens.tolist()


class KillAt(L.Callback):
    """Ends the process in the middle of a step."""

    def __init__(self, step):
        self.step = step

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step + 1 == self.step and module._closing:
            os.kill(os.getpid(), signal.SIGKILL)


def run_online(job, folder):
    """Runs a job here."""
    found = Completions()
    run(job, folder, [found, *([KillAt(job["kill_at"])] if "kill_at" in job else [])])
    if os.environ.get("RANK", "0") == "0":
        (folder / f"{job['name']}-completions.json").write_text(json.dumps(found.seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    for entry in json.loads(Path(sys.argv[2]).read_text()):
        run_online(entry, target)
