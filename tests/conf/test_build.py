"""Every option of every group, and every experiment: composed, checked and built, with no weight file opened."""

import json
import re

import pytest

from workbench import run
from workbench.cli import check, config

CONF = config.config_dir()
GROUPS = sorted(p.name for p in CONF.iterdir() if p.is_dir() and p.name not in ("hydra", "sweep", "invariant"))
CHOICES = [f"{group}={f.stem}" for group in GROUPS for f in sorted((CONF / group).glob("*.yaml"))]
# What an option needs beside itself to be complete.
NEEDS = {
    "model=hf": ["model.name=x"],
    "data=file": ["data.train=rows.jsonl", "exact_match=0"],
    "data=hub": ["data.train.path=owner/name"],
    "data=mixture": ["data.train.sources=[{path: a.jsonl, weight: 2}, b.jsonl]"],
    "peft=qlora": ["model=hf", "model.name=x"],
}
NEEDS |= {choice: ["method=grpo"] for choice in CHOICES if choice.startswith("engine=")}
NEEDS["engine=scripted"] = ["method=grpo", "method.engine.completions=[{token_ids: [1]}]"]
OBJECTS = ("engine", "rewards", "eval_sampling")  # that the method makes of what it is given
# What cannot be built without CUDA or a package that is not always there.
CHECKED_ONLY = r"trainer=gpu|strategy=deepspeed|logger=(wandb|tensorboard)"


@pytest.fixture
def no_weights(monkeypatch):
    """Fails whatever opens a model."""
    import safetensors.torch
    import torch
    import transformers

    def refuse(*_, **__):
        raise AssertionError("a weight file was opened")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(refuse))
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(safetensors, "safe_open", refuse)
    monkeypatch.setattr(safetensors.torch, "load_file", refuse)
    for name in ("load_model", "load_tokenizer"):  # where they are used: a module imported meanwhile would keep a patch
        monkeypatch.setattr(f"workbench.methods.base.{name}", refuse)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_option_builds_without_opening_weights(choice, no_weights, tmp_path):
    cfg = config.compose(choice, *NEEDS.get(choice, []))
    if re.match(CHECKED_ONLY, choice):
        return
    cfg.paths.run_dir = str(tmp_path)
    cfg.trainer.accelerator = "cpu"
    cfg.trainer.devices = 1
    check.check_targets(cfg)
    parts = run.build(cfg)
    assert parts.trainer.max_epochs == (cfg.trainer.max_epochs)
    plain = check.to_plain(cfg)
    assert isinstance(parts.data.spec.chat_template_kwargs, (dict, type(None)))
    for name, value in plain["method"].items():
        if not name.startswith("_") and hasattr(parts.method, name) and name not in OBJECTS:
            assert getattr(parts.method, name) == value, name


def test_containers_that_reach_a_library_are_plain(no_weights, tmp_path):
    cfg = config.compose("peft=lora", "peft.target_modules=[q_proj,v_proj]", "model.init_kwargs={a: {b: [1]}}")
    cfg.paths.run_dir = str(tmp_path)
    method = run.build(cfg).method
    assert json.loads(json.dumps(method.peft_spec.target_modules)) == ["q_proj", "v_proj"]
    assert json.loads(json.dumps(method.model_spec.init_kwargs)) == {"a": {"b": [1]}}
