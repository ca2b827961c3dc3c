"""The history in memory: a row per step, validations in theirs, complete after a resume."""

import math

import pytest
from matplotlib.figure import Figure
from small_run import SmallModule, trainer
from support import run_method

from workbench.callbacks.checkpoint import Checkpoint, resolve_checkpoint
from workbench.callbacks.history import History
from workbench.errors import UserError
from workbench.loggers.csv import CSVLogger, read_history
from workbench.methods.kto import KTO


def test_one_row_per_step(tmp_path):
    history, module, losses = History(), SmallModule(), {}
    module.on_train_batch_end = lambda *_: losses.update({module.trainer.global_step: module.step_metrics.get("train/loss")})
    trainer(tmp_path, history).fit(module)
    frame = history.frame
    assert frame["step"].tolist() == list(range(1, 9))
    assert list(frame) == ["step", "train/loss", "train/grad_norm", "val/loss", "val/accuracy"]
    assert frame["train/loss"].tolist() == [losses[s] for s in range(1, 9)]
    assert [None if math.isnan(v) else v for v in frame["val/loss"]] == [None] * 3 + [6.0] + [None] * 3 + [2.0]


def test_it_agrees_with_the_csv_file(tmp_path):
    history = History()
    trainer(tmp_path, history, logger=CSVLogger(str(tmp_path))).fit(SmallModule())
    saved = read_history(tmp_path)
    assert history.frame[list(history.frame)].equals(saved[list(history.frame)])


def test_a_step_without_a_value_has_none(tmp_path):
    """A batch of one label has no mean of the other's rewards: not that of an earlier step, in memory or on disk."""
    rows = [{"prompt": "the mill", "completion": f" counts {i} lanterns", "label": i < 4} for i in range(8)]
    history = History()
    settings = {"logger": CSVLogger(str(tmp_path)), "log_every_n_steps": 1, "max_steps": 2}
    run_method(KTO, {"train": rows, "batch_size": 4}, trainer=settings, callbacks=[history])
    for frame in (history.frame, read_history(tmp_path)):
        for name, step in (("chosen", 0), ("rejected", 1)):
            assert [math.isnan(v) for v in frame[f"train/rewards/{name}"]] == [step == 1, step == 0]


def test_a_resumed_run_has_all_its_steps_once(tmp_path):
    for steps, resume in ((6, None), (8, 3)):
        history = History()
        path = resolve_checkpoint(resume, tmp_path)
        callbacks = [history, Checkpoint(every_n_steps=1, keep=None)]
        run = trainer(tmp_path, *callbacks, logger=CSVLogger(str(tmp_path)), max_steps=steps)
        run.fit(SmallModule(), ckpt_path=path)
    assert history.frame["step"].tolist() == list(range(1, 9))
    whole = History()
    trainer(tmp_path / "whole", whole).fit(SmallModule())
    assert history.frame["train/loss"].tolist() == pytest.approx(whole.frame["train/loss"].tolist(), abs=1e-6)


def test_a_second_run_starts_anew(tmp_path):
    history = History()
    trainer(tmp_path, history).fit(SmallModule())
    trainer(tmp_path, history, max_steps=3).fit(SmallModule())
    assert history.frame["step"].tolist() == [1, 2, 3]
    assert History().frame.empty


def test_plot(tmp_path):
    history = History()
    trainer(tmp_path, history).fit(SmallModule())
    figure = history.plot("train/loss", "val/loss", "train/grad_norm")
    assert isinstance(figure, Figure)
    titles = {axis.get_title(): axis for axis in figure.axes}
    assert set(titles) == {"loss", "grad_norm"}
    lines = titles["loss"].get_lines()
    assert [list(line.get_xdata()) for line in lines] == [list(range(1, 9)), [4, 8]]
    assert list(lines[1].get_ydata()) == [6.0, 2.0]
    assert len(history.plot().axes) >= 1
    with pytest.raises(UserError, match="train/lost"):
        history.plot("train/lost")
