"""What goes wrong with pairs, labels and references in practice: the smallest input that shows it, in every method it reaches."""

import functools
import importlib
import math
import subprocess
import sys

import pytest
import torch
from support import DATA, MODEL, run_method

from workbench.errors import UserError
from workbench.models.load import ModelSpec, load_model
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.save import save_pretrained
from workbench.models.tokenizer import load_tokenizer

METHODS = {
    "dpo": ("dpo:DPO", {"beta": 0.3}),
    "kto": ("kto:KTO", {"beta": 0.3}),
    "bco": ("bco:BCO", {"beta": 0.3}),
    "reward": ("reward:Reward", {}),
    "cpo": ("cpo:CPO", {}),
    "orpo": ("orpo:ORPO", {}),
}
PAIRED = ("dpo", "reward", "cpo", "orpo")
LORA = PeftSpec(r=4, alpha=8)


def run(name, rows, method=None, data=None, trainer=None, **options):
    path, defaults = METHODS[name]
    module, _, kind = path.partition(":")
    kind = getattr(importlib.import_module(f"workbench.methods.{module}"), kind)
    data = {"train": rows, "batch_size": min(8, len(rows)) if isinstance(rows, list) else 8, **(data or {})}
    return run_method(kind, data, {**defaults, **(method or {})}, {"max_steps": 1, **(trainer or {})}, **options)


def rows_of(name, *pairs):
    """Rows of the kind that the method takes from ``(prompt, better, worse)``."""
    if name in PAIRED:
        return [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in pairs]
    return [{"prompt": p, "completion": text, "label": good} for p, c, r in pairs for text, good in ((c, True), (r, False))]


def numbers(steps):
    return {k: v for k, v in steps[0].items() if not k.endswith("per_second")}


PLAIN = [("The river counts", " the lantern.", " a violin repairs."), ("A garden", " of mills.", " the the the of the mills.")]


@pytest.mark.parametrize("name", METHODS)
def test_metrics_are_means_over_the_step_however_it_is_cut(name):
    """huggingface/trl #6380, verl-project/verl #2259: means of micro-batches' means, or of the last one alone."""
    rows = rows_of(name, *PLAIN)
    whole, cut = (numbers(run(name, rows, data={"micro_batch_size": m})[0]) for m in (len(rows), 1))
    assert whole.keys() == cut.keys()
    for key, value in whole.items():
        assert cut[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
@pytest.mark.parametrize("name", METHODS)
def test_a_completion_that_does_not_fit_leaves_every_number_finite(name, truncation, caplog):
    """huggingface/trl #6320, #3398: the mean over nothing is NaN; a long partner makes padding of a short answer."""
    long = ("The river counts the lantern and the mill and the garden of the mills", " yes.", " no.")
    unequal = ("A", " mill.", " the lantern repairs the river and the garden and the mill and the violin and the lantern.")
    rows = rows_of(name, *PLAIN, long, unequal)
    steps, _, trainer = run(name, rows, data={"max_length": 12, "truncation": truncation, "micro_batch_size": 1})
    assert all(math.isfinite(v) for v in steps[0].values()), steps[0]
    report = trainer.datamodule.reports["train"]
    assert report.rows_in - report.rows_out == sum(report.dropped.values())
    assert report.truncated > 0
    if truncation == "keep_start":
        assert report.dropped.get("cut_away", 0) > 0


@pytest.mark.parametrize("name", METHODS)
def test_no_row_left_is_an_error(name):
    """huggingface/trl #5826."""
    long = ("The river counts the lantern and the mill and the garden of the mills", " yes.", " no.")
    with pytest.raises(UserError, match=r"no row|left"):
        run(name, rows_of(name, long), data={"max_length": 6})


@pytest.mark.parametrize("name", PAIRED)
def test_a_pair_that_differs_after_the_limit_is_dropped_and_counted(name):
    """natolambert/rlhf-book #503: identical sides have no gradient."""
    same = "the lantern and the mill and the garden and the river and"
    pair = ("Say", f" {same} yes.", f" {same} no.")
    _, _, trainer = run(name, rows_of(name, *PLAIN, pair), data={"max_length": 12, "batch_size": 2})
    assert trainer.datamodule.reports["train"].dropped == {"identical_pair": 1}


def frozen_adapter(folder):
    from peft import PeftModel

    model = apply_peft(load_model(MODEL), LORA)
    save_pretrained(model, load_tokenizer(ModelSpec(MODEL)), folder)
    return PeftModel.from_pretrained(load_model(MODEL), folder)


@pytest.mark.parametrize("name", [n for n in METHODS if n != "reward"])
def test_an_adapter_loaded_frozen_is_an_error_before_the_first_step(name, tmp_path):
    """huggingface/trl #6700: an empty optimizer, and a run that learns nothing."""
    with pytest.raises(UserError, match=r"0 trainable parameters; .*is_trainable=True"):
        run(name, rows_of(name, *PLAIN), {"model": frozen_adapter(tmp_path), "tokenizer": load_tokenizer(ModelSpec(MODEL))})


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("adapter", [{}, {"use_dora": True}, {"use_rslora": True}], ids=str)
def test_a_fresh_adapter_starts_as_the_base(name, adapter):
    """pytorch/torchtune #1909: magnitudes that were never set. The first loss is the base's, bit for bit."""
    rows = rows_of(name, *PLAIN)
    base, adapted = (run(name, rows, {"peft": peft})[0][0]["train/loss"] for peft in (None, PeftSpec(r=4, alpha=8, **adapter)))
    assert adapted == base


@pytest.mark.parametrize("name", ["dpo", "kto", "bco"])
def test_dropout_leaves_the_start_exact_and_modes_as_they_were(name):
    """huggingface/trl #2042, #3000: dropout in a reference's pass, or left switched off after one."""
    model = ModelSpec(MODEL, init_kwargs={"attention_dropout": 0.5})
    steps, module, _ = run(name, rows_of(name, *PLAIN), {"model": model})
    assert abs(steps[0].get("train/rewards/chosen", 0.0)) == 0.0
    assert steps[0]["train/loss"] == pytest.approx({"dpo": math.log(2), "kto": 0.5, "bco": math.log(2)}[name], rel=1e-6)
    assert module.policy.training
    assert all(m.training for m in module.policy.modules())
    assert not module.reference.policy.training


SCORES = """
import sys, json
sys.path.insert(0, {tests!r})
from support import DATA, MODEL, run_method
from workbench.methods.reward import Reward
from workbench.models.load import ModelSpec
options = {{"model": ModelSpec(MODEL, init_seed={seed})}}
steps, _, _ = run_method(Reward, {{"train": str(DATA / "preference.jsonl")}}, options, {{"max_steps": 2}})
print("LOSS", [s["train/loss"] for s in steps])
"""


@pytest.mark.slow
def test_a_reward_model_starts_the_same_in_every_process():
    """huggingface/trl #4887: a head drawn before the seed was set."""

    def losses(seed):
        code = SCORES.format(tests=str(DATA.parent.parent), seed=seed)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return next(line for line in done.stdout.splitlines() if line.startswith("LOSS"))

    assert losses(0) == losses(0) != losses(1)


@pytest.mark.parametrize("name", METHODS)
def test_the_packed_path_gives_the_loss_and_gradient_of_the_plain_one(name):
    """linkedin/Liger-Kernel #1082: another normaliser on the fast path, a gradient a hundred times as long."""
    rows = rows_of(name, *PLAIN)
    padded, packed = (numbers(run(name, rows, {"layout": layout})[0]) for layout in ("padded", "packed"))
    for key in ("train/loss", "train/grad_norm"):
        assert packed[key] == pytest.approx(padded[key], rel=1e-5)


def test_rewards_of_a_list_of_losses_are_those_of_its_preference_part():
    """huggingface/trl #5079: the last loss of the list overwrote them."""
    data = {"train": str(DATA / "preference.jsonl")}
    runs = [
        run("dpo", data["train"], {"loss": loss, "reference_free": True})[0][0]
        for loss in (["sigmoid"], ["sigmoid", "sft"], ["sft", "sigmoid"])
    ]
    for key in ("chosen", "rejected", "margins", "accuracies"):
        first, *others = (r[f"train/rewards/{key}"] for r in runs)
        assert first != 0 and others == [first, first]
    nll = run("dpo", data["train"], {"loss": "sft", "reference_free": True})[0][0]["train/loss"]
    assert runs[1]["train/loss"] == pytest.approx(runs[0]["train/loss"] + nll, rel=1e-6) == runs[2]["train/loss"]


@pytest.mark.parametrize("name", ["kto", "bco"])
@pytest.mark.parametrize(("good", "bad"), [(1, 0), ("true", "false"), (1.0, 0.0), ("True", "False")])
def test_labels_of_every_type_mean_the_same(name, good, bad):
    """huggingface/trl #2127, #6424: labels of integers inverted bit by bit, or everything true."""
    rows = rows_of(name, *PLAIN)
    other = [{**row, "label": good if row["label"] else bad} for row in rows]
    try:
        theirs = numbers(run(name, other)[0])
    except UserError as error:
        assert "label" in str(error)
        return
    assert theirs == numbers(run(name, rows)[0])


@pytest.mark.parametrize("name", METHODS)
def test_empty_prompts_train(name):
    """huggingface/trl #2093: empty prompts crash."""
    steps, _, _ = run(name, rows_of(name, ("", "The lantern.", "A violin repairs."), *PLAIN))
    assert all(math.isfinite(v) for v in steps[0].values())


@pytest.mark.parametrize("name", PAIRED)
def test_pairs_without_a_prompt_column_share_what_they_have_in_common(name):
    """huggingface/trl #4639, #2164: implicit prompts, in conversations too."""
    ask, yes, no = ({"role": r, "content": c} for r, c in (("user", "Is it?"), ("assistant", "Yes."), ("assistant", "No, not.")))
    explicit = [{"prompt": [ask], "chosen": [yes], "rejected": [no]}] * 2
    implicit = [{"chosen": [ask, yes], "rejected": [ask, no]}] * 2
    assert numbers(run(name, explicit)[0]) == numbers(run(name, implicit)[0])


@pytest.mark.parametrize("name", METHODS)
def test_evaluation_sets_of_one_row_work(name, tmp_path):
    """huggingface/trl #6370: small sets, with stored reference log-probabilities too."""
    rows = rows_of(name, *PLAIN, *PLAIN[::-1])
    options = [{}] + [{"precompute_ref_logps": True}] * (name in ("dpo", "kto", "bco"))
    data = {"eval": {"a": rows[:3], "b": rows[:1]}, "batch_size": 2, "cache_dir": str(tmp_path)}
    values = []
    for method in options:
        _, _, trainer = run(name, rows, method, data, {"max_steps": 2, "val_check_interval": 1})
        values.append({k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("val/")})
        assert {k.split("/")[1] for k in values[-1]} == {"a", "b"}
        assert all(math.isfinite(v) for v in values[-1].values())
    assert values[-1] == pytest.approx(values[0], rel=1e-5, abs=1e-6)


def test_a_second_run_of_the_same_method_goes_on_from_its_own_reference():
    """A reference is that of the model handed in, also where one object is trained twice."""
    from workbench.methods.dpo import DPO

    model = load_model(MODEL)
    tokenizer = load_tokenizer(ModelSpec(MODEL))
    first = functools.partial(
        run_method, DPO, {"train": str(DATA / "preference.jsonl")}, {"model": model, "tokenizer": tokenizer}
    )
    assert first(trainer={"max_steps": 2})[0][1]["train/loss"] != pytest.approx(math.log(2), rel=1e-4)
    again = first(trainer={"max_steps": 2})[0]
    assert again[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-7)
    assert not torch.equal(model.lm_head.weight, load_model(MODEL).lm_head.weight)
