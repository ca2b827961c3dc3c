"""What an online method writes depends on seed, window, prompt and sample alone: not on processes, micro-batches or resuming."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from online_members import run_online
from support import DATA

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 10  # windows begin at steps 1, 5 and 9
REWARDS = [f"workbench.invariants.rewards:{name}" for name in ("letters", "ending")]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "stop": ["e"], "max_completion_length": 10}
METHOD = {
    **SAMPLED,
    "rewards": REWARDS,
    "num_generations": 4,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "beta": 0.1,
    "log_completions_every_n_steps": 0,
}
DATA_ARGS = {"train": str(DATA / "prompt.jsonl"), "shuffle": True, "micro_batch_size": 2}
GRPO = {"kind": "grpo:GRPO", "method": {**METHOD, "epsilon": 0.05}, "data": DATA_ARGS, "trainer": {"max_steps": STEPS}}
RLOO = {**GRPO, "kind": "rloo:RLOO", "method": METHOD}
BASE = {"grpo": GRPO, "rloo": RLOO}
EXACT = ("lr", "num_tokens", "reward", "completions/mean_length")
SIGNED = ("loss", "grad_norm", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "kl")  # a loss cancels: near 0 at first
NOT_THE_RUNS = ("train/tokens_per_second",)


def start(folder: Path, jobs: list[dict], processes: int) -> subprocess.CompletedProcess:
    path = folder / f"jobs-{processes}.json"
    path.write_text(json.dumps(jobs))
    command = [sys.executable] + ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] * (
        processes > 1
    )
    script = Path(__file__).with_name("online_members.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, str(script), str(folder), str(path)], capture_output=True, text=True, env=env, check=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("online")
    for name, job in BASE.items():
        run_online({**job, "name": name, "save": list(range(1, STEPS))}, folder)
    on_two = [
        {**job, "name": f"{name}-{strategy}", "strategy": strategy, "save": [3, 4]}
        for name, job in BASE.items()
        for strategy in ("ddp", "fsdp2")
    ]
    on_two += [
        {**GRPO, "name": f"two-from-one-{step}", "strategy": "fsdp2", "checkpoint": str(folder / f"grpo/{step}.ckpt")}
        for step in (3, 4)
    ]
    done = start(folder, on_two, 2)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def completions(folder, name):
    return json.loads((folder / f"{name}-completions.json").read_text())


def steps(folder, name):
    rows = json.loads((folder / f"{name}.json").read_text())["steps"]
    return [{key: value for key, value in row.items() if key not in NOT_THE_RUNS} for row in rows]


def assert_follows(folder, ours, theirs, after=0):
    """The same completions, token by token, and the same trajectory after a step."""
    found, whole = completions(folder, ours), completions(folder, theirs)
    assert found == {key: whole[key] for key in found}
    windows = {int(key.split()[0]) for key in found}
    assert windows == set(range(after // 4, 3))
    a, b = steps(folder, ours), steps(folder, theirs)[after:]
    for name in EXACT + SIGNED:
        values = [[step.get(f"train/{name}", 0.0) for step in run] for run in (a, b)]
        rounding = {"rel": 0, "abs": 0} if name in EXACT else {"rel": 1e-5, "abs": 1e-5}
        assert values[0] == pytest.approx(values[1], **rounding), name


def test_runs_bind(results):
    """Ratios leave their bounds on both sides, completions have unequal lengths, groups are not written twice."""
    for name in BASE:
        run = steps(results, name)
        assert max(step["train/clip_ratio/low_mean"] for step in run) > 0
        assert max(step["train/clip_ratio/high_mean"] for step in run) > 0
        written = completions(results, name)
        assert len({len(tokens) for tokens in written.values()}) > 3
        assert len({tuple(tokens) for tokens in written.values()}) > 0.9 * len(written)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", BASE)
def test_two_processes_write_and_learn_what_one_does(results, name, strategy):
    assert_follows(results, f"{name}-{strategy}", name)


@pytest.mark.parametrize("size", [1, 4, 8])
def test_micro_batches_change_nothing(results, size):
    name = f"grpo-micro-{size}"
    run_online({**GRPO, "name": name, "data": {**DATA_ARGS, "micro_batch_size": size}}, results)
    assert_follows(results, name, "grpo")


@pytest.mark.parametrize("name", BASE)
@pytest.mark.parametrize("step", range(1, STEPS))
def test_resumed_at_any_step_the_run_is_the_same_to_the_last_bit(results, name, step):
    resumed = f"{name}-from-{step}"
    run_online({**BASE[name], "name": resumed, "checkpoint": str(results / f"{name}/{step}.ckpt")}, results)
    assert_follows(results, resumed, name, step)
    assert steps(results, resumed) == steps(results, name)[step:]


@pytest.mark.parametrize("step", [3, 4])
def test_checkpoints_of_one_process_go_on_on_two_and_back(results, step):
    assert_follows(results, f"two-from-one-{step}", "grpo", step)
    back = f"one-from-two-{step}"
    run_online({**GRPO, "name": back, "checkpoint": str(results / f"grpo-fsdp2/{step}.ckpt")}, results)
    assert_follows(results, back, "grpo", step)


def test_a_killed_run_goes_on_as_if_nothing_had_been(results):
    """SIGKILL in the middle of step 7, within a window; what is left is the checkpoint of step 6."""
    done = start(results, [{**GRPO, "name": "killed", "save": [2, 6], "kill_at": 7}], 1)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert not (results / "killed.json").exists()
    run_online({**GRPO, "name": "revived", "checkpoint": str(results / "killed/6.ckpt")}, results)
    assert_follows(results, "revived", "grpo", 6)
    assert steps(results, "revived") == steps(results, "grpo")[6:]
