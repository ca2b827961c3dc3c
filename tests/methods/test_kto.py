"""KTO: what it starts from, its baseline, and that a run does not depend on how it is executed."""

import json
import logging
import pickle

import pytest
import torch
from support import DATA, MODEL, SaveAt, assert_same_trajectory, run_method

from workbench.data.mismatched import Mismatch
from workbench.data.module import DataModule
from workbench.errors import UserError
from workbench.methods.kto import KTO
from workbench.models.load import ModelSpec, load_model
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.save import save_pretrained
from workbench.models.tokenizer import load_tokenizer

ROWS = {"train": str(DATA / "unpaired.jsonl")}
SHUFFLED = {**ROWS, "shuffle": True}
STEPS = {"max_steps": 14}  # 12 steps an epoch: the run crosses an epoch's end
METHOD = {"beta": 0.3, "undesirable_weight": 1.7}
LORA = PeftSpec(r=4, alpha=8)
SIGNED = ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logits/rejected", "count/chosen")


def run(data=None, method=None, trainer=None, **options):
    return run_method(KTO, {**ROWS, **(data or {})}, {**METHOD, **(method or {})}, trainer, **options)


def assert_same(ours, theirs, tolerance=1e-5):
    assert_same_trajectory(ours, theirs, tolerance)
    for name in SIGNED:  # in nats: rewards are small differences of large numbers
        sides = [[s[f"train/{name}"] for s in steps] for steps in (ours, theirs)]
        assert sides[0] == pytest.approx(sides[1], rel=10 * tolerance, abs=10 * tolerance), name


@pytest.fixture(scope="module")
def canonical():
    return run(SHUFFLED, trainer=STEPS)[0]


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


# -- the start -------------------------------------------------------------------------------------------------------

STARTS = {
    "full": lambda path: {},
    "fresh adapter": lambda path: {"peft": LORA},
    "continued adapter": lambda path: {"peft": PeftSpec(adapter=path)},
    "precomputed": lambda path: {"precompute_ref_logps": True},
    "moving": lambda path: {"sync_ref_model": True},
    "baselines apart": lambda path: {"kl_scope": "micro_batch"},
    "no baseline": lambda path: {"loss": "apo_zero_unpaired"},
    "dropout in the model": lambda path: {"model": ModelSpec(MODEL, init_kwargs={"attention_dropout": 0.5})},
}


@pytest.mark.parametrize("start", STARTS)
def test_the_first_loss_is_one_half(start, trained_adapter, tmp_path):
    """Whatever is handed in is the reference, so that at the start no completion has a reward, of its own prompt or another."""
    options = {"undesirable_weight": 1.0, **STARTS[start](trained_adapter)}
    steps, module, _ = run({"cache_dir": str(tmp_path), "micro_batch_size": 4}, options, {"max_steps": 1})
    exact = start != "precomputed"  # that in other micro-batches, which gives the same numbers to rounding only
    assert steps[0]["train/loss"] == pytest.approx(0.5, rel=1e-7 if exact else 1e-5)
    assert steps[0]["train/kl"] == 0.0
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert steps[0][f"train/{name}"] == (0.0 if exact else pytest.approx(0.0, abs=1e-4))
    assert steps[0]["train/grad_norm"] > 0
    assert not any("reference" in name for name, p in module.named_parameters() if p.requires_grad)


# -- the baseline ----------------------------------------------------------------------------------------------------


def prepared(**options):
    module = KTO(MODEL)
    data = DataModule(ROWS["train"], **{"max_length": 256, **options})
    return data.prepare_train(module.tokenizer, module.data_types), module.tokenizer


def parts(row):
    boundary = len(row["input_ids"]) - row["lengths"][-1]
    return row["input_ids"][:boundary], row["input_ids"][boundary:]


def test_a_mismatched_row_is_a_prompt_with_the_completion_before():
    rows, _ = prepared()
    made = Mismatch().batches(rows.__getitem__, [7, 2, 5], [[5, 7], [2]], norm=None)
    got = [batch.tokens[batch.starts[s] : batch.starts[s + 2]].tolist() for batch in made for s in range(0, len(batch.row), 2)]
    expected = [parts(rows[prompt])[0] + parts(rows[other])[1] for prompt, other in ((5, 2), (7, 5), (2, 7))]
    assert got == expected
    trained = [batch.weights[batch.starts[1] : batch.starts[2]] for batch in made]
    assert torch.equal(trained[0], torch.tensor(rows[2]["weights"][len(parts(rows[2])[0]) :]))
    assert not made[0].extras


@pytest.mark.parametrize("keep_end", [False, True])
def test_a_mismatched_row_is_cut_as_the_rows_are(keep_end):
    """It holds as much of the completion as there is room for, also what its own, longer prompt had no room for."""
    whole, _ = prepared()
    limit = 30
    rows, _ = prepared(max_length=limit, truncation="keep_end" if keep_end else "keep_start")
    made, regained = Mismatch(limit, keep_end), 0
    for i in range(1, len(rows)):
        row = made.row(rows[i], rows[i - 1])
        assert sum(row["lengths"]) == len(row["input_ids"]) == len(row["weights"]) <= limit
        if keep_end:
            full = parts(rows[i])[0] + parts(rows[i - 1])[1]
            assert row["input_ids"] == full[-limit:]
        else:
            full = parts(whole[i])[0] + parts(whole[i - 1])[1]
            assert row["input_ids"] == full[:limit]
            regained += len(row["input_ids"]) > len(parts(rows[i])[0] + parts(rows[i - 1])[1])
    assert keep_end or regained > 0


def test_rows_without_a_prompt():
    row = {
        "input_ids": [1, 2, 3],
        "weights": [0.0, 1.0, 1.0],
        "lengths": [3],
        "parents": [-1],
        "tail_ids": [],
        "tail_weights": [],
    }
    other = {**row, "input_ids": [9, 4, 5, 6], "weights": [0.0, 0.0, 1.0, 1.0], "lengths": [2, 2], "parents": [-1, 0]}
    assert Mismatch().row(row, other)["input_ids"] == [5, 6]
    assert Mismatch().row(row, other)["parents"] == [-1]
    assert Mismatch().row(other, row) | {"roles": 0} == {
        "input_ids": [9, 4, 1, 2, 3],
        "weights": [0.0, 0.0, 0.0, 1.0, 1.0],
        "lengths": [2, 3],
        "parents": [-1, 0],
        "roles": 0,
    }


EVEN = {"undesirable_weight": 1.0}  # the policy moves towards all completions, and so away from the reference, at once


def test_the_baseline_by_hand():
    """The mean log-ratio of a step's mismatched rows under the policy before its update."""
    _, module, _ = run(method=EVEN, trainer={"max_steps": 3})
    rows, _ = prepared()
    order = list(range(24, 32))
    batch = Mismatch().batches(rows.__getitem__, order, [order], norm=None)[0]
    ratios = module._mismatched_logratios([batch])
    assert len(ratios) == 8
    steps, _, _ = run({"micro_batch_size": 2}, EVEN, {"max_steps": 4})
    assert steps[3]["train/kl"] == pytest.approx(ratios.mean().item(), rel=1e-4)
    assert steps[3]["train/kl"] > 1


def test_the_baseline_is_a_constant_of_the_step():
    seen = []

    class Spy(KTO):
        def row_losses(self, labelled):
            seen.append(self.baseline)
            return super().row_losses(labelled)

    run_method(Spy, {**ROWS, "micro_batch_size": 4}, {**METHOD, **EVEN}, {"max_steps": 4})
    assert not any(value.requires_grad for value in seen)
    assert [seen[k] is seen[k + 1] for k in range(7)] == [True, False] * 3 + [True]
    assert seen[6] > 1


def test_a_micro_batch_of_its_own_for_each_micro_batch():
    """Memory stays bounded: the first item of a step brings as many micro-batches as the rank has, of their size."""
    _, _, trainer = run({"micro_batch_size": 2}, trainer={"max_steps": 1})
    items = [trainer.train_dataloader.dataset[(0, 0, k)] for k in range(4)]
    assert [[c.num_rows for c in item.companions] for item in items] == [[2, 2, 2, 2], [], [], []]
    assert [c.row.unique().tolist() for c in items[0].companions] == [item.row.unique().tolist() for item in items]
    assert len(items[0].to("cpu").companions) == 4
    copied = pickle.loads(pickle.dumps(items[0]))  # as from a loader's worker
    for one, other in zip(copied.companions, items[0].companions, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.weights, other.weights)
        assert one.norm == other.norm


def test_the_baseline_of_single_micro_batches_is_another():
    step, _, _ = run({"micro_batch_size": 2}, trainer={"max_steps": 3})
    micro, _, _ = run({"micro_batch_size": 2}, {"kl_scope": "micro_batch"}, {"max_steps": 3})
    assert abs(step[2]["train/kl"] - micro[2]["train/kl"]) > 0.01
    alone, _, _ = run(method={"kl_scope": "micro_batch"}, trainer={"max_steps": 3})
    together, _, _ = run(trainer={"max_steps": 3})
    assert_same(alone, together, 1e-6)  # one micro-batch is the step


# -- the same run, executed otherwise --------------------------------------------------------------------------------


def test_the_canonical_run_binds(canonical):
    """Clipping acts, both labels and a baseline above 0 are there, and the run learns."""
    assert min(s["train/grad_norm"] for s in canonical[1:]) > 1.0
    assert max(s["train/kl"] for s in canonical) > 5
    assert canonical[-1]["train/rewards/margins"] > 1
    assert canonical[0]["train/count/chosen"] + canonical[0]["train/count/rejected"] == 8


@pytest.mark.parametrize(
    ("data", "method"),
    [
        ({"micro_batch_size": 4}, {}),
        ({"micro_batch_size": 1}, {}),
        ({"micro_batch_size": 2, "balance": "none"}, {}),
        ({"micro_batch_tokens": 150}, {}),
        ({"micro_batch_size": 4}, {"layout": "packed"}),
        ({"micro_batch_size": 4}, {"gradient_checkpointing": True, "pad_to_multiple_of": 16}),
        ({"micro_batch_size": 2}, {"precompute_ref_logps": True}),
        ({"num_workers": 1, "micro_batch_size": 4}, {}),
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "-",
)
def test_members(canonical, data, method, tmp_path):
    steps, _, _ = run({**SHUFFLED, "cache_dir": str(tmp_path), **data}, method, STEPS)
    assert_same(steps, canonical)


def test_members_with_an_adapter(trained_adapter):
    method = {"peft": PeftSpec(adapter=trained_adapter)}
    whole = run(SHUFFLED, method, {"max_steps": 6})[0]
    cut = run({**SHUFFLED, "micro_batch_size": 2}, {**method, "layout": "packed"}, {"max_steps": 6})[0]
    assert_same(cut, whole)


@pytest.mark.parametrize("stop", [5, 12])
def test_resume_with_another_micro_batch_size(tmp_path, canonical, stop):
    run({**SHUFFLED, "micro_batch_size": 2}, trainer=STEPS, callbacks=[SaveAt(tmp_path, [stop])])
    steps, _, _ = run({**SHUFFLED, "micro_batch_size": 4}, trainer=STEPS, checkpoint=tmp_path / f"{stop}.ckpt")
    assert steps[0]["step"] == stop + 1
    assert_same(steps, canonical[stop:])


def test_streaming_is_the_map_style_run(tmp_path):
    data = {"micro_batch_size": 3, "batch_size": 6}
    in_order, _, _ = run(data, trainer=STEPS)
    stream, _, _ = run({**data, "streaming": True}, trainer=STEPS, callbacks=[SaveAt(tmp_path, [9])])
    assert_same(stream, in_order)
    rest, _, _ = run({**data, "micro_batch_size": 2, "streaming": True}, trainer=STEPS, checkpoint=tmp_path / "9.ckpt")
    assert_same(rest, stream[9:])


@pytest.fixture(scope="module")
def evaluated():
    def values(size, **method):
        data = {"eval": ROWS["train"], "eval_micro_batch_size": size}
        _, _, trainer = run(data, method, {"max_steps": 4, "val_check_interval": 4, "num_sanity_val_steps": 0})
        return {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("val")}

    return values


def test_an_evaluation_set_has_one_baseline(evaluated):
    one, other, micro = evaluated(32), evaluated(3), evaluated(5, kl_scope="micro_batch")
    assert one.keys() == other.keys() >= {"val/loss", "val/kl", "val/rewards/margins", "val/count/rejected", "val/logps/chosen"}
    assert one["val/kl"] > 1
    for name, value in one.items():
        assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert micro["val/kl"] > 0  # of another run, whose evaluation set has one baseline as well
    assert one["val/rewards/margins"] == pytest.approx(one["val/rewards/chosen"] - one["val/rewards/rejected"])
    assert one["val/rewards/chosen_sum"] == pytest.approx(one["val/rewards/chosen"] * one["val/count/chosen"])


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [{"loss": "apo_zero_unpaired"}, {"beta": 0.5}, {"desirable_weight": 0.5}, {"undesirable_weight": 1.0}]
)
def test_every_option_acts(canonical, method):
    steps, _, _ = run(SHUFFLED, method, {"max_steps": 4})
    assert abs(steps[3]["train/loss"] - canonical[3]["train/loss"]) > 1e-3


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"loss": "kot"}, "method.loss='kot' is not known. Did you mean 'kto'"),
        ({"beta": 0.0}, "method.beta=0.0 must be above 0"),
        ({"desirable_weight": -1.0}, "method.desirable_weight=-1.0 must be at least 0"),
        ({"desirable_weight": 0.0, "undesirable_weight": 0.0}, "leave nothing to learn from"),
        ({"loss": "apo_zero_unpaired", "kl_scope": "micro_batch"}, "method.kl_scope=micro_batch has no effect"),
    ],
)
def test_impossible_options_say_why(method, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        KTO(MODEL, **method)


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"micro_batch_size": 1}])
def test_a_row_alone_has_no_other_completion(options):
    name = next(iter(options))
    with pytest.raises(UserError, match=f"data.{name}=1 leaves no other row"):
        run(options, {"kl_scope": "step" if name == "batch_size" else "micro_batch"}, {"max_steps": 1})


# -- labels ----------------------------------------------------------------------------------------------------------


def labelled(make):
    rows = [json.loads(line) for line in (DATA / "unpaired.jsonl").read_text().splitlines()][:16]
    return [{**row, "label": make(row["label"])} for row in rows]


def test_labels_of_any_kind_train_the_same():
    kinds = (bool, int, float, lambda label: str(label).lower(), lambda label: str(int(label)))
    losses = [[s["train/loss"] for s in run({"train": labelled(kind)}, trainer={"max_steps": 2})[0]] for kind in kinds]
    assert all(other == losses[0] for other in losses)


def test_a_step_without_one_of_the_labels_has_no_margin():
    rows = sorted(labelled(bool), key=lambda row: row["label"])
    steps, _, _ = run({"train": rows, "batch_size": 4, "micro_batch_size": 2}, trainer={"max_steps": 2})
    assert "train/rewards/margins" not in steps[0]
    assert "train/rewards/chosen" not in steps[0]
    assert (steps[0]["train/count/chosen"], steps[0]["train/count/rejected"]) == (0, 4)


def warned(caplog, rows, **method):
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="workbench"):
        run({"train": rows}, {"undesirable_weight": 1.0, **method}, {"max_steps": 1})
    return " ".join(r.getMessage() for r in caplog.records if r.name == "workbench.methods.kto")


def test_unbalanced_labels_are_told_with_the_weights_that_would_do(caplog):
    rows = [{**row, "label": i % 4 != 0} for i, row in enumerate(labelled(bool))]  # 12 to 4
    message = warned(caplog, rows)
    assert "The 12 desirable rows weigh 3 times as much as the 4 undesirable ones" in message
    assert "method.desirable_weight between 0.333 and 0.444, or method.undesirable_weight between 2.25 and 3" in message
    assert not warned(caplog, rows, undesirable_weight=2.5)
    assert "All 16 training rows are labelled false" in warned(caplog, labelled(lambda label: False))


def test_precomputing_keeps_the_reference_for_the_baseline(caplog, tmp_path):
    options = {"precompute_ref_logps": True}
    with caplog.at_level(logging.INFO, logger="workbench"):
        _, module, _ = run({"cache_dir": str(tmp_path)}, options, {"max_steps": 1})
    assert module.reference is not None
    assert "The reference stays in memory" in caplog.text
    _, module, _ = run({"cache_dir": str(tmp_path)}, {**options, "loss": "apo_zero_unpaired"}, {"max_steps": 1})
    assert module.reference is None


def test_pairs_become_two_rows():
    data = {"train": {"path": str(DATA / "preference.jsonl"), "convert": "unpaired_preference"}}
    steps, _, _ = run(data, trainer={"max_steps": 2})
    assert [(s["train/count/chosen"], s["train/count/rejected"]) for s in steps] == [(4, 4)] * 2
