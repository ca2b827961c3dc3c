"""RLOO: its baseline, its divergence in the reward, clipping; and how online methods are evaluated and log completions."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from online_rig import run_online, spread

from workbench.errors import UserError
from workbench.methods.grpo import GRPO
from workbench.methods.rloo import RLOO

ONE_STEP = {"steps_per_generation": 1, "num_iterations": 1}
FIRST = {"max_steps": 1}


def rewards_of(window):
    return np.array(spread(window.token_ids)).reshape(-1, 4)


def others_mean(rewards):
    return (rewards.sum(1, keepdims=True) - rewards) / (rewards.shape[1] - 1)


# -- RLOO ------------------------------------------------------------------------------------------------------------


def test_the_baseline_is_the_mean_of_the_others():
    _, module, _ = run_online(RLOO, {"beta": 0.0, **ONE_STEP}, trainer=FIRST)
    rewards = rewards_of(module.window)
    assert module.window.advantages == pytest.approx((rewards - others_mean(rewards)).ravel(), abs=1e-12)


def test_the_divergence_is_taken_off_the_reward():
    """Field report 40: log p - log ref of the whole completion (k1), in the reward and so without gradient, and named ``kl``."""
    steps, module, _ = run_online(RLOO, {"beta": 0.3, **ONE_STEP}, trainer={"max_steps": 2}, lr=1e-2)
    window = module.window
    per_token = [old.astype(np.float64) - ref for old, ref in zip(window.old_logps, window.ref_logps, strict=True)]
    assert steps[0]["train/kl"] == 0.0  # the reference is the model as it was handed in
    assert steps[1]["train/kl"] == pytest.approx(np.concatenate(per_token).mean())
    assert steps[1]["train/kl"] != 0.0
    rewards = rewards_of(window) - 0.3 * np.array([d.sum() for d in per_token]).reshape(-1, 4)
    assert window.advantages == pytest.approx((rewards - others_mean(rewards)).ravel(), abs=1e-9)
    assert steps[1]["train/reward"] == pytest.approx(rewards_of(window).mean())  # as the functions gave it


def test_advantages_are_normalised_over_the_batch():
    _, module, _ = run_online(RLOO, {"beta": 0.0, "normalize_advantages": True, **ONE_STEP}, trainer=FIRST)
    rewards = rewards_of(module.window)
    plain = (rewards - others_mean(rewards)).ravel()
    expected = (plain - plain.mean()) / (plain.std(ddof=1) + 1e-4)
    assert module.window.advantages == pytest.approx(expected, rel=1e-9)


def test_rewards_are_clipped_before_they_are_compared():
    _, module, _ = run_online(RLOO, {"beta": 0.0, "reward_clip_range": [0.3, 0.6], **ONE_STEP}, trainer=FIRST)
    rewards = rewards_of(module.window).clip(0.3, 0.6)
    assert module.window.advantages == pytest.approx((rewards - others_mean(rewards)).ravel(), abs=1e-12)


def test_the_ratio_of_a_completion_is_clipped():
    steps = run_online(RLOO, {"beta": 0.0, "epsilon": 1e-4}, lr=1e-2)[0]
    shares = [step["train/clip_ratio/region_mean"] for step in steps]
    assert [share == 0 for share in shares] == [i % 4 == 0 for i in range(len(steps))]
    for step in steps:
        parts = step["train/clip_ratio/low_mean"] + step["train/clip_ratio/high_mean"]
        assert step["train/clip_ratio/region_mean"] == pytest.approx(parts)


REFUSED = [
    ({"num_generations": 1}, "leaves nothing to compare"),
    ({"reward_clip_range": [1.0]}, "must be two numbers"),
    ({"reward_clip_range": [1.0, 0.0]}, "the smaller one first"),
    ({"epsilon": 1.5}, "must lie in [0, 1]"),
    ({"epsilon_high": -0.1}, "be at least 0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_options_that_cannot_be_are_refused_in_one_line(options, message):
    with pytest.raises(UserError) as caught:
        run_online(RLOO, options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["loss", "delta", "scale_rewards", "entropy_coef"])
def test_it_has_no_options_of_grpo(name):
    with pytest.raises(TypeError, match=name):
        run_online(RLOO, {name: 1})


# -- rewards that look at the end --------------------------------------------------------------------------------------


def test_a_missing_end_is_found_in_the_completion_and_not_in_the_prompt():
    """Field report 13: it is taken off the other rewards of completions that were cut, whatever the prompt holds."""
    _, module, _ = run_online(RLOO, {"rewards": ["missing_eos_penalty", half], "beta": 0.0, **ONE_STEP}, trainer=FIRST)
    window = module.window
    rewards = np.where(window.truncated, -0.5, 0.5).reshape(-1, 4)
    assert 0 < window.truncated.sum() < len(window)
    assert window.advantages == pytest.approx((rewards - others_mean(rewards)).ravel())


def half(completion_ids, **columns):
    return [0.5] * len(completion_ids)


# -- evaluation ------------------------------------------------------------------------------------------------------

SETS = {"eval": {"a": {"path": "tiny:sums", "kwargs": {"size": 5}}, "b": {"path": "tiny:sums", "kwargs": {"size": 3, "seed": 4}}}}


def evaluated(method, data=SETS, **options):
    _, module, trainer = run_online(GRPO, {**ONE_STEP, **method}, data, {**FIRST, "num_sanity_val_steps": 0}, lr=0.0, **options)
    return {k: float(v) for k, v in trainer.validate(module, datamodule=trainer.datamodule, verbose=False)[0].items()}, trainer


def test_evaluation_is_greedy_and_deterministic():
    """Field report 103: sampling of its own, several sets."""
    first, second = (evaluated({"engine": None}, SETS | {"eval_micro_batch_size": size})[0] for size in (None, 2))
    assert {"val/a/reward", "val/b/reward", "val/a/rewards/spread/mean", "val/a/completions/mean_length"} <= first.keys()
    assert first == pytest.approx(second)
    assert not any("reward_best" in name for name in first)


def test_evaluation_of_several_samples_has_the_best_of_them():
    """Field report 103: pass@k."""
    found, _ = evaluated({"engine": None, "eval_sampling": {"temperature": 1.0, "num_generations": 8, "max_new_tokens": 3}})
    assert found["val/a/reward_best"] > found["val/a/reward"]
    assert found["val/a/completions/max_length"] <= 3


def test_metrics_of_ones_own_see_the_texts_and_the_columns():
    """Field reports 94 and 103: ``compute_metrics(prompts, completions, **columns)`` over the whole set, each under its printed
    name."""
    calls = []

    def compute(prompts, completions, answer, **columns):
        calls.append((prompts, completions, answer))
        return {"mine": len(completions), "share": np.mean([len(a) for a in answer])}

    found, trainer = evaluated({"engine": None, "compute_metrics": compute})
    assert (found["val/a/mine"], found["val/b/mine"]) == (5, 3)
    assert trainer.callback_metrics["val/a/mine"] == 5  # what a checkpoint may be ranked by
    prompts, completions, answer = calls[0]
    assert len(prompts) == len(completions) == len(answer) == 5


def test_metrics_of_ones_own_must_be_a_dict():
    with pytest.raises(UserError, match="must return a dict of numbers, not int"):
        evaluated({"engine": None, "compute_metrics": lambda prompts, completions, **columns: 3})


def test_evaluation_does_not_move_the_draws_of_training():
    plain, other = (
        run_online(GRPO, {"engine": None, "eval_sampling": {"temperature": 1.0}}, data, {"max_steps": 4, **often})[1].window
        for data, often in (({}, {}), (SETS, {"val_check_interval": 1, "num_sanity_val_steps": 0}))
    )
    assert [list(ids) for ids in plain.token_ids] == [list(ids) for ids in other.token_ids]


# -- the table of completions ----------------------------------------------------------------------------------------


def test_every_completion_of_a_logged_step_is_in_the_table(tmp_path):
    """Field report 95: all prompts of the step, each reward and the advantage, whatever the micro-batch, without a tracker."""
    options = {"rewards": [spread, half], "log_completions_every_n_steps": 2, **ONE_STEP}
    trainer = {"max_steps": 4, "default_root_dir": str(tmp_path)}
    _, module, _ = run_online(GRPO, options, {"micro_batch_size": 2}, trainer)
    files = sorted(tmp_path.rglob("*.parquet"))
    tables = [pq.read_table(file).to_pydict() for file in files]
    assert len(tables) >= 2
    for table in tables:
        assert len(table["completion"]) == 8 and len(set(map(str, table["prompt"]))) == 2
        assert table["spread"] == pytest.approx(spread_of(table)) and set(table["half"]) == {0.5}
    assert tables[-1]["advantage"] == pytest.approx(module.window.advantages.tolist()) or tables[-1]["step"][0] < 4


def spread_of(table):
    advantages = np.array(table["advantage"]).reshape(-1, 4)
    rewards = np.array(table["spread"]).reshape(-1, 4)
    assert (np.sign(rewards - rewards.mean(1, keepdims=True)) == np.sign(advantages.round(9))).all()
    return table["spread"]
