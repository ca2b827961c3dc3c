"""Which learning rate a run gets: that of its method and model; an experiment's wins over it, and the command line over all."""

import pytest

from workbench.cli import config

HF = ["model=hf", "model.name=x"]


@pytest.mark.parametrize(
    ("typed", "lr", "scheduler"),
    [
        ([], 2e-3, "linear"),
        (HF, 2e-5, "linear"),
        (["model=smollm2"], 2e-5, "linear"),
        (["method=dpo"], 1e-4, "linear"),
        (["method=dpo", *HF], 1e-6, "linear"),
        ([*HF, "method=dpo"], 1e-6, "linear"),
        (["method=dpo", "model=smollm2"], 1e-6, "linear"),
        (["method=orpo", *HF], 1e-6, "linear"),
        (["method=cpo", *HF], 1e-6, "linear"),
        (["method=simpo", *HF], 1e-6, "linear"),
        (["method=tpo", *HF], 5e-7, "linear"),
        (["method=tpo"], 1e-4, "linear"),
        (["method=dpo", *HF, "optim=adamw"], 2e-5, "linear"),
        (["method=dpo", "optim=adamw_tiny"], 2e-3, "linear"),
        (["method=dpo", "optim=sgd"], 1e-2, "linear"),
        (["method=dpo", *HF, "optim.lr=3e-5"], 3e-5, "linear"),
        (["method=dpo", "optim.lr=3e-5"], 3e-5, "linear"),
        (["method=dpo", "scheduler=cosine"], 1e-4, "cosine"),
        (["experiment=apo_zero"], 2e-7, "linear"),
        (["experiment=apo_zero", *HF], 2e-7, "linear"),
        (["experiment=wpo", *HF], 1e-6, "linear"),  # the paper names no rate: the method's
        (["experiment=wpo"], 1e-4, "linear"),
        (["experiment=dpo", *HF], 1e-6, "constant"),
        (["experiment=dpo", "optim=adamw_preference", *HF], 1e-6, "constant"),
        (["experiment=dpo", "optim.lr=5e-5"], 5e-5, "constant"),
        (["experiment=smollm2_lora", "method=dpo"], 3e-4, "linear"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else str(v),
)
def test_the_rate(typed, lr, scheduler):
    cfg = config.load(typed).cfg
    assert (cfg.optim.lr, cfg.scheduler.name) == (lr, scheduler)


def test_the_nano_model_warms_up_whatever_the_method():
    assert config.load(["method=dpo"]).cfg.scheduler.warmup_steps == config.load([]).cfg.scheduler.warmup_steps > 0


def test_a_model_of_ones_own_needs_no_rate_for_each_kind_of_method(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# Mine.\ndefaults:\n  - hf\n  - _self_\nname: x\n")
    assert config.load(["method=dpo", "model=mine"], config_dirs=[tmp_path]).cfg.optim.lr == 1e-6
    (tmp_path / "optim" / "adamw_preference").mkdir(parents=True)
    (tmp_path / "optim" / "adamw_preference" / "mine.yaml").write_text("lr: 5e-6\n")
    assert config.load(["method=dpo", "model=mine"], config_dirs=[tmp_path]).cfg.optim.lr == 5e-6


def test_an_experiment_may_choose_another_optimizer(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\n# Mine.\ndefaults:\n  - override /method: dpo\n  - override /optim: adafactor\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    cfg = config.load(["experiment=mine", *HF], config_dirs=[tmp_path]).cfg
    assert cfg.optim._target_.endswith("Adafactor") and cfg.method._target_.endswith("DPO")


def test_the_chosen_optim_is_still_a_plain_one():
    assert config.load(["method=dpo"]).choices["optim"] == "adamw_preference"
    assert config.load([]).choices["optim"] == "adamw_tiny"
