"""GMPO: what it clips, and which options it has."""

import math

import numpy as np
import pytest
from online_rig import run_online, spread

from workbench.errors import UserError
from workbench.methods.gmpo import GMPO


def test_the_bound_is_one_of_logarithms():
    """A bound of 0.4 nats lets a ratio be 1.49, where GRPO's 0.4 would stop at 1.4; and it is read."""
    loose, tight = (run_online(GMPO, {"epsilon": epsilon}, lr=1e-2)[0] for epsilon in (100.0, 1e-3))
    assert all(step["train/clip_ratio/region_mean"] == 0 for step in loose)
    assert [step["train/clip_ratio/region_mean"] > 0 for step in tight] == [i % 4 != 0 for i in range(len(tight))]


def test_the_divergence_is_added_to_the_loss():
    plain, pulled = (run_online(GMPO, {"beta": beta}, lr=1e-2)[0] for beta in (0.0, 1.0))
    assert "train/kl" not in plain[0] and pulled[0]["train/kl"] == 0
    assert pulled[-1]["train/kl"] > 0
    assert plain[-1]["train/loss"] != pulled[-1]["train/loss"]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_grpo(scale):
    _, module, _ = run_online(GMPO, {"scale_rewards": scale}, trainer={"max_steps": 1})
    rewards = np.array(spread(module.window.token_ids)).reshape(-1, 4)
    centred = rewards - rewards.mean(1, keepdims=True)
    over = {"group": rewards.std(1, ddof=1, keepdims=True) + 1e-4, "batch": rewards.std(ddof=1) + 1e-4, "none": 1.0}[scale]
    assert module.window.advantages == pytest.approx((centred / over).ravel(), rel=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "method.epsilon=0.0 must be above 0"),
        ({"epsilon": math.nan}, "method.epsilon=nan must be above 0"),
        ({"num_generations": 1}, "leaves nothing to compare"),
        ({"scale_rewards": "all"}, "method.scale_rewards"),
        ({"kl_estimator": "k4"}, "method.kl_estimator"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused_in_one_line(options, message):
    with pytest.raises(UserError) as caught:
        run_online(GMPO, options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["loss", "delta", "epsilon_high", "importance_sampling_level", "top_entropy_quantile"])
def test_it_has_no_options_that_it_does_not_read(name):
    with pytest.raises(TypeError, match=name):
        run_online(GMPO, {name: 1})
