"""A run killed without warning goes on from its last checkpoint as if nothing had happened (command line, real processes)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

RUN = [
    "train",
    "data.batch_size=16",
    "data.train={path: tiny:sums, kwargs: {size: 200}}",
    "data.eval=null",
    "model.init_kwargs={size: pico}",
    "trainer.max_steps=20",
    "exact_match=0",
    "save_model=false",
    "logger=csv",
    "callbacks.checkpoint.every_n_steps=1",
    "callbacks.checkpoint.keep=null",
]


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "workbench", *RUN, f"paths.run_dir={folder}", *overrides]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


def history(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "metrics.csv").dropna(subset=["train/loss"]).set_index("step")


@pytest.mark.slow
def test_killed_at_steps_1_7_and_13(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(whole).returncode == 0
    resume: list[str] = []
    for step, rows in ((1, 16), (7, 8), (13, 4)):
        kill = f"+callbacks.kill={{_target_: kill_at.KillAt, step: {step}}}"
        done = run(broken, *resume, kill, f"data.micro_batch_size={rows}")
        assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
        resume = [f"resume={broken}"]
    done = run(broken, *resume, "callbacks.kill=null", "data.micro_batch_size=2")  # a resume repeats what was typed before
    assert done.returncode == 0, done.stderr[-2000:]
    expected, actual = history(whole), history(broken)
    assert actual.index.tolist() == expected.index.tolist() == list(range(1, 21))
    for name in ("train/loss", "train/grad_norm", "train/lr", "train/num_tokens"):
        assert ((actual[name] - expected[name]).abs() / expected[name].abs()).max() <= 1e-5, name
