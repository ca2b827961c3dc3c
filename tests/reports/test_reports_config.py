"""What goes wrong with configurations and commands in practice: silent typos, odd paths, what reaches libraries."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from report_rig import Fit, write_rows
from rig import CHATML, assistant, t2, user, with_template
from transformers import AutoModelForCausalLM

import workbench
from workbench import run as runs
from workbench.cli import config, main
from workbench.data.module import DataModule
from workbench.errors import UserError

NANO = [
    "model.init_kwargs={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 1}",
    "model.init_kwargs.num_key_value_heads=1",
]
SMALL = [
    *NANO,
    "data=file",
    "data.batch_size=8",
    "exact_match=0",
    "callbacks.samples=null",
    "trainer=cpu",
    "scheduler=constant",
    "logger=csv",
    "trainer.max_epochs=2",
]
ROWS = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(16)]
TALK = [{"messages": [user("q"), assistant("a")]}]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A fresh working folder with rows in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "rows.jsonl", ROWS)
    return tmp_path


def only_run() -> pathlib.Path:
    (folder,) = pathlib.Path("runs").glob("*/*")
    return folder


def test_what_a_run_prints_can_be_typed(capsys):
    """facebookresearch/hydra #1577: a checkpoint called epoch=3-step=20.ckpt is no override."""
    options = [*SMALL, "data.train=data/rows.jsonl", "callbacks.checkpoint.every_n_steps=1", "callbacks.checkpoint.keep=null"]
    assert main(["train", *options, "trainer.max_steps=2"]) == 0
    folder = only_run()
    assert not [path for path in folder.rglob("*") if set(path.name) & set("=#,()[]{} ")]
    straight = None
    for wanted in ("last", "1", str(folder), str(folder / "checkpoints"), str(folder / "checkpoints" / "last.ckpt")):
        assert main(["train", f"resume={wanted}", "trainer.max_steps=3", "callbacks.checkpoint=null"]) == 0
        history = runs.read(only_run()).history
        assert list(history["step"]) == [1, 2, 3]
        straight = straight or history["train/loss"].tolist()
        assert history["train/loss"].tolist() == pytest.approx(straight, abs=1e-6), wanted
    with pytest.raises(UserError) as caught:
        config.load(["resume=runs/epoch=3-step=20.ckpt"])
    assert "'resume=\"runs/epoch=3-step=20.ckpt\"'" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["rows#1.jsonl", "a=1.jsonl", "rows (1).jsonl", "50%.jsonl", "rows@v2.jsonl", "rows, more.jsonl"]
)
def test_any_file_name_can_be_given_in_the_form_that_the_message_shows(name, here):
    """facebookresearch/hydra #2705 (#), #962 (%), #1074 (@)."""
    file = here / name
    write_rows(file, ROWS)
    typed = f"data.train={name}"
    try:
        cfg = config.load([*SMALL, typed]).cfg
    except UserError as error:
        assert "\n" not in str(error)
        shown = str(error).split("'")[-2]
        cfg = config.load([*SMALL, shown]).cfg
    assert cfg.data.train == name
    assert len(DataModule(cfg.data.train).load_train()) == 16


SILENT = [
    ({"chat_template_kwargs": {"enable_thinkin": False}}, "reads no variable 'enable_thinkin'. Did you mean 'enable_thinking'"),
    ({"role_weights": {"assistant": 1.0, "asistant": 2.0}}, "Did you mean 'assistant'"),
    ({"role_names": {"critic": "usr"}}, "Did you mean 'user'"),
    ({"max_lenght": 8}, "max_lenght"),
]


@pytest.mark.parametrize(("data", "message"), SILENT)
def test_keys_of_open_mappings_are_read_by_something_or_refused(data, message):
    """facebookresearch/hydra #1457: a misspelt key is accepted and dropped, and the run uses the default."""
    template = "{%- if enable_thinking is defined and not enable_thinking %}{{- 'no' }}{%- endif %}" + CHATML
    with pytest.raises((UserError, TypeError), match=message):
        Fit(TALK, with_template(t2(), template), **data)
    run = Fit(TALK, with_template(t2(), template), chat_template_kwargs={"enable_thinking": False})
    assert run.segments()[0][0].startswith("no<|im_start|>")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("scheduler.options={num_cycle: 2}", "scheduler.options"),
        ("data.role_weights={asistant: 1}", "Did you mean 'assistant'"),
        ("model.init_kwargs.hiden_size=16", "Did you mean 'hidden_size'"),
        (
            "data.train={path: data/rows.jsonl, columns: {promt: prompt}}",
            "has no column 'promt' to rename. Did you mean 'prompt'",
        ),
        ("+data.train={path: data/rows.jsonl, lmit: 5}", "Did you mean 'limit'"),
    ],
)
def test_typos_below_the_schema_end_the_command_before_training(typed, message, capsys):
    """facebookresearch/hydra #1457, for keys whose names only a library or the data knows."""
    assert main(["train", *SMALL, "data.train=data/rows.jsonl", typed]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not list(pathlib.Path("runs").rglob("*.ckpt"))


def test_held_out_rows_count_as_evaluation_data():
    """A rule that asks for data.eval is content with data.eval_size."""
    base = ["data=file", "data.train=x", "data.eval_size=0.1"]
    assert config.load([*base, "exact_match=4"]).cfg.exact_match == 4
    workbench.compose(*base, "exact_match=4", "callbacks.checkpoint.monitor=val/loss")
    with pytest.raises(UserError, match="needs evaluation data"):
        workbench.compose(*base[:2], "exact_match=4")


def test_lists_of_a_configuration_reach_the_saved_adapter_as_lists(here):
    """huggingface/peft #567: a list from the configuration cannot be written as JSON, at the end of training."""
    adapter = ["peft=lora", "peft.target_modules=[q_proj,v_proj]", "peft.rank_pattern={q_proj: 2}"]
    run = workbench.train(*SMALL, "data.train=data/rows.jsonl", "trainer.max_steps=1", *adapter)
    saved = json.loads((run.dir / "model" / "adapter_config.json").read_text())
    assert sorted(saved["target_modules"]) == ["q_proj", "v_proj"] and saved["rank_pattern"] == {"q_proj": 2}
    state = {name: p for name, p in run.model.state_dict().items() if "lora" not in name}
    base = AutoModelForCausalLM.from_config(run.method.policy.config)
    base.load_state_dict({n.removeprefix("base_model.model.").replace(".base_layer", ""): p for n, p in state.items()})
    plain = PeftModel.from_pretrained(base, run.dir / "model").eval()
    ids = torch.arange(3, 9)[None]
    assert torch.equal(plain(ids).logits, run.model.eval()(ids).logits)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_write_one_folder_and_relative_paths_keep_their_meaning(here):
    """facebookresearch/hydra #2070: children make folders of their own and look for the data elsewhere."""
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(workbench.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    options = [*SMALL, "data.train=data/rows.jsonl", "trainer.max_steps=2", "trainer.devices=2", "strategy=ddp"]
    words = [sys.executable, "-m", "workbench", "train", *options]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)
    assert result.returncode == 0, result.stderr
    assert sorted(p.name for p in here.iterdir() if p.name != "trackio") == ["data", "runs"]
    both = runs.read(only_run())
    assert list(both.history["step"]) == [1, 2]
    alone = workbench.train(*SMALL, "data.train=data/rows.jsonl", "trainer.max_steps=2", "name=alone")
    assert both.history["train/loss"].to_numpy() == pytest.approx(alone.history["train/loss"].to_numpy(), abs=1e-5)
