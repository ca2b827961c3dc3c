"""Tables are kept per step, with or without a logger."""

import json
from types import SimpleNamespace

import pytest

from workbench.loggers.tables import log_table, read_table, rewind


class _Logger:
    def __init__(self):
        self.tables, self.rewound = [], []

    def log_table(self, key, columns=None, data=None, dataframe=None, step=None):  # As Lightning's WandbLogger takes it.
        self.tables.append((key, columns, data, dataframe, step))

    def rewind(self, step):
        self.rewound.append(step)


def _trainer(folder, step, *loggers, rank=0):
    return SimpleNamespace(default_root_dir=str(folder), global_step=step, loggers=list(loggers), is_global_zero=rank == 0)


def test_every_step_is_kept_in_order(tmp_path):
    logger = _Logger()
    for step in (9, 120, 1_000_000, 10):
        log_table(_trainer(tmp_path, step, object(), logger), "val/samples", ["prompt", "reward"], [[f"p{step}", 0.5]])
    frame = read_table(tmp_path, "val/samples")
    assert frame["step"].tolist() == [9, 10, 120, 1_000_000]
    assert frame["prompt"].tolist() == ["p9", "p10", "p120", "p1000000"] and frame["reward"].tolist() == [0.5] * 4
    assert logger.tables[0] == ("val/samples", ["prompt", "reward"], [["p9", 0.5]], None, 9)
    assert (tmp_path / "tables" / "val" / "samples" / "step-000009.parquet").exists()


def test_without_a_logger_and_on_other_ranks(tmp_path):
    log_table(_trainer(tmp_path, 1, rank=1), "t", ["a"], [[1]])
    assert read_table(tmp_path, "t").empty
    log_table(_trainer(tmp_path, 1), "t", ["a"], [[1]])
    assert read_table(tmp_path, "t").to_dict("list") == {"step": [1], "a": [1]}


@pytest.mark.parametrize("value", [[{"role": "user", "content": "ü"}], {"a": [1, None]}])
def test_other_cells_become_json(tmp_path, value):
    log_table(_trainer(tmp_path, 1), "t", ["a", "b"], [[value, "text"], ["plain", 3], [None, None]])
    frame = read_table(tmp_path, "t")
    assert json.loads(frame["a"][0]) == value and frame["a"][1] == "plain" and frame["b"].tolist()[:2] == ["text", "3"]
    assert frame.isna().values.tolist()[2] == [False, True, True]


def test_rewind_drops_later_steps(tmp_path):
    for step in (5, 10, 15):
        log_table(_trainer(tmp_path, step), "x/y", ["a"], [[step]])
    logger = _Logger()
    rewind(_trainer(tmp_path, 10, object(), logger))
    assert read_table(tmp_path, "x/y")["a"].tolist() == [5, 10] and logger.rewound == [10]
    rewind(_trainer(tmp_path, 5, logger, rank=1))
    assert read_table(tmp_path, "x/y")["a"].tolist() == [5, 10] and logger.rewound == [10]
