"""A run killed without warning goes on from its last checkpoint as if nothing had happened (command line, real processes)."""

import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest

RUN = [
    *(
        "train",
        "data.batch_size=16",
        "trainer.max_steps=20",
        "exact_match=0",
        "save_model=false",
        "logger=csv",
        "callbacks=default",
    ),
    *(
        "callbacks.checkpoint.every_n_steps=1",
        "callbacks.checkpoint.keep=null",
        "data.train={path: tiny:sums, kwargs: {size: 200}}",
    ),
    *("data.eval=null", "model=tiny", "model.init_kwargs={size: pico}"),
]


def start(folder, *overrides):
    command = [sys.executable, "-m", "workbench", *RUN, f"paths.run_dir={folder}", *overrides]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    return output


def history(folder):
    frame = pd.read_csv(folder / "metrics.csv")
    return frame.dropna(subset=["train/loss"]).drop_duplicates("step", keep="last").set_index("step")


@pytest.mark.slow
def test_killed_at_steps_1_7_and_13(tmp_path):
    whole = start(tmp_path / "whole")
    broken = start(tmp_path / "broken")
    finish(whole)
    for step in (1, 7, 13):
        wait_for(tmp_path / f"broken/checkpoints/step-{step:06d}.ckpt", broken)
        broken.send_signal(signal.SIGKILL)
        broken.communicate()
        assert broken.returncode == -signal.SIGKILL
        # Whatever was written after that step is as if it had never been.
        for later in (tmp_path / "broken/checkpoints").glob("step-*.ckpt"):
            if int(later.stem[5:]) > step:
                later.unlink()
        broken = start(tmp_path / "broken", f"resume={step}", f"data.micro_batch_size={(16, 8, 4)[(1, 7, 13).index(step)]}")
    finish(broken)
    expected, actual = history(tmp_path / "whole"), history(tmp_path / "broken")
    # A step's row is written after its checkpoint: the kill may come between the two.
    assert set(range(1, 21)) - set(actual.index) <= {1, 7, 13}
    expected = expected.loc[actual.index]
    for name in ("train/loss", "train/grad_norm", "train/lr", "train/num_tokens"):
        assert ((actual[name] - expected[name]).abs() / expected[name].abs()).max() <= 1e-5, name


def wait_for(path, process):
    deadline = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
