"""Reward models on two real processes (gloo) follow the single one: DDP, FSDP2, an adapter with its head, resume across them."""

import pytest
from members import run as run_here
from support import DATA
from test_two_processes import launch, read

from workbench.models.heads import load_classifier
from workbench.models.scoring import score
from workbench.models.tokenizer import load_tokenizer
from workbench.tiny.tasks import make_rows

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# 7 rows in micro-batches of 1 on two processes: one of them has an empty micro-batch in every step.
PAIRS = {"train": str(DATA / "preference.jsonl"), "eval": str(DATA / "preference.jsonl")}
STEPWISE = make_rows("sort", "stepwise_supervision", 40)
SHAPE = {"shuffle": True, "micro_batch_size": 1, "batch_size": 7}
TRAINER = {"max_steps": 5, "val_check_interval": 5}
REWARD = {
    "kind": "reward:Reward",
    "data": {**SHAPE, **PAIRS},
    "method": {"center_rewards_coefficient": 0.1},
    "trainer": TRAINER,
}
LORA = {**REWARD, "method": {"peft": {"r": 4, "alpha": 8}}}
PRM = {"kind": "prm:PRM", "data": {**SHAPE, "train": STEPWISE, "eval": STEPWISE}, "trainer": TRAINER}
BASE = {"reward": REWARD, "reward-lora": LORA, "prm": PRM}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    for name, job in BASE.items():
        run_here({**job, "name": name, "save": [2], "export": True}, folder)
    jobs = [{**job, "name": f"{name}-{s}", "strategy": s, "export": True} for name, job in BASE.items() for s in ("ddp", "fsdp2")]
    resumed = {**LORA, "name": "reward-lora-resumed", "strategy": "fsdp2", "checkpoint": str(folder / "reward-lora/2.ckpt")}
    launch(folder, [*jobs, resumed])
    return folder


def assert_same(folder, ours, theirs, first=0):
    ours, theirs = read(folder, ours), read(folder, theirs)
    steps = theirs["steps"][first:]
    assert len(ours["steps"]) == len(steps)
    for a, b in zip(ours["steps"], steps, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"train/tokens_per_second"}:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name
    assert ours["validation"] == pytest.approx(theirs["validation"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", BASE)
def test_two_processes_follow_one(results, name, strategy):
    assert_same(results, f"{name}-{strategy}", name)


def test_an_adapter_resumes_sharded(results):
    assert_same(results, "reward-lora-resumed", "reward-lora", first=2)


@pytest.mark.parametrize("name", ["reward", "reward-lora"])
def test_sharded_models_are_saved_whole(results, name):
    rows = [{"text": "The river counts the lantern."}, {"text": "A violin."}]
    whole, sharded = (str(results / f"{run}-model") for run in (name, f"{name}-fsdp2"))
    tokenizer = load_tokenizer(whole)
    found = [score(load_classifier(folder, seed=9), tokenizer, rows) for folder in (whole, sharded)]
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-5)
