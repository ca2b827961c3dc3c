"""What is saved and kept, at which steps, and that a run resumed from any of it is the same run."""

import json
import math
import os

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_run import SmallModule, trainer

from workbench.callbacks.checkpoint import Checkpoint, resolve_checkpoint
from workbench.callbacks.early_stopping import EarlyStopping
from workbench.errors import UserError
from workbench.loggers.csv import CSVLogger, read_history
from workbench.strategies.checkpoint_io import read_checkpoint


def _files(folder):
    return sorted(os.listdir(folder / "checkpoints")) if (folder / "checkpoints").exists() else []


def _steps(folder):
    return [int(name[5:11]) for name in _files(folder) if name.startswith("step-")]


def _same(folder, name, other):
    return (folder / "checkpoints" / name).samefile(folder / "checkpoints" / other)


class _Saves(Callback):
    """Which micro-batch of the epoch each checkpoint was written after."""

    def __init__(self):
        self.at = []

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.at.append((trainer.global_step, trainer.fit_loop.batch_idx + 1))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [8]),
        ({"keep": None}, [4, 8]),
        ({"every_n_steps": 3}, [8]),
        ({"every_n_steps": 3, "keep": 2}, [6, 8]),
        ({"every_n_steps": 3, "keep": None}, [3, 6, 8]),
        ({"every_n_steps": 1, "keep": 3}, [6, 7, 8]),
    ],
)
@pytest.mark.parametrize("validate", [True, False])
def test_what_is_kept(tmp_path, options, steps, validate):
    trainer(tmp_path, Checkpoint(**options), limit_val_batches=2 if validate else 0).fit(SmallModule())
    assert _files(tmp_path) == ["last.ckpt", *(f"step-{s:06d}.ckpt" for s in steps)]
    assert _same(tmp_path, "last.ckpt", "step-000008.ckpt")
    for step in steps:
        assert read_checkpoint(tmp_path / "checkpoints" / f"step-{step:06d}.ckpt")["global_step"] == step


@pytest.mark.parametrize("every", [1, 2, 3])
def test_checkpoints_are_written_at_the_end_of_steps_only(tmp_path, every):
    saves = _Saves()
    run = trainer(tmp_path, saves, Checkpoint(every_n_steps=every, keep=None), accumulate_grad_batches=3)
    run.fit(SmallModule(accumulate=3))
    assert [step for step, _ in saves.at] == [s for s in range(1, 9) if s % every == 0 or s == 8]
    assert all(batch == ((step - 1) % 4 + 1) * 3 for step, batch in saves.at)


def test_no_checkpoint_within_the_first_step_after_a_resume(tmp_path):
    trainer(tmp_path, Checkpoint(every_n_steps=2), max_steps=2).fit(SmallModule())
    saves = _Saves()
    trainer(tmp_path, saves, Checkpoint(every_n_steps=2)).fit(SmallModule(), ckpt_path=tmp_path / "checkpoints/last.ckpt")
    assert saves.at == [(4, 8), (6, 4), (8, 8)]


@pytest.mark.parametrize(
    ("options", "scores", "kept", "best"),
    [
        ({}, {2: 5.0, 4: 3.0, 6: 4.0, 8: 6.0}, [4, 8], 4),
        ({"keep_best": 2}, {2: 5.0, 4: 3.0, 6: 4.0, 8: 6.0}, [4, 6, 8], 4),
        ({"monitor": "val/accuracy", "mode": "max"}, {2: 5.0, 4: 3.0, 6: 4.0, 8: 6.0}, [4, 8], 4),
        ({"mode": "max"}, {2: 5.0, 4: 3.0, 6: 4.0, 8: 6.0}, [8], 8),
        ({}, {2: math.nan, 4: math.nan, 6: 4.0, 8: math.nan}, [6, 8], 6),
        ({}, {2: 1.0, 4: 1.0, 6: 1.0, 8: 1.0}, [2, 8], 2),
    ],
)
def test_the_best_by_any_printed_metric(tmp_path, options, scores, kept, best):
    checkpoint = Checkpoint(**{"monitor": "val/loss", **options})
    trainer(tmp_path, checkpoint, val_check_interval=4).fit(SmallModule(val_losses=scores))
    assert _steps(tmp_path) == kept
    assert _same(tmp_path, "best.ckpt", f"step-{best:06d}.ckpt") and _same(tmp_path, "last.ckpt", "step-000008.ckpt")
    assert checkpoint.best_model_path.endswith(f"step-{best:06d}.ckpt")
    assert abs(checkpoint.best_model_score.item()) == scores[best]


def test_a_metric_of_training_ranks_too(tmp_path):
    module = SmallModule()
    losses = []
    module.on_train_batch_end = lambda *_: losses.append((module.step_metrics.get("train/loss"), module.trainer.global_step))
    trainer(tmp_path, Checkpoint(every_n_steps=1, monitor="train/loss"), limit_val_batches=0).fit(module)
    by_step = {step: loss for loss, step in losses if step}
    best = min(by_step, key=by_step.get)
    assert best not in (1, 8) and _steps(tmp_path) == [best, 8]


@pytest.mark.parametrize("monitor", ["val/los", "train/reward"])
def test_an_unknown_monitor_lists_the_metrics(tmp_path, monitor):
    with pytest.raises(UserError, match=f"monitor='{monitor}' is not among the metrics") as error:
        trainer(tmp_path, Checkpoint(monitor=monitor)).fit(SmallModule())
    assert "Available: train/grad_norm, train/loss, val/accuracy, val/loss." in str(error.value)
    assert ("Did you mean 'val/loss'?" in str(error.value)) == (monitor == "val/los")


@pytest.mark.parametrize("options", [{"limit_val_batches": 0}, {"module": 0}])
def test_a_monitor_without_validation_fails_before_training(tmp_path, options):
    module = SmallModule(val_batches=options.pop("module", 2))
    with pytest.raises(UserError, match="is never measured: there is no validation"):
        trainer(tmp_path, Checkpoint(monitor="val/loss"), **options).fit(module)
    assert not module.trained


def test_wrong_options():
    for options in ({"every_n_steps": 0}, {"keep": 0}, {"keep_best": -1}, {"mode": "low"}):
        with pytest.raises(UserError):
            Checkpoint(**options)


def _trajectory(folder, *callbacks, ckpt_path=None, **options):
    module = SmallModule()
    trainer(folder, *callbacks, **options).fit(module, ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("interval", [None, 2, 6])
@pytest.mark.parametrize("every", [1, None])
def test_a_run_resumed_from_any_checkpoint_is_the_same_run(tmp_path, interval, every):
    options = {"max_epochs": 3, "val_check_interval": interval}
    whole = _trajectory(tmp_path / "a", Checkpoint(every_n_steps=every, keep=None), **options)
    assert _steps(tmp_path / "a") == (list(range(1, 13)) if every else [4, 8, 12])
    for step in _steps(tmp_path / "a")[:-1]:
        path = resolve_checkpoint(step, tmp_path / "a")
        resumed = _trajectory(tmp_path / "b", Checkpoint(), ckpt_path=path, **options)
        assert resumed.weights() == whole.weights(), step
        assert resumed.trained == whole.trained[2 * step :], step
        assert resumed.validated == [s for s in whole.validated if s > step], step
        assert resumed.trainer.global_step == 12 and resumed.trainer.current_epoch == 3


def test_scores_survive_a_resume_and_a_move_of_the_folder(tmp_path):
    scores = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: 2.0, 6: 2.5, 7: 9.0, 8: 9.0}
    options = {"val_check_interval": 2}
    callbacks = {"monitor": "val/loss", "every_n_steps": 1}
    trainer(tmp_path / "a", Checkpoint(**callbacks), max_steps=3, **options).fit(SmallModule(val_losses=scores))
    (tmp_path / "a").rename(tmp_path / "b")
    checkpoint = Checkpoint(**callbacks)
    path = resolve_checkpoint("last", tmp_path / "b")
    trainer(tmp_path / "b", checkpoint, **options).fit(SmallModule(val_losses=scores), ckpt_path=path)
    assert _steps(tmp_path / "b") == [2, 8] and checkpoint.best_model_score.item() == 1.0
    assert _same(tmp_path / "b", "best.ckpt", "step-000002.ckpt")


def test_early_stopping_saves_the_step_it_stops_at(tmp_path):
    scores = {2: 1.0, 4: 2.0, 6: 3.0, 8: 4.0}
    stop = EarlyStopping("val/loss", patience=2, verbose=False)
    run = trainer(tmp_path, stop, Checkpoint(every_n_steps=100), max_epochs=9, val_check_interval=4)
    run.fit(SmallModule(val_losses=scores))
    assert run.global_step == 6 and _steps(tmp_path) == [6]
    assert read_checkpoint(tmp_path / "checkpoints/last.ckpt")["callbacks"][stop.state_key]["wait_count"] == 2


def test_early_stopping_with_an_unknown_metric(tmp_path):
    with pytest.raises(UserError, match=r"monitor='val/acuracy' .*Did you mean 'val/accuracy'\? Available: train/grad"):
        trainer(tmp_path, EarlyStopping("val/acuracy")).fit(SmallModule())


class _StopAfter(Callback):
    """Stops after Checkpoint has looked, as a module or a late callback may."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


def test_a_late_decision_to_stop_is_saved(tmp_path):
    run = trainer(tmp_path, _StopAfter(), Checkpoint(every_n_steps=100), max_epochs=9, limit_val_batches=0)
    run.fit(SmallModule())
    assert run.global_step == 4 and _steps(tmp_path) == [4]


def test_a_failed_write_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    original = torch.save

    def full(checkpoint, file, *args, **kwargs):
        if checkpoint["global_step"] == 6:
            file.write(b"half a checkpoint")
            raise OSError(28, "No space left on device")
        original(checkpoint, file, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"step-000006.ckpt: No space left on device; it needs about") as error:
        trainer(tmp_path, Checkpoint(every_n_steps=2)).fit(SmallModule())
    assert "\n" not in str(error.value)
    assert _files(tmp_path) == ["last.ckpt", "step-000004.ckpt"] and _same(tmp_path, "last.ckpt", "step-000004.ckpt")
    monkeypatch.undo()
    whole = _trajectory(tmp_path / "a", Checkpoint())
    assert _trajectory(tmp_path, Checkpoint(), ckpt_path=resolve_checkpoint("last", tmp_path)).weights() == whole.weights()


def test_a_disk_without_hard_links(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    trainer(tmp_path, Checkpoint(monitor="val/loss")).fit(SmallModule())
    assert _files(tmp_path) == ["best.ckpt", "last.ckpt", "step-000008.ckpt"]
    assert read_checkpoint(tmp_path / "checkpoints/last.ckpt")["global_step"] == 8


def test_the_logs_of_a_resumed_run_have_one_row_per_step(tmp_path):
    for path, steps in ((None, 7), (3, 8)):
        logger = CSVLogger(str(tmp_path))
        ckpt = resolve_checkpoint(path, tmp_path)
        run = trainer(tmp_path, Checkpoint(every_n_steps=1, keep=None), logger=logger, max_steps=steps)
        run.fit(SmallModule(), ckpt_path=ckpt)
    history = read_history(tmp_path)
    assert history["step"].tolist() == list(range(1, 9))
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 9
    assert history["val/loss"].notna().tolist() == [s % 4 == 0 for s in range(1, 9)]


def test_loggers_hear_of_checkpoints(tmp_path):
    heard = []

    class Logger(CSVLogger):
        def after_save_checkpoint(self, callback):
            heard.append((callback.last_model_path, callback.current_score.item(), len(callback.best_k_models)))

    trainer(tmp_path, Checkpoint(monitor="val/loss"), logger=Logger(str(tmp_path))).fit(SmallModule())
    folder = tmp_path / "checkpoints"
    assert heard == [(f"{folder}/step-000004.ckpt", 6.0, 1), (f"{folder}/step-000008.ckpt", 2.0, 1)]


# -- resolve_checkpoint ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    scores = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    checkpoint = Checkpoint(every_n_steps=1, keep=2, monitor="val/loss")
    trainer(folder, checkpoint, max_epochs=1, val_check_interval=2).fit(SmallModule(val_losses=scores))
    assert _steps(folder) == [1, 3, 4]
    return folder


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("last", "last.ckpt"),
        ("auto", "last.ckpt"),
        ("best", "best.ckpt"),
        (3, "step-000003.ckpt"),
        ("3", "step-000003.ckpt"),
        ("000003", "step-000003.ckpt"),
        ("step-000003", "step-000003.ckpt"),
        ("step-000003.ckpt", "step-000003.ckpt"),
        ("{run}", "last.ckpt"),
        ("{run}/checkpoints", "last.ckpt"),
        ("{run}/checkpoints/step-000001.ckpt", "step-000001.ckpt"),
    ],
)
@pytest.mark.parametrize("inner", [True, False])
def test_resolve(run_dir, spec, name, inner):
    spec = spec.format(run=run_dir) if isinstance(spec, str) else spec
    assert resolve_checkpoint(spec, run_dir / "checkpoints" if inner else run_dir) == run_dir / "checkpoints" / name


def test_resolve_nothing(run_dir, tmp_path):
    assert resolve_checkpoint(None, run_dir) is None
    assert resolve_checkpoint("auto", tmp_path) is None and resolve_checkpoint("auto", None) is None


@pytest.mark.parametrize("spec", [2, "step-2", "{run}/checkpoints/step-000002.ckpt", "worst"])
def test_resolve_lists_what_is_there(run_dir, spec):
    spec = spec.format(run=run_dir) if isinstance(spec, str) else spec
    with pytest.raises(UserError, match="names no checkpoint") as error:
        resolve_checkpoint(spec, run_dir)
    listed = "best.ckpt, last.ckpt, step-000001.ckpt, step-000003.ckpt, step-000004.ckpt."
    assert str(error.value).endswith(f"In {run_dir}/checkpoints: {listed}") and "\n" not in str(error.value)


def test_resolve_without_any(tmp_path):
    with pytest.raises(UserError, match=r"resume=last names no checkpoint\. In .*: none\."):
        resolve_checkpoint("last", tmp_path)
    with pytest.raises(UserError, match="Give the path of a checkpoint or of a run's folder"):
        resolve_checkpoint("last", None)


def test_resolve_refuses_a_cut_checkpoint(tmp_path):
    trainer(tmp_path, Checkpoint(every_n_steps=1, keep=2), max_steps=2, limit_val_batches=0).fit(SmallModule())
    path = tmp_path / "checkpoints/step-000002.ckpt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"resume=last: .* is damaged or cut short\. In .*: step-000001.ckpt\."):
        resolve_checkpoint("last", tmp_path)


def test_a_sharded_checkpoint_is_a_folder(tmp_path):
    (tmp_path / "checkpoints" / "step-000002.ckpt").mkdir(parents=True)
    os.symlink("step-000002.ckpt", tmp_path / "checkpoints" / "last.ckpt")
    assert resolve_checkpoint("last", tmp_path).is_dir()
    assert resolve_checkpoint(2, tmp_path).name == "step-000002.ckpt"


def test_names_need_no_quotes(run_dir):
    assert not any(set(name) & set("= ,:{}[]()#@") for name in _files(run_dir))
    json.dumps(Checkpoint().state_dict())
