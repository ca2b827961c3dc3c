"""DPO: what it starts from, what its reference is, and that a run does not depend on how it is executed."""

import functools
import math

import lightning as L
import pytest
import torch
from support import DATA, MODEL, QUIET, SaveAt, assert_same_trajectory, deviation, run_method

from workbench.callbacks.averaging import EMA
from workbench.data.module import DataModule
from workbench.errors import UserError
from workbench.methods.dpo import DPO
from workbench.methods.optim import adamw
from workbench.models.load import ModelSpec, load_model
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.reference import AdapterView, FrozenCopy, MergedCopy, fingerprint
from workbench.models.save import save_pretrained
from workbench.models.tokenizer import load_tokenizer

PAIRS = {"train": str(DATA / "preference.jsonl")}
SHUFFLED = {**PAIRS, "shuffle": True}
STEPS = {"max_steps": 14}  # 12 steps an epoch: the run crosses an epoch's end
LORA = PeftSpec(r=4, alpha=8)
METHOD = {"beta": 0.3, "loss": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "ld_alpha": 0.7}
SIGNED = ("train/rewards/chosen", "train/rewards/margins", "train/logps/rejected", "train/logits/chosen")


def run(data=None, method=None, trainer=None, **options):
    return run_method(DPO, {**PAIRS, **(data or {})}, method, trainer, **options)


def assert_same(ours, theirs, tolerance=1e-5):
    assert_same_trajectory(ours, theirs, tolerance)
    for name in SIGNED:  # in nats: rewards are small differences of large numbers
        assert [s[name] for s in ours] == pytest.approx([s[name] for s in theirs], rel=10 * tolerance, abs=10 * tolerance), name


@pytest.fixture(scope="module")
def canonical():
    return run(SHUFFLED, METHOD, STEPS)[0]


# -- the start -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained_adapter(tmp_path_factory):
    """A saved adapter with weights that change the model's outputs."""
    folder = tmp_path_factory.mktemp("adapter")
    model = apply_peft(load_model(MODEL), LORA)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    save_pretrained(model, load_tokenizer(ModelSpec(MODEL)), folder)
    return str(folder)


def dropout_model():
    return ModelSpec(MODEL, init_kwargs={"attention_dropout": 0.5})


def two_adapters(trained_adapter):
    model = apply_peft(load_model(MODEL), PeftSpec(adapter=trained_adapter, adapter_name="tuned"))
    model.load_adapter(trained_adapter, adapter_name="ref")
    return model


STARTS = {
    "full": lambda path: {},
    "packed": lambda path: {"layout": "packed"},
    "shared": lambda path: {"layout": "shared"},
    "dropout in the model": lambda path: {"model": dropout_model()},
    "fresh adapter": lambda path: {"peft": LORA},
    "fresh DoRA": lambda path: {"peft": PeftSpec(r=4, alpha=8, use_dora=True)},
    "PiSSA": lambda path: {"peft": PeftSpec(r=4, alpha=8, init_lora_weights="pissa")},
    "random adapter": lambda path: {"peft": PeftSpec(r=4, alpha=8, init_lora_weights=False)},
    "trained biases": lambda path: {"peft": PeftSpec(r=4, alpha=8, bias="all", target_modules=["q_proj"])},
    "head saved": lambda path: {"peft": PeftSpec(r=4, alpha=8, modules_to_save=["lm_head"])},
    "continued adapter": lambda path: {"peft": PeftSpec(adapter=path)},
    "adapter as the model": lambda path: {"model": path},
    "several adapters": lambda path: {"model": two_adapters(path), "model_adapter": "tuned", "ref_adapter": "ref"},
    "adapter from a folder": lambda path: {"peft": PeftSpec(adapter=path), "ref_adapter": path},
    "same model by name": lambda path: {"ref_model": MODEL},
    "precomputed": lambda path: {"precompute_ref_logps": True},
    "precomputed, continued": lambda path: {"precompute_ref_logps": True, "peft": PeftSpec(adapter=path)},
    "moving": lambda path: {"sync_ref_model": True},
    "moving adapter": lambda path: {"sync_ref_model": True, "peft": PeftSpec(adapter=path)},
}


# Merged weights and other micro-batches give the same numbers to rounding only.
ROUNDED = ("moving adapter", "precomputed", "precomputed, continued")


@pytest.mark.parametrize("start", STARTS)
def test_the_first_loss_is_ln_2(start, trained_adapter, tmp_path):
    """Whatever is handed in is the reference, so that at the start no pair has a margin."""
    options = STARTS[start](trained_adapter)
    steps, module, _ = run({"cache_dir": str(tmp_path)}, options, {"max_steps": 1})
    exact = start not in ROUNDED
    assert steps[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-7 if exact else 1e-5)
    for name in ("chosen", "rejected", "margins"):
        assert steps[0][f"train/rewards/{name}"] == (0.0 if exact else pytest.approx(0.0, abs=1e-4))
    assert steps[0]["train/grad_norm"] > 0
    assert not any("reference" in name for name, p in module.named_parameters() if p.requires_grad)


def test_dropout_acts_where_it_is_left_on_but_not_in_the_reference():
    options = {"model": dropout_model(), "disable_dropout": False}
    first, second = (run(method=options, trainer={"max_steps": 1})[0][0]["train/logps/chosen"] for _ in "ab")
    plain = run(trainer={"max_steps": 1})[0][0]
    assert first != second
    _, module, _ = run(method=options, trainer={"max_steps": 1})
    batch = first_batch(module)
    assert torch.equal(module.reference.logps(batch), module.reference.logps(batch))
    assert abs(first - plain["train/logps/chosen"]) > 1e-3


def first_batch(module):
    return module.trainer.train_dataloader.dataset[(0, 0, 0)]


@pytest.mark.parametrize("start", ["full", "fresh adapter", "continued adapter", "several adapters", "trained biases"])
def test_training_leaves_the_reference_as_it_was(start, trained_adapter):
    before = {}

    def note(method):
        before["fingerprint"] = state(method.reference)

    class Watched(DPO):
        def build_beside(self):
            super().build_beside()
            note(self)

    options = STARTS[start](trained_adapter)
    _, module, _ = run_method(Watched, PAIRS, options, {"max_steps": 5}, lr=1e-2)
    assert state(module.reference) == before["fingerprint"]
    assert module.step_metrics["train/rewards/margins"] > 0


def state(reference):
    if isinstance(reference, FrozenCopy):
        return fingerprint(reference.policy.hf)
    trained = {id(p) for p in reference.beside.parameters() if p.requires_grad}
    return fingerprint(reference.beside.hf, lambda p: id(p) not in trained)


def test_only_what_needs_a_copy_gets_one(trained_adapter):
    kinds = {}
    for name in ("full", "fresh adapter", "continued adapter", "trained biases", "moving adapter"):
        module = DPO(**{"model": MODEL, **STARTS[name](trained_adapter)})
        module.configure_model()
        kinds[name] = (type(module.reference), getattr(module.reference, "name", None))
    assert kinds == {
        "full": (FrozenCopy, None),
        "fresh adapter": (AdapterView, None),
        "continued adapter": (AdapterView, "reference"),
        "trained biases": (FrozenCopy, None),
        "moving adapter": (MergedCopy, None),
    }


def test_the_reference_is_in_no_checkpoint_and_no_optimizer(tmp_path):
    _, module, _ = run(trainer={"max_steps": 1}, callbacks=[SaveAt(tmp_path, [1])])
    saved = torch.load(tmp_path / "1.ckpt", weights_only=True)
    assert len(saved["state_dict"]) == len(module.policy.state_dict())
    assert set(saved["reference"]) == {"fingerprint"}
    assert not list(module.children())[1:]


# -- the same run, executed in other ways ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "method"),
    [
        ({"micro_batch_size": 4}, {}),
        ({"micro_batch_size": 1}, {}),
        ({"micro_batch_size": 2, "balance": "none"}, {}),
        ({"micro_batch_tokens": 300}, {}),
        ({"micro_batch_size": 4}, {"layout": "packed"}),
        ({"micro_batch_size": 4}, {"layout": "shared"}),
        ({}, {"layout": "auto", "gradient_checkpointing": True, "pad_to_multiple_of": 16}),
        ({}, {"gradient_checkpointing": True, "pad_to_multiple_of": 8}),
        ({"micro_batch_size": 4}, {"precompute_ref_logps": True, "precompute_ref_micro_batch_size": 3}),
        ({"micro_batch_size": 4}, {"ref_model": MODEL}),
        ({"num_workers": 1, "micro_batch_size": 4}, {}),
    ],
    ids=str,
)
def test_members(canonical, data, method, tmp_path):
    steps, _, _ = run({**SHUFFLED, "cache_dir": str(tmp_path), **data}, {**METHOD, **method}, STEPS)
    assert_same(steps, canonical)


def test_the_canonical_run_binds(canonical):
    assert min(s["train/grad_norm"] for s in canonical) > 1.0
    assert canonical[-1]["train/rewards/margins"] > 0.1
    assert min(s["train/rewards/accuracies"] for s in canonical[1:]) < 1.0


@pytest.mark.parametrize("method", [{}, {"peft": LORA}, {"precompute_ref_logps": True}], ids=str)
def test_resume_with_another_micro_batch_size(tmp_path, method):
    method, data = {**METHOD, **method}, {**SHUFFLED, "cache_dir": str(tmp_path)}
    whole, _, _ = run({**data, "micro_batch_size": 2}, method, STEPS, callbacks=[SaveAt(tmp_path, [5, 12])])
    for stop in (5, 12):
        rest, _, _ = run({**data, "micro_batch_size": 4}, method, STEPS, checkpoint=tmp_path / f"{stop}.ckpt")
        assert_same(rest, whole[stop:])


def test_streaming_is_the_map_style_run():
    in_order, _, _ = run({"micro_batch_size": 4}, METHOD, STEPS)
    stream, _, _ = run({"micro_batch_size": 4, "streaming": True}, METHOD, STEPS)
    assert_same(stream, in_order)


# -- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(data, method):
    _, _, trainer = run({"eval": PAIRS["train"], **data}, method, {"max_steps": 2, "val_check_interval": 2})
    return {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("val/")}


def test_evaluation_does_not_depend_on_micro_batches(tmp_path):
    whole = evaluate({"eval_micro_batch_size": 96, "micro_batch_size": 4}, METHOD)
    cut = evaluate({"eval_micro_batch_size": 7}, METHOD)
    stored = evaluate({"eval_micro_batch_size": 7, "cache_dir": str(tmp_path)}, {**METHOD, "precompute_ref_logps": True})
    for other in (cut, stored):
        assert other.keys() == whole.keys()
        assert all(other[k] == pytest.approx(v, rel=2e-5, abs=1e-6) for k, v in whole.items())
    assert whole["val/loss"] > 0
    assert whole["val/rewards/margins"] != 0


def test_predictions_of_pairs_reach_a_metric_of_ones_own():
    def metric(predictions):
        return {"share": sum((p == t).sum() for p, t in zip(predictions.predictions, predictions.labels, strict=True)) / 100}

    assert evaluate({}, {"compute_metrics": metric})["val/share"] >= 0


# -- references that are stored or move ------------------------------------------------------------------------------


def test_stored_log_probabilities_are_found_again_and_checked(tmp_path, caplog):
    data, method = {"cache_dir": str(tmp_path)}, {**METHOD, "precompute_ref_logps": True}
    caplog.set_level("INFO", "workbench.methods.precompute")
    first, module, _ = run(data, method, {"max_steps": 2})
    (file,) = (tmp_path / "reference").glob("*.safetensors")
    assert module.reference is None
    assert "reference log-probabilities of" not in caplog.text
    again, _, _ = run(data, method, {"max_steps": 2})
    assert "reference log-probabilities of" in caplog.text
    assert_same(again, first, 1e-12)
    written = file.stat().st_mtime_ns
    file.write_bytes(file.read_bytes()[:-100])
    cut, _, _ = run(data, method, {"max_steps": 2})
    assert "computed again" in caplog.text
    assert file.stat().st_mtime_ns > written
    assert_same(cut, first, 1e-12)


@pytest.mark.parametrize(
    ("data", "method"),
    [
        ({"max_length": 24}, {}),
        ({}, {"ld_alpha": 0.1}),
        ({}, {"ref_model": ModelSpec(MODEL, init="random")}),
        ({"train": [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8}, {}),
    ],
    ids=["max_length", "ld_alpha", "reference", "rows"],
)
def test_stored_log_probabilities_are_not_taken_for_others(tmp_path, data, method):
    for d, m in (({}, {}), (data, method)):
        options = {**METHOD, "precompute_ref_logps": True, **m}
        stored = run({"cache_dir": str(tmp_path), **d}, options, {"max_steps": 1})[0]
    live = run({"cache_dir": str(tmp_path), **data}, {**METHOD, **method}, {"max_steps": 1})[0]
    assert_same(stored, live)
    assert len(list((tmp_path / "reference").glob("*.safetensors"))) == 2


def test_a_stream_cannot_be_computed_beforehand():
    with pytest.raises(UserError, match="precompute_ref_logps needs all rows before training"):
        run({"streaming": True}, {"precompute_ref_logps": True})


@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_a_reference_that_follows_by_shares(alpha):
    """After steps 2 and 4 the reference is ``alpha * policy + (1 - alpha) * reference``."""
    weights = []

    class Watched(DPO):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().on_train_batch_end(outputs, batch, batch_idx)
            if self._closing:
                weights.append([m.lm_head.weight.detach().clone() for m in (self.policy.hf, self.reference.policy.hf)])

    options = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": alpha}
    run_method(Watched, {**PAIRS, "micro_batch_size": 4}, options, {"max_steps": 4})
    initial = load_model(MODEL).lm_head.weight
    assert torch.equal(weights[0][1], initial)
    assert torch.allclose(weights[1][1], alpha * weights[1][0] + (1 - alpha) * initial, atol=1e-7)
    assert torch.equal(weights[2][1], weights[1][1])
    assert torch.allclose(weights[3][1], alpha * weights[3][0] + (1 - alpha) * weights[1][1], atol=1e-7)


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_a_reference_that_has_moved_resumes(tmp_path, peft):
    options = {"sync_ref_model": True, "ref_model_sync_steps": 3, "peft": peft, "beta": 0.3}
    whole, _, _ = run(SHUFFLED, options, {"max_steps": 8}, callbacks=[SaveAt(tmp_path, [5, 6])])
    for stop in (5, 6):  # also right after a move
        rest, _, _ = run({**SHUFFLED, "micro_batch_size": 4}, options, {"max_steps": 8}, checkpoint=tmp_path / f"{stop}.ckpt")
        assert_same(rest, whole[stop:])
    still, _, _ = run(SHUFFLED, {"peft": peft, "beta": 0.3}, {"max_steps": 8})
    assert deviation(still[5:], whole[5:], "train/rewards/chosen") > 1e-3


def test_a_merged_reference_is_the_full_models(trained_adapter):
    """With share 1 the reference becomes the policy: margins are zero again in the step after."""
    options = {
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
        "ref_model_mixup_alpha": 1.0,
        "peft": PeftSpec(adapter=trained_adapter),
    }
    steps, _, _ = run(method=options, trainer={"max_steps": 3})
    assert abs(steps[1]["train/rewards/margins"]) > 1e-3
    assert steps[2]["train/loss"] == pytest.approx(math.log(2), rel=1e-4)


def test_a_resume_against_another_reference_is_refused(tmp_path):
    run(trainer={"max_steps": 1}, callbacks=[SaveAt(tmp_path, [1])])
    other = {"model": ModelSpec(MODEL, init="random")}
    with pytest.raises(UserError, match="trained against another reference"):
        run(method=other, trainer={"max_steps": 2}, checkpoint=tmp_path / "1.ckpt")


def test_low_precision_references_do_not_lose_small_moves():
    module = DPO(model=ModelSpec(MODEL, dtype="bfloat16"), sync_ref_model=True)
    module.configure_model()
    before = module.reference.policy.hf.lm_head.weight.clone()
    target = {n: p.detach() + 1.0 for n, p in module.policy.named_parameters()}
    for _ in range(300):
        module.move_reference(target, 0.001)
    moved = (module.reference.policy.hf.lm_head.weight.float() - before.float()).mean().item()
    assert moved == pytest.approx(1 - 0.999**300, rel=0.02)


# -- losses in lists, options ----------------------------------------------------------------------------------------


def test_a_list_of_losses_is_their_weighted_sum():
    method = {"beta": 0.3, "reference_free": True}
    first = {
        loss: run(method={**method, "loss": loss}, trainer={"max_steps": 1})[0][0]["train/loss"]
        for loss in ("hinge", "ipo", "sft")
    }
    names = list(first)
    mixed = run(method={**method, "loss": names, "loss_weights": [0.5, 0.001, 2.0]}, trainer={"max_steps": 1})[0][0]["train/loss"]
    assert mixed == pytest.approx(0.5 * first["hinge"] + 0.001 * first["ipo"] + 2.0 * first["sft"], rel=1e-6)


def test_weighting_and_the_sft_term_go_together():
    """Only the pairs' losses are weighted, by the likelihood of the completions under the policy."""
    steps = [
        run(method={"loss": ["sigmoid", "sft"], "use_weighting": w}, trainer={"max_steps": 1})[0][0]["train/loss"]
        for w in (False, True)
    ]
    nll = run(method={"loss": "sft"}, trainer={"max_steps": 1})[0][0]["train/loss"]
    assert 0 < steps[1] - nll < math.log(2)
    assert steps[0] - nll == pytest.approx(math.log(2), rel=1e-5)


def test_a_reference_free_run_holds_no_reference():
    steps, module, _ = run(method={"reference_free": True}, trainer={"max_steps": 1})
    assert module.reference is None
    assert steps[0]["train/rewards/chosen"] == pytest.approx(0.1 * steps[0]["train/logps/chosen"], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "sigmod"}, "loss='sigmod'.*Did you mean 'sigmoid'"),
        ({"loss": ["sigmoid", "sigmoid"]}, "none twice"),
        ({"loss": ["sigmoid", "sft"], "loss_weights": [1.0]}, "one value for each of the 2 losses"),
        ({"loss": "exo_pair"}, "needs label_smoothing above 0"),
        ({"loss": "hinge", "label_smoothing": 0.1}, "has no effect on loss hinge"),
        ({"loss": "nca_pair", "divergence": "js_divergence"}, "does not go with loss nca_pair"),
        ({"beta": 0}, "beta=0 must be above 0"),
        ({"divergence_alpha": 0.3}, "has no effect with method.divergence=reverse_kl"),
        ({"discopop_tau": 0.1}, "has no effect without method.loss=discopop"),
        ({"ld_alpha": 1.5}, r"must lie in \[0, 1\]"),
        ({"loss": "sft", "ld_alpha": 0.5}, "no effect with method.loss=sft"),
        ({"loss": "aot", "use_weighting": True}, "WPO weights belong to pairs"),
        ({"reference_free": True, "precompute_ref_logps": True}, "no effect with method.reference_free=true"),
        ({"ref_model": MODEL, "sync_ref_model": True}, "exclude each other"),
        ({"precompute_ref_logps": True, "sync_ref_model": True}, "turn one of them off"),
        ({"ref_model_sync_steps": 4}, "no effect with method.sync_ref_model=false"),
        ({"sync_ref_model": True, "ref_model_mixup_alpha": 0.0}, "must lie above 0"),
        ({"precompute_ref_micro_batch_size": 4}, "no effect with method.precompute_ref_logps=false"),
    ],
    ids=str,
)
def test_options_that_cannot_act_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        DPO(model=MODEL, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ref_model": "tiny"}, "has a vocabulary of .* tokens and the model one of"),
        ({"ref_adapter": "x"}, "needs a model with adapters"),
        ({"ref_adapter": "defalt", "peft": LORA}, "is no adapter of the model. Did you mean 'default'"),
        ({"model_adapter": "x", "peft": LORA}, "is no adapter of the model"),
    ],
    ids=str,
)
def test_references_that_cannot_be_are_refused(options, message):
    module = DPO(**{"model": MODEL, **options})
    with pytest.raises(UserError, match=message):
        module.configure_model()


def test_couplings_are_named(caplog):
    run(method={"loss": "aot"}, trainer={"max_steps": 1})
    assert "method.loss=aot sorts the pairs of a micro-batch" in caplog.text


def test_truncation_of_one_side_does_not_depend_on_the_other():
    """A side's log-probability is the same beside any partner, however long."""
    row = {"prompt": "The river counts", "chosen": " the lantern and the mill.", "rejected": " no."}
    long = {**row, "rejected": " no." * 40}
    for rows in ([row], [long]):
        steps, _, _ = run({"train": rows, "batch_size": 1, "max_length": 16}, {"reference_free": True}, {"max_steps": 1})
        row["logps"] = [*row.get("logps", []), steps[0]["train/logps/chosen"]]
    assert row["logps"][0] == pytest.approx(row["logps"][1], rel=1e-6)


def test_a_bare_trainer_and_the_configured_one_agree(tmp_path):
    """The same data module and method, built by hand."""
    data = DataModule(**PAIRS, batch_size=8, shuffle=False, max_length=256)
    module = DPO(MODEL, optim=functools.partial(adamw, lr=1e-3))
    assert data.batch_size == 8
    assert module.data_types == ("preference",)


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_a_reference_that_follows_an_average(tmp_path, peft):
    """With an average that keeps nothing of the past, the reference of every other step is the policy; it resumes."""

    def average():
        return EMA(decay=0.0, update_ref_model=True, ref_model_update_freq=2)

    options = {"peft": peft, "beta": 0.3}
    whole, _, _ = run(SHUFFLED, options, {"max_steps": 6}, callbacks=[average(), SaveAt(tmp_path, [3])])
    losses = [step["train/loss"] for step in whole]
    assert all(losses[i] == pytest.approx(math.log(2), rel=1e-6) for i in (0, 2, 4))
    assert all(abs(losses[i] - math.log(2)) > 1e-4 for i in (1, 3, 5))
    rest, _, _ = run(SHUFFLED, options, {"max_steps": 6}, callbacks=[average()], checkpoint=tmp_path / "3.ckpt")
    assert_same(rest, whole[3:])


def test_an_average_needs_a_reference_to_move():
    with pytest.raises(UserError, match="update_ref_model=true needs a method with a reference that can move"):
        run(method={"reference_free": True}, callbacks=[EMA(update_ref_model=True)])
    with pytest.raises(UserError, match="both move the reference"):
        run(method={"sync_ref_model": True}, callbacks=[EMA(update_ref_model=True)])
    with pytest.raises(UserError, match="have no effect with update_ref_model=false"):
        EMA(ref_model_update_freq=3)


@pytest.mark.parametrize("precompute", [False, True])
def test_evaluation_without_training_has_its_reference(precompute, tmp_path):
    module = DPO(MODEL, precompute_ref_logps=precompute)
    data = DataModule(**PAIRS, eval=PAIRS["train"], batch_size=8, cache_dir=str(tmp_path))
    found = L.Trainer(**QUIET, devices=1).validate(module, data, verbose=False)[0]
    assert found["val/loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert found["val/rewards/chosen"] == pytest.approx(0.0, abs=1e-4)
