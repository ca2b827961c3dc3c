"""Advantages: hand numbers, recorded statistics, and what nobody scored."""

import json
import math
from pathlib import Path

import pytest
import torch
from support import REFERENCES
from transformers import AutoTokenizer

from workbench.errors import UserError
from workbench.losses.advantages import (
    batch_std,
    clip_rewards,
    combine,
    group_advantages,
    group_mean,
    group_std,
    leave_one_out,
    normalize_advantages,
    reward_metrics,
    zero_spread,
)

NAN = math.nan
ONE = torch.ones(1)


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def column(*values):
    return rows(*values)[:, None]


def groups(*sizes):
    return torch.cat([torch.full((size,), i) for i, size in enumerate(sizes)])


def close(found, *expected, abs=1e-12):
    assert found.tolist() == pytest.approx([float(x) for x in expected], abs=abs)


def test_three_right_of_eight_report_42():
    right = rows(1, 1, 1, 0, 0, 0, 0, 0)
    loo = leave_one_out(right, groups(8)).values
    close(loo, *[5 / 7] * 3, *[-3 / 7] * 5)  # 0.7143 and -0.4286
    grpo = group_advantages(right[:, None], ONE, groups(8)).values
    close(grpo, *[1.2074] * 3, *[-0.7244] * 5, abs=5e-5)
    std = math.sqrt(8 * 0.375 * 0.625 / 7)
    close(grpo, *[0.625 / (std + 1e-4)] * 3, *[-0.375 / (std + 1e-4)] * 5)


@pytest.mark.parametrize("rewards", [[1, 0, 0, 0], [0, *[0.95] * 7], [1e6, *[1e6 + 0.1] * 7], [1e-3, *[0.95] * 7]])
def test_advantages_stay_modest_report_42(rewards):
    """A leave-one-out baseline with normalisation gave 1e6, and -2075 where E[x^2] - mean^2 cancels."""
    rewards, group = rows(*rewards), groups(len(rewards))
    for values in (leave_one_out(rewards, group, normalize=True).values, group_advantages(rewards[:, None], ONE, group).values):
        assert values.isfinite().all() and values.abs().max() < math.sqrt(len(rewards))
        assert values.abs().max() > 0.5
        assert values.sum().abs() < 1e-6


def test_no_spread_is_no_advantage_report_42():
    rewards = column(0.1, 0.1, 0.1, 1e9, 1e9, 1e9)
    for scale in ("group", "batch", "none"):
        found = group_advantages(rewards, ONE, groups(3, 3), scale)
        assert found.values.eq(0).all() and found.valid.all() and found.zero_spread.all()
    assert leave_one_out(rewards[:, 0], groups(3, 3), normalize=True).values.eq(0).all()
    assert normalize_advantages(rows(0, 0, 0)).eq(0).all()


def test_scales_report_43():
    """Groups [0, 1] and [0, 10]: the group's spread makes them equal, the batch's keeps 1:10, none leaves the distance."""
    rewards, group = column(0, 1, 0, 10), groups(2, 2)
    by_group = group_advantages(rewards, ONE, group, "group", eps=0.0).values
    close(by_group, *[-math.sqrt(0.5), math.sqrt(0.5)] * 2)
    by_batch = group_advantages(rewards, ONE, group, "batch", eps=0.0).values
    close(by_batch / by_batch[1], -1, 1, -10, 10)
    close(by_batch, *(rows(-0.5, 0.5, -5, 5) / rows(0, 1, 0, 10).std()))
    close(group_advantages(rewards, ONE, group, "none").values, -0.5, 0.5, -5, 5)


def test_eps_is_beside_the_deviation():
    close(group_advantages(column(0, 1), ONE, groups(2), eps=1.0).values, -0.5 / (math.sqrt(0.5) + 1), 0.5 / (math.sqrt(0.5) + 1))


def test_abstentions_report_44():
    """Two functions, four completions, one None, and a fifth that nobody scored: that one is left out of every mean."""
    rewards = torch.tensor([[1.0, 2.0], [NAN, 3.0], [0.0, 0.0], [1.0, NAN], [NAN, NAN]])
    weights = torch.ones(2)
    close(combine(rewards, weights)[:4], 3, 3, 0, 1)
    assert combine(rewards, weights)[4].isnan()
    scored = rewards[:4]
    for options in ({"scale": "group"}, {"scale": "batch"}, {"scale": "none"}, {"aggregation": "normalize_then_sum"}):
        found = group_advantages(rewards, weights, groups(5), **options)
        assert found.valid.tolist() == [True] * 4 + [False] and found.unscored == 1
        assert found.values.isfinite().all() and found.values[4] == 0
        close(found.values[:4], *group_advantages(scored, weights, groups(4), **options).values)  # leaving out equals deleting
        assert found.values[:4].abs().sum() > 0
    total = combine(rewards, weights)
    close(leave_one_out(total, groups(5)).values, *leave_one_out(total[:4], groups(4)).values, 0)
    found = reward_metrics(rewards, weights, groups(5), ["a", "b"])
    assert found == pytest.approx(reward_metrics(scored, weights, groups(4), ["a", "b"]))
    assert found["rewards/a/mean"] == pytest.approx(2 / 3) and found["reward"] == pytest.approx(7 / 4)


def test_a_group_nobody_scored_report_44():
    rewards = column(NAN, NAN, 0, 2)
    for found in (group_advantages(rewards, ONE, groups(2, 2), "none"), leave_one_out(rewards[:, 0], groups(2, 2))):
        assert found.valid.tolist() == [False, False, True, True] and found.unscored == 2
        assert found.values[:2].eq(0).all() and found.values[2:].abs().min() >= 1
    everything = group_advantages(column(NAN, NAN), ONE, groups(2))
    assert everything.values.eq(0).all() and not everything.valid.any()
    assert reward_metrics(column(NAN, NAN), ONE, groups(2), ["a"]) == {"frac_reward_zero_std": 1.0}


def test_one_scored_completion_has_no_advantage():
    rewards = column(5, NAN, 0, 2)
    for scale in ("group", "batch", "none"):
        found = group_advantages(rewards, ONE, groups(2, 2), scale)
        assert found.values[0] == 0 and found.valid[0] and found.values[3] > 0
    assert leave_one_out(rewards[:, 0], groups(2, 2)).values[0] == 0


def test_no_reward_function_report_44():
    with pytest.raises(UserError, match=r"no reward function: name at least one in method\.rewards"):
        combine(torch.zeros(3, 0), torch.zeros(0))
    with pytest.raises(UserError, match="2 reward functions have 1 weights"):
        combine(torch.zeros(3, 2), ONE)


def test_weights_are_logged_report_46():
    """Rewards 1 and 1 under weights 2 and 0.5: what is trained on and what is logged is 2.5."""
    rewards, weights = torch.ones(2, 2), torch.tensor([2.0, 0.5])
    found = reward_metrics(rewards, weights, groups(2), ["a", "b"])
    assert found["reward"] == 2.5 and found["rewards/a/mean"] == found["rewards/b/mean"] == 1.0
    spread = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    found = reward_metrics(spread, weights, groups(2), ["a", "b"])
    assert found["reward_std"] == pytest.approx(2.5 * math.sqrt(0.5))
    assert found["rewards/a/std"] == pytest.approx(math.sqrt(0.5))


def test_gdpo():
    """Each function by its own spread, then the weighted sum by the batch's: a large reward does not drown a small one."""
    rewards = torch.tensor([[0.0, 0.0], [1.0, 100.0], [1.0, 0.0], [0.0, 100.0], [0, 0], [0, 0], [0, 0], [2, 50]]).double()
    weights, group, eps = torch.tensor([2.0, 1.0]), groups(4, 4), 1e-4
    total = torch.zeros(8, dtype=torch.float64)
    for i, weight in enumerate(weights.tolist()):
        for start in (0, 4):
            part = rewards[start : start + 4, i]
            total[start : start + 4] += weight * (part - part.mean()) / (part.std() + eps)
    expected = (total - total.mean()) / (total.std() + eps)
    found = group_advantages(rewards, weights, group, aggregation="normalize_then_sum", eps=eps).values
    close(found, *expected.tolist())
    assert found[2] > 0 > found[3]  # with weight 2 the first function counts more; summed first it would vanish
    summed = group_advantages(rewards, weights, group).values
    assert summed[3] > 0 > summed[2]
    with pytest.raises(UserError, match="scale_rewards=none has no effect with normalize_then_sum"):
        group_advantages(rewards, weights, group, "none", "normalize_then_sum")


def test_leave_one_out_is_the_mean_of_the_others():
    torch.manual_seed(0)
    rewards = torch.randn(7, dtype=torch.float64)
    found = leave_one_out(rewards, groups(4, 3)).values
    for i in range(7):
        part = range(4) if i < 4 else range(4, 7)
        others = [rewards[j].item() for j in part if j != i]
        assert found[i].item() == pytest.approx(rewards[i].item() - sum(others) / len(others), abs=1e-12)
    normal = leave_one_out(rewards, groups(4, 3), normalize=True).values
    close(normal, *((found - found.mean()) / (found.std() + 1e-4)).tolist())


def test_order_of_the_completions_does_not_matter():
    torch.manual_seed(0)
    rewards, group = torch.randn(12, 2, dtype=torch.float64), groups(4, 4, 4) * 17 - 5
    order = torch.randperm(12)
    for options in ({}, {"scale": "batch"}, {"aggregation": "normalize_then_sum"}):
        found = group_advantages(rewards, torch.ones(2), group, **options).values
        close(group_advantages(rewards[order], torch.ones(2), group[order], **options).values, *found[order].tolist())


def test_group_statistics():
    rewards, group = rows(1, 5, NAN, 2, 2, 8), torch.tensor([3, 3, 3, 0, 0, 9])
    close(group_mean(rewards, group), 3, 3, 3, 2, 2, 8)
    close(group_std(rewards, group), *[math.sqrt(8)] * 3, 0, 0, 0)
    assert zero_spread(rewards, group).tolist() == [False] * 3 + [True] * 3
    assert batch_std(rows(NAN, 4)) == 0
    assert reward_metrics(rewards[:, None], ONE, group, ["a"])["frac_reward_zero_std"] == pytest.approx(3 / 5)


def test_clipping():
    close(clip_rewards(rows(-3, 0.5, 9), -1, 1), -1, 0.5, 1)
    assert clip_rewards(rows(NAN), -1, 1).isnan().all()
    with pytest.raises(UserError, match="the first bound must be below the second"):
        clip_rewards(rows(0), 1, -1)


@pytest.mark.parametrize(("option", "value"), [("scale", "groups"), ("aggregation", "sum")])
def test_unknown_names(option, value):
    with pytest.raises(UserError, match=f"'{value}' is not known"):
        group_advantages(column(0, 1), ONE, groups(2), **{option: value})


MODEL = Path(__file__).parents[1] / "parity" / "model"
CASES = sorted([*REFERENCES.glob("grpo_*.json"), *REFERENCES.glob("rloo_*.json")])
NAMES = ["reward_len", "reward_vowels"]


def recorded_rewards(tokenizer, rollout):
    texts = tokenizer.batch_decode(rollout["completion_ids"], skip_special_tokens=True)
    rewards = [[len(t) / 40 + 0.5 * t.count("the"), sum(c in "aeiou" for c in t) / 20] for t in texts]
    return torch.tensor(rewards, dtype=torch.float64)


@pytest.mark.parametrize("file", CASES, ids=lambda f: f.stem)
def test_recorded_statistics(file):
    """Every generation of TRL 1.16's recorded runs: means, deviations and the share of groups without spread."""
    case, tokenizer = json.loads(file.read_text()), AutoTokenizer.from_pretrained(MODEL)
    steps = len(case["steps"]) // len(case["rollouts"])
    for i, rollout in enumerate(case["rollouts"]):
        rewards = recorded_rewards(tokenizer, rollout)
        group = torch.arange(len(rewards)) // case["args"]["num_generations"]
        found = reward_metrics(rewards, torch.ones(2), group, NAMES)
        recorded = case["steps"][i * steps]
        assert len(found) == 7
        assert {k: recorded[k] for k in found} == pytest.approx(found, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "scale"), [("grpo_dapo", "group"), ("grpo_scale_none", "none"), ("grpo_grpo", "group"), ("rloo_default", "loo")]
)
def test_recorded_first_loss(name, scale):
    """With a ratio of 1 the first loss is the mean of -A over tokens (dapo) or over completions (grpo, rloo)."""
    case, tokenizer = json.loads((REFERENCES / f"{name}.json").read_text()), AutoTokenizer.from_pretrained(MODEL)
    rewards = recorded_rewards(tokenizer, case["rollouts"][0])
    group = torch.arange(len(rewards)) // 4
    if scale == "loo":
        values = leave_one_out(combine(rewards, torch.ones(2)), group).values
    else:
        values = group_advantages(rewards, torch.ones(2), group, scale).values
    lengths = torch.tensor([len(ids) for ids in case["rollouts"][0]["completion_ids"]])
    by_token = name in ("grpo_dapo", "grpo_scale_none")
    loss = -(values * lengths).sum() / lengths.sum() if by_token else -values.mean()
    assert loss.item() == pytest.approx(case["steps"][0]["loss"], rel=1e-5, abs=1e-6)
