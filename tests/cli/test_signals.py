"""Ctrl-C and SIGTERM at every moment of a run, through the command itself."""

import contextlib
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import workbench
from workbench.callbacks import exact_match
from workbench.callbacks.checkpoint import Checkpoint
from workbench.cli import main
from workbench.data import module
from workbench.loggers.csv import read_history
from workbench.methods import base
from workbench.methods.sft import SFT

SMALL = [
    *("train", "model.init_kwargs={size: pico}", "trainer=cpu", "exact_match=4", "callbacks.samples=null", "logger=csv"),
    *("scheduler=constant", "trainer.max_steps=3", "trainer.val_check_interval=1", "data.batch_size=4", "paths.run_dir=run"),
    "data.train={path: tiny:sums, kwargs: {size: 16}}",
    "data.eval={path: tiny:sums, kwargs: {size: 4}}",
]
BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    yield tmp_path
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.fixture
def send():
    """Has this process get a signal, once or more, at the given call of a function within the block."""

    @contextlib.contextmanager
    def at(owner: object, name: str, number: int, call: int = 1, times: int = 1) -> Iterator[None]:
        original, calls = getattr(owner, name), []

        def wrapped(*args, **kwargs):
            calls.append(name)
            if len(calls) == call:
                for _ in range(times):
                    os.kill(os.getpid(), number)
                    time.sleep(0.02)
            return original(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, wrapped)
            yield

    return at


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run that nothing stops."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main([*SMALL, f"paths.run_dir={folder}"]) == 0
    return read_history(folder)["train/loss"].dropna().tolist()


@BOTH
@pytest.mark.parametrize(
    ("owner", "name", "call", "step"),
    [
        (exact_match, "exact_match", 1, 1),  # before the first step
        (exact_match, "exact_match", 2, 2),  # beside the first validation, which is finished
        (SFT, "evaluation_step", 1, 2),
        (Checkpoint, "_write", 1, 3),
    ],
)
def test_within_training_it_stops_after_the_step_and_goes_on_alike(owner, name, call, step, number, send, whole, capfd):
    with send(owner, name, number, call):
        assert main(SMALL) == 130
    output = capfd.readouterr()
    assert "Stopping after this step, with a checkpoint. Once more aborts at once." in output.err
    found = re.search(rf"Interrupted after step {step}\. To continue: workbench (train resume=\S+)", output.out)
    assert found, output.out
    assert main(found[1].split()) == 0
    assert read_history("run")["train/loss"].dropna().tolist() == whole


@BOTH
def test_a_second_one_aborts_a_validation(number, send, capfd, here):
    with send(SFT, "evaluation_step", number, times=2):
        assert main(SMALL) == 130
    assert f"workbench: aborted by a second {number.name}" in capfd.readouterr().err
    assert not list(here.rglob("*.ckpt"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_while_data_is_prepared(number, code, send, capfd, here):
    with send(module, "prepare", number):
        assert main(SMALL) == code
    error = capfd.readouterr().err
    assert error.strip().endswith({130: "workbench: interrupted", 143: "workbench: terminated"}[code])
    assert "Traceback" not in error


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_in_the_last_save_and_the_command_that_repeats_it(number, code, send, capfd, here):
    with send(base, "save_pretrained", number):
        assert main(SMALL) == code
    found = re.search(r"To save it: workbench (train resume=\S+)", capfd.readouterr().out)
    assert not (here / "run/model").exists()
    assert main(found[1].split()) == 0
    assert (here / "run/model/model.safetensors").is_file()


def test_a_forked_worker_ends_on_sigterm_as_ever():
    from workbench.cli import _sigterm_raises

    with _sigterm_raises():
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_are_both_gone_when_stopped_before_the_first_step(here):
    """The first process prepares the data for as long as the source sleeps; the second one waits for it."""
    (here / "rows.py").write_text(
        "import pathlib, time\n"
        "def slow():\n"
        "    pathlib.Path('preparing').touch()\n"
        "    time.sleep(120)\n"
        "    return [{'prompt': '1+1=', 'completion': '2'}] * 8\n"
    )
    words = [w for w in SMALL if not w.startswith(("data.train", "data.eval", "exact_match", "trainer.val"))]
    words += ["data=file", "data.train=rows:slow", "trainer.devices=2", "strategy=ddp"]
    path = os.pathsep.join([str(pathlib.Path(workbench.__file__).parents[1]), str(here)])
    process = subprocess.Popen(
        [sys.executable, "-m", "workbench", *words],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 90
    while not (here / "preparing").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    process.terminate()  # to the first alone, as a scheduler does
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143, error
    assert "Traceback" not in error
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # the group is empty soon
            os.killpg(process.pid, 0)
            time.sleep(0.1)


_CELL = """
import time, pathlib, workbench
from lightning.pytorch.callbacks import Callback

class Slow(Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        pathlib.Path("training").touch()
        time.sleep(0.1)

run = workbench.train(*{words!r}, callbacks=[Slow()])
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason="needs the notebooks extra")
def test_the_stop_button_ends_workbench_train_and_not_the_kernel(here, monkeypatch):
    from jupyter_client.manager import start_new_kernel

    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(workbench.__file__).parents[1]))
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(here))
    outputs = []
    try:

        def interrupt():
            while not (here / "training").exists():
                time.sleep(0.05)
            manager.interrupt_kernel()

        threading.Thread(target=interrupt, daemon=True).start()
        words = [*SMALL[1:], "trainer.max_steps=500", "trainer.max_epochs=500", "trainer.val_check_interval=null"]
        reply = client.execute_interactive(_CELL.format(words=words), timeout=120, output_hook=outputs.append)
        assert reply["content"]["status"] == "ok", reply
        again = "print('alive', run.interrupted, len(run.history))"
        client.execute_interactive(again, timeout=60, output_hook=outputs.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    text = "".join(o["content"].get("text", "") for o in outputs)
    assert "alive True" in text and "To continue: workbench train resume=run/checkpoints/step-" in text
    assert list((here / "run/checkpoints").glob("step-*.ckpt")) and not (here / "run/model").exists()
