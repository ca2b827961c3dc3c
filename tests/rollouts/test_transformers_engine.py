"""Continuous batching of transformers: the trainer's log-probabilities, and what it refuses."""

import numpy as np
import pytest
import torch
from test_torch_engine import prompts, requests, trainer_logps

from workbench.errors import UserError
from workbench.models.policy import Policy
from workbench.rollouts.transformers_engine import TransformersEngine
from workbench.rollouts.types import Sampling
from workbench.tiny.model import tiny_model


def engine(policy):
    made = TransformersEngine(page_size=16, num_pages=64, max_batch_tokens=64)
    made.start(policy, None)
    return made


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_the_trainers_and_runs_repeat(temperature):
    policy = Policy(tiny_model("llama", size="pico"), layout="shared")
    asked, sampling = requests(prompts(1, 9, 30)), Sampling(max_new_tokens=10, end_ids=(7, 9, 30), temperature=temperature)
    state = torch.get_rng_state()
    rollouts = engine(policy).generate(asked, sampling)
    assert torch.equal(torch.get_rng_state(), state)
    assert policy.config._attn_implementation == "forest_sdpa"
    mine = np.concatenate([r.logps for r in rollouts])
    assert np.abs(mine - trainer_logps(policy.eval(), asked, rollouts, sampling)).max() < 1e-5
    assert [r.token_ids for r in engine(policy).generate(asked, sampling)] == [r.token_ids for r in rollouts]


@pytest.mark.parametrize(("option", "value"), [("stop", ("a",)), ("repetition_penalty", 1.2)])
def test_what_it_does_not_know_is_refused(option, value):
    with pytest.raises(UserError, match=rf"engine=transformers does not know method.{option}=.*engine=torch"):
        engine(Policy(tiny_model("llama", size="pico"))).generate(requests(prompts(3)), Sampling(**{option: value}))


def test_a_recurrent_state_is_refused():
    with pytest.raises(UserError, match="recurrent state"):
        engine(Policy(tiny_model("mamba", size="pico")))
