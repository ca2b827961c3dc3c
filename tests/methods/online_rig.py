"""What the tests of online methods share: a pico model, a script that depends on a completion's key alone, and rewards."""

import numpy as np
import pytest
from support import run_method

from workbench.models.load import ModelSpec
from workbench.rollouts.scripted import ScriptedEngine

MODEL = ModelSpec("tiny", init_kwargs={"size": "pico"})
UNEVEN = ModelSpec("tiny", init_kwargs={"size": "pico", "initializer_range": 0.2})  # entropies that rank clearly
LONGEST = 6  # tokens of a completion
END = 3  # the tiny tokenizer's EOS, which `test_the_script_is_of_the_tiny_tokenizer` holds it to
# 12 prompts, 4 completions each, 8 of these a step: windows of 2 steps, swept twice, are 4 prompts and 4 steps.
PROMPTS = {"train": {"path": "tiny:sums", "kwargs": {"size": 12}}, "batch_size": 8, "shuffle": True}
WINDOWS = {"num_generations": 4, "steps_per_generation": 2, "num_iterations": 2}
STEPS = {"max_steps": 10}


def script(prompt_ids, key):
    """1 to 6 tokens; the shorter ones have an end."""
    rng = np.random.default_rng([*key, *prompt_ids])
    length = int(rng.integers(1, LONGEST + 1))
    ids = rng.integers(5, 30, length).tolist()
    return ids if length == LONGEST else [*ids[:-1], END]


def scripted(answer=script, **options):
    return ScriptedEngine(answer, **options)


def spread(completion_ids, **columns):
    """Rewards that differ within a group."""
    return [float(sum(ids) % 11) / 10 for ids in completion_ids]


def run_online(kind, method=None, data=None, trainer=None, *, engine=None, **options):
    """Steps, method and trainer of a run on scripted completions."""
    given = {"model": MODEL, "engine": engine or scripted(), "rewards": spread, "max_completion_length": LONGEST}
    given |= {"log_completions_every_n_steps": 0, **WINDOWS}
    return run_method(kind, {**PROMPTS, **(data or {})}, {**given, **(method or {})}, {**STEPS, **(trainer or {})}, **options)


def assert_same(ours, theirs, tolerance=1e-5):
    """Losses, norms and counts of every step agree; a loss is about 0 by construction, so that it is compared in nats."""
    assert [s["step"] for s in ours] == [s["step"] for s in theirs]
    for name in ("loss", "grad_norm", "lr", "entropy", "num_tokens", "kl", "reward", "entropy_coef", "top_entropy"):
        for a, b in zip(ours, theirs, strict=True):
            a_value, b_value = (step.get(f"train/{name}", float("nan")) for step in (a, b))
            assert a_value == pytest.approx(b_value, rel=tolerance, abs=tolerance, nan_ok=True), (name, a["step"])
