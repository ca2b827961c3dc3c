"""The default path gives the same bits run to run: ``workbench train method=...`` on the nano model, only its length set."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from workbench.invariants import execute
from workbench.invariants.trajectory import Trajectory, parameter_marks, plain_name
from workbench.loggers.csv import read_history

METHODS = ["sft", "dpo", pytest.param("grpo", marks=pytest.mark.slow)]  # whose nano model is trained beforehand, once a session
STEPS = 3


def default_path(method):
    return [f"method={method}", f"trainer.max_steps={STEPS}"]


def assert_trained(trajectory):
    """Guards against a comparison of nothing with nothing."""
    norms = trajectory.steps["grad_norm"][-STEPS:]
    assert len(norms) == STEPS and all(norm > 0 for norm in norms)


@pytest.mark.parametrize("method", METHODS)
def test_twice_in_one_process(tmp_path, method):
    runs = []
    for name in ("first", "second"):
        torch.manual_seed(len(runs))  # what the process drew before is of no meaning
        torch.rand(len(runs))
        runs.append(execute.run_here(default_path(method), tmp_path / name, tmp_path / "cache").to_dict())
    first, second = runs
    assert_trained(Trajectory.from_dict(first))
    assert len(first["hashes"]) == 2 and (method == "grpo") == bool(first.get("completions"))
    assert first == second  # losses, norms, rows, completions and the weights' hashes


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_by_two_commands_and_in_this_process(tmp_path, method):
    """Each command prepares its rows anew, in a process whose sets and dictionaries of strings have another order."""
    started = {seed: _start(method, tmp_path / seed, seed) for seed in ("1", "2")}
    for process in started.values():
        assert process.wait(timeout=300) == 0
    first, second = (_read(tmp_path / seed / "run") for seed in started)
    assert_trained(first[0])
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys() and all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    here = execute.run_here(default_path(method), tmp_path / "here", tmp_path / "1" / "cache")
    saved = {plain_name(name): weights for name, weights in first[1].items()}
    assert {name: parameter_marks(name, weights) for name, weights in saved.items()} == here.parameters


def _start(method, folder, seed):
    folder.mkdir()
    command = [sys.executable, "-m", "workbench", "train", *default_path(method)]
    command += [f"paths.run_dir={folder / 'run'}", f"paths.cache_dir={folder / 'cache'}"]
    environment = {**os.environ, "PYTHONHASHSEED": seed, "TRACKIO_DIR": str(folder / "trackio")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def _read(folder):
    """Metrics as they were logged, and the saved model."""
    weights = {name: tensor for file in (folder / "model").glob("*.safetensors") for name, tensor in load_file(file).items()}
    return Trajectory.of_metrics(read_history(folder).to_dict("records")), weights
