"""Reward follows TRL 1.16's recorded trajectories on the same model, head and rows: loss 1e-5, the rest 1e-4 relative."""

import pytest
import torch
from support import DATA, MODEL, reference, run_method

from workbench.methods.reward import Reward
from workbench.models.heads import classification_head, load_classifier
from workbench.models.tokenizer import load_tokenizer


def recorded_model():
    """The fixture with the head of the recorded runs."""
    model = load_classifier(MODEL)
    weight = classification_head(model).weight
    weight.data.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    return model


@pytest.mark.parametrize("name", ["reward_default", "reward_center"])
def test_trajectory(name):
    case = reference(name)
    args = case["args"]
    data = {"train": str(DATA / "preference.jsonl"), "max_length": args["max_length"], "micro_batch_size": 4, "balance": "none"}
    # The recorded extremes are means of those of micro-batches; padded, as they were, since rounding comes to 1e-6 in ten steps.
    method = {"model": recorded_model(), "tokenizer": load_tokenizer(MODEL), "scope": "micro_batch", "layout": "padded"}
    coefficient = args.get("center_rewards_coefficient")
    steps, _, _ = run_method(Reward, data, {**method, "center_rewards_coefficient": coefficient})
    assert len(steps) == len(case["steps"])
    for ours, theirs in zip(steps, case["steps"], strict=True):
        assert abs(ours["train/loss"] - theirs["loss"]) <= 1e-5 * abs(theirs["loss"]) + 1e-6
        assert ours["train/grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        for metric in ("min_reward", "mean_reward", "max_reward", "accuracy", "margin"):
            assert ours[f"train/{metric}"] == pytest.approx(theirs[metric], rel=1e-4, abs=1e-6), metric
