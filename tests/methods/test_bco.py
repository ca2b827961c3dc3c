"""BCO: what it starts from, its shift, the weights of prompts, and that a run does not depend on how it is executed."""

import json
import math

import lightning as L
import numpy as np
import pytest
import torch
from support import DATA, MODEL, QUIET, SaveAt, assert_same_trajectory, run_method

from workbench.data.batch import Role
from workbench.data.module import DataModule
from workbench.errors import UserError
from workbench.methods.bco import BCO
from workbench.methods.density_ratio import COLUMN, prompts_of
from workbench.models.peft import PeftSpec

ROWS = {"train": str(DATA / "unpaired.jsonl")}
SHUFFLED = {**ROWS, "shuffle": True}
STEPS = {"max_steps": 14}  # 12 steps an epoch: the run crosses an epoch's end
METHOD = {"beta": 0.3}
SIGNED = ("delta", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/rejected", "logits/chosen", "count/rejected")


def run(data=None, method=None, trainer=None, **options):
    return run_method(BCO, {**ROWS, **(data or {})}, {**METHOD, **(method or {})}, trainer, **options)


def assert_same(ours, theirs, tolerance=1e-5):
    assert_same_trajectory(ours, theirs, tolerance)
    for name in SIGNED:  # in nats: rewards are small differences of large numbers
        sides = [[s[f"train/{name}"] for s in steps] for steps in (ours, theirs)]
        assert sides[0] == pytest.approx(sides[1], rel=10 * tolerance, abs=10 * tolerance), name


@pytest.fixture(scope="module")
def canonical():
    return run(SHUFFLED, trainer=STEPS)[0]


# -- the start and the shift -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [{}, {"peft": PeftSpec(r=4, alpha=8)}, {"shift_scope": "micro_batch"}], ids=str)
def test_the_first_loss_is_ln_2(method):
    steps, _, _ = run({"micro_batch_size": 4}, method, {"max_steps": 1})
    assert steps[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-7)
    assert steps[0]["train/delta"] == steps[0]["train/rewards/margins"] == 0.0
    assert steps[0]["train/grad_norm"] > 0


def test_a_step_is_shifted_by_the_rewards_of_the_steps_before(canonical):
    """Half the sum of the labels' means over all earlier rows."""
    totals = np.zeros(4)
    for step in canonical:
        means = [totals[i] / max(totals[i + 1], 1) for i in (0, 2)]
        assert step["train/delta"] == pytest.approx(sum(means) / 2, rel=1e-9, abs=1e-12)
        names = ("rewards/chosen_sum", "count/chosen", "rewards/rejected_sum", "count/rejected")
        totals += [step[f"train/{name}"] for name in names]
    assert canonical[-1]["train/delta"] > 0.5


def test_the_shift_of_micro_batches_is_the_mean_of_all_rewards_so_far():
    steps, _, _ = run(method={"shift_scope": "micro_batch"}, trainer={"max_steps": 4})
    total = count = 0.0
    for step in steps:
        total += step["train/rewards/chosen_sum"] + step["train/rewards/rejected_sum"]
        count += step["train/count/chosen"] + step["train/count/rejected"]
        assert step["train/delta"] == pytest.approx(total / count, rel=1e-9, abs=1e-12)
    cut, _, _ = run({"micro_batch_size": 2}, {"shift_scope": "micro_batch"}, {"max_steps": 4})
    assert abs(cut[3]["train/loss"] - steps[3]["train/loss"]) > 1e-4


def test_the_loss_by_hand():
    """Of a step of two rows, from their rewards."""
    rows = [json.loads(line) for line in (DATA / "unpaired.jsonl").read_text().splitlines()][:2]
    steps, _, _ = run({"train": rows, "batch_size": 2}, trainer={"max_steps": 3, "max_epochs": -1})
    chosen, rejected, delta = (steps[2][f"train/{name}"] for name in ("rewards/chosen", "rewards/rejected", "delta"))
    assert delta != 0
    expected = (math.log1p(math.exp(delta - chosen)) + math.log1p(math.exp(rejected - delta))) / 2
    assert steps[2]["train/loss"] == pytest.approx(expected, rel=1e-6)


# -- the same run, executed otherwise --------------------------------------------------------------------------------


def test_the_canonical_run_binds(canonical):
    assert min(s["train/grad_norm"] for s in canonical) > 1.0
    assert canonical[-1]["train/rewards/margins"] > 1


@pytest.mark.parametrize(
    ("data", "method"),
    [
        ({"micro_batch_size": 4}, {}),
        ({"micro_batch_size": 1}, {}),
        ({"micro_batch_size": 2, "balance": "none"}, {"layout": "packed"}),
        ({"micro_batch_size": 4}, {"precompute_ref_logps": True}),
    ],
    ids=str,
)
def test_members(canonical, data, method, tmp_path):
    steps, _, _ = run({**SHUFFLED, "cache_dir": str(tmp_path), **data}, method, STEPS)
    assert_same(steps, canonical)


@pytest.mark.parametrize("stop", [5, 12])
def test_resume_with_another_micro_batch_size(tmp_path, canonical, stop):
    """The shift goes on where it was."""
    run({**SHUFFLED, "micro_batch_size": 2}, trainer=STEPS, callbacks=[SaveAt(tmp_path, [stop])])
    steps, _, _ = run({**SHUFFLED, "micro_batch_size": 4}, trainer=STEPS, checkpoint=tmp_path / f"{stop}.ckpt")
    assert_same(steps, canonical[stop:])


def test_streaming_is_the_map_style_run():
    in_order, _, _ = run({"micro_batch_size": 4}, trainer={"max_steps": 6})
    stream, _, _ = run({"micro_batch_size": 4, "streaming": True}, trainer={"max_steps": 6})
    assert_same(stream, in_order)


def evaluate(size, method=None, **data):
    data = {"eval": ROWS["train"], "eval_micro_batch_size": size, **data}
    _, module, trainer = run(data, method, {"max_steps": 4, "val_check_interval": 4, "num_sanity_val_steps": 0})
    return {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("val")}, module


def test_evaluation_does_not_depend_on_micro_batches_and_leaves_the_shift_alone():
    one, module = evaluate(32)
    seen = module.rewards_seen.clone()
    other, _ = evaluate(5)
    assert one.keys() == other.keys() >= {"val/loss", "val/rewards/margins", "val/count/chosen"}
    for name, value in one.items():
        assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert seen[1] + seen[3] == 32  # four steps of training


# -- distribution matching -------------------------------------------------------------------------------------------


def skewed():
    """Undesirable rows ask about the river, desirable ones about the violin, but for a few."""
    rows = []
    for i in range(32):
        label = i % 3 != 0
        word = "violin" if label != (i % 8 == 0) else "river"
        prompt = f"What does the {word} do near the old mill?"
        rows.append(
            {"prompt": prompt, "completion": f"the {'bakery' if i % 2 else 'lantern'} paints the meadow.", "label": label}
        )
    return rows


UDM = {"use_udm": True, "min_density_ratio": 0.01, "max_density_ratio": 100.0}


def ratios(module):
    return module.trainer.datamodule.train_column(COLUMN)


def words(texts):
    """An embedding by hand: whether the text speaks of the river."""
    return torch.tensor([[10.0 * ("river" in text), 0.0] for text in texts])


def test_weights_are_the_density_ratio_of_the_prompts():
    rows = skewed()
    steps, module, _ = run({"train": rows, "batch_size": 32}, {**UDM, "embedding_model": words}, {"max_steps": 1})
    river = np.array(["river" in row["prompt"] for row in rows])
    label = np.array([row["label"] for row in rows])
    got = ratios(module)
    assert (got[label] == 1).all()
    for word in (river, ~river):
        expected = (word & label).sum() / label.sum() / ((word & ~label).sum() / (~label).sum())
        assert got[~label & word] == pytest.approx(expected, rel=0.03)  # the classifier's weights are drawn to 0 a little
    assert steps[0]["train/loss"] == pytest.approx(math.log(2) * got.mean(), rel=1e-6)
    assert got.max() > 2
    assert got.min() < 0.5


@pytest.mark.parametrize("embedding", [None, MODEL, {"name": MODEL}], ids=str)
def test_a_model_embeds_prompts(embedding):
    _, module, _ = run({"train": skewed()}, {**UDM, "embedding_model": embedding}, {"max_steps": 1})
    got = ratios(module)
    river = np.array(["river" in row["prompt"] for row in skewed()])
    label = np.array([row["label"] for row in skewed()])
    assert got[~label & ~river].min() > got[~label & river].max()


def test_the_range_and_the_sample_act():
    _, module, _ = run({"train": skewed()}, {"use_udm": True, "embedding_model": words}, {"max_steps": 1})
    label = np.array([row["label"] for row in skewed()])
    assert ratios(module)[~label].min() == 0.5
    sampled = [
        run({"train": skewed(), "seed": seed}, {**UDM, "prompt_sample_size": 4}, {"max_steps": 1})[1] for seed in (0, 0, 1)
    ]
    first, again, other = map(ratios, sampled)
    assert np.array_equal(first, again)
    assert not np.allclose(first, other)


def test_matched_runs_do_not_depend_on_micro_batches_and_resume(tmp_path):
    options = {**UDM, "precompute_ref_logps": True}
    data = {**SHUFFLED, "cache_dir": str(tmp_path)}
    whole, module, _ = run(data, options, {"max_steps": 6}, callbacks=[SaveAt(tmp_path, [3])])
    assert module.reference is None
    cut, _, _ = run({**data, "micro_batch_size": 2}, {**UDM, "layout": "packed"}, {"max_steps": 6})
    assert_same(cut, whole)
    rest, _, _ = run({**data, "micro_batch_size": 4}, UDM, {"max_steps": 6}, checkpoint=tmp_path / "3.ckpt")
    assert_same(rest, whole[3:])
    plain, _, _ = run(data, trainer={"max_steps": 6})
    assert abs(plain[5]["train/loss"] - whole[5]["train/loss"]) > 1e-3


def test_evaluation_alone_takes_the_weights_of_training(tmp_path, caplog):
    data = {"train": skewed(), "eval": str(DATA / "unpaired.jsonl"), "cache_dir": str(tmp_path)}
    trainer = {"max_steps": 2, "val_check_interval": 2, "num_sanity_val_steps": 0}
    _, _, trained = run(data, UDM, trainer, callbacks=[SaveAt(tmp_path, [2])])

    def validate(checkpoint, **method):
        options = {"ckpt_path": checkpoint, "weights_only": True, "verbose": False}
        alone = L.Trainer(**QUIET, devices=1)
        return alone.validate(BCO(MODEL, **METHOD, **UDM, **method), DataModule(**data, batch_size=8), **options)[0]["val/loss"]

    for method in ({}, {"precompute_ref_logps": True}):
        found = validate(tmp_path / "2.ckpt", **method)
        assert found == pytest.approx(trained.callback_metrics["val/loss"].item(), rel=1e-5)
    assert "no training rows" not in caplog.text
    validate(None)
    assert "no training rows to match prompts with" in caplog.text


def test_prompts_are_read_at_every_token():
    _, _, trainer = run({"micro_batch_size": 4}, trainer={"max_steps": 1})
    batch = trainer.train_dataloader.dataset[(0, 0, 0)]
    prompts = prompts_of(batch)
    tokens = [batch.tokens[batch.starts[s] : batch.starts[s + 1]] for s in batch.segments_of(Role.PROMPT).tolist()]
    assert torch.equal(prompts.tokens[prompts.predictors()], torch.cat(tokens))
    assert prompts.row.tolist() == [0, 1, 2, 3]


def test_the_embedding_is_the_mean_hidden_state_of_the_prompt():
    _, module, trainer = run({"micro_batch_size": 4}, UDM, {"max_steps": 1})
    batch = trainer.train_dataloader.dataset[(0, 0, 0)]
    embedded = module._embedding()(batch)
    for row, s in enumerate(batch.segments_of(Role.PROMPT).tolist()):
        ids = batch.tokens[batch.starts[s] : batch.starts[s + 1]]
        with torch.no_grad():
            hidden = module.reference.policy.causal_lm.base_model(input_ids=ids[None]).last_hidden_state[0]
        assert torch.allclose(embedded[row].float(), hidden.mean(0), atol=1e-5)


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"beta": -1.0}, "method.beta=-1.0 must be above 0"),
        ({"shift_scope": "epoch"}, "method.shift_scope='epoch' is not known"),
        ({"prompt_sample_size": 5}, "method.prompt_sample_size has no effect with method.use_udm=false"),
        ({"embedding_model": MODEL}, "method.embedding_model has no effect with method.use_udm=false"),
        ({"use_udm": True, "min_density_ratio": 3.0, "max_density_ratio": 2.0}, "method.min_density_ratio=3.0 must lie"),
    ],
)
def test_impossible_options_say_why(method, message):
    with pytest.raises(UserError, match=message):
        BCO(MODEL, **method)


@pytest.mark.parametrize(
    ("data", "method", "message"),
    [
        ({"streaming": True}, {}, "method.use_udm compares the prompts of all rows"),
        ({"train": [row for row in skewed() if row["label"]]}, {}, "method.use_udm needs rows of both labels"),
        ({}, {"sync_ref_model": True}, "which moves here"),
    ],
)
def test_impossible_matching_says_why(data, method, message):
    with pytest.raises(UserError, match=message):
        run(data, {"use_udm": True, **method}, {"max_steps": 1})
