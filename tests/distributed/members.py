"""Runs a list of jobs on every process of a torchrun launch: ``members.py <folder> <jobs.json>``.

A job is ``{name, kind, strategy, data, method, trainer, save, checkpoint}``, where ``kind`` is the method's class as
``module:name`` under ``workbench.methods`` (SFT if left out); its steps go to ``<folder>/<name>.json``.
"""

import functools
import importlib
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from support import SaveAt, run_method, run_sft


def strategy_of(name):
    if name.startswith("deepspeed"):
        from workbench.invariants.deepspeed_cpu import DeepSpeedOnCPU

        return DeepSpeedOnCPU(int(name[-1]))
    if name == "fsdp2":
        from workbench.strategies.fsdp2 import FSDP2Strategy

        return FSDP2Strategy()
    return name


def sgd(params, lr=0.5):
    return torch.optim.SGD(params, lr=lr)


def run(job, folder, callbacks=()):
    from workbench.models.peft import PeftSpec

    method = dict(job.get("method", {}))
    if method.get("optim") == "sgd":
        method["optim"] = sgd
    if "peft" in method:
        method["peft"] = PeftSpec(**method["peft"])
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = {"devices": devices, **job.get("trainer", {})}
    if devices > 1:
        trainer["strategy"] = strategy_of(job["strategy"])
    saves = [SaveAt(folder / job["name"], job["save"])] if "save" in job else []
    go = run_sft
    if "kind" in job:
        module, _, name = job["kind"].partition(":")
        go = functools.partial(run_method, getattr(importlib.import_module(f"workbench.methods.{module}"), name))
    steps, module, fit = go(job.get("data"), method, trainer, checkpoint=job.get("checkpoint"), callbacks=[*saves, *callbacks])
    if job.get("export"):
        module.save_pretrained(folder / f"{job['name']}-model")
    if fit.is_global_zero:
        values = {k: float(v) for k, v in fit.callback_metrics.items() if k.startswith("val")}
        (folder / f"{job['name']}.json").write_text(json.dumps({"steps": steps, "validation": values}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    for entry in json.loads(Path(sys.argv[2]).read_text()):
        run(entry, target)
