"""Memory that a step frees serves the next one."""

import subprocess
import sys

import lightning as L
import pytest

import workbench
from workbench.models import host_memory

FAULTS = """
import resource, sys, torch
from workbench.models.host_memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    print(-1); raise SystemExit
def step():
    return [torch.ones(2**20 * n) for n in (3, 9, 17)]
for _ in range(8):  # the heap takes some to settle
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    """Pages that three steps of 116 MiB had to have mapped, after eight of the same kind."""
    done = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone is told")
def test_a_step_maps_no_memory_that_the_one_before_had():
    kept = faults("keep")
    if kept < 0:
        pytest.skip("this C library has no mallopt")
    assert kept < 100 < faults("as it is") / 10


def test_it_begins_when_the_optimizer_has_its_states(monkeypatch, tmp_path):
    steps = []
    monkeypatch.setattr(host_memory, "keep_freed_memory", lambda: steps.append(trained["trainer"].global_step))
    trained = {}

    class Watch(L.Callback):
        def on_train_start(self, trainer, method):
            trained["trainer"] = trainer

    workbench.train(
        "method=sft", "model=tiny", "data=tiny", "data.batch_size=4", "data.micro_batch_size=2", "trainer.max_steps=3",
        "callbacks=none", "logger=none", "save_model=false", f"paths.run_dir={tmp_path}", callbacks=[Watch()],
    )  # fmt: skip
    assert steps == [1]


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(host_memory.sys, "platform", "darwin")
    assert not host_memory.keep_freed_memory()
