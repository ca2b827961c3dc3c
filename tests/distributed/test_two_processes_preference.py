"""Preference methods on two real processes (gloo) follow the single one: DDP, FSDP2, resume across them."""

import pytest
from members import run as run_here
from support import DATA, assert_same_trajectory
from test_two_processes import launch, read

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# 7 pairs in micro-batches of 1 on two processes: one of them has an empty micro-batch in every step.
PAIRS = {"train": str(DATA / "preference.jsonl"), "shuffle": True, "micro_batch_size": 1, "batch_size": 7}
TRAINER = {"max_steps": 6, "val_check_interval": 3}
DPO = {
    "kind": "dpo:DPO",
    "data": {**PAIRS, "eval": str(DATA / "preference.jsonl")},
    "method": {"beta": 0.3, "loss": ["sigmoid", "sft"]},
    "trainer": TRAINER,
}
MOVING = {**DPO, "method": {"beta": 0.3, "sync_ref_model": True, "ref_model_sync_steps": 2}}
LORA = {**DPO, "method": {"beta": 0.3, "peft": {"r": 4, "alpha": 8, "init_lora_weights": False}}}
CPO = {**DPO, "kind": "cpo:CPO", "method": {"beta": 0.3}}
BASE = {"dpo": DPO, "dpo-moving": MOVING, "dpo-lora": LORA, "cpo": CPO}
SIGNED = ("train/rewards/chosen", "train/rewards/margins", "train/logps/chosen")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Every job on one process, then on two, each writing and reading checkpoints of the other."""
    folder = tmp_path_factory.mktemp("preference")
    for name, job in BASE.items():
        run_here({**job, "name": name, "save": [3]}, folder)
    stored = {**DPO["method"], "precompute_ref_logps": True}
    launch(
        folder,
        [
            *({**job, "name": f"{name}-{s}", "strategy": s, "save": [3]} for name, job in BASE.items() for s in ("ddp", "fsdp2")),
            {
                **DPO,
                "name": "dpo-stored-fsdp2",
                "strategy": "fsdp2",
                "method": stored,
                "data": {**DPO["data"], "cache_dir": str(folder)},
            },
            {**MOVING, "name": "moving-from-one", "strategy": "fsdp2", "checkpoint": str(folder / "dpo-moving/3.ckpt")},
            {**LORA, "name": "lora-from-one", "strategy": "fsdp2", "checkpoint": str(folder / "dpo-lora/3.ckpt")},
        ],
    )
    run_here({**MOVING, "name": "moving-from-fsdp2", "checkpoint": str(folder / "dpo-moving-fsdp2/3.ckpt")}, folder)
    return folder


def assert_same(folder, ours, theirs, first=0):
    ours, theirs = read(folder, ours), read(folder, theirs)
    assert_same_trajectory(ours["steps"], theirs["steps"][first:])
    for name in SIGNED:
        values = [[s[name] for s in run] for run in (ours["steps"], theirs["steps"][first:])]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-4), name
    assert ours["validation"] == pytest.approx(theirs["validation"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", BASE)
def test_two_processes_follow_one(results, name, strategy):
    assert_same(results, f"{name}-{strategy}", name)


def test_log_probabilities_of_a_sharded_reference_can_be_stored(results):
    assert_same(results, "dpo-stored-fsdp2", "dpo")


@pytest.mark.parametrize(
    ("resumed", "whole"), [("moving-from-one", "dpo-moving"), ("lora-from-one", "dpo-lora"), ("moving-from-fsdp2", "dpo-moving")]
)
def test_runs_resume_on_another_number_of_processes(results, resumed, whole):
    """The moved reference goes through the checkpoint, whole."""
    assert_same(results, resumed, whole, first=3)
