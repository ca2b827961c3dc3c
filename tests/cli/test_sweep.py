"""Sweeps: one process per job, failures recorded, a table at the end."""

import json
import os
import pathlib
import signal
import sys
import threading
import time

import pandas as pd
import pytest
from omegaconf import OmegaConf

from workbench.cli import sweep

JOB = """
import json, os, pathlib, sys
folder, *overrides = sys.argv[1:]
values = dict(o.split("=") for o in overrides)
print("job", values, flush=True)
if values["optim.lr"] == "0":
    sys.exit("workbench: it went wrong\\nanother process: connection closed")
metrics = {"val/loss": abs(float(values["optim.lr"]) - 0.3), "devices": float(os.environ.get("CUDA_VISIBLE_DEVICES", -1))}
pathlib.Path(folder, "result.json").write_text(json.dumps({"metrics": metrics}))
"""


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "job_command", lambda o, folder: [sys.executable, "-c", JOB, str(folder), *o])

    def make(**options):
        made = sweep.SubprocessLauncher(**options)
        cfg = {"metric": "val/loss", "metric_goal": "min", "hydra": {"sweep": {"dir": str(tmp_path / "sweep")}}}
        made.setup(hydra_context=None, task_function=None, config=OmegaConf.create(cfg))
        return made

    return make


def test_a_failed_job_is_recorded_and_the_others_run(launcher, tmp_path, capsys):
    jobs = [["optim.lr=0.1", "seed=0"], ["optim.lr=0", "seed=0"], ["optim.lr=0.2", "seed=0"]]
    returns = launcher().launch(jobs, 0)
    assert [r.status.name for r in returns] == ["COMPLETED", "FAILED", "COMPLETED"]
    assert [r.return_value for r in (returns[0], returns[2])] == pytest.approx([0.2, 0.1])
    with pytest.raises(sweep.JobFailed, match="it went wrong"):
        _ = returns[1].return_value
    assert "job 1: failed with exit code 1: workbench: it went wrong" in capsys.readouterr().out
    assert "job {'optim.lr': '0.2'" in (tmp_path / "sweep" / "2" / "log.txt").read_text()


def test_an_optimising_sweeper_is_given_what_to_minimise(launcher):
    made = launcher()
    made.config.metric_goal = "max"
    (result,) = made.launch([["optim.lr=0.1"]], 0)
    assert result.return_value == pytest.approx(-0.2)


def test_concurrent_jobs_get_devices_of_their_own(launcher, tmp_path):
    launcher(n_jobs=2, devices=["4", "5"]).launch([["optim.lr=1"], ["optim.lr=2"]], 0)
    used = {r["metrics"]["devices"] for r in sweep.read_records(tmp_path / "sweep")}
    assert used <= {4.0, 5.0}


def test_sigterm_ends_the_running_job_and_starts_no_other(launcher, tmp_path, monkeypatch):
    waiting = "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'started').touch(); time.sleep(60)"
    monkeypatch.setattr(sweep, "job_command", lambda o, folder: [sys.executable, "-c", waiting, str(folder)])

    def kill_once_started():
        while not (tmp_path / "sweep" / "0" / "started").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=kill_once_started).start()
    with pytest.raises(KeyboardInterrupt):
        launcher().launch([["optim.lr=1"], ["optim.lr=2"]], 0)
    (record,) = sweep.read_records(tmp_path / "sweep")
    assert record["exit_code"] == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _record(job, lr, loss, code=0):
    metrics = {} if code else {"val/loss": loss}
    overrides = [f"optim.lr={lr}", "model=tiny"]
    return {"job": job, "overrides": overrides, "exit_code": code, "error": "", "seconds": 1.0, "metrics": metrics}


def test_summary_ranks_names_the_best_and_writes_table_and_plot(tmp_path):
    records = [_record(0, "1e-3", 0.5), _record(1, "1e-2", 0.25), _record(2, "1e-1", float("nan")), _record(3, "1", 0, code=1)]
    text = sweep.summary(records, "val/loss", "min", tmp_path, ["optim.lr=1e-3,1e-2,1e-1", "model=tiny", "sweep=x"])
    assert "best val/loss: job 1" in text
    assert "again: workbench train model=tiny optim.lr=1e-2" in text
    table = pd.read_csv(tmp_path / "sweep.csv")
    assert list(table["job"]) == [1, 0, 2, 3]
    assert "model" not in table  # only what was varied
    assert list(table["status"]) == ["ok", "ok", "ok", "exit 1"]
    assert (tmp_path / "sweep.png").stat().st_size > 1000
    assert "best val/loss: job 0" in sweep.summary(records, "val/loss", "max", tmp_path)


def test_summary_says_when_the_metric_was_never_logged(tmp_path):
    text = sweep.summary([_record(0, "1", 0.5)], "val/reward", "max", tmp_path)
    assert "no job logged metric=val/reward; logged: val/loss" in text


def test_places_are_logarithmic_over_a_decade():
    assert sweep._places(["1e-3", "1e-2"]) == ([1e-3, 1e-2], True)
    assert sweep._places(["1", "2"]) == ([1.0, 2.0], False)
    assert sweep._places(["adamw", "sgd"]) == (["adamw", "sgd"], False)


def test_job_command_is_what_a_person_would_type():
    command = sweep.job_command(["model=tiny", 'name="a b"'], pathlib.Path("/x/with space/0"))
    assert command[1:4] == ["-m", "workbench", "train"]
    assert command[4:] == ["model=tiny", 'name="a b"', "hydra.mode=RUN", 'paths.run_dir="/x/with space/0"']


def test_records_are_read_in_order(tmp_path):
    for number in (10, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "job.json").write_text(json.dumps({"job": number}))
    assert [r["job"] for r in sweep.read_records(tmp_path)] == [2, 10]
