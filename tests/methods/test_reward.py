"""Reward model: where the score is read, what a pair costs, and that a run does not depend on how it is executed."""

import functools
import json
import math

import lightning as L
import pytest
import torch
from support import DATA, MODEL, QUIET, SaveAt, run_method
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from workbench.callbacks.exact_match import ExactMatch
from workbench.callbacks.samples import GenerationSamples
from workbench.cli import config
from workbench.data.batch import Role
from workbench.data.module import DataModule
from workbench.errors import UserError
from workbench.methods.optim import adamw, schedule
from workbench.methods.reward import Reward, pair_scores
from workbench.models.heads import classification_head, load_classifier
from workbench.models.load import ModelSpec, load_model
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.policy import Policy
from workbench.models.save import save_pretrained
from workbench.models.scoring import score, score_steps
from workbench.models.tokenizer import load_tokenizer
from workbench.run import build

ROWS = [json.loads(line) for line in (DATA / "preference.jsonl").read_text().splitlines()]
MARGINS = [{**row, "margin": 0.25 * (7 * i % 5)} for i, row in enumerate(ROWS)]
SHUFFLED = {"train": MARGINS, "shuffle": True}
STEPS = {"max_steps": 14}  # 12 steps an epoch: the run crosses an epoch's end
METHOD = {"center_rewards_coefficient": 0.1}
LORA = {"peft": PeftSpec(r=4, alpha=8)}
NAMES = ("loss", "grad_norm", "mean_reward", "min_reward", "max_reward", "accuracy", "margin", "num_tokens")


def run(data=None, method=None, trainer=None, **options):
    return run_method(
        Reward, {"train": ROWS, **(data or {})}, method, trainer, **{"lr": 3e-4, **options}
    )  # above, rounding grows


def assert_same(ours, theirs, tolerance=1e-5):
    for name in NAMES:
        ours_, theirs_ = ([step[f"train/{name}"] for step in steps] for steps in (ours, theirs))
        assert ours_ == pytest.approx(theirs_, rel=tolerance, abs=tolerance / 10), name


@pytest.fixture(scope="module")
def canonical():
    return run(SHUFFLED, METHOD, STEPS)[0]


@pytest.fixture(scope="module")
def trained():
    """A trained method, its trainer, and the scores that its evaluation read."""
    found = []
    method = {"compute_metrics": lambda predictions: found.append(predictions) or {"own": 1.0}}
    _, module, trainer = run({"eval": ROWS[:10]}, method, {"max_steps": 3, "num_sanity_val_steps": 0})
    trainer.validate(module, trainer.datamodule, verbose=False)
    return module, trainer, found[-1]


def batch_of(rows, tokenizer=None, **data):
    """One micro-batch of all the rows."""
    module = DataModule(rows, max_length=256, **data)
    prepared = module.prepare_train(tokenizer or load_tokenizer(MODEL), Reward.data_types)
    from workbench.data.batch import MicroBatch
    from workbench.losses.reduce import Normalisers

    size = float(len(prepared))
    return MicroBatch.from_rows(list(prepared), range(len(prepared)), Normalisers(1.0, size, size, 1.0))


# -- the score -------------------------------------------------------------------------------------------------------


def sequences(batch, role):
    """The tokens of each sequence that ends in a segment of ``role``."""
    for s in batch.segments_of(role).tolist():
        parts = [batch.tokens[batch.starts[i] : batch.starts[i + 1]] for i in (int(batch.parent[s]), s) if i >= 0]
        yield torch.cat(parts)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_score_is_that_of_the_sequence_alone(layout):
    """Right padding, the partner and the rows beside it have no say: transformers gives the same for each sequence by itself."""
    classifier = load_classifier(MODEL)
    batch = batch_of(ROWS[:6])
    with torch.no_grad():
        scores = pair_scores(batch, Policy(classifier, layout=layout, pad_to_multiple_of=16)(batch, ["scores"]))
        for ours, role in zip(scores, (Role.CHOSEN, Role.REJECTED), strict=True):
            alone = [
                classifier(input_ids=ids[None], attention_mask=torch.ones_like(ids[None])).logits.item()
                for ids in sequences(batch, role)
            ]
            assert ours.tolist() == pytest.approx(alone, rel=1e-4, abs=1e-6)


def test_it_is_read_at_the_end_of_the_turn_also_where_the_padding_is_that_token():
    tokenizer = load_tokenizer(ModelSpec(MODEL, pad_token="<|im_end|>"))
    batch, other = batch_of(ROWS[:4], tokenizer), batch_of(ROWS[:4])
    assert torch.equal(batch.tokens, other.tokens)
    ends = batch.tokens[batch.ends()]
    assert tokenizer.decode(ends[:1]).strip() in ("<|im_end|>", "")
    with torch.no_grad():
        policy = Policy(load_classifier(MODEL))
        scores = policy(batch, ["scores"]).scores
        last = policy(batch, ["scores"], at=batch.ends()).scores
        before = policy(batch, ["scores"], at=batch.ends() - 1).scores
    assert torch.equal(scores, last)
    assert not torch.allclose(scores, before)


def test_exchanged_sides_exchange_scores():
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS]
    trainer = {"max_steps": 1}
    ours, theirs = (run({"train": rows}, METHOD, trainer)[0][0] for rows in (ROWS, swapped))
    assert theirs["train/margin"] == pytest.approx(-ours["train/margin"], rel=1e-5)
    for name in ("mean_reward", "min_reward", "max_reward"):
        assert theirs[f"train/{name}"] == pytest.approx(ours[f"train/{name}"], rel=1e-5)
    assert theirs["train/accuracy"] == pytest.approx(1 - ours["train/accuracy"])


# -- the loss --------------------------------------------------------------------------------------------------------


def first_step(rows, method=None):
    """Metrics of the first step over these rows, and their scores before it."""
    steps, _, _ = run({"train": rows, "batch_size": len(rows)}, method, {"max_steps": 1})
    policy = Reward(MODEL).build_policy()
    batch = batch_of(rows)
    with torch.no_grad():
        return steps[0], *pair_scores(batch, policy(batch, ["scores"]))


def test_the_loss_and_its_metrics_by_hand():
    rows = MARGINS[:7]
    step, chosen, rejected = first_step(rows, {"center_rewards_coefficient": 0.5})
    margins = torch.tensor([row["margin"] for row in rows])
    losses = torch.log1p(torch.exp(-(chosen - rejected - margins))) + 0.5 * (chosen + rejected) ** 2
    both = torch.cat([chosen, rejected])
    expected = {
        "loss": losses.mean(),
        "mean_reward": both.mean(),
        "min_reward": both.min(),
        "max_reward": both.max(),
        "accuracy": (chosen > rejected).float().mean(),
        "margin": (chosen - rejected).mean(),
    }
    for name, value in expected.items():
        assert step[f"train/{name}"] == pytest.approx(value.item(), rel=1e-5), name


def test_a_head_of_zeros_costs_ln_2():
    classifier = load_classifier(MODEL)
    torch.nn.init.zeros_(classification_head(classifier).weight)
    step = run(method={"model": classifier, "tokenizer": load_tokenizer(MODEL)}, trainer={"max_steps": 1})[0][0]
    assert step["train/loss"] == pytest.approx(math.log(2))
    assert step["train/margin"] == step["train/accuracy"] == step["train/max_reward"] == 0


def test_a_row_without_a_margin_counts_0_and_is_told(caplog):
    some = [{**row, "margin": 1.0} if i % 2 else row for i, row in enumerate(ROWS[:8])]
    zeros = [{**row, "margin": 1.0 if i % 2 else 0.0} for i, row in enumerate(ROWS[:8])]
    losses = [run({"train": rows}, trainer={"max_steps": 1})[0][0]["train/loss"] for rows in (some, zeros, ROWS[:8])]
    assert losses[0] == losses[1] != losses[2]
    assert "4 of 8 rows have no margin, which counts as 0" in caplog.text
    for value, message in ((math.nan, "nan is not a finite number"), ("wide", "'wide' is not a number")):
        with pytest.raises(UserError, match=f"Row 0, column 'margin': {message}"):
            run({"train": [{**ROWS[0], "margin": value}]})


# -- truncation ------------------------------------------------------------------------------------------------------


def test_truncation_of_a_side_does_not_depend_on_the_other():
    """A cut completion is scored at its last token, whatever its partner; a pair that the cut makes equal is left out."""
    long, short, other = (
        "one two three four five six seven eight nine ten",
        "one",
        "one two three four five six seven eight nine no",
    )
    prompt = [{"role": "user", "content": "count"}]
    answer = lambda text: [{"role": "assistant", "content": text}]  # noqa: E731
    limit = (
        len(next(sequences(batch_of([{"prompt": prompt, "chosen": answer(short), "rejected": answer("two")}]), Role.CHOSEN))) + 6
    )

    def cut(chosen, rejected):
        data = DataModule([{"prompt": prompt, "chosen": answer(chosen), "rejected": answer(rejected)}], max_length=limit)
        rows = data.prepare_train(load_tokenizer(MODEL), Reward.data_types)[0]
        ids, lengths = rows["input_ids"], rows["lengths"]
        return ids[: lengths[0]] + ids[lengths[0] : lengths[0] + lengths[1]]

    assert cut(long, short) == cut(long, "no")
    assert len(cut(long, short)) == limit
    rows = [{"prompt": prompt, "chosen": answer(long), "rejected": answer(other)}, ROWS[0]]
    data = DataModule(rows, max_length=limit)
    try:
        data.prepare_train(load_tokenizer(MODEL), Reward.data_types)
    except UserError as error:
        assert "identical_pair 1" in str(error)
    else:
        assert data.reports["train"].dropped["identical_pair"] == 1


# -- execution -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "method"),
    [
        ({"micro_batch_size": 4}, {}),
        ({"micro_batch_size": 2, "balance": "none"}, {}),
        ({"micro_batch_size": 1}, {}),
        ({"micro_batch_tokens": 200}, {}),
        ({"micro_batch_size": 4}, {"layout": "packed"}),
        ({}, {"gradient_checkpointing": True, "pad_to_multiple_of": 8}),
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "-",
)
def test_members(canonical, data, method):
    assert_same(run({**SHUFFLED, **data}, {**METHOD, **method}, STEPS)[0], canonical)


def test_the_canonical_run_binds(canonical):
    assert max(s["train/grad_norm"] for s in canonical) > 1.0
    assert canonical[-1]["train/loss"] < 0.8 * canonical[0]["train/loss"]
    assert all(s["train/min_reward"] < s["train/mean_reward"] < s["train/max_reward"] for s in canonical)


@pytest.mark.parametrize("method", [{}, LORA], ids=["full", "lora"])
def test_resume(tmp_path, canonical, method):
    method = {**METHOD, **method}
    whole = run(SHUFFLED, method, STEPS, callbacks=[SaveAt(tmp_path, [5, 12])])[0]
    for stop in (5, 12):
        rest = run({**SHUFFLED, "micro_batch_size": 2}, method, STEPS, checkpoint=tmp_path / f"{stop}.ckpt")[0]
        assert_same(rest, whole[stop:])
    if "peft" in method:
        saved = torch.load(tmp_path / "5.ckpt", weights_only=True)["state_dict"]
        assert any("lora_" in key for key in saved)
        assert all("lora_" in key or ".score.modules_to_save." in key for key in saved), "the head is trained in full"


def test_an_adapter_starts_from_the_same_scores():
    plain, adapted = (run(method=method, trainer={"max_steps": 1})[0][0] for method in ({}, LORA))
    assert adapted["train/loss"] == pytest.approx(plain["train/loss"], rel=1e-6)


def parts_of(folder, *overrides):
    return build(config.compose("method=reward", "trainer=cpu", f"paths.run_dir={folder}", *overrides))


def test_the_head_follows_the_seed(tmp_path):
    """The same seed gives the same head and curve, another one another, whatever was drawn before (a configuration's seed is its
    model's)."""

    def curve(seed, drawn):
        torch.manual_seed(drawn)
        return [s["train/loss"] for s in run(method={"model": ModelSpec(MODEL, init_seed=seed)}, trainer={"max_steps": 3})[0]]

    assert curve(1, 5) == curve(1, 6) != curve(2, 5)
    heads = [classification_head(parts_of(tmp_path, f"seed={s}").method.load_network()).weight for s in (3, 3, 4)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    objects = [Reward(load_model(MODEL), seed=seed).load_network() for seed in (3, 3, 4)]
    weights = [classification_head(model).weight for model in objects]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


# -- evaluation and saving -------------------------------------------------------------------------------------------


def test_evaluation(trained):
    _, trainer, predictions = trained
    scores = torch.tensor([p.tolist() for p in predictions.predictions]).squeeze(1)
    assert scores.shape == (10, 2)
    chosen, rejected = scores.unbind(-1)
    logps = torch.nn.functional.logsigmoid(chosen - rejected)
    metrics = {k.removeprefix("val/"): v.item() for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
    expected = {
        "loss": -logps.mean(),
        "mean_reward": scores.mean(),
        "min_reward": scores.min(),
        "max_reward": scores.max(),
        "accuracy": (chosen > rejected).float().mean(),
        "margin": (chosen - rejected).mean(),
        "own": torch.tensor(1.0),
    }
    assert metrics.keys() - {"step"} >= expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-5, abs=1e-7), name
    assert [label.tolist() for label in predictions.labels] == [[0]] * 10
    assert [p.item() for p in predictions.logps] == pytest.approx(logps.tolist(), rel=1e-5)


def completions(rows):
    return [{"prompt": row["prompt"], "completion": row[side]} for row in rows for side in ("chosen", "rejected")]


def in_transformers(folder, rows, batch_size=4, tokenizer=None):
    """Scores by transformers alone, from what was saved, padded by the saved tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer or folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert model.config.num_labels == 1
    texts = [tokenizer.apply_chat_template([*row["prompt"], *row["completion"]], tokenize=False) for row in rows]
    found = []
    for start in range(0, len(texts), batch_size):
        inputs = tokenizer(texts[start : start + batch_size], padding=True, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            found += model(**{k: inputs[k] for k in ("input_ids", "attention_mask")}).logits.squeeze(-1).tolist()
    return found


def test_a_saved_model_scores_as_it_did(trained, tmp_path):
    module, _, predictions = trained
    expected = [value for pair in predictions.predictions for value in pair.flatten().tolist()]
    module.save_pretrained(tmp_path)
    rows = completions(ROWS[:10])
    loaded = load_classifier(str(tmp_path), seed=99)
    assert score(loaded, load_tokenizer(str(tmp_path)), rows, batch_size=3) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert score(module.policy, module.tokenizer, rows) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert in_transformers(tmp_path, rows) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    again = run(method={"model": str(tmp_path)}, trainer={"max_steps": 1})[0][0]
    assert again["train/loss"] < 0.9 * run(trainer={"max_steps": 1})[0][0]["train/loss"]


def test_a_saved_adapter_scores_as_it_did(tmp_path):
    _, module, _ = run(method=LORA, trainer={"max_steps": 4}, lr=1e-2)
    rows = completions(ROWS[:4])
    expected = score(module.policy, module.tokenizer, rows)
    assert expected != pytest.approx(score(load_classifier(MODEL), module.tokenizer, rows), rel=1e-2)
    module.save_pretrained(tmp_path, merge=True)
    assert score(load_classifier(str(tmp_path)), module.tokenizer, rows) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert in_transformers(tmp_path / "merged", rows, tokenizer=tmp_path) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    with pytest.raises(UserError, match="is that of a classifier, not of a language model"):
        load_model(str(tmp_path))


def test_transformers_reads_the_end_also_where_it_is_the_padding_token(tmp_path):
    """Its classifiers read at the last token that is no padding: the saved tokenizer pads with another one."""
    module = Reward(ModelSpec(MODEL, pad_token="<|im_end|>"))
    module.configure_model()
    module.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.pad_token != "<|im_end|>" == module.tokenizer.pad_token == tokenizer.eos_token
    texts = ["The river counts the lantern.", "A violin.", "The garden repairs the mill."]
    inputs = tokenizer([text + tokenizer.eos_token for text in texts], padding=True, return_tensors="pt")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        found = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.squeeze(-1).tolist()
    expected = score(module.policy, module.tokenizer, [{"text": text} for text in texts])
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_scores_of_texts():
    """A text is scored at the end of sequence that training puts there; what a reward model was not trained for is refused."""
    model, tokenizer = load_classifier(MODEL), load_tokenizer(MODEL)
    parts = {"prompt": "Is it so?", "completion": " It is."}
    assert score(model, tokenizer, [parts]) == score(model, tokenizer, [{"text": "Is it so? It is."}])
    ids = tokenizer("Is it so? It is.", add_special_tokens=False, return_tensors="pt")["input_ids"]
    ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], 1)
    with torch.no_grad():
        alone = classification_head(model)(model.base_model(ids).last_hidden_state[:, -1]).item()
    assert score(model, tokenizer, [parts]) == pytest.approx([alone], rel=1e-5)
    with pytest.raises(UserError, match="has 1 outputs, not 2"):
        score_steps(model, tokenizer, [{"prompt": "a", "completions": ["b"]}])
    with pytest.raises(UserError, match="The columns prompt make prompt_only"):
        score(model, tokenizer, [{"prompt": "a"}])


# -- refusals --------------------------------------------------------------------------------------------------------


def test_it_writes_nothing(tmp_path):
    module = Reward(MODEL)
    with pytest.raises(UserError, match="Reward trains a model that scores text and writes none"):
        module.generate(["a"])
    for overrides in (["exact_match=8"], ["callbacks=samples"]):
        with pytest.raises(UserError, match="needs a model that writes, and Reward trains one that scores"):
            parts_of(tmp_path, *overrides)
    assert not any(isinstance(c, ExactMatch | GenerationSamples) for c in parts_of(tmp_path).trainer.callbacks)


@pytest.mark.parametrize(
    ("data", "option"),
    [({"train_on": "assistant"}, "train_on=assistant"), ({"role_weights": {"assistant": 2.0}}, "role_weights")],
)
def test_options_that_choose_tokens_are_refused(data, option):
    with pytest.raises(UserError, match=f"data.{option} has no effect with Reward, which scores whole answers at their end"):
        run(data)


def test_impossible_options_are_refused():
    with pytest.raises(UserError, match=r"method.center_rewards_coefficient=-1.0 must be 0 or more"):
        Reward(MODEL, center_rewards_coefficient=-1.0)
    with pytest.raises(UserError, match="carries an adapter of a language model"):
        Reward(apply_peft(load_model(MODEL), LORA["peft"])).load_network()
    with pytest.raises(UserError, match="holds no classification head"):
        save = apply_peft(load_model(MODEL), LORA["peft"])
        Reward(_saved(save)).load_network()


def _saved(model):
    import tempfile

    folder = tempfile.mkdtemp()
    save_pretrained(model, None, folder)
    return folder


def test_a_frozen_head_is_told(caplog):
    classifier = load_classifier(MODEL)
    classification_head(classifier).requires_grad_(False)
    Reward(classifier).build_policy()
    assert "The classification head is frozen" in caplog.text
    with pytest.raises(UserError, match=r"peft.task_type=CAUSAL_LM does not fit Qwen2ForSequenceClassification"):
        Reward(MODEL, peft=PeftSpec(r=2, task_type="CAUSAL_LM")).build_policy()


# -- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_ranks_held_out_pairs():
    """From random weights, 80 steps of 32 pairs: which of two numbers is the larger, of pairs of numbers it has not seen."""
    data = DataModule("tiny:compare", eval="tiny:compare", batch_size=32, eval_micro_batch_size=128)
    optim = functools.partial(adamw, lr=2e-3)
    method = Reward("tiny", optim=optim, scheduler=functools.partial(schedule, name="linear", warmup_steps=20))
    trainer = L.Trainer(**QUIET, devices=1, max_steps=80, gradient_clip_val=1.0, num_sanity_val_steps=0)
    trainer.validate(method, data, verbose=False)
    before = trainer.callback_metrics["val/accuracy"].item()
    trainer.fit(method, data)
    trainer.validate(method, data, verbose=False)
    assert before < 0.7
    assert trainer.callback_metrics["val/accuracy"].item() > 0.9
