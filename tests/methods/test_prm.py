"""Process reward model: where a step is judged, which steps are trained, and that a run does not depend on how it is executed."""

import functools
import math

import lightning as L
import pytest
import torch
from support import MODEL, QUIET, SaveAt, run_method
from transformers import AutoModelForTokenClassification, AutoTokenizer

from workbench.data.batch import MicroBatch
from workbench.data.module import DataModule
from workbench.errors import UserError
from workbench.losses.reduce import Normalisers
from workbench.methods.optim import adamw, schedule
from workbench.methods.prm import PRM, step_labels
from workbench.models.heads import classification_head, load_classifier
from workbench.models.peft import PeftSpec
from workbench.models.policy import Policy
from workbench.models.scoring import score_steps
from workbench.models.tokenizer import load_tokenizer
from workbench.tiny.tasks import make_rows

ROWS = make_rows("sort", "stepwise_supervision", 96)
SHUFFLED = {"shuffle": True}
STEPS = {"max_steps": 14}  # 12 steps an epoch: the run crosses an epoch's end
LORA = {"peft": PeftSpec(r=4, alpha=8)}
NAMES = ("loss", "grad_norm", "accuracy", "num_tokens")


def run(data=None, method=None, trainer=None, **options):
    options = {"lr": 3e-4, **options}  # above it, rounding grows from step to step
    return run_method(PRM, {"train": ROWS, **(data or {})}, method, trainer, **options)


def assert_same(ours, theirs, tolerance=1e-5):
    for name in NAMES:
        a, b = ([step[f"train/{name}"] for step in steps] for steps in (ours, theirs))
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance / 10), name


def batch_of(rows, **data):
    """One micro-batch of all the rows, and their tokenizer."""
    tokenizer = load_tokenizer(MODEL)
    prepared = list(DataModule(rows, **data).prepare_train(tokenizer, PRM.data_types))
    size = float(len(prepared))
    weight = float(sum(sum(row["weights"]) for row in prepared))
    return MicroBatch.from_rows(prepared, range(len(prepared)), Normalisers(weight, size, size, 1.0)), tokenizer


@pytest.fixture(scope="module")
def canonical():
    return run(SHUFFLED, trainer=STEPS)[0]


# -- where a step is judged ------------------------------------------------------------------------------------------


def row(labels=(True, False), steps=("It is a cat.", "It is a dog."), prompt="What is it?\n"):
    return {"prompt": prompt, "completions": list(steps), "labels": list(labels)}


def judged(rows, **data):
    """The texts that end where a label is read, and the labels."""
    batch, tokenizer = batch_of(rows, **data)
    texts = []
    for token in batch.outputs.tolist():
        segment, parts = int(batch.segment[token]), []
        end = token + 1
        while segment >= 0:
            parts.insert(0, batch.tokens[batch.starts[segment] : end])
            segment = int(batch.parent[segment])
            end = int(batch.starts[segment + 1]) if segment >= 0 else 0
        texts.append(tokenizer.decode(torch.cat(parts)))
    return texts, step_labels(batch).tolist()


@pytest.mark.parametrize("separator", ["\n", "\n\n", " ", "<step>"])
def test_a_step_is_judged_at_the_end_of_its_separator(separator):
    """Nothing of the next step has been read by then, also where the tokenizer would join the separator to it."""
    texts, labels = judged([row()], step_separator=separator)
    first = f"What is it?\nIt is a cat.{separator}"
    assert texts == [first, f"{first}It is a dog.{separator}"]
    assert labels == [1.0, 0.0]


def test_the_tokens_of_a_step_do_not_depend_on_what_follows():
    """So that a model that judges step by step reads what it was trained on."""
    whole, _ = batch_of([row()], step_separator=" ")
    first, _ = batch_of([row((True,), ("It is a cat.",))], step_separator=" ")
    assert whole.tokens[: len(first.tokens)].tolist() == first.tokens.tolist()


@pytest.mark.parametrize(("labels", "kept"), [((True, -100), [1.0]), ((-100, False), [0.0]), ((0.3, 1), [0.3, 1.0])])
def test_labels(labels, kept):
    texts, found = judged([row(labels)])
    assert found == pytest.approx(kept)
    assert len(texts) == len(kept)


@pytest.mark.parametrize("truths", [(True, False), (1, 0), (1.0, 0.0), ("+", "-"), ("true", "false")])
def test_labels_of_any_type_are_one(truths):
    """A bool or integer column keeps its ignored steps, too."""
    rows = [row(truths), row((truths[1], truths[0]))]
    assert judged(rows)[1] == [1.0, 0.0, 0.0, 1.0]


def test_the_last_step_alone():
    rows = [row(), row((True, -100)), row((True, True, False), ("a", "b", "c"))]
    data = DataModule(rows, train_on="last_step", eval=rows)
    tokenizer = load_tokenizer(MODEL)
    assert [sum(r["weights"]) for r in data.prepare_train(tokenizer, PRM.data_types)] == [1, 1]
    assert data.reports["train"].dropped == {"untrained": 1}
    assert [sum(r["weights"]) for r in data.prepare_eval(tokenizer, PRM.data_types)["eval"]] == [2, 1, 3]
    texts, labels = judged([rows[0], rows[2]], train_on="last_step")
    assert (len(texts), labels) == (2, [0.0, 0.0])
    assert texts[0].endswith("It is a dog.\n")


def test_a_row_whose_last_step_is_cut_away_is_left_out_and_counted():
    batch, _ = batch_of([row((True,), ("It is a cat.",))])
    data = DataModule([row(), row((True,), ("It is a cat.",))], max_length=len(batch.tokens) + 2, train_on="last_step")
    assert len(data.prepare_train(load_tokenizer(MODEL), PRM.data_types)) == 1
    assert data.reports["train"].dropped == {"cut_away": 1}
    assert judged([row()], max_length=len(batch.tokens) + 2) == judged([row((True,), ("It is a cat.",))])


def test_other_parts_are_refused():
    with pytest.raises(UserError, match="train_on=completion is impossible with plain text stepwise_supervision rows"):
        batch_of([row()], train_on="completion")
    with pytest.raises(UserError, match="role_weights has no effect on plain text stepwise_supervision rows"):
        batch_of([row()], role_weights={"assistant": 1.0})


# -- the loss --------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_transformers_over_the_whole_step():
    """Its token classifier's own loss on unpadded rows: labels at the judged tokens, -100 elsewhere."""
    rows = [*ROWS[:5], row((True, -100)), row()]
    batch, _ = batch_of(rows)
    model = load_classifier(MODEL, kind="token", num_labels=2)
    labels = torch.full_like(batch.tokens, -100)
    labels[batch.outputs] = step_labels(batch).long()
    total, right = 0.0, 0.0
    with torch.no_grad():
        for r in batch.row.unique().tolist():
            mine = torch.isin(batch.segment, (batch.row == r).nonzero().flatten())
            out = model(input_ids=batch.tokens[mine][None], labels=labels[mine][None])
            known = labels[mine] >= 0
            total += out.loss.item() * known.sum().item()
            right += (out.logits[0, known].argmax(-1) == labels[mine][known]).sum().item()
    count = (labels >= 0).sum().item()
    for micro_batch_size in (1, 7):
        data = {"train": rows, "batch_size": 7, "micro_batch_size": micro_batch_size}
        step = run(data, trainer={"max_steps": 1})[0][0]
        assert step["train/loss"] == pytest.approx(total / count, rel=1e-5)
        assert step["train/accuracy"] == pytest.approx(right / count)


def test_a_head_of_zeros_costs_ln_2():
    model = load_classifier(MODEL, kind="token", num_labels=2)
    torch.nn.init.zeros_(classification_head(model).weight)
    step = run(method={"model": model, "tokenizer": load_tokenizer(MODEL)}, trainer={"max_steps": 1})[0][0]
    assert step["train/loss"] == pytest.approx(math.log(2))


def test_opposite_labels_are_exchanged_outputs():
    """A head with its two rows exchanged sees the opposite labels as these."""
    opposite = [{**r, "labels": [not label for label in r["labels"]]} for r in ROWS]
    model = load_classifier(MODEL, kind="token", num_labels=2)
    with torch.no_grad():
        for parameter in classification_head(model).parameters():
            parameter.copy_(parameter.flip(0))
    ours = run(trainer={"max_steps": 2})[0]
    method = {"model": model, "tokenizer": load_tokenizer(MODEL)}
    theirs = run({"train": opposite}, method, {"max_steps": 2})[0]
    assert_same(ours, theirs)


# -- execution -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "method"),
    [
        ({"micro_batch_size": 4}, {}),
        ({"micro_batch_size": 1}, {}),
        ({"micro_batch_tokens": 100}, {}),
        ({"micro_batch_size": 4}, {"layout": "packed"}),
        ({}, {"gradient_checkpointing": True, "pad_to_multiple_of": 8}),
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "-",
)
def test_members(canonical, data, method):
    assert_same(run({**SHUFFLED, **data}, method, STEPS)[0], canonical)


def test_members_of_last_steps():
    data = {"train": [*ROWS, *[{**r, "labels": [*r["labels"][:-1], -100]} for r in ROWS[:20]]], "train_on": "last_step"}
    whole, parts = (run({**data, **more}, trainer={"max_steps": 4})[0] for more in ({}, {"micro_batch_size": 2}))
    assert_same(parts, whole)


@pytest.mark.parametrize("method", [{}, LORA], ids=["full", "lora"])
def test_resume_and_save(tmp_path, method):
    whole, module, _ = run(SHUFFLED, method, STEPS, callbacks=[SaveAt(tmp_path, [5])])
    rest = run({**SHUFFLED, "micro_batch_size": 2}, method, STEPS, checkpoint=tmp_path / "5.ckpt")[0]
    assert_same(rest, whole[5:])
    expected = score_steps(module.policy, module.tokenizer, ROWS[:4])
    module.save_pretrained(tmp_path / "model", merge=bool(method))
    for folder in ("model", "model/merged")[: 1 + bool(method)]:
        loaded = load_classifier(str(tmp_path / folder), kind="token", num_labels=2, seed=9)
        found = score_steps(loaded, module.tokenizer, ROWS[:4])
        assert [p for steps in found for p in steps] == pytest.approx([p for steps in expected for p in steps], rel=1e-4)


def test_dropout_before_the_head_acts_where_it_is_wanted():
    """Transformers' token classifiers have one of their own."""
    model = load_classifier(MODEL, kind="token", num_labels=2)
    batch, _ = batch_of(ROWS[:4])
    with torch.no_grad():
        plain, dropped = (Policy(m, layout="padded")(batch, ["scores"]).scores for m in (model.eval(), model.train()))
    assert model.dropout.p > 0
    assert not torch.allclose(plain, dropped)
    built = PRM(MODEL).build_policy()
    assert built.training
    assert built.causal_lm.dropout.p == 0


# -- evaluation and saving -------------------------------------------------------------------------------------------


def test_a_saved_model_judges_as_it_did(tmp_path):
    found = []
    method = {"compute_metrics": lambda predictions: found.append(predictions) or {"own": 1.0}}
    _, module, trainer = run({"eval": ROWS[:10]}, method, {"max_steps": 3, "num_sanity_val_steps": 0})
    trainer.validate(module, trainer.datamodule, verbose=False)
    outputs, labels = (torch.cat([torch.from_numpy(v) for v in values]) for values in (found[-1].predictions, found[-1].labels))
    assert labels.tolist() == [float(label) for r in ROWS[:10] for label in r["labels"]]
    metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
    loss = torch.nn.functional.cross_entropy(outputs, labels.long()).item()
    assert metrics["val/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["val/accuracy"] == pytest.approx((outputs.argmax(-1) == labels).float().mean().item())
    assert [len(v) for v in found[-1].logps] == [len(r["labels"]) for r in ROWS[:10]]
    expected = outputs.softmax(-1)[:, 1].tolist()

    module.save_pretrained(tmp_path)
    loaded, tokenizer = load_classifier(str(tmp_path), kind="token", num_labels=2), load_tokenizer(str(tmp_path))
    judged = score_steps(loaded, tokenizer, ROWS[:10], batch_size=3)
    assert [len(steps) for steps in judged] == [len(r["labels"]) for r in ROWS[:10]]
    assert [p for steps in judged for p in steps] == pytest.approx(expected, rel=1e-4)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    tokenizer, alone = AutoTokenizer.from_pretrained(tmp_path), []
    for r in ROWS[:10]:
        for end in range(1, len(r["completions"]) + 1):
            ids = tokenizer(r["prompt"] + "".join(s + "\n" for s in r["completions"][:end]), return_tensors="pt")
            with torch.no_grad():
                alone.append(model(ids["input_ids"]).logits[0, -1].softmax(-1)[1].item())
    assert alone == pytest.approx(expected, rel=1e-4)


def test_it_writes_nothing():
    with pytest.raises(UserError, match="PRM trains a model that scores text and writes none"):
        PRM(MODEL).generate(["a"])


# -- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_judges_held_out_steps():
    """From random weights, 200 steps of 64 solutions: which of two numbers is the larger, of pairs of numbers it has not seen. A
    judge that always says right would have 0.63."""
    data = DataModule("tiny:compare", eval="tiny:compare", batch_size=64, eval_micro_batch_size=128)
    optim = functools.partial(adamw, lr=2e-3)
    method = PRM("tiny", optim=optim, scheduler=functools.partial(schedule, name="linear", warmup_steps=20))
    trainer = L.Trainer(**QUIET, devices=1, max_steps=200, gradient_clip_val=1.0, num_sanity_val_steps=0)
    trainer.fit(method, data)
    trainer.validate(method, data, verbose=False)
    assert trainer.callback_metrics["val/accuracy"].item() > 0.85
