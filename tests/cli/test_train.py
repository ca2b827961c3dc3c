"""Runs from the command line and from Python, on a model of a few thousand parameters."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import yaml
from lightning.pytorch.callbacks import Callback

import workbench
from workbench import run as runs
from workbench.cli import main, notebook
from workbench.errors import UserError

SMALL = [
    "data.train={path: tiny:sums, kwargs: {size: 24}}",
    "data.eval={path: tiny:sums, kwargs: {size: 8}}",
    "data.batch_size=8",
    "model.init_kwargs={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 1}",
    "model.init_kwargs.num_key_value_heads=1",
    "exact_match=0",
    "callbacks.samples=null",
    "trainer=cpu",
    "scheduler=constant",
    "logger=csv",
    "trainer.max_epochs=2",
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Runs go into a fresh working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return tmp_path


def only_run() -> pathlib.Path:
    (folder,) = pathlib.Path("runs").glob("*/*")
    return folder


class SignalAt(Callback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, step: int, number: int = signal.SIGINT):
        self.step, self.number = step, number

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


def test_a_run_leaves_what_it_says(capsys):
    from transformers import AutoModelForCausalLM

    run = workbench.train(*SMALL, "exact_match=4")
    printed = capsys.readouterr().out
    assert run.dir == only_run().absolute()
    assert list(run.history["step"]) == [0, 1, 2, 3, 4, 5, 6]  # 0 is the exact match before training
    assert run.history["train/loss"].dropna().iloc[-1] == pytest.approx(run.metrics["train/loss"])
    assert run.history["val/loss"].dropna().iloc[-1] == pytest.approx(run.metrics["val/loss"])
    assert json.loads((run.dir / "result.json").read_text())["metrics"]["steps"] == 6
    assert f"folder      {os.path.relpath(run.dir)}" in printed
    assert f"workbench generate run={os.path.relpath(run.dir)}" in printed
    assert "exact match 0.000 -> " in printed
    assert "optim       adamw lr=0.002" in printed  # the effective configuration
    saved = AutoModelForCausalLM.from_pretrained(run.dir / "model")
    assert all((saved.state_dict()[k] == v).all() for k, v in run.model.state_dict().items())
    assert not [p for p in run.dir.rglob("*") if "=" in p.name]  # could not be typed as an override
    assert sorted(p.name for p in pathlib.Path().iterdir()) == ["runs"]
    assert len(run.plot().axes) >= 3
    with pytest.raises(UserError, match="val/lost was not logged"):
        run.plot("val/lost")


def test_python_and_command_line_give_the_same_numbers(capsys):
    overrides = [*SMALL, "data.micro_batch_size=4"]
    by_overrides = workbench.train(*overrides)
    by_config = workbench.train(workbench.compose(*overrides))
    assert main(["train", *overrides]) == 0
    by_command = runs.read(sorted(pathlib.Path("runs/sft_tiny").iterdir())[-1])
    columns = ["train/loss", "train/grad_norm", "val/loss"]
    for other in (by_config, by_command):
        assert other.history[columns].equals(by_overrides.history[columns])


def test_resume_by_the_printed_command_goes_on_with_the_run_s_own_options(capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(runs, "_exact_match", lambda rows: [SignalAt(2)])
        assert main(["train", *SMALL, "callbacks.checkpoint.every_n_steps=1"]) == 130
    printed = capsys.readouterr().out
    (command,) = [line.split("To continue: ", 1)[1] for line in printed.splitlines() if "To continue: " in line]
    assert main(command.removeprefix("workbench ").split()) == 0
    resumed = runs.read(only_run())  # the same folder
    assert resumed.config.data.batch_size == 8 and resumed.config.trainer.max_epochs == 2
    straight = workbench.train(*SMALL, "name=straight")
    assert list(resumed.history["step"]) == [1, 2, 3, 4, 5, 6]
    losses = resumed.history["train/loss"].to_numpy()
    assert losses == pytest.approx(straight.history["train/loss"].to_numpy(), abs=1e-6)


def test_resume_by_step_and_last_and_unknown_step(capsys):
    keep_all = ["callbacks.checkpoint.every_n_steps=1", "callbacks.checkpoint.keep=null"]
    assert main(["train", *SMALL, *keep_all, "trainer.max_steps=2"]) == 0
    assert main(["train", "resume=1", "trainer.max_steps=3"]) == 0
    assert list(runs.read(only_run()).history["step"]) == [1, 2, 3]
    assert main(["train", "resume=7"]) == 2
    assert "resume=7 names no checkpoint" in capsys.readouterr().err


def test_ctrl_c_leaves_a_checkpoint_and_the_process_alive(capsys):
    run = workbench.train(*SMALL, callbacks=[SignalAt(2)])
    assert run.interrupted and run.metrics["steps"] == 3
    assert "interrupted" in capsys.readouterr().out
    assert not (run.dir / "model").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not workbench.train(*SMALL).interrupted


def test_ctrl_c_while_data_is_prepared_is_a_keyboard_interrupt():
    class Interrupt(Callback):
        def setup(self, trainer, pl_module, stage):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workbench.train(*SMALL, callbacks=[Interrupt()])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_saved_configuration_repeats_the_run_in_a_new_folder(capsys):
    first = workbench.train(*SMALL, "trainer.max_steps=2", "seed=5")
    assert main(["train", "-cd", str(first.dir), "-cn", "config"]) == 0
    again = runs.read(sorted(pathlib.Path("runs/sft_tiny").iterdir())[-1])
    assert again.dir.absolute() != first.dir
    assert again.history["train/loss"].equals(first.history["train/loss"])
    assert len(list(first.dir.glob("checkpoints/*"))) == len(list(again.dir.glob("checkpoints/*"))) == 2
    saved = yaml.safe_load((first.dir / "config.yaml").read_text())
    assert saved["data"]["seed"] == 5  # resolved
    assert saved["callbacks"]["checkpoint"]["dirpath"] == "${paths.run_dir}/checkpoints"


def test_evaluate_repeats_the_run_s_last_evaluation(capsys):
    run = workbench.train(*SMALL, "data.batch_size=4")
    # The overrides as from the command line, of a group that evaluation has its own choice of among them.
    capsys.readouterr()
    assert main(["evaluate", f"run={run.dir}", "output=out/measures.json"]) == 0
    measured = json.loads(pathlib.Path("out/measures.json").read_text())["metrics"]
    assert measured["val/loss"] == pytest.approx(run.metrics["val/loss"], abs=1e-6)
    assert "val/loss" in capsys.readouterr().out


def test_generate_answers_as_the_run_does(capsys):
    run = workbench.train(*SMALL)
    capsys.readouterr()
    assert main(["generate", f"run={run.dir}", "prompt=1+2=", "max_new_tokens=4"]) == 0
    answered = capsys.readouterr().out.rstrip("\n")
    assert answered == run.generate("1+2=", max_new_tokens=4)[0].rstrip("\n")
    assert run.generate([[{"role": "user", "content": "1+2="}]], max_new_tokens=4) == run.generate("1+2=", max_new_tokens=4)


def test_generate_reads_prompts_from_a_pipe(capsys, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("1+1=\n\n2+2=\n"))
    small = [o for o in SMALL if o.startswith("model.")]
    assert main(["generate", "model.name=tiny", *small, "max_new_tokens=3", "temperature=1.0", "seed=1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_objects_take_the_place_of_configured_parts():
    from datasets import Dataset

    from workbench.tiny.model import tiny_model
    from workbench.tiny.tokenizer import tiny_tokenizer

    model = tiny_model(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    rows = Dataset.from_list([{"prompt": "1+1=", "completion": "2"}] * 8)
    overrides = [o for o in SMALL if not o.startswith(("model.", "data.eval"))]
    run = workbench.train(*overrides, "data.eval=null", model=model, tokenizer=tiny_tokenizer(), data=rows)
    assert run.model is model
    assert run.metrics["steps"] == 2


def test_a_mistake_in_the_data_is_one_line_and_exit_code_2(capsys):
    assert main(["train", *SMALL, "data.train=not_there.jsonl"]) == 2
    error = capsys.readouterr().err
    assert "not_there.jsonl" in error
    assert "Traceback" not in error
    assert len([line for line in error.splitlines() if line.startswith("workbench: ")]) == 1


def test_a_run_does_not_change_the_configuration_it_was_given():
    cfg = workbench.compose(*SMALL, "trainer.max_steps=1")
    workbench.train(cfg)
    assert cfg.paths.run_dir is None


def command(*words: str, **environment: str) -> subprocess.CompletedProcess:
    path = str(pathlib.Path(workbench.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-m", "workbench", *words], capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_sweep_of_two_jobs_on_two_processes_each():
    words = [o for o in SMALL if "max_epochs" not in o]
    options = ["metric=train/loss", "trainer.max_steps=2", "trainer.devices=2", "strategy=ddp", "-m", "optim.lr=1e-3,1e30"]
    result = command("train", *words, *options)
    (folder,) = pathlib.Path("runs/sft_tiny").iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["0", "1", "multirun.yaml", "sweep.csv", "sweep.png"], result.stdout
    first, second = (json.loads((folder / n / "job.json").read_text()) for n in "01")
    assert first["exit_code"] == 0 and first["metrics"]["steps"] == 2
    assert second["exit_code"] == 2 and "not finite" in second["error"]
    assert result.returncode == 1
    assert "best train/loss: job 0" in result.stdout
    assert sorted(p.name for p in pathlib.Path().iterdir()) == ["runs"]  # nothing beside, no second folder
    straight = workbench.train(*words, "trainer.max_steps=2", "optim.lr=1e-3", "name=straight")
    assert first["metrics"]["train/loss"] == pytest.approx(straight.metrics["train/loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_notebook_trains_on_two_devices_in_processes_of_their_own(monkeypatch, capfd):
    monkeypatch.setattr(notebook, "in_notebook", lambda: True)
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(workbench.__file__).parents[1]))
    cfg = workbench.compose(*SMALL, "trainer.devices=2", "strategy=ddp", "trainer.max_steps=2")
    with pytest.raises(UserError, match=r"cannot share callbacks with this notebook: set trainer\.devices=1"):
        workbench.train(cfg, callbacks=[])
    run = workbench.train(cfg)
    assert "2 devices: training in processes of their own" in capfd.readouterr().out
    assert run.metrics["steps"] == 2 and list(run.history["step"]) == [1, 2]
    alone = workbench.train(*SMALL, "trainer.max_steps=2", "name=alone")
    assert run.history["train/loss"].to_numpy() == pytest.approx(alone.history["train/loss"].to_numpy(), abs=1e-5)
    assert run.model.num_parameters() == alone.model.num_parameters()


@pytest.mark.slow
@pytest.mark.distributed
def test_ctrl_c_on_two_processes_exits_130_with_one_checkpoint():
    words = [*SMALL, "trainer.devices=2", "strategy=ddp", "trainer.max_epochs=100000", "logger=csv"]
    path = str(pathlib.Path(workbench.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "workbench", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )
    output = []
    for line in process.stdout:
        output.append(line)
        if line.startswith("step ") and process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            break
    output.extend(process.stdout)
    assert process.wait(120) == 130, "".join(output)
    assert sum("To continue: workbench train resume=" in line for line in output) == 1
    assert list(only_run().glob("checkpoints/*.ckpt"))
