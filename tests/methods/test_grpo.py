"""GRPO and what online methods share: windows, losses, advantages, entropy, rewards that fail, resuming, evaluation."""

import logging
import math

import numpy as np
import pytest
import torch
from online_rig import END, LONGEST, UNEVEN, assert_same, run_online, script, scripted, spread
from support import SaveAt

from workbench.errors import UserError
from workbench.losses.policy_options import LOSSES
from workbench.methods.gmpo import GMPO
from workbench.methods.grpo import GRPO
from workbench.methods.rloo import RLOO
from workbench.tiny.tokenizer import tiny_tokenizer

LOG = "workbench.methods.online"
OF_LOSS = {  # what a loss needs beside its name
    "cispo": {"epsilon_high": 1.5},
    "luspo": {"importance_sampling_level": "sequence"},
    "vespo": {"importance_sampling_mode": None},
}
ONE_STEP = {"steps_per_generation": 1, "num_iterations": 1}
RUNS = {
    **{loss: (GRPO, {"loss": loss, **OF_LOSS.get(loss, {})}) for loss in LOSSES if loss != "bnpo"},
    "gspo": (GRPO, {"loss": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05}),
    "top entropy": (GRPO, {"top_entropy_quantile": 0.4, "model": UNEVEN}),
    "kl": (GRPO, {"beta": 0.2, "loss": "grpo"}),
    "entropy bonus": (GRPO, {"entropy_coef": 0.05}),
    "adaptive entropy": (GRPO, {"use_adaptive_entropy": True, "entropy_target": 5.0, "entropy_coef": 0.01}),
    "masked": (GRPO, {"mask_truncated_completions": True, "loss": "grpo", "average_over": "trained"}),
    "rloo": (RLOO, {"beta": 0.1}),
    "gmpo": (GMPO, {"beta": 0.1}),
}


def test_the_script_is_of_the_tiny_tokenizer():
    assert tiny_tokenizer().eos_token_id == END


# -- one trajectory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_the_trajectory_does_not_depend_on_micro_batches(name):
    """Field reports 4 and 9: whatever the loss, the step divides once, and metrics are means over the step."""
    kind, options = RUNS[name]
    whole, *others = (run_online(kind, options, {"micro_batch_size": size})[0] for size in (None, 1, 2))
    for steps in others:
        assert_same(steps, whole)
        for metric in whole[0].keys() & {"train/clip_ratio/region_mean", "train/clip_ratio/high_max"}:
            assert [s.get(metric) for s in steps] == pytest.approx([s.get(metric) for s in whole], rel=1e-5, abs=1e-9), metric
    assert any(step["train/grad_norm"] > 0 for step in whole)


@pytest.mark.parametrize("geometry", [(1, 1), (2, 1), (1, 3), (3, 2)], ids=str)
def test_windows_of_any_shape(geometry):
    """Field report 56: ``num_iterations * ceil(prompts * num_generations / batch_size)`` steps an epoch, and each prompt is
    answered once in it."""
    steps_per_generation, num_iterations = geometry
    asked = []

    def answer(prompt_ids, key):
        asked.append(tuple(prompt_ids))
        return script(prompt_ids, key)

    options = {"steps_per_generation": steps_per_generation, "num_iterations": num_iterations}
    data = {"train": {"path": "tiny:sums", "kwargs": {"size": 7}}}
    epoch = {"max_steps": -1, "max_epochs": 1}
    found = [run_online(GRPO, options, data | {"micro_batch_size": m}, epoch, engine=scripted(answer)) for m in (None, 2)]
    assert len(found[0][0]) == num_iterations * math.ceil(7 * 4 / 8)
    assert_same(found[1][0], found[0][0])
    counts = [asked.count(prompt) for prompt in set(asked)]
    assert counts == [2 * 4] * 7  # two runs, four completions


def test_windows_leave_the_policy_that_wrote_them():
    """Only in a window's first step are all ratios 1."""
    steps = run_online(GRPO, {"epsilon": 1e-4}, lr=1e-2)[0]
    assert [step["train/clip_ratio/region_mean"] == 0 for step in steps] == [i % 4 == 0 for i in range(len(steps))]


# -- losses ----------------------------------------------------------------------------------------------------------


def plain_norm(module, denominator):
    """Norm of the gradient of ``-sum A log p / denominator`` at the window's weights."""
    window = module.window
    batch = window.batch_of(range(len(window)), window.plans[0].norm)
    logps = module.policy(batch, ["logps"], processing=module.processing(batch)).logps
    segment, weights = batch.segment[batch.outputs], batch.weights[batch.outputs]
    lengths = torch.zeros(len(batch.row)).index_add(0, segment, weights)
    loss = -(batch.extras["advantages"][segment] * logps * weights / denominator(window, lengths[segment])).sum()
    parameters = [p for p in module.policy.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.stack([g.norm() for g in gradients if g is not None]).norm().item()


def all_tokens(window, lengths):
    return window.lengths.sum()


def each_completion(window, lengths):
    return lengths * len(window)


def completions(window, lengths):
    return len(window)


def longest(window, lengths):
    return len(window) * LONGEST


FIRST = {
    **dict.fromkeys(("dapo", "bnpo", "cispo", "vespo"), all_tokens),
    **dict.fromkeys(("grpo", "sapo", "gspo", "gmpo"), each_completion),
    "luspo": completions,
    "rloo": completions,
    "dr_grpo": longest,
}


@pytest.mark.parametrize("loss", FIRST)
def test_the_first_step_is_the_plain_policy_gradient(loss):
    """At a ratio of 1 nothing is clipped, so that the losses differ in their denominators alone."""
    kind, options = RUNS["dapo"] if loss == "bnpo" else RUNS[loss]
    options = options | ({"loss": "bnpo"} if loss == "bnpo" else {}) | ({"beta": 0.0} if kind is not GRPO else {}) | ONE_STEP
    steps, module, _ = run_online(kind, options, trainer={"max_steps": 1}, lr=0.0)
    assert steps[0]["train/grad_norm"] == pytest.approx(plain_norm(module, FIRST[loss]), rel=1e-5)


def test_the_first_loss_is_about_0_and_says_nothing():
    """Field report 93: advantages of a group add up to 0, whatever is learnt; reward and gradient norm tell."""
    steps = run_online(GRPO, {"loss": "grpo", **ONE_STEP})[0]
    for step in steps:
        assert abs(step["train/loss"]) < 1e-6 < step["train/grad_norm"]
        assert step["train/frac_reward_zero_std"] == 0 and "train/reward" in step


@pytest.mark.parametrize("loss", [*LOSSES])
def test_every_loss_runs_with_a_sampler_that_is_a_little_off(loss):
    def answer(prompt_ids, key):
        ids = script(prompt_ids, key)
        return {"token_ids": ids, "logps": [None if i == 0 else -4.6 for i in range(len(ids))]}

    options = {
        "loss": loss,
        **OF_LOSS.get(loss, {}),
        "importance_sampling_mode": "token_truncate",
        "off_policy_mask_threshold": 1.0,
    }
    steps, _, _ = run_online(GRPO, options, engine=scripted(answer))
    first = [step for i, step in enumerate(steps) if i % 4 in (0, 1)]  # the first sweep
    for name in ("sampling_logp_difference/mean", "sampling_logp_difference/max", "importance_sampling_ratio/mean"):
        assert all(np.isfinite(step[f"train/sampling/{name}"]) for step in first)
        assert not any(f"train/sampling/{name}" in step for i, step in enumerate(steps) if i % 4 > 1)
    assert all(math.isfinite(step["train/loss"]) for step in steps)


# -- advantages and masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_distances_from_the_group(scale):
    _, module, _ = run_online(GRPO, {"scale_rewards": scale, **ONE_STEP}, trainer={"max_steps": 1})
    window = module.window
    rewards = np.array(spread(window.token_ids)).reshape(-1, 4)
    centred = rewards - rewards.mean(1, keepdims=True)
    over = {"group": rewards.std(1, ddof=1, keepdims=True) + 1e-4, "batch": rewards.std(ddof=1) + 1e-4, "none": 1.0}[scale]
    assert window.advantages == pytest.approx((centred / over).ravel(), rel=1e-9)


def test_weights_of_rewards_are_those_of_the_log():
    """Field report 46: what is logged is what is trained on."""
    options = {"rewards": [spread, constant], "reward_weights": [2.0, 0.5], **ONE_STEP}
    step = run_online(GRPO, options, trainer={"max_steps": 1})[0][0]
    assert step["train/reward"] == pytest.approx(2 * step["train/rewards/spread/mean"] + 0.5)


def constant(completion_ids, **columns):
    return [1.0] * len(completion_ids)


@pytest.mark.parametrize("kind", [GRPO, RLOO, GMPO])
def test_completions_that_nobody_scores_take_no_part(kind, caplog):
    """Field report 44: None is neither 0 nor NaN."""

    def some(completion_ids, **columns):
        return [None if i % 4 == 0 else value for i, value in enumerate(spread(completion_ids))]

    with caplog.at_level(logging.WARNING, LOG):
        steps, module, _ = run_online(kind, {"rewards": some, "beta": 0.1})
    window = module.window
    assert "4 of 16 completions were scored by no reward function; they are left out." in caplog.text
    assert (window.advantages[::4] == 0).all() and not window.trained[::4].any() and not window.counted[::4].any()
    assert window.plans[0].norm.sequences == 6
    assert all(math.isfinite(step["train/loss"]) for step in steps) and steps[0]["train/grad_norm"] > 0


BAD = {
    "too few": (lambda completions, **c: [1.0], "returned 1 value for 16 completions"),
    "nan": (lambda completions, **c: [math.nan] * len(completions), "returned nan for completion 0"),
    "text": (lambda completions, **c: "good", "returned the text 'good'"),
    "texts": (lambda completions, **c: ["good"] * len(completions), "returned the text 'good' for completion 0"),
    "raises": (lambda completions, **c: 1 / 0, "failed: ZeroDivisionError"),
    "column": (lambda completions, label, **c: [0.0], "needs 'label', which the rows do not have"),
}


@pytest.mark.parametrize("name", BAD)
def test_rewards_that_fail_are_named_in_one_line(name):
    """Field report 45."""
    reward, message = BAD[name]
    reward.__name__ = "mine"
    with pytest.raises(UserError) as caught:
        run_online(GRPO, {"rewards": reward})
    assert message in str(caught.value) and "'mine'" in str(caught.value) and "\n" not in str(caught.value)


def weights_of(module):
    return torch.cat([p.detach().flatten() for p in module.policy.parameters()])


DULL = {
    "empty": (lambda prompt_ids, key: [], {}),
    "all cut, and left out": (lambda prompt_ids, key: [7] * LONGEST, {"mask_truncated_completions": True}),
    "no spread": (script, {"rewards": constant}),
    "nobody scores": (script, {"rewards": lambda completions, **columns: [None] * len(completions)}),
}


@pytest.mark.parametrize("options", [*RUNS.values()], ids=[*RUNS])
@pytest.mark.parametrize("name", DULL)
def test_windows_that_teach_nothing_do_no_harm(name, options):
    """The policy's loss is 0, its gradient too, and no weight becomes NaN."""
    answer, more = DULL[name]
    kind, given = options
    bonus = given.get("entropy_coef", 0)
    given = {**given, **more} if "average_over" not in given else {**given, **more, "mask_truncated_completions": True}
    steps, module, _ = run_online(kind, {**given, "beta": 0.0}, trainer={"max_steps": 4}, engine=scripted(answer))
    assert weights_of(module).isfinite().all()
    trains = bonus and name == "no spread"  # of the entropy, which needs no reward
    for step in steps:
        assert step["train/grad_norm"] == 0 or trains
        assert step["train/loss"] == 0 or trains


def test_ten_windows_without_spread_are_told(caplog):
    """Field report 93: nothing is learnt, and the loss does not show it."""
    with caplog.at_level(logging.WARNING, LOG):
        run_online(GRPO, {"rewards": constant, **ONE_STEP}, trainer={"max_steps": 9})
    assert "in a row" not in caplog.text
    with caplog.at_level(logging.WARNING, LOG):
        run_online(GRPO, {"rewards": constant, **ONE_STEP}, trainer={"max_steps": 12})
    assert caplog.text.count("in 10 generations in a row all completions of each prompt had the same reward") == 1


def test_masked_completions_shrink_the_tokens_and_not_the_completions():
    for loss, average_over, per in (("dapo", "all", "tokens"), ("grpo", "all", "sequences"), ("grpo", "trained", "unmasked")):
        options = {"loss": loss, "average_over": average_over, "mask_truncated_completions": True, **ONE_STEP}
        _, module, _ = run_online(GRPO, options, trainer={"max_steps": 1}, lr=0.0)
        window = module.window
        kept = window.lengths[~window.truncated]
        assert 0 < len(kept) < len(window)
        expected = {"tokens": kept.sum(), "sequences": len(window), "unmasked": len(kept)}
        assert getattr(window.plans[0].norm, per) == expected[per]


# -- entropy ---------------------------------------------------------------------------------------------------------


def test_the_entropy_bonus_adds_its_gradient():
    plain, bonus = (
        run_online(GRPO, {"rewards": constant, "entropy_coef": coef, **ONE_STEP}, trainer={"max_steps": 6}, lr=1e-2)[0]
        for coef in (0.0, 0.5)
    )
    assert plain[0]["train/grad_norm"] == 0 < bonus[0]["train/grad_norm"]
    assert bonus[0]["train/loss"] == pytest.approx(-0.5 * bonus[0]["train/entropy"], rel=1e-5)
    assert bonus[0]["train/policy_loss"] == 0 and bonus[0]["train/entropy_coef"] == 0.5
    assert bonus[-1]["train/entropy"] > bonus[0]["train/entropy"]


@pytest.mark.parametrize("target", [0.1, 100.0])
def test_the_adaptive_weight_moves_towards_its_target(target):
    options = {"use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_coef_delta": 0.01, "entropy_target": target}
    steps = run_online(GRPO, options)[0]
    moves = np.sign(np.diff([step["train/entropy_coef"] for step in steps]))
    assert (moves[:2] == (1 if target == 100.0 else -1)).all()
    assert min(step["train/entropy_coef"] for step in steps) >= 0


def test_the_top_tokens_alone_are_trained():
    _, module, _ = run_online(GRPO, {"top_entropy_quantile": 0.25, **ONE_STEP}, trainer={"max_steps": 1})
    entropy = np.concatenate(module.window.old_entropy)
    assert module.step_metrics["train/top_entropy"] == pytest.approx(
        entropy[entropy >= np.quantile(entropy, 0.75)].mean(), rel=1e-5
    )
    assert module.step_metrics["train/top_entropy"] > module.step_metrics["train/entropy"]


# -- dynamic sampling ------------------------------------------------------------------------------------------------


def test_groups_without_spread_are_replaced():
    """Field report 101: half of the prompts have a constant reward; others stand in for them, and are counted."""

    def half(completion_ids, answer, **columns):
        return [float(int(a) % 2 and sum(ids) % 11) for a, ids in zip(answer, completion_ids, strict=True)]

    data = {"train": {"path": "tiny:sums", "kwargs": {"size": 40}}}
    plain, _, _ = run_online(GRPO, {"rewards": half, **ONE_STEP}, data)
    steps, module, _ = run_online(GRPO, {"rewards": half, "dynamic_sampling": 8, **ONE_STEP}, data)
    assert any(step["train/frac_reward_zero_std"] > 0 for step in plain)
    assert all(step["train/frac_reward_zero_std"] == 0 for step in steps)
    for before, step in zip(plain, steps, strict=True):
        dull = 2 * before["train/frac_reward_zero_std"]
        assert step["train/dynamic_sampling/replaced"] >= dull and step["train/dynamic_sampling/rounds"] <= 8
        assert (step["train/dynamic_sampling/replaced"] == 0) == (dull == 0)
    assert module.window.plans[0].norm.sequences == 8 and len(module.window) == 8


def test_replacement_has_a_bound():
    steps, _, _ = run_online(GRPO, {"rewards": constant, "dynamic_sampling": 3, **ONE_STEP}, trainer={"max_steps": 2})
    assert [(s["train/dynamic_sampling/rounds"], s["train/dynamic_sampling/replaced"]) for s in steps] == [(3, 6), (3, 6)]
    assert steps[0]["train/frac_reward_zero_std"] == 1


# -- resuming --------------------------------------------------------------------------------------------------------

RESUMED = {
    "script": (GRPO, {"engine": scripted()}),
    "own samples": (GRPO, {"engine": None}),
    "adaptive entropy": RUNS["adaptive entropy"],
    "top entropy": RUNS["top entropy"],
    "dynamic": (
        GRPO,
        {"rewards": lambda completion_ids, **c: [float(ids[0] % 2) for ids in completion_ids], "dynamic_sampling": 2},
    ),
    "reference": (GRPO, {"beta": 0.1}),
    "support": (GRPO, {"engine": None, "top_k": 20, "temperature": 0.9}),
    "rloo": RUNS["rloo"],
    "gmpo": RUNS["gmpo"],
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumed_at_any_step_of_a_window_follows_the_same_trajectory(name, tmp_path):
    kind, options = RESUMED[name]
    at = range(1, 9) if name == "script" else (2, 3, 5)
    own = options.get("engine", 0) is None
    options = {k: v for k, v in options.items() if k != "engine"} | ({"engine": None} if own else {})
    steps = run_online(kind, options, callbacks=[SaveAt(tmp_path, at)])[0]
    for step in at:
        rest, _, _ = run_online(kind, options, checkpoint=tmp_path / f"{step}.ckpt")
        assert_same(rest, steps[step:])


def test_a_checkpoint_without_its_window_is_refused(tmp_path):
    run_online(GRPO, callbacks=[SaveAt(tmp_path, [2])], trainer={"max_steps": 2})
    saved = torch.load(tmp_path / "2.ckpt", weights_only=True)
    saved.pop("window")
    torch.save(saved, tmp_path / "2.ckpt")
    with pytest.raises(UserError, match="lies within a window of completions that the checkpoint does not hold"):
        run_online(GRPO, checkpoint=tmp_path / "2.ckpt")


# -- options ---------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"num_generations": 1}, "leaves nothing to compare"),
    ({"num_generations": 3}, "holds no whole number of groups"),
    ({"temperature": 0.0}, "method.temperature=0 writes the same"),
    ({"top_p": 0.0}, "method.top_p=0.0"),
    ({"beta": -1.0}, "must be at least 0"),
    ({"beta": math.nan}, "must be at least 0"),
    ({"sync_ref_model": True}, "has no effect with method.beta=0"),
    ({"loss": "ppo"}, "method.loss"),
    ({"loss": "cispo"}, "needs method.epsilon_high"),
    ({"loss": "luspo"}, "importance_sampling_level=sequence"),
    ({"loss": "sapo", "epsilon": 0.1}, "has no effect"),
    ({"delta": 1.1}, "above 1 + epsilon_high"),
    ({"importance_sampling_clip_max": None}, "has no bound to keep"),
    ({"importance_sampling_clip_min": 4.0}, "the first must be below the second"),
    ({"loss": "vespo", "importance_sampling_mode": "sequence_truncate"}, "cannot go with method.loss=vespo"),
    ({"average_over": "trained"}, "has no effect"),
    ({"top_entropy_quantile": 0.0}, "must lie above 0"),
    ({"rewards": []}, "reward"),
    ({"rewards": "exactmatch"}, "Did you mean 'exact_match'?"),
    ({"reward_weights": [1.0, 2.0]}, "2 weights for 1 reward"),
    ({"dynamic_sampling": -1}, "method.dynamic_sampling=-1"),
    ({"eval_sampling": {"num_generations": 4}}, "are all the same at temperature=0"),
    ({"eval_sampling": {"temprature": 1.0}}, "Did you mean 'temperature'?"),
    ({"steps_per_generation": 0}, "steps_per_generation"),
    ({"top_k": 5}, "the engine does not say which tokens could be drawn"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_options_that_cannot_be_are_refused_in_one_line(options, message):
    """Field report 73: one message with a setting that works, before anything is trained."""
    with pytest.raises(UserError) as caught:
        run_online(GRPO, options, trainer={"max_steps": 1})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_window_that_holds_part_of_a_group_names_settings_that_work():
    """Field report 73."""
    with pytest.raises(UserError, match=r"set data.batch_size=6 or 9, or method.num_generations to one of 1, 2, 4, 8, 16\."):
        run_online(GRPO, {"num_generations": 3})


@pytest.mark.parametrize("context", [10, 40])
def test_lengths_are_compared_with_the_engine_before_the_first_step(context):
    """Field reports 74 and 111: the longest prompt and completion must fit the engine's window."""
    if context == 40:
        assert run_online(GRPO, engine=scripted(context=context), trainer={"max_steps": 1})[0]
        return
    with pytest.raises(UserError, match=r"are more than the 10 that the engine holds; set method.max_completion_length=\d"):
        run_online(GRPO, engine=scripted(context=context))


def test_a_stream_of_prompts_is_answered(caplog):
    """Field report 111: prompts may come as a stream, in their order."""
    data = {"streaming": True, "shuffle": False}
    plain = run_online(GRPO, data={"shuffle": False}, trainer={"max_steps": 6})[0]
    assert_same(run_online(GRPO, data=data, trainer={"max_steps": 6})[0], plain)
    with pytest.raises(UserError, match=r"method\.dynamic_sampling=2 draws further prompts"):
        run_online(GRPO, {"dynamic_sampling": 2}, data)


def test_completions_are_written_anew_for_every_window_of_a_prompt():
    """Field report 75: nothing that is drawn at random is kept from an epoch before."""
    keys = []

    def answer(prompt_ids, key):
        keys.append((tuple(prompt_ids), key))
        return script(prompt_ids, key)

    run_online(GRPO, ONE_STEP, trainer={"max_steps": 12}, engine=scripted(answer))  # 6 steps an epoch
    assert len(keys) == len(set(keys)) == 12 * 8
    assert {key[:2] for _, key in keys} == {(0, window) for window in range(12)}
