"""Every experiment: what it names is what runs, on any model, and it trains on the embedded world."""

import json
import math

import pytest
import yaml
from omegaconf import OmegaConf

import workbench
from workbench.cli import check, config, main

FOLDER = config.config_dir() / "experiment"
EXPERIMENTS = sorted(file.stem for file in FOLDER.glob("*.yaml"))
ELSEWHERE = {"smollm2_lora": "a package with weights, and data of its own"}
HF = ["model=hf", "model.name=x", "data=file", "data.train=rows.jsonl", "exact_match=0"]
SHORT = [
    "data.train={path: 'tiny:sums', kwargs: {size: 32}}",
    "data.eval={path: 'tiny:sums', kwargs: {size: 4}}",
    "data.batch_size=8",
    "data.max_length=64",
    "model.init_kwargs={size: pico}",
    "trainer=cpu",
    "trainer.max_epochs=1",
    "trainer.max_steps=2",
    "trainer.val_check_interval=1",
    "exact_match=0",
    "callbacks=none",
    "logger=none",
    "save_model=false",
]
# Online ones, whose windows are made small; the engine is the one that is always there.
ONLINE = [
    "engine=torch",
    "model=tiny",
    "method.num_generations=4",
    "method.steps_per_generation=2",
    "method.max_completion_length=8",
]


def length(completion_ids, **columns):
    """A reward with spread, whatever an untrained model writes."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def made_small(method):
    """Overrides of an online experiment, which keep its rewards and add one."""
    rewards, weights = [*method["rewards"], f"{__name__}:length"], method["reward_weights"]
    found = [*ONLINE, f"method.dynamic_sampling={min(method['dynamic_sampling'], 1)}", f"method.rewards={typed(rewards)}"]
    return found + ([] if weights is None else [f"method.reward_weights={typed([*weights, 1.0])}"])


def typed(value):
    """As it is typed on the command line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {typed(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(typed, value)) + "]"
    return f"'{value}'" if isinstance(value, str) else json.dumps(value)


def leaves(node, path=""):
    """Dotted key -> value."""
    for key, value in node.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value:
            yield from leaves(value, name)
        else:
            yield name, value


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("model", [[], HF], ids=["tiny", "hf"])
def test_what_it_names_is_what_runs(name, model):
    own = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    own.pop("defaults", None)
    cfg = config.load([f"experiment={name}", *(model if name not in ELSEWHERE else [])]).cfg
    check.check(cfg)
    for key, value in leaves(own):
        found = OmegaConf.select(cfg, key)
        found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
        assert found == (float(value) if isinstance(found, float) else value), key


@pytest.mark.parametrize("name", sorted(set(EXPERIMENTS) - ELSEWHERE.keys()))
def test_it_trains_on_the_embedded_world(name, tmp_path):
    method = OmegaConf.to_container(config.load([f"experiment={name}"]).cfg)["method"]
    online = "engine" in method
    small = made_small(method) if online else []
    run = workbench.train(f"experiment={name}", *SHORT, *small, f"paths.run_dir={tmp_path}")
    assert run.metrics["steps"] == 2
    assert math.isfinite(run.metrics["train/loss"]) and run.metrics["train/grad_norm"] > 0
    assert math.isfinite(run.metrics["val/reward" if online else "val/loss"])


def test_it_is_printed_with_its_method(capsys):
    assert main(["train", "--cfg", "job", "experiment=exo", "-p", "method"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["_target_"], shown["loss"], shown["label_smoothing"]) == ("workbench.methods.dpo.DPO", "exo_pair", 1e-3)


def test_the_command_line_wins_over_it():
    cfg = config.load(["experiment=simpo", "method.beta=2.0", "optim.lr=3e-7", "data.batch_size=64"]).cfg
    assert (cfg.method.beta, cfg.optim.lr, cfg.data.batch_size) == (2.0, 3e-7, 64)
