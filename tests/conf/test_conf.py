"""Every configuration file: documented, composed, checked, built; its defaults are those of the signatures."""

import json
import re

import pytest
from omegaconf import OmegaConf

import workbench
from workbench.cli import check, config, schema
from workbench.cli.settings import COMMAND_SETTINGS
from workbench.errors import UserError

CONF = config.config_dir()
# The file that carries a class's own defaults; other options of its group exist to differ.
DEFAULTS_OF = {
    "workbench.methods.sft.SFT": "method/sft.yaml",
    "workbench.methods.dpo.DPO": "method/dpo.yaml",
    "workbench.methods.bco.BCO": "method/bco.yaml",
    "workbench.methods.kto.KTO": "method/kto.yaml",
    "workbench.methods.cpo.CPO": "method/cpo.yaml",
    "workbench.methods.orpo.ORPO": "method/orpo.yaml",
    "workbench.methods.tpo.TPO": "method/tpo.yaml",
    "workbench.data.module.DataModule": "data/file.yaml",
    "workbench.models.load.ModelSpec": "model/hf.yaml",
    "workbench.models.peft.PeftSpec": "peft/lora.yaml",
    "workbench.methods.grpo.GRPO": "method/grpo.yaml",
    "workbench.methods.rloo.RLOO": "method/rloo.yaml",
    "workbench.methods.gmpo.GMPO": "method/gmpo.yaml",
    "workbench.rollouts.scripted.ScriptedEngine": "engine/scripted.yaml",
    "workbench.rollouts.torch_engine.TorchEngine": "engine/torch.yaml",
    "workbench.rollouts.transformers_engine.TransformersEngine": "engine/transformers.yaml",
    "workbench.rollouts.vllm_engine.VLLMEngine": "engine/vllm.yaml",
    "workbench.rollouts.vllm_server.VLLMServerEngine": "engine/vllm_server.yaml",
    "workbench.methods.reward.Reward": "method/reward.yaml",
    "workbench.methods.prm.PRM": "method/prm.yaml",
    "workbench.methods.optim.adamw": "optim/adamw.yaml",
    "workbench.methods.optim.schedule": "scheduler/constant.yaml",
    "workbench.strategies.fsdp2.FSDP2Strategy": "strategy/fsdp2.yaml",
    "workbench.strategies.deepspeed.DeepSpeed": "strategy/deepspeed_stage_2.yaml",
    "workbench.callbacks.progress.StepProgress": "callbacks/default.yaml",
    "workbench.callbacks.checkpoint.Checkpoint": "callbacks/default.yaml",
    "workbench.callbacks.interrupt.GracefulStop": "callbacks/default.yaml",
    "workbench.callbacks.samples.GenerationSamples": "callbacks/samples.yaml",
    "workbench.callbacks.throughput.Throughput": "callbacks/throughput.yaml",
    "workbench.callbacks.early_stopping.EarlyStopping": "callbacks/early_stopping.yaml",
    "workbench.callbacks.averaging.EMA": "callbacks/ema.yaml",
    "workbench.callbacks.averaging.BEMA": "callbacks/bema.yaml",
    "workbench.loggers.csv.CSVLogger": "logger/csv.yaml",
    "workbench.loggers.trackio.TrackioLogger": "logger/default.yaml",
    "workbench.cli.sweep.SubprocessLauncher": "hydra/launcher/subprocess.yaml",
}
# Keys whose value in the file ties the part to the run that it belongs to, or is a part of its own.
TIED = {"save_dir", "dirpath", "resume_hint", "cache_dir", "name", "engine"}


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda f: str(f.relative_to(CONF)))
def test_every_key_has_a_comment(file):
    lines = file.read_text().splitlines()
    assert any(re.match(r"# (?!@package)", line) for line in lines[:2]), "the file says what it is first"
    in_defaults = False
    for line in lines:
        in_defaults = line.startswith("defaults:") or (in_defaults and line.startswith((" ", "-")))
        key = re.match(r"^ *([\w.]+):(.*)$", line)
        if in_defaults or not key or key[1] in ("_target_", "_partial_"):
            continue
        is_parent = not key[2].strip()
        assert is_parent or re.search(r"\S +# \S", line), f"no comment: {line}"


@pytest.mark.parametrize("option", [f.stem for f in (CONF / "sweep").glob("*.yaml")])
def test_every_sweep_composes_into_jobs_that_pass(option):
    from workbench.cli import sweep

    found = config.load([f"sweep={option}"], sweep=True)
    assert found.hydra.mode.name == "MULTIRUN"
    first, *_, last = sweep.job_overrides(found)
    assert first != last
    for job in (first, last):
        check.check(config.load(job).cfg)


@pytest.mark.parametrize("command", COMMAND_SETTINGS)
def test_every_command_composes(command):
    primary = COMMAND_SETTINGS[command][0]
    overrides = ["model.name=x"] if command == "generate" else []
    config.compose(*overrides, config_name=primary)


def _nodes(target: str):
    group, _, option = DEFAULTS_OF[target].removesuffix(".yaml").rpartition("/")
    if group == "hydra/launcher":
        yield OmegaConf.to_container(config.load([]).hydra.launcher)
        return
    # Not the nano model and its sums, which set values of their own.
    others = ["model=hf", "model.name=x", "data=file", "data.train=rows.jsonl", "exact_match=0"]
    others = [o for o in others if o.split("=")[0] != group] + ["method=grpo"] * (group == "engine")
    plain = check.to_plain(config.load([*others, f"{group}={option}"]).cfg)
    yield from (node for _, node in check.walk_targets(plain) if node["_target_"] == target)


@pytest.mark.parametrize("target", DEFAULTS_OF)
def test_files_hold_the_defaults_of_the_signatures(target):
    described = schema.describe(schema.locate(target))["properties"]
    typed = {"name", "train"}  # required
    provided = check.FROM_GROUPS.get(DEFAULTS_OF[target].partition("/")[0], {})
    nodes = list(_nodes(target))
    assert nodes, f"{target} is not in {DEFAULTS_OF[target]}"
    for name, spec in described.items():
        if name in TIED or name in typed or name in provided or "default" not in spec:
            continue
        for node in nodes:
            if name not in node:  # objects that a file cannot hold are not listed
                assert name in ("tokenizer", "params", "optimizer", "num_training_steps"), f"{target}: {name} is not listed"
                continue
            value = list(node[name]) if isinstance(node[name], list) else node[name]
            default = list(spec["default"]) if isinstance(spec["default"], (list, tuple)) else spec["default"]
            assert value == default and type(value) is type(default), f"{target}: {name}"


def test_every_own_class_in_the_files_has_its_defaults_compared():
    used = {t for f in CONF.rglob("*.yaml") for t in schema.targets_in(f.read_text()) if t.startswith("workbench.")}
    used = {t for t in used if not t.startswith("workbench.rewards.")}  # experiments name them, with values of their own
    assert used | {"workbench.cli.sweep.SubprocessLauncher"} == set(DEFAULTS_OF)


@pytest.mark.parametrize("command", COMMAND_SETTINGS)
def test_top_level_keys_hold_the_defaults_of_the_settings(command):
    primary, settings = COMMAND_SETTINGS[command]
    plain = config.load(["model.name=x"] if command == "generate" else ["data=file", "data.train=x"], primary).cfg
    plain = OmegaConf.to_container(plain)
    for name, spec in schema.describe(settings)["properties"].items():
        if "default" in spec and name not in ("name", "method", "optim", "scheduler", "callbacks", "logger", "peft", "strategy"):
            assert plain[name] == spec["default"], name


def test_the_schema_file_is_that_of_the_signatures():
    """Run ``python -m workbench.cli.schema`` after a change of a signature or a file in ``conf/``."""
    shipped, built = schema.load(), schema.build()
    assert shipped["commands"] == json.loads(json.dumps(built["commands"]))
    for path, definition in built["$defs"].items():
        recorded = shipped["$defs"].get(path)
        assert recorded is not None, path
        if definition.get("from") == recorded.get("from"):  # another version of another package may differ
            assert recorded == json.loads(json.dumps(definition)), path
    assert shipped["$defs"].keys() == built["$defs"].keys()


def test_every_described_argument_of_our_classes_has_a_description():
    for path, definition in schema.load()["$defs"].items():
        if path.startswith("workbench."):
            undescribed = [name for name, spec in definition["properties"].items() if "description" not in spec]
            assert not undescribed, f"{path}: {undescribed}"


def test_every_method_is_a_name_of_the_package():
    for target in DEFAULTS_OF:
        if target.startswith("workbench.methods.") and not target.startswith("workbench.methods.optim"):
            assert getattr(workbench, target.rpartition(".")[2]) is schema.locate(target)


MISSPELT = [
    ("method.losss=nll", "method.losss is not an option of SFT. Did you mean 'loss'?"),
    ("+method.los=nll", "Did you mean 'loss'?"),
    ("+trainer.lerning_rate=1", "trainer.lerning_rate is not an option of Trainer."),
    ("trainer.max_epoch=1", "trainer.max_epoch is not an option of Trainer. Did you mean 'max_epochs'?"),
    ("optim.learning_rate=1e-3", "optim.learning_rate is not an option of adamw."),
    ("optim=sgd +optim.momentun=0.9", "optim.momentun is not an option of SGD. Did you mean 'momentum'?"),
    ("data.batchsize=4", "data.batchsize is not an option of DataModule. Did you mean 'batch_size'?"),
    ("peft=lora peft.rank=8", "peft.rank is not an option of PeftSpec."),
    ("+model.nam=x", "Did you mean 'name'?"),
    ("sed=1", "sed is not an option of train. Did you mean 'seed'?"),
    ("modle=tiny", "modle is not an option of train. Did you mean 'model'?"),
    ("callbacks.checkpoint.every_n_step=5", "Did you mean 'every_n_steps'?"),
    ("logger.trackio.projekt=x", "Did you mean 'project'?"),
    ("paths.rot=x", "Did you mean 'root'?"),
    ("data.train={pth: x}", "data.train.pth is not an option of a source. Did you mean 'path'?"),
    ("data.train={path: x, splitt: train}", "Did you mean 'split'?"),
    ("method._target_=workbench.methods.sft.SFTT", "Did you mean 'workbench.methods.sft.SFT'?"),
]


@pytest.mark.parametrize(("typed", "message"), MISSPELT)
def test_misspelt_on_the_command_line(typed, message):
    with pytest.raises(UserError) as caught:
        config.compose(*re.findall(r"(?:[^\s{]|\{[^}]*\})+", typed))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("optim: {lrr: 1}", "optim.lrr is not an option of adamw. Did you mean 'lr'?"),
        ("methd: {loss: dft}", "methd is not an option of train. Did you mean 'method'?"),
        ("trainer: {devises: 2}", "Did you mean 'devices'?"),
        ("data: {max_lenght: 5}", "Did you mean 'max_length'?"),
        ("callbacks: {checkpoint: {monitr: val/loss}}", "Did you mean 'monitor'?"),
    ],
)
def test_misspelt_in_an_experiment(tmp_path, lines, message):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{lines}\n")
    with pytest.raises(UserError) as caught:
        config.compose("experiment=mine", config_dirs=[tmp_path])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["data.batch_size=many"], "data.batch_size='many': expects an integer."),
        (["data.batch_size=1e2"], "Write 100."),
        (["method.loss=nl"], "Did you mean 'nll'?"),
        (["trainer.max_epochs=two"], "expects an integer or null"),
        (["seed=null"], "seed=null: expects an integer."),
        (["model=hf"], "model.name is required"),
        (["data=file"], "data.train is required"),
        (["data.micro_batch_size=256"], "data.micro_batch_size=256 is larger than data.batch_size=128"),
        (["model.quantization=4bit"], "choose peft=lora"),
        (["peft.r=8"], "peft"),
        (["scheduler.warmup_steps=5", "scheduler.warmup_ratio=0.1"], "exclude each other"),
        (["scheduler=cosine", "scheduler.warmup_ratio=5"], "must lie between 0 and 1"),
        (["data.streaming=true"], "set trainer.max_steps"),
        (["trainer.max_epochs=-1"], "never end"),
        (["callbacks.checkpoint.monitor=val/loss", "data.eval=null", "exact_match=0"], "set data.eval"),
        (["data.eval=null"], "exact_match=256 needs evaluation data"),
        (["trainer=cpu", "strategy=deepspeed_stage_2"], "needs CUDA"),
        (["+trainer.accumulate_grad_batches=4"], "write data.micro_batch_size=..."),
        (["+trainer.overfit_batches=1"], "write debug=overfit"),
        (["method.layout=packed", "method.pad_to_multiple_of=8"], "has no effect"),
        (["data.packing=bfd", "data.max_length=null"], "set data.max_length"),
        (["data.seed=${sead}"], "sead"),
        (["engine=torch"], "engine is a group that neither this command nor its method has"),
        (["method=grpo", "engine=tor"], "Did you mean 'torch'?"),
    ],
    ids=str,
)
def test_wrong_values_and_combinations(typed, message):
    with pytest.raises(UserError) as caught:
        config.compose(*typed)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_that_take_any_keys_need_no_plus():
    assert config.compose("data.chat_template_kwargs.enable_thinking=false").data.chat_template_kwargs.enable_thinking is False
    assert config.compose("model.init_kwargs.rope_theta=5.0").model.init_kwargs.rope_theta == 5.0


def test_third_party_targets_are_checked_after_import():
    cfg = config.load(["optim=sgd", "+optim.momentun=0.9", "optim._target_=torch.optim.Muon"]).cfg
    check.check(cfg)  # Muon is not in the schema
    with pytest.raises(UserError, match=r"optim\.momentun is not an option of Muon\. Did you mean 'momentum'"):
        check.check_targets(cfg)
    cfg = config.load(["optim=sgd", "optim._target_=torch.optim.Nonsense"]).cfg
    with pytest.raises(UserError, match=r"optim: _target_ 'torch\.optim\.Nonsense' cannot be imported"):
        check.check_targets(cfg)
    cfg = config.load(["optim=sgd", "optim._target_=bitsandbites.Adam"]).cfg
    with pytest.raises(UserError, match="Is the package 'bitsandbites' installed"):
        check.check_targets(cfg)
