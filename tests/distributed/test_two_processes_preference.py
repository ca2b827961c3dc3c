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
LABELLED = {"train": str(DATA / "unpaired.jsonl"), "eval": str(DATA / "unpaired.jsonl")}
KTO = {**DPO, "kind": "kto:KTO", "data": {**PAIRS, **LABELLED}, "method": {"beta": 0.3}}
KTO_LORA = {**KTO, "method": LORA["method"]}
KTO_STREAM = {**KTO, "data": {**KTO["data"], "streaming": True}, "trainer": {"max_steps": 6, "val_check_interval": 3}}
BCO = {**KTO, "kind": "bco:BCO", "method": {"beta": 0.3, "use_udm": True}}
BASE = {
    "dpo": DPO,
    "dpo-moving": MOVING,
    "dpo-lora": LORA,
    "cpo": CPO,
    "kto": KTO,
    "kto-lora": KTO_LORA,
    "kto-stream": KTO_STREAM,
    "bco": BCO,
}
# Every method and DDP meet in the invariant suite; here DDP stands for evaluation and streams on two processes.
PAIRED = [*((name, "fsdp2") for name in BASE), ("dpo", "ddp"), ("kto-stream", "ddp")]
SIGNED = ("rewards/chosen", "rewards/margins", "logps/chosen", "kl", "delta", "count/rejected")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Every job on one process, then on two, each writing and reading checkpoints of the other."""
    folder = tmp_path_factory.mktemp("preference")
    for name, job in BASE.items():
        run_here({**job, "name": name, "save": [3]}, folder)
    stored, fsdp2 = {**DPO["method"], "precompute_ref_logps": True}, {"strategy": "fsdp2"}
    launch(
        folder,
        [
            *({**BASE[name], "name": f"{name}-{s}", "strategy": s, "save": [3]} for name, s in PAIRED),
            *(
                {**job, **fsdp2, "name": f"{name}-stored", "method": stored, "data": {**job["data"], "cache_dir": str(folder)}}
                for name, job, stored in (("dpo", DPO, stored), ("kto", KTO, {"beta": 0.3, "precompute_ref_logps": True}))
            ),
            {**MOVING, **fsdp2, "name": "moving-from-one", "checkpoint": str(folder / "dpo-moving/3.ckpt")},
            {**LORA, **fsdp2, "name": "lora-from-one", "checkpoint": str(folder / "dpo-lora/3.ckpt")},
            {**BCO, **fsdp2, "name": "bco-from-one", "checkpoint": str(folder / "bco/3.ckpt")},
        ],
    )
    run_here({**MOVING, "name": "moving-from-fsdp2", "checkpoint": str(folder / "dpo-moving-fsdp2/3.ckpt")}, folder)
    return folder


def assert_same(folder, ours, theirs, first=0):
    ours, theirs = read(folder, ours), read(folder, theirs)
    assert_same_trajectory(ours["steps"], theirs["steps"][first:])
    for name in SIGNED:  # those that the method has, where the step's rows give them a value
        values = [[s.get(f"train/{name}", 0.0) for s in run] for run in (ours["steps"], theirs["steps"][first:])]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-4), name
    assert ours["validation"] == pytest.approx(theirs["validation"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("name", "strategy"), PAIRED)
def test_two_processes_follow_one(results, name, strategy):
    assert_same(results, f"{name}-{strategy}", name)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_log_probabilities_of_a_sharded_reference_can_be_stored(results, name):
    assert_same(results, f"{name}-stored", name)


def test_labelled_runs_bind(results):
    """There is a baseline, a shift, and a step in which the two processes hold another number of rows."""
    assert max(s["train/kl"] for s in read(results, "kto")["steps"]) > 1
    assert abs(read(results, "bco")["steps"][-1]["train/delta"]) > 0.1


@pytest.mark.parametrize(
    ("resumed", "whole"),
    [
        ("moving-from-one", "dpo-moving"),
        ("lora-from-one", "dpo-lora"),
        ("moving-from-fsdp2", "dpo-moving"),
        ("bco-from-one", "bco"),
    ],
)
def test_runs_resume_on_another_number_of_processes(results, resumed, whole):
    """What has moved, a reference or a shift, goes through the checkpoint, whole."""
    assert_same(results, resumed, whole, first=3)
