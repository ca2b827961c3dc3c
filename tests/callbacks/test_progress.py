"""One bar in optimizer steps, whose total is right and whose output stays small."""

import importlib.util
import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from small_run import SmallModule, trainer

from workbench.callbacks import progress
from workbench.callbacks.checkpoint import Checkpoint, resolve_checkpoint
from workbench.callbacks.progress import Lines, State, StepProgress, phase
from workbench.errors import UserError

BAR = {"enable_progress_bar": True}


@pytest.fixture
def shown(monkeypatch):
    """Every state that would be shown, without limits in time."""

    class Recorder:
        interval = 0.0
        closed = 0

        def __init__(self):
            self.states = []

        def show(self, state):
            self.states.append(State(**{**vars(state), "values": dict(state.values)}))

        def close(self):
            self.closed += 1

    recorder = Recorder()
    monkeypatch.setattr(progress, "_display", lambda style, seconds: recorder)
    return recorder


@pytest.mark.parametrize(
    ("options", "module", "total"),
    [
        ({}, {}, 8),
        ({"max_steps": 5}, {}, 5),
        ({"max_steps": 100, "max_epochs": 2}, {}, 8),
        ({"max_epochs": 3, "accumulate_grad_batches": 4}, {"accumulate": 4, "steps": 3}, 9),
        ({"limit_train_batches": 4}, {}, 4),
    ],
)
def test_it_counts_optimizer_steps(tmp_path, shown, options, module, total):
    trainer(tmp_path, StepProgress(), **BAR, **options).fit(SmallModule(**module))
    assert {s.total for s in shown.states} == {total}
    counted = [s.step for s in shown.states if not s.phase]
    assert sorted(set(counted)) == list(range(total + 1)) and counted == sorted(counted)
    assert shown.closed == 1


def test_a_resumed_run_starts_where_it_continues(tmp_path, shown):
    trainer(tmp_path, Checkpoint(every_n_steps=1, keep=None), max_steps=3).fit(SmallModule())
    path = resolve_checkpoint("last", tmp_path)
    trainer(tmp_path, StepProgress(), Checkpoint(), **BAR).fit(SmallModule(), ckpt_path=path)
    steps = [s.step for s in shown.states]
    assert (min(steps), max(steps)) == (3, 8) and {s.total for s in shown.states} == {8}


def test_the_time_that_remains_is_of_this_session(tmp_path, shown, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    trainer(tmp_path, Checkpoint(every_n_steps=1), max_steps=4).fit(SmallModule())
    module = SmallModule(on_batch=lambda *_: clock.__setitem__(0, clock[0] + 5))  # 10 seconds per step
    run = trainer(tmp_path, StepProgress(), **BAR, limit_val_batches=0)
    run.fit(module, ckpt_path=resolve_checkpoint("last", tmp_path))
    remaining = {s.step: s.remaining for s in shown.states}
    assert remaining == {4: None, 5: 30.0, 6: 20.0, 7: 10.0, 8: 0.0}


def test_phases_are_visible(tmp_path, shown):
    class Generating(Callback):
        def on_train_batch_start(self, run, module, batch, batch_idx):
            if batch_idx == 2:
                with phase(run, "generating") as report:
                    report(64, 128)

    trainer(tmp_path, StepProgress(), Generating(), Checkpoint(), max_epochs=1, **BAR).fit(SmallModule())
    phases = [(s.step, s.phase) for s in shown.states if s.phase]
    assert phases == [
        (1, "generating"),
        (1, "generating 64/128"),
        (4, "validating"),
        (4, "validating 1/2"),
        (4, "validating 2/2"),
        (4, "saving"),
    ]


def test_what_is_shown(tmp_path, shown):
    trainer(tmp_path, StepProgress(), **BAR).fit(SmallModule())
    assert list(shown.states[-1].values) == ["train/loss", "train/grad_norm", "val/loss"]
    assert shown.states[-1].values["val/loss"] == 2.0
    trainer(tmp_path, StepProgress(metrics=["val/accuracy", "absent"]), **BAR).fit(SmallModule())
    assert shown.states[-1].values == {"val/accuracy": -2.0}


def test_the_reward_comes_before_the_loss():
    values = {"train/reward": 0.25, "train/loss": 1e-9, "train/tokens_per_second": 123456.0, "val/loss": 2.0}
    state = State(step=120, total=500, values=values, phase="generating", elapsed=65, remaining=3700)
    assert state.info() == "reward 0.25  loss 1e-09  tok/s 123k  val/loss 2  1:05 +1:01:40  generating"
    assert state.counter() == "step 120/500" and State(step=3).counter() == "step 3"


def test_a_validation_outside_training(tmp_path, shown):
    trainer(tmp_path, StepProgress(), **BAR).validate(SmallModule(), verbose=False)
    assert [s.phase for s in shown.states] == ["", "validating", "validating 1/2", "validating 2/2", ""]
    assert shown.states[-1].counter() == "evaluation" and "val/loss" in shown.states[-1].info() and shown.closed == 1


def test_an_error_ends_the_display(tmp_path, shown):
    def fail(module, index):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        trainer(tmp_path, StepProgress(), **BAR).fit(SmallModule(on_batch=fail))
    assert shown.closed == 1


def test_off_and_other_processes_show_nothing(tmp_path, shown):
    trainer(tmp_path, StepProgress("off"), **BAR).fit(SmallModule())
    bar = StepProgress()
    bar.disable()
    trainer(tmp_path, bar, **BAR).fit(SmallModule())
    assert not shown.states
    with pytest.raises(UserError, match="Allowed: auto, bar, notebook, lines, off"):
        StepProgress("fancy")


def test_phase_without_a_bar(tmp_path):
    run = trainer(tmp_path)
    with phase(run, "generating") as report:
        report(1, 2)


def _fast(module_steps=500):
    return SmallModule(accumulate=2, steps=module_steps, val_batches=1)


@pytest.mark.parametrize(("seconds", "most"), [(10.0, 8), (0.0, 520)])
def test_without_a_terminal_it_is_lines_every_so_often(tmp_path, capsys, seconds, most):
    trainer(tmp_path, StepProgress("lines", log_seconds=seconds), max_epochs=1, **BAR).fit(_fast())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert 2 <= len(lines) <= most and sum(map(len, lines)) < 100_000
    assert re.match(r"step 1/500 \(0%\)  loss [\d.e-]+  grad_norm [\d.e-]+  0:0\d \+0:\d\d$", lines[0])
    assert lines[-1].startswith("step 500/500 (100%)") and "\r" not in "".join(lines)


def test_auto_is_lines_where_nothing_is_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(progress._display("auto", 3.0), Lines)


_TERMINAL = """
import sys
sys.path.insert(0, sys.argv[1])
from small_run import SmallModule, trainer
from workbench.callbacks.progress import StepProgress
module = SmallModule(steps=500, on_batch=lambda m, i: print("hello from step 250") if i == 500 else None)
trainer(sys.argv[2], StepProgress(), max_epochs=1, enable_progress_bar=True).fit(module)
"""


@pytest.mark.slow
def test_in_a_terminal_it_is_one_bar(tmp_path):
    """On a real pseudo-terminal: little output, prints of others intact and above the bar."""
    parent, child = pty.openpty()
    here = Path(__file__).parent
    environment = dict(os.environ, COLUMNS="120", TERM="xterm", OMP_NUM_THREADS="1", PYTHONPATH=str(here.parents[1]))
    command = [sys.executable, "-c", _TERMINAL, str(here), str(tmp_path)]
    process = subprocess.Popen(command, stdout=child, stderr=child, stdin=child, env=environment)
    os.close(child)
    output = b""
    while True:
        try:
            data = os.read(parent, 65536)
        except OSError:  # The other end is closed.
            break
        if not data:
            break
        output += data
    assert process.wait() == 0, output.decode()
    text = output.decode()
    assert len(output) < 100_000 and "step 500/500" in text and text.count("hello from step 250") == 1


_NOTEBOOK = """
import sys
sys.path[:0] = [{here!r}, {root!r}]
from small_run import SmallModule, trainer
from workbench.callbacks.progress import StepProgress
bar = StepProgress()
trainer({folder!r}, bar, max_epochs=1, enable_progress_bar=True).fit(SmallModule(steps=500))
type(bar).__name__
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason="needs the notebooks extra")
def test_in_a_notebook_it_is_one_small_output(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    here = Path(__file__).parent
    code = _NOTEBOOK.format(here=str(here), root=str(here.parents[1]), folder=str(tmp_path))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    bars = [o for o in outputs if "text/html" in o.get("data", {})]
    assert len(bars) == 1 and "step 500/500" in bars[0]["data"]["text/html"]
    assert len(json.dumps(outputs)) < 100_000


def test_lightning_does_not_add_its_own(tmp_path):
    run = trainer(tmp_path, StepProgress("off"), **BAR)
    assert [c for c in run.callbacks if isinstance(c, L.pytorch.callbacks.ProgressBar)] == [run.progress_bar_callback]
