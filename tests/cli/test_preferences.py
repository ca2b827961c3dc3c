"""Every preference and reward method from the command line, on the embedded world, after a run of SFT."""

import math
import pathlib

import pytest
from test_train import SMALL, here  # noqa: F401  runs go into a fresh working folder

import workbench
from workbench.cli import config, main
from workbench.errors import UserError

ONLINE = {"grpo", "rloo", "gmpo"}
METHODS = sorted({file.stem for file in (config.config_dir() / "method").glob("*.yaml")} - {"sft"} - ONLINE)
SCORES = {"reward", "prm"}
REFINES = {"dpo", "kto", "bco", "simpo"}
PAIRS = {"dpo", "orpo", "cpo", "simpo", "tpo"}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model that has been through two steps of SFT, as `workbench train` leaves it."""
    folder = tmp_path_factory.mktemp("sft")
    run = workbench.train(*SMALL, "trainer.max_steps=2", f"paths.run_dir={folder}")
    return run.dir / "model"


@pytest.mark.parametrize("method", METHODS)
def test_it_trains_on_what_sft_left(method, start, capsys):
    options = [option for option in SMALL if not option.startswith("model.")]
    answers = [] if method in SCORES else ["exact_match=4"]
    run = workbench.train(f"method={method}", f"model.name={start}", *options, *answers, "trainer.max_steps=3")
    out, err = capsys.readouterr()
    assert run.metrics["steps"] == 3 and math.isfinite(run.metrics["val/loss"])
    assert "untrained" not in err
    assert run.config.metric in run.metrics, "what a sweep would rank by is logged"
    assert ("exact match" in out) is (method not in SCORES)
    if run.config.metric != "val/loss":
        assert f"{run.config.metric} " in out
    assert f"workbench train method=dpo model.name={run.dir}" not in out


@pytest.mark.parametrize("method", METHODS)
def test_an_untrained_start_is_told_where_it_is_a_mistake(method, caplog):
    workbench.train(f"method={method}", *SMALL, "trainer.max_steps=1")
    told = [r.getMessage() for r in caplog.records if "starts untrained" in r.getMessage()]
    assert len(told) == (method in REFINES)
    assert all("run SFT first (workbench train)" in text and "model.name=tiny" in text for text in told)


def test_sft_says_what_can_follow(capsys):
    assert main(["train", *SMALL, "trainer.max_steps=1"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "method=dpo" in line)
    words = line.split()
    assert words[:3] == ["workbench", "train", "method=dpo"]
    model = words[3].removeprefix("model.name=")
    assert (pathlib.Path(model) / "config.json").is_file()


@pytest.mark.parametrize("method", sorted(SCORES))
def test_a_model_that_scores_is_not_asked_to_write(method):
    with pytest.raises(UserError, match="needs a model that writes"):
        workbench.train(f"method={method}", *SMALL, "exact_match=4")


def test_rows_of_another_type_are_refused_in_one_line(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    assert main(["train", "method=dpo", *SMALL[2:], "data=file", f"data.train={rows}"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "preference" in error and "prompt_completion" in error
