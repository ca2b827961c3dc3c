"""The CSV history: one row per step, columns that grow, runs that continue."""

import csv
import math

import pandas as pd
import pytest

from workbench.loggers.csv import CSVLogger, read_history


def _log(folder, steps, **constant):
    logger = CSVLogger(str(folder))
    for step in steps:
        logger.log_metrics({"train/loss": step / 10, **constant}, step=step)
    return logger


def _lines(folder):
    return (folder / "metrics.csv").read_text().splitlines()


def test_one_row_per_step_and_columns_that_grow(tmp_path):
    logger = CSVLogger(str(tmp_path))
    logger.log_metrics({"train/loss": 2.5, "step": 99}, step=1)
    logger.log_metrics({"train/loss": 1.5}, step=2)
    logger.log_metrics({"val/loss": 3.0}, step=2)
    logger.log_metrics({"train/loss": 0.1, "val/acc": 1}, step=3.0)
    assert _lines(tmp_path) == [
        "step,train/loss,val/loss,val/acc",
        "1,2.5,,",
        "2,1.5,3.0,",
        "3,0.1,,1.0",
    ]


def test_a_later_value_of_the_same_step_wins(tmp_path):
    logger = CSVLogger(str(tmp_path))
    logger.log_metrics({"a": 123456.789}, step=1)
    logger.log_metrics({"a": 2}, step=1)
    assert _lines(tmp_path) == ["step,a", "1,2.0"]


def test_a_resumed_run_has_one_point_per_step(tmp_path):
    _log(tmp_path, range(16), source=1).log_metrics({"val/loss": 9}, step=15)
    resumed = CSVLogger(str(tmp_path))
    resumed.rewind(10)
    for step in range(10, 21):
        resumed.log_metrics({"train/loss": step / 10, "source": 2}, step=step)
    history = read_history(tmp_path)
    assert history["step"].tolist() == list(range(21))
    assert history["train/loss"].tolist() == [step / 10 for step in range(21)]
    assert history["source"].tolist() == [1.0] * 10 + [2.0] * 11
    assert history["val/loss"].isna().all()
    assert len(_lines(tmp_path)) == 22


def test_without_rewind_the_reader_still_gives_one_point_per_step(tmp_path):
    _log(tmp_path, range(16), source=1)
    _log(tmp_path, range(10, 21), source=2)
    history = read_history(tmp_path / "metrics.csv")
    assert history["step"].tolist() == list(range(21))
    assert history["source"].tolist() == [1.0] * 10 + [2.0] * 11


def test_a_continued_last_row_keeps_its_values(tmp_path):
    _log(tmp_path, [1, 2])
    CSVLogger(str(tmp_path)).log_metrics({"val/accuracy": 0.5}, step=2)
    assert _lines(tmp_path) == ["step,train/loss,val/accuracy", "1,0.1,", "2,0.2,0.5"]


def test_a_run_from_the_beginning_sets_the_old_file_aside(tmp_path):
    for _ in range(2):
        _log(tmp_path, [1, 2, 3]).rewind(0)
    logger = CSVLogger(str(tmp_path))
    logger.log_metrics({"val/loss": 4.0}, step=0)
    logger.rewind(0)  # An evaluation before the first step belongs to the run.
    logger.log_metrics({"train/loss": 5.0}, step=1)
    assert read_history(tmp_path)["step"].tolist() == [0, 1]
    for n in (1, 2):
        assert read_history(tmp_path / f"metrics.{n}.csv")["step"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path, cut):
    _log(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_history(tmp_path)["step"].tolist() == [1, 2]
    _log(tmp_path, [3, 4])
    assert _lines(tmp_path) == ["step,train/loss", "1,0.1", "2,0.2", "3,0.3", "4,0.4"]


def test_nan_and_infinities_survive(tmp_path):
    logger = CSVLogger(str(tmp_path))
    logger.log_metrics({"loss": math.nan, "a": math.inf, "b": -math.inf}, step=1)
    logger.log_metrics({"loss": 1.0}, step=2)
    with open(tmp_path / "metrics.csv") as file:
        assert next(csv.DictReader(file)) == {"step": "1", "loss": "nan", "a": "inf", "b": "-inf"}
    history = read_history(tmp_path)
    assert math.isnan(history["loss"][0]) and history["a"][0] == math.inf and history["b"][0] == -math.inf
    CSVLogger(str(tmp_path)).log_metrics({"loss": 2.0}, step=3)
    assert read_history(tmp_path)["a"].tolist()[0] == math.inf


def test_floats_are_exact(tmp_path):
    value = 0.1 + 0.2
    CSVLogger(str(tmp_path)).log_metrics({"x": value}, step=1)
    assert read_history(tmp_path)["x"][0] == value


def test_a_missing_file_is_an_empty_history(tmp_path):
    assert list(read_history(tmp_path)) == ["step"] and isinstance(read_history(tmp_path), pd.DataFrame)
