"""CPO, SimPO, ORPO and TPO: numbers by hand, options, and that a run does not depend on how it is executed."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from support import DATA, MODEL, SaveAt, run_method
from transformers import AutoModelForCausalLM

from workbench.errors import UserError
from workbench.methods.cpo import CPO
from workbench.methods.orpo import ORPO
from workbench.methods.tpo import TPO
from workbench.models.load import ModelSpec
from workbench.models.peft import PeftSpec
from workbench.models.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(ModelSpec(MODEL))
PAIRS = [json.loads(line) for line in (DATA / "preference.jsonl").read_text().splitlines()]
# Gold completions of their own lengths, other than the pair's.
TRIPLES = [{**row, "reference": PAIRS[(i + 7) % len(PAIRS)]["chosen"]} for i, row in enumerate(PAIRS)]
LORA = PeftSpec(r=4, alpha=8)
STEPS = {"max_steps": 6}

# The method, its options, those of the data.
RUNS = {
    "cpo": (CPO, {"beta": 0.3, "label_smoothing": 0.1}, {}),
    "cpo-ipo": (CPO, {"loss": "ipo", "beta": 0.3, "cpo_alpha": 0.5, "alpha": 0.1}, {}),
    "simpo": (CPO, {"loss": "simpo", "beta": 2.0, "cpo_alpha": 0.0}, {}),
    "orpo": (ORPO, {"beta": 0.5}, {}),
    "orpo-prompts": (ORPO, {"beta": 0.5}, {"train_on": "all"}),
    "tpo": (TPO, {"beta": 0.1, "tpo_alpha": 0.7}, {}),
    "tpo-l": (TPO, {"loss": "tpo-l", "beta": 2.0}, {}),
}
MAIN = ("cpo", "simpo", "orpo-prompts", "tpo")


def run(name, data=None, method=None, trainer=None, **options):
    kind, own, rows = RUNS[name]
    train = TRIPLES if kind is TPO else PAIRS
    return run_method(kind, {"train": train, **rows, **(data or {})}, {**own, **(method or {})}, trainer or STEPS, **options)


def assert_same(ours, theirs, tolerance=1e-5):
    """Every number that is logged, rewards and log-probabilities in nats, which are small differences of large numbers."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"train/tokens_per_second"}:
            allowed = {"rel": tolerance} if name.endswith(("loss", "grad_norm")) else {"rel": 10 * tolerance, "abs": tolerance}
            assert a[name] == pytest.approx(b[name], **allowed), name


# -- by hand ---------------------------------------------------------------------------------------------------------


def log_probabilities(model, row):
    """Log-probabilities of the tokens of each of a row's answers, and of its prompt, by a forward of transformers alone."""
    found = {}
    for side in ("chosen", "rejected", "reference"):
        if side in row:
            whole = TOKENIZER.apply_chat_template([*row["prompt"], *row[side]], tokenize=True, return_dict=False)
            prompt = TOKENIZER.apply_chat_template(row["prompt"], tokenize=True, return_dict=False, add_generation_prompt=True)
            with torch.no_grad():
                logits = model(torch.tensor([whole])).logits[0, :-1]
            logps = logits.double().log_softmax(-1).gather(1, torch.tensor(whole[1:])[:, None])[:, 0]
            found["prompt"], found[side] = logps[: len(prompt) - 1], logps[len(prompt) - 1 :]
    return found


def by_hand(name, rows):
    """The first step's loss and metrics, written out."""
    kind, options, data = RUNS[name]
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    logps = [log_probabilities(model, row) for row in rows]
    means = name in ("cpo-ipo", "simpo", "orpo", "orpo-prompts", "tpo-l")
    sides = {s: torch.stack([p[s].mean() if means else p[s].sum() for p in logps]) for s in ("chosen", "rejected")}
    beta, gold = options["beta"], "reference" if kind is TPO else "chosen"
    trained = [p[gold] for p in logps] + [p["prompt"] for p in logps if data.get("train_on") == "all"]
    nll = -torch.cat(trained).mean()
    shape = {s: (1 - torch.exp(-0.1 * v)) / 0.1 if name == "cpo-ipo" else v for s, v in sides.items()}
    margins = shape["chosen"] - shape["rejected"]
    if kind is ORPO:
        odds = {s: v - torch.log(1 - v.exp()) for s, v in sides.items()}
        losses, weight = -beta * F.logsigmoid(odds["chosen"] - odds["rejected"]), 1.0
    elif name == "cpo-ipo":
        losses, weight = (margins - 1 / (2 * beta)) ** 2, 0.5
    elif name in ("simpo", "tpo-l"):
        losses, weight = -F.logsigmoid(beta * margins - 0.5), float(name == "tpo-l")
    else:
        smooth = options.get("label_smoothing", 0.0)
        losses = -(1 - smooth) * F.logsigmoid(beta * margins) - smooth * F.logsigmoid(-beta * margins)
        weight = options.get("tpo_alpha", 1.0)
    return {
        "loss": (losses.mean() + weight * nll).item(),
        "nll_loss": nll.item() if weight else 0.0,
        "logps/chosen": sides["chosen"].mean().item(),
        "logps/rejected": sides["rejected"].mean().item(),
        "rewards/chosen": (beta * shape["chosen"]).mean().item(),
        "rewards/margins": (beta * margins).mean().item(),
        "rewards/accuracies": (margins > 0).double().mean().item(),
    }


@pytest.mark.parametrize("name", RUNS)
def test_the_first_step_by_hand(name):
    step = run(name, {"micro_batch_size": 2}, trainer={"max_steps": 1})[0][0]
    expected = by_hand(name, (TRIPLES if RUNS[name][0] is TPO else PAIRS)[:8])
    for metric, value in expected.items():
        if metric != "nll_loss" or RUNS[name][0] is not TPO:
            assert step[f"train/{metric}"] == pytest.approx(value, rel=2e-6, abs=2e-6), metric


@pytest.fixture(scope="module")
def uniform():
    """A model to which all tokens are equally likely."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    torch.nn.init.zeros_(model.lm_head.weight)
    return model, math.log(model.config.vocab_size)


@pytest.mark.parametrize(
    ("name", "method", "preference"),
    [
        ("cpo", {}, math.log(2)),
        ("cpo", {"loss": "hinge", "label_smoothing": 0.0}, 1.0),
        ("cpo-ipo", {"beta": 0.25}, 4.0),
        ("simpo", {}, math.log(1 + math.exp(0.5))),
        ("simpo", {"loss": "alphapo", "alpha": 0.25, "simpo_gamma": 0.1}, math.log(1 + math.exp(0.1))),
        ("orpo", {}, 0.5 * math.log(2)),
        ("orpo-prompts", {}, 0.5 * math.log(2)),
        ("tpo", {"tpo_alpha": 1.0}, math.log(2)),
        ("tpo-l", {}, math.log(1 + math.exp(0.5))),
    ],
)
def test_where_nothing_is_preferred(uniform, name, method, preference):
    """Two answers of one length and equal probability per token: margins are 0, and the likelihood costs ln V a token."""
    model, log_v = uniform
    rows = [
        {"prompt": "the river", "chosen": " mill lantern", "rejected": " violin garden", "reference": " bridge"},
        {"prompt": "the", "chosen": " quiet", "rejected": " engine", "reference": " library glacier bakery"},
    ]
    rows = [{key: value for key, value in row.items() if key != "reference" or name.startswith("tpo")} for row in rows]
    lengths = {len(TOKENIZER(row[side]).input_ids) - row[side].count(" ") for row in rows for side in row}
    assert lengths <= {0, 1}, "a token for each word"
    data = {"train": rows, "batch_size": 2}
    step = run(name, data, {"model": model, "tokenizer": TOKENIZER, **method}, {"max_steps": 1}, lr=0.0)[0][0]
    weight = {"cpo-ipo": 0.5, "simpo": 0.0}.get(name, 1.0)
    assert step["train/loss"] == pytest.approx(preference + weight * log_v, rel=1e-6)
    assert step["train/rewards/margins"] == pytest.approx(0.0, abs=1e-6)


def test_the_likelihood_term_can_be_turned_off():
    on, off = (run("cpo", method={"cpo_alpha": alpha}, trainer={"max_steps": 1})[0][0] for alpha in (1.0, 0.0))
    assert (on["train/nll_loss"] > 1, off["train/nll_loss"]) == (True, 0.0)
    assert on["train/loss"] - off["train/loss"] == pytest.approx(on["train/nll_loss"], rel=1e-5)
    gold, none = (run("tpo", method={"tpo_alpha": alpha}, trainer={"max_steps": 1})[0][0] for alpha in (1.0, 0.0))
    assert gold["train/loss"] - none["train/loss"] > 1
    assert gold["train/rewards/margins"] == none["train/rewards/margins"]


def test_trained_prompts_change_the_likelihood_alone():
    completions, all_tokens = (run(name, trainer={"max_steps": 1})[0][0] for name in ("orpo", "orpo-prompts"))
    assert completions["train/nll_loss"] != pytest.approx(all_tokens["train/nll_loss"], rel=1e-3)
    same = ("log_odds_chosen", "log_odds_ratio", "rewards/margins", "logps/chosen", "logits/rejected", "num_tokens")
    assert all(completions[f"train/{m}"] == pytest.approx(all_tokens[f"train/{m}"], rel=1e-5) for m in same)
    with pytest.raises(UserError, match=r"data.train_on=all has no effect with CPO, which reads the answers of a pair alone"):
        run("cpo", {"train_on": "all"})


def test_a_triple_is_one_forward_on_a_shared_prompt_and_each_side_is_cut_on_its_own():
    row = {"prompt": "The river counts", "chosen": " the lantern.", "rejected": " no.", "reference": " the mill."}
    long = {**row, "reference": " the mill and the violin." * 9}
    data = {"batch_size": 1, "max_length": 24}
    first, second = (run("tpo", {**data, "train": [r]}, trainer={"max_steps": 1})[0][0] for r in (row, long))
    assert first["train/logps/chosen"] == pytest.approx(second["train/logps/chosen"], rel=1e-6)
    assert first["train/loss"] != pytest.approx(second["train/loss"], rel=1e-3)
    size = {side: len(TOKENIZER(row["prompt"] + row.get(side, "")).input_ids) for side in ("", "chosen", "rejected", "reference")}
    own = sum(size[side] - size[""] + 1 for side in ("chosen", "rejected", "reference"))
    assert first["train/num_tokens"] == size[""] + own


def test_pairs_without_a_gold_answer_are_no_triples():
    with pytest.raises(UserError, match=r"make preference, but this needs triple_preference.*missing: reference"):
        run("tpo", {"train": PAIRS[:8]})


# -- the same run, executed in other ways ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def canonical():
    return {name: run(name, {"shuffle": True})[0] for name in RUNS}


@pytest.mark.parametrize(("name", "size"), [(n, k) for n in RUNS for k in (4, 2, 1) if n in MAIN or k == 2])
def test_micro_batches(canonical, name, size):
    assert_same(run(name, {"shuffle": True, "micro_batch_size": size})[0], canonical[name])


@pytest.mark.parametrize(
    ("data", "method"),
    [
        ({"micro_batch_size": 4}, {"layout": "packed"}),
        ({"micro_batch_tokens": 400}, {}),
        ({"micro_batch_size": 4, "balance": "none"}, {"gradient_checkpointing": True, "pad_to_multiple_of": 8}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MAIN)
def test_members(canonical, name, data, method):
    assert_same(run(name, {"shuffle": True, **data}, method)[0], canonical[name])


@pytest.mark.parametrize("name", RUNS)
def test_the_canonical_run_binds(canonical, name):
    """Clipping acts, the run learns, and a mean of micro-batches' means would be another number."""
    steps = canonical[name]
    assert max(s["train/grad_norm"] for s in steps) > 1.0
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    assert len({s["train/rewards/accuracies"] for s in steps}) > 1 or name in ("cpo", "tpo")
    if name != "simpo":
        data = {"shuffle": True, "micro_batch_size": 1, "balance": "none"}
        means, _, _ = run(name, data, {"scope": "micro_batch"}, {"max_steps": 1})
        assert abs(means[0]["train/loss"] - steps[0]["train/loss"]) > 5e-5 * steps[0]["train/loss"]


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", MAIN)
def test_resume_with_another_micro_batch_size(tmp_path, name, peft):
    data = {"shuffle": True, "micro_batch_size": 2}
    whole, module, _ = run(name, data, {"peft": peft}, callbacks=[SaveAt(tmp_path, [4])])
    rest, _, _ = run(name, {**data, "micro_batch_size": 4}, {"peft": peft}, checkpoint=tmp_path / "4.ckpt")
    assert_same(rest, whole[4:])
    saved = torch.load(tmp_path / "4.ckpt", weights_only=True)["state_dict"]
    assert all("lora" in key for key in saved) is bool(peft)
    assert not hasattr(module, "reference")


# -- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(name, data, method=None):
    rows = (TRIPLES if RUNS[name][0] is TPO else PAIRS)[:21]
    trainer = {"max_steps": 1, "val_check_interval": 1, "limit_train_batches": 1}
    # a rate of zero: what is evaluated is the model as it came
    _, _, fit = run(name, {"eval": rows, **data}, method, trainer, lr=0.0)
    return {k.removeprefix("val/"): v.item() for k, v in fit.callback_metrics.items() if k.startswith("val/")}


@pytest.mark.parametrize("name", RUNS)
def test_evaluation_is_the_loss_of_the_whole_set_by_hand(name):
    found = evaluate(name, {"eval_micro_batch_size": 4})
    expected = by_hand(name, (TRIPLES if RUNS[name][0] is TPO else PAIRS)[:21])
    for metric, value in expected.items():
        if metric != "nll_loss" or RUNS[name][0] is not TPO:
            assert found[metric] == pytest.approx(value, rel=2e-6, abs=2e-6), metric
    other = evaluate(name, {"eval_micro_batch_size": 21})
    assert other.keys() == found.keys()
    assert all(other[k] == pytest.approx(v, rel=1e-5, abs=1e-6) for k, v in found.items())


@pytest.mark.parametrize("name", ["cpo", "orpo", "tpo"])
def test_predictions_reach_a_metric_of_ones_own(name):
    def share(predictions):
        tokens = sum(len(row) for row in predictions.labels)
        return {"share": sum((p == t).sum() for p, t in zip(predictions.predictions, predictions.labels, strict=True)) / tokens}

    assert 0 <= evaluate(name, {}, {"compute_metrics": share})["share"] < 0.2


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (CPO, {"loss": "sigmod"}, r"method.loss='sigmod' is not known. Did you mean 'sigmoid'"),
        (CPO, {"loss": "tpo-l"}, "Allowed: sigmoid, hinge, ipo, simpo, alphapo"),
        (CPO, {"beta": 0.0}, r"method.beta=0.0 must be above 0"),
        (CPO, {"label_smoothing": 0.5}, "the share of labels that are wrong"),
        (CPO, {"loss": "hinge", "label_smoothing": 0.1}, "has no effect with method.loss=hinge; set it to 0.0, or use sigmoid"),
        (CPO, {"simpo_gamma": 1.0}, r"method.simpo_gamma=1.0 has no effect with method.loss=sigmoid; set it to 0.5"),
        (CPO, {"cpo_alpha": -1.0}, "would make the chosen completions unlikely"),
        (CPO, {"loss": "alphapo", "alpha": 0.25}, r"method.cpo_alpha=1.0: AlphaPO has no likelihood term"),
        (CPO, {"loss": "alphapo", "cpo_alpha": 0.0}, r"is simpo at method.alpha=0"),
        (ORPO, {"beta": -0.1}, "would prefer the rejected completions"),
        (TPO, {"loss": "simpo"}, "Allowed: sigmoid, hinge, ipo, tpo-l"),
        (TPO, {"loss": "ipo", "tpo_l_gamma": 0.2}, r"method.tpo_l_gamma=0.2 has no effect with method.loss=ipo; .* or use tpo-l"),
        (TPO, {"loss": "hinge", "label_smoothing": 0.2}, "or use sigmoid, tpo-l"),
        (TPO, {"tpo_alpha": -1.0}, "would make the gold completions unlikely"),
    ],
    ids=str,
)
def test_options_that_cannot_act_are_refused(kind, options, message):
    with pytest.raises(UserError, match=message):
        kind(model=MODEL, **options)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("cpo", {"alpha": 0.01}),
        ("cpo", {"label_smoothing": 0.3}),
        ("cpo", {"cpo_alpha": 0.2}),
        ("simpo", {"simpo_gamma": 1.0}),
        ("simpo", {"cpo_alpha": 0.2}),
        ("orpo", {"beta": 0.2}),
        ("tpo", {"label_smoothing": 0.3}),
        ("tpo", {"tpo_alpha": 0.2}),
        ("tpo-l", {"tpo_l_gamma": 1.0}),
    ],
    ids=str,
)
def test_every_option_changes_the_run(name, method):
    plain, changed = (run(name, method=m, trainer={"max_steps": 1})[0][0] for m in ({}, method))
    assert abs(plain["train/loss"] - changed["train/loss"]) > 1e-4
