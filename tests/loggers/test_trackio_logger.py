"""Trackio: local, one point per step also after a resume, tables and odd numbers kept."""

import json
import math
import socket
import uuid

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from workbench.errors import UserError
from workbench.loggers.trackio import IDENTITY, TrackioLogger


@pytest.fixture
def project(monkeypatch):
    """A fresh project, in a process that cannot open connections."""

    def refuse(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("HF_TOKEN", "hf_token_of_somebody")  # A stored login must not cause a look-up either.
    return f"test-{uuid.uuid4().hex[:8]}"


def _points(project, run):
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(project, run)
    return [{k: v for k, v in row.items() if k != "timestamp"} for row in sorted(rows, key=lambda r: r["step"])]


def _config(project, run):
    from trackio.sqlite_storage import SQLiteStorage

    return {k: v for k, v in SQLiteStorage.get_run_config(project, run).items() if not k.startswith("_")}


def _runs(project):
    from trackio.sqlite_storage import SQLiteStorage

    return sorted(record["name"] for record in SQLiteStorage.get_run_records(project))


def _log(logger, steps, **constant):
    for step in steps:
        logger.log_metrics({"train/loss": step / 10, **constant}, step=step)
    logger.finalize("success")


@pytest.mark.parametrize("rewound", [True, False])
@pytest.mark.parametrize("by_folder", [True, False])
def test_a_resumed_run_has_one_point_per_step(project, tmp_path, rewound, by_folder):
    options = {"save_dir": str(tmp_path / "run")} if by_folder else {"name": "run"}
    first = TrackioLogger(project, **options)
    for step in range(16):
        first.log_metrics({"train/loss": step / 10, "source": 1}, step=step)
    first.finalize("failed")
    resumed = TrackioLogger(project, **options)
    if rewound:
        resumed.rewind(10)
    _log(resumed, range(10, 21), source=2)
    points = _points(project, "run")
    assert [p["step"] for p in points] == list(range(21))
    assert [p["source"] for p in points] == [1] * 10 + [2] * 11
    assert [p["train/loss"] for p in points] == [step / 10 for step in range(21)]
    assert _runs(project) == ["run"]


def test_rewind_drops_the_later_steps(project, tmp_path):
    _log(TrackioLogger(project, "run", str(tmp_path)), range(1, 16))
    resumed = TrackioLogger(project, "run", str(tmp_path))
    resumed.rewind(10)
    _log(resumed, [11])
    assert [p["step"] for p in _points(project, "run")] == list(range(1, 12))


def test_values_of_one_step_from_one_process_are_all_kept(project):
    logger = TrackioLogger(project, "run")
    logger.log_metrics({"train/loss": 1.0}, step=5)
    logger.log_metrics({"val/loss": 2.0}, step=5)
    logger.finalize("success")
    logger.log_metrics({"val/loss": 3.0}, step=5)  # An evaluation after training replaces its own value only.
    logger.finalize("success")
    merged = {}
    for point in _points(project, "run"):
        assert not merged.keys() & (point.keys() - {"step"})
        merged |= point
    assert merged == {"train/loss": 1.0, "val/loss": 3.0, "step": 5}


def test_a_new_run_does_not_touch_one_of_the_same_name(project, tmp_path):
    for n in range(3):
        _log(TrackioLogger(project, "run", str(tmp_path / str(n))), [1, 2])
    assert _runs(project) == ["run", "run-2", "run-3"]
    assert json.loads((tmp_path / "1" / IDENTITY).read_text()) == {"project": project, "name": "run-2"}
    _log(TrackioLogger(project, "run", str(tmp_path / "1")), [3])
    assert [len(_points(project, name)) for name in _runs(project)] == [2, 3, 2]


def test_training_from_the_beginning_in_the_same_folder_is_a_new_run(project, tmp_path):
    logger = TrackioLogger(project, "run", str(tmp_path))
    _log(logger, [1, 2, 3])
    logger.log_metrics({"val/loss": 1.0}, step=0)
    logger.rewind(0)
    _log(logger, [1])
    assert [p["step"] for p in _points(project, "run")] == [0, 1, 2, 3]
    assert [p["step"] for p in _points(project, "run-2")] == [1]


def test_resume_never_and_must(project):
    _log(TrackioLogger(project, "run"), [1])
    _log(TrackioLogger(project, "run", resume="never"), [1])
    assert _runs(project) == ["run", "run-2"]
    _log(TrackioLogger(project, "run-2", resume="must"), [2])
    assert [p["step"] for p in _points(project, "run-2")] == [1, 2]
    with pytest.raises(UserError, match="has none named 'absent'"):
        _ = TrackioLogger(project, "absent", resume="must").experiment
    with pytest.raises(UserError, match="Allowed: auto, must, never"):
        TrackioLogger(project, resume="allow")


def test_odd_numbers_and_tables(project):
    logger = TrackioLogger(project, "run")
    logger.log_metrics({"loss": math.nan, "a": math.inf, "b": torch.tensor(2.0)}, step=1)
    prompt = [{"role": "user", "content": "1 + 1 = ?"}]
    rows = [[1, prompt, "2", math.nan], [1, prompt, object, None]]
    logger.log_table("samples", ["step", "prompt", "completion", "reward"], rows, step=1)
    logger.log_metrics({"loss": 1.0}, step=2)
    logger.finalize("success")
    first, table, last = _points(project, "run")
    assert math.isnan(first["loss"]) and first["a"] == math.inf and first["b"] == 2.0
    rows = table["samples"]["_value"]
    assert json.loads(rows[0]["prompt"]) == prompt and rows[0]["completion"] == "2" and rows[1]["reward"] is None
    assert last == {"loss": 1.0, "step": 2}


def test_the_configuration_is_kept_and_added_to(project, tmp_path):
    logger = TrackioLogger(project, "run", str(tmp_path), config={"_target_": "x", "optim": {"lr": 1e-3}})
    logger.log_metrics({"a": 1}, step=1)
    logger.log_hyperparams({"seed": 1})
    logger.log_metrics({"a": 1}, step=2)
    logger.finalize("success")
    assert _config(project, "run") == {"target_": "x", "optim": {"lr": 1e-3}, "seed": 1}
    resumed = TrackioLogger(project, "run", str(tmp_path), config={"seed": 2})
    resumed.log_metrics({"a": 1}, step=3)
    resumed.finalize("success")
    assert _config(project, "run") == {"target_": "x", "optim": {"lr": 1e-3}, "seed": 2}


def test_it_is_quiet(project, capsys):
    _log(TrackioLogger(project, "run"), [1])
    assert capsys.readouterr() == ("", "")


def test_another_folder_in_the_same_process_is_refused(project, tmp_path):
    with pytest.raises(UserError, match="cannot change to dir="):
        _ = TrackioLogger(project, dir=str(tmp_path)).experiment


class _Module(L.LightningModule):
    def __init__(self, crash_at=None):
        super().__init__()
        self.crash_at = crash_at
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if self.global_step == self.crash_at:
            raise RuntimeError("boom")
        loss = self.layer(batch).sum()
        self.log_dict({"train/loss": loss, "step": float(self.global_step + 1)})
        return loss

    def validation_step(self, batch, batch_idx):
        self.log_dict({"val/loss": 7.0, "step": float(self.global_step)})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def _trainer(logger, folder):
    return L.Trainer(
        max_epochs=1,
        logger=logger,
        log_every_n_steps=1,
        accumulate_grad_batches=2,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )


def test_under_a_trainer(project, tmp_path):
    loader = DataLoader(torch.ones(6, 1))
    _trainer(TrackioLogger(project, "run", str(tmp_path)), tmp_path).fit(_Module(), loader, loader)
    points = _points(project, "run")
    assert [p["step"] for p in points if "train/loss" in p] == [1, 2, 3]
    assert [(p["step"], p["val/loss"]) for p in points if "val/loss" in p] == [(3, 7.0)]


def test_a_crash_loses_nothing(project, tmp_path):
    with pytest.raises(RuntimeError, match="boom"):
        _trainer(TrackioLogger(project, "run"), tmp_path).fit(_Module(crash_at=2), DataLoader(torch.ones(6, 1)))
    assert [p["step"] for p in _points(project, "run")] == [1, 2]
