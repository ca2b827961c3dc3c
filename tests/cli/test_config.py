"""Composition: precedence, and every mistake as one readable line."""

import pytest
from omegaconf import OmegaConf

from workbench.cli import config
from workbench.errors import UserError


@pytest.fixture
def own(tmp_path):
    """A folder of one's own with an experiment that sets many scalars."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /optim: sgd\n"
        "optim: {lr: 0.5, momentum: 0.9}\nseed: 7\ndata: {batch_size: 3, shuffle: false}\ntrainer: {max_epochs: 9}\n"
    )
    return tmp_path


def test_command_line_over_experiment_over_group_over_default(own):
    assert config.load([]).cfg.optim.weight_decay == 0.0
    assert config.load(["model=hf", "model.name=x"]).cfg.optim.lr == 2e-5
    assert config.load([]).cfg.optim.lr == 2e-3  # model=tiny brings its optimizer ...
    assert config.load(["optim=sgd"]).cfg.optim.lr == 1e-2  # ... unless another one is chosen
    assert config.load(["optim=adamw"]).cfg.optim.lr == 2e-5
    mine = config.load(["experiment=mine"], config_dirs=[own]).cfg
    assert mine.optim._target_ == "torch.optim.SGD"
    assert (mine.optim.lr, mine.optim.momentum, mine.seed, mine.data.batch_size) == (0.5, 0.9, 7, 3)
    typed = config.load(["experiment=mine", "debug=fast", "data.batch_size=5"], config_dirs=[own]).cfg
    assert (typed.data.batch_size, typed.trainer.max_epochs, typed.optim.lr) == (5, 1, 0.5)


def _scalars(cfg):
    flat = {}

    def walk(node, path):
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, f"{path}{key}.")
            elif isinstance(value, (bool, int, float)):
                flat[path + key] = value

    walk(OmegaConf.to_container(cfg, resolve=True), "")
    return flat


def test_a_default_typed_on_the_command_line_wins_over_a_file(own):
    """Also where what is typed equals the default, for every scalar there is."""
    defaults = _scalars(config.load(["model=hf", "model.name=x", "data=file", "data.train=x"]).cfg)
    lines = "".join(f"  {k}: 12345\n" for k in ())
    other = OmegaConf.create({})
    for path, value in defaults.items():
        OmegaConf.update(other, path, (not value) if isinstance(value, bool) else value + 1)
    (own / "experiment" / "all.yaml").write_text("# @package _global_\n" + OmegaConf.to_yaml(other) + lines)
    base = ["model=hf", "model.name=x", "data=file", "data.train=x", "experiment=all"]
    changed = _scalars(config.load(base, config_dirs=[own]).cfg)
    assert all(changed[path] != value for path, value in defaults.items())
    typed = [f"{path}={str(value).lower() if isinstance(value, bool) else value}" for path, value in defaults.items()]
    restored = _scalars(config.load([*base, *typed], config_dirs=[own]).cfg)
    assert {path: restored[path] for path in defaults} == defaults


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=tinyy"], "model=tinyy is not an option of the group 'model'. Did you mean 'tiny'? Options: "),
        (["experiment=smolm2_lora"], "Did you mean 'smollm2_lora'?"),
        (["resume=epoch=3-step=20.ckpt"], "'resume=\"epoch=3-step=20.ckpt\"'"),
        (["name=a(b)"], "'name=\"a(b)\"'"),
        (["name=a#b"], "'name=\"a#b\"'"),
        (["seed"], "an override is written key=value"),
        (["seed=1,2"], "add -m to run one job for each, or write seed=[1,2] for a list or 'seed=\"1,2\"' for text"),
        (["+seed=1"], "leave the + out"),
        (["~seeed"], "does not exist"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(overrides, message):
    with pytest.raises(UserError) as caught:
        config.load(overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_quoted_form_that_a_message_shows_works():
    with pytest.raises(UserError) as caught:
        config.load(['resume=runs/a b/epoch=3, (x) {y} #1 "q".ckpt'])
    shown = str(caught.value).split("command line: '", 1)[1].removesuffix("'")
    assert config.load([shown]).cfg.resume == 'runs/a b/epoch=3, (x) {y} #1 "q".ckpt'


def test_broken_yaml_names_file_and_line(own):
    (own / "experiment" / "broken.yaml").write_text("# @package _global_\noptim:\n  lr: [1\nseed: 2\n")
    with pytest.raises(UserError, match=r"broken\.yaml, line \d+ is not valid YAML"):
        config.load(["experiment=broken"], config_dirs=[own])


def test_unknown_group_in_an_experiment_is_named(own):
    (own / "experiment" / "wrong.yaml").write_text("# @package _global_\ndefaults:\n  - override /optimm: sgd\n")
    with pytest.raises(UserError, match="optimm"):
        config.load(["experiment=wrong"], config_dirs=[own])


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        config.load([], config_dirs=[tmp_path / "nowhere"])


def test_name_of_a_run(own):
    assert config.load([]).cfg.name == "sft_tiny"
    assert config.load(["experiment=mine"], config_dirs=[own]).cfg.name == "mine"
    assert config.load(["name=x"]).cfg.name == "x"


def test_composing_leaves_no_state_behind():
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    for seed in range(3):
        assert config.load([f"seed={seed}"]).cfg.seed == seed
    assert not GlobalHydra.instance().is_initialized()
    assert not HydraConfig.initialized()  # Lightning would start DDP processes in Hydra's way


def test_a_saved_configuration_composes_to_itself(tmp_path):
    cfg = config.load(["optim.lr=0.25"]).cfg
    cfg.paths.run_dir = str(tmp_path)
    OmegaConf.save(cfg, tmp_path / "config.yaml", resolve=True)
    again = config.load(["seed=4"], "config", [tmp_path]).cfg
    assert again.optim.lr == 0.25 and again.seed == 4
    assert OmegaConf.to_container(again.trainer) == OmegaConf.to_container(cfg.trainer, resolve=True)
