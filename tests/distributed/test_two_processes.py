"""Two real processes (gloo) follow the single one: DDP, FSDP2, DeepSpeed; resume across strategies and numbers of processes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from members import run as run_here
from support import DATA, assert_same_trajectory, deviation
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DATA_ARGS = {"shuffle": True, "train_on": "assistant", "micro_batch_size": 2, "eval": str(DATA / "messages.jsonl")}
TRAINER = {"max_steps": 20, "val_check_interval": 6}
BASE = {"data": DATA_ARGS, "trainer": TRAINER}
LORA = {"data": DATA_ARGS, "trainer": {"max_steps": 8}, "method": {"peft": {"r": 4, "alpha": 8}}}
# Traced and differentiated as by inductor, around the hooks of DDP and FSDP2, but not turned into C++.
COMPILED = {"data": DATA_ARGS, "trainer": {"max_steps": 3}, "method": {"torch_compile": {"backend": "aot_eager"}}}
UNEVEN = {"data": {**DATA_ARGS, "micro_batch_size": 1, "batch_size": 7}, "trainer": {"max_steps": 14}}


def launch(folder: Path, jobs: list[dict]) -> None:
    """Runs ``jobs`` on two processes."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = Path(__file__).with_name("members.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(script), str(folder), str(path)], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """All jobs: first on one process, then on two, then what one process makes of two processes' checkpoints."""
    folder = tmp_path_factory.mktemp("members")
    for job in (
        {"name": "one", "save": [7], **BASE},
        {"name": "one-lora", **LORA},
        {"name": "one-uneven", **UNEVEN},
    ):
        run_here(job, folder)
    launch(
        folder,
        [
            {"name": "ddp", "strategy": "ddp", "save": [1, 12], **BASE},
            {"name": "fsdp2", "strategy": "fsdp2", "save": [7, 13], "export": True, **BASE},
            {"name": "fsdp2-from-one", "strategy": "fsdp2", "checkpoint": str(folder / "one/7.ckpt"), **BASE},
            {"name": "ddp-from-fsdp2", "strategy": "ddp", "checkpoint": str(folder / "fsdp2/7.ckpt"), **BASE},
            {"name": "fsdp2-from-ddp", "strategy": "fsdp2", "checkpoint": str(folder / "ddp/12.ckpt"), **BASE},
            {"name": "ddp-lora", "strategy": "ddp", "save": [5], **LORA},
            {"name": "fsdp2-lora", "strategy": "fsdp2", "save": [5], "export": True, **LORA},
            {"name": "fsdp2-offloaded", "strategy": "fsdp2", **LORA, "method": {**LORA["method"], "activation_offloading": True}},
            {"name": "fsdp2-lora-resumed", "strategy": "fsdp2", "checkpoint": str(folder / "ddp-lora/5.ckpt"), **LORA},
            {"name": "ddp-uneven", "strategy": "ddp", **UNEVEN},
            *({**COMPILED, "name": f"{s}-compiled", "strategy": s} for s in ("ddp", "fsdp2")),
            {"name": "ddp-stream", "strategy": "ddp", **UNEVEN, "data": {**UNEVEN["data"], "streaming": True}},
        ],
    )
    run_here({"name": "one-from-fsdp2", "checkpoint": str(folder / "fsdp2/13.ckpt"), **BASE}, folder)
    run_here({"name": "one-from-ddp", "checkpoint": str(folder / "ddp/1.ckpt"), **BASE}, folder)
    run_here({"name": "one-stream", **UNEVEN, "data": {**UNEVEN["data"], "streaming": True}}, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "base", "first"),
    [
        ("ddp", "one", 0),
        ("fsdp2", "one", 0),
        ("fsdp2-from-one", "one", 7),
        ("ddp-from-fsdp2", "one", 7),
        ("fsdp2-from-ddp", "one", 12),
        ("one-from-fsdp2", "one", 13),
        ("one-from-ddp", "one", 1),
        ("ddp-lora", "one-lora", 0),
        ("fsdp2-lora", "one-lora", 0),
        ("fsdp2-offloaded", "one-lora", 0),
        ("fsdp2-lora-resumed", "one-lora", 5),
        ("ddp-uneven", "one-uneven", 0),
        ("ddp-stream", "one-stream", 0),
    ],
)
def test_same_trajectory(results, name, base, first):
    assert_same_trajectory(read(results, name)["steps"], read(results, base)["steps"][first:])


@pytest.mark.parametrize("name", ["ddp-compiled", "fsdp2-compiled"])
def test_compiled_layers_follow_one_process_without(results, name):
    assert_same_trajectory(read(results, name)["steps"], read(results, "one")["steps"][:3], tolerance=1e-6)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_same_evaluation(results, name):
    ours, theirs = read(results, name)["validation"], read(results, "one")["validation"]
    assert ours.keys() == theirs.keys() >= {"val/loss", "val/mean_token_accuracy"}
    assert all(ours[k] == pytest.approx(theirs[k], rel=1e-5) for k in ours)


def test_sharded_weights_are_saved_whole(results):
    saved = torch.load(results / "fsdp2/13.ckpt", weights_only=True)["state_dict"]
    model = AutoModelForCausalLM.from_pretrained(results / "fsdp2-model")
    assert {n.removeprefix("policy.hf."): tuple(t.shape) for n, t in saved.items()} == {
        n: tuple(t.shape) for n, t in model.state_dict().items()
    }
    assert (results / "fsdp2-lora-model/adapter_config.json").exists()


def test_adapter_checkpoints_hold_no_base_weights_under_any_strategy(results):
    for name in ("ddp-lora", "fsdp2-lora"):
        saved = torch.load(results / name / "5.ckpt", weights_only=True)["state_dict"]
        assert saved
        assert all("lora_" in key for key in saved)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_steps_as_far_as_one_process(tmp_path):
    """SGD with K = 4 shows a loss divided once too often, which Adam would hide."""
    job = {"data": {"micro_batch_size": 1, "shuffle": True}, "method": {"optim": "sgd"}, "trainer": {"max_steps": 8}}
    run_here({"name": "one", **job}, tmp_path)
    # DeepSpeed's engine keeps state in the process: a launch for each run.
    launch(tmp_path, [{"name": "zero1", "strategy": "deepspeed1", **job}])
    launch(tmp_path, [{"name": "zero2", "strategy": "deepspeed2", "save": [3], **job}])
    launch(tmp_path, [{"name": "resumed", "strategy": "deepspeed2", "checkpoint": str(tmp_path / "zero2/3.ckpt"), **job}])
    one = read(tmp_path, "one")["steps"]
    for name in ("zero1", "zero2"):
        assert_same_trajectory(read(tmp_path, name)["steps"], one)
    assert deviation(read(tmp_path, "resumed")["steps"], one[3:], "train/loss") <= 1e-5
