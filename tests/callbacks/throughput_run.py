"""Trains on two processes and writes what each rank did: ``throughput_run.py FOLDER``, run by test_throughput.py."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import DATA, run_method

from workbench.callbacks import throughput
from workbench.callbacks.throughput import Throughput
from workbench.methods.dpo import DPO
from workbench.methods.sft import SFT
from workbench.strategies.fsdp2 import FSDP2Strategy

JOBS = {
    "sft": {"kind": SFT, "rows": "messages.jsonl", "strategy": "ddp"},
    "dpo": {"kind": DPO, "rows": "preference.jsonl", "strategy": "fsdp2"},
}


def run_job(job, trainer):
    """Two steps of four rows, whose tokens are counted without padding: how they are dealt out changes no count."""
    data = {"train": str(DATA / job["rows"]), "batch_size": 4, "micro_batch_size": 2}
    run_method(job["kind"], data, {"layout": "packed"}, {"max_steps": 2, **trainer}, callbacks=[Throughput()])


def main(folder):
    """All jobs; what each rank hears of all goes to ``<job>-<rank>.json``."""
    original, heard = throughput.rates, []

    def kept(ranks, peak=None):
        heard.append([dataclasses.asdict(share) for share in ranks])
        return original(ranks, peak)

    throughput.rates = kept
    for name, job in JOBS.items():
        strategy = FSDP2Strategy() if job["strategy"] == "fsdp2" else job["strategy"]
        run_job(job, {"devices": 2, "strategy": strategy})
        Path(folder, f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(heard))
        heard.clear()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
