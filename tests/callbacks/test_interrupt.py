"""Real signals: the first one saves and stops, the second aborts, and everything is as before afterwards."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback
from small_run import SmallModule, trainer

from workbench.callbacks.checkpoint import Checkpoint, resolve_checkpoint
from workbench.callbacks.interrupt import Aborted, GracefulStop
from workbench.data.loader import StepLoader

SCRIPT = Path(__file__).with_name("interrupted_run.py")


def _start(folder, devices=1, what=""):
    command = [sys.executable, str(SCRIPT), str(folder), str(devices), what]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(SCRIPT.parents[2]))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not (folder / "training").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    return process


def _finish(process):
    """What it printed; a step of a process that is stuck takes 600 seconds, much longer than is waited here."""
    try:
        return process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_saves_stops_and_tells_how_to_resume(tmp_path, number):
    process = _start(tmp_path)
    process.send_signal(number)
    out, err = _finish(process)
    assert process.returncode == 130, err
    assert "Stopping after this step" in err
    report, last = out.strip().splitlines()[-2:]
    step = int(last.split()[3])
    assert 3 <= step < 1000 and last == f"rank 0 step {step} interrupted True restored True"
    path = tmp_path / "checkpoints" / f"step-{step:06d}.ckpt"
    assert report == f"Interrupted after step {step}. To continue: resume={path}"
    assert resolve_checkpoint("last", tmp_path).samefile(path)


@pytest.mark.slow
def test_the_second_signal_aborts_within_a_step(tmp_path):
    process = _start(tmp_path, what="stuck")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    out, err = _finish(process)
    assert process.returncode == 130, err
    assert "aborted: aborted by a second SIGINT" in out and "interrupted True restored True" in out
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("to_group", [True, False])
def test_all_processes_stop_at_the_same_step(tmp_path, to_group):
    """Ctrl-C reaches every process of a terminal; a scheduler may send SIGTERM to one."""
    process = _start(tmp_path, devices=2)
    if to_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    out, err = _finish(process)
    assert process.returncode == 130, err
    ranks = sorted(re.findall(r"rank (\d) step (\d+) interrupted True restored True", out))
    step = int(ranks[0][1])
    assert ranks == [("0", str(step)), ("1", str(step))]
    assert os.listdir(tmp_path / "checkpoints") and resolve_checkpoint(step, tmp_path) is not None
    assert out.count("To continue") == 1


@pytest.mark.slow
@pytest.mark.distributed
def test_an_abort_leaves_no_process_behind(tmp_path):
    process = _start(tmp_path, devices=2, what="stuck")
    for _ in range(2):
        process.send_signal(signal.SIGTERM)  # To the first process alone; the other is asleep in a step.
        time.sleep(0.5)
    out, err = _finish(process)  # Returns once no process holds the pipes any more.
    assert process.returncode == 130, err
    assert "aborted by a second SIGTERM" in out


@pytest.mark.slow
@pytest.mark.distributed
def test_a_full_disk_ends_all_processes_with_the_same_line(tmp_path):
    process = _start(tmp_path, devices=2, what="full")
    out, err = _finish(process)
    assert process.returncode == 2, err
    failed = sorted(re.findall(r"rank (\d) failed at step (\d+): .*?No space left on device; it needs about", out))
    assert failed == [("0", "3"), ("1", "3")]
    assert os.listdir(tmp_path / "checkpoints") == []


class _Signal(Callback):
    """Sends signals to this process from within a hook, at given steps."""

    def __init__(self, hook, steps, number=signal.SIGINT):
        self.steps = list(steps)
        setattr(self, hook, self._send)
        self.number = number

    def _send(self, run, *args):
        if run.global_step in self.steps and not run.sanity_checking:
            self.steps.remove(run.global_step)
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_validation_start"])
@pytest.mark.parametrize("interval", [None, 4])
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path, hook, interval, capfd):
    options = {"val_check_interval": interval, "min_epochs": 2}
    whole = SmallModule()
    trainer(tmp_path / "a", Checkpoint(), **options).fit(whole)
    first, stop = SmallModule(), GracefulStop()
    run = trainer(tmp_path / "b", _Signal(hook, [4]), stop, Checkpoint(), **options)
    run.fit(first)
    assert stop.interrupted and run.state.finished
    saved = run.global_step
    assert saved == 5
    assert first.validated == [s for s in whole.validated if s <= 4]
    assert (run.limit_val_batches, run.fit_loop.min_epochs) == (1.0, 2)
    second = SmallModule()
    trainer(tmp_path / "b", GracefulStop(), Checkpoint(), **options).fit(
        second, ckpt_path=resolve_checkpoint("last", tmp_path / "b")
    )
    assert second.weights() == whole.weights() and first.trained + second.trained == whole.trained


def test_no_validation_before_the_stop(tmp_path, capfd):
    """Lightning would validate where it is told to stop, and here one is due as well."""
    module = SmallModule()
    trainer(tmp_path, _Signal("on_train_batch_start", [3]), GracefulStop(), Checkpoint()).fit(module)
    assert module.validated == [] and os.listdir(tmp_path / "checkpoints") and module.trainer.global_step == 4
    out, err = capfd.readouterr()
    assert "Interrupted after step 4. To continue: resume from" in out and "Once more aborts" in err


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_epoch_end"])
def test_a_signal_after_the_last_step_still_counts(tmp_path, hook, capfd):
    stop = GracefulStop()
    trainer(tmp_path, _Signal(hook, [8]), stop, Checkpoint()).fit(SmallModule())
    assert stop.interrupted


def test_in_a_notebook_nothing_is_raised_and_the_next_fit_works(tmp_path, capfd):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    stop = GracefulStop()
    run = trainer(tmp_path, _Signal("on_train_batch_start", [1]), stop, Checkpoint())
    run.fit(SmallModule())
    assert stop.interrupted and run.global_step == 2
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    again = trainer(tmp_path / "again", stop, Checkpoint())
    again.fit(SmallModule())
    assert not stop.interrupted and again.global_step == 8


_NOTEBOOK = """
import sys, time
sys.path[:0] = [{here!r}, {root!r}]
from pathlib import Path
from small_run import SmallModule, trainer
from workbench.callbacks.checkpoint import Checkpoint
from workbench.callbacks.interrupt import GracefulStop

def on_batch(module, index):
    Path({folder!r}, "training").touch()
    time.sleep(0.1)

stop = GracefulStop()
run = trainer({folder!r}, stop, Checkpoint(), max_epochs=50)
run.fit(SmallModule(steps=1000, on_batch=on_batch))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason="needs the notebooks extra")
def test_the_stop_button_of_a_real_notebook(tmp_path):
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    outputs = []
    try:
        code = _NOTEBOOK.format(here=str(SCRIPT.parent), root=str(SCRIPT.parents[2]), folder=str(tmp_path))

        def interrupt():
            while not (tmp_path / "training").exists():
                time.sleep(0.05)
            manager.interrupt_kernel()

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        reply = client.execute_interactive(code, timeout=120, output_hook=outputs.append)
        assert reply["content"]["status"] == "ok", reply
        again = "print('alive', stop.interrupted, run.global_step)"
        client.execute_interactive(again, timeout=60, output_hook=outputs.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    text = "".join(o["content"].get("text", "") for o in outputs)
    step = int(re.search(r"alive True (\d+)", text)[1])
    assert f"Interrupted after step {step}. To continue: resume from" in text
    assert resolve_checkpoint(step, tmp_path) is not None


def test_a_second_signal_raises_what_lightning_does_not_turn_into_an_exit(tmp_path, capfd):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    stop = GracefulStop()
    run = trainer(tmp_path, _Signal("on_before_backward", [1, 1], signal.SIGTERM), stop, Checkpoint())
    with pytest.raises(Aborted, match="second SIGTERM"):
        run.fit(SmallModule())
    assert stop.interrupted and run.global_step == 1 and not (tmp_path / "checkpoints").exists()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_error_in_training_restores_the_handlers(tmp_path):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    def fail(module, index):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        trainer(tmp_path, GracefulStop()).fit(SmallModule(on_batch=fail))
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_without_a_checkpoint_callback_it_says_so(tmp_path, capfd):
    trainer(tmp_path, _Signal("on_train_batch_start", [1]), GracefulStop()).fit(SmallModule())
    assert "Interrupted after step 2; nothing was saved" in capfd.readouterr().out


def test_loader_workers_outlive_ctrl_c():
    """The terminal sends it to them as well; without them the step under way could not be finished."""
    loader = StepLoader(list(range(200)), batch_size=None, num_workers=2)
    items = iter(loader)
    first = [next(items), next(items)]  # One of each worker: both are up.
    for worker in items._workers:
        os.kill(worker.pid, signal.SIGINT)
    assert first + list(items) == list(range(200))


def test_off_the_main_thread_it_does_nothing(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def fit():
        run = trainer(tmp_path, GracefulStop(), max_epochs=1)
        run.fit(SmallModule(on_batch=lambda *_: seen.append(signal.getsignal(signal.SIGINT))))

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert set(seen) == {before}
