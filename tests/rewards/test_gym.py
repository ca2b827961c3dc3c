"""Tasks of reasoning-gym as rows and as a reward."""

import importlib.util
import json

import pytest

from workbench.data.sources import load_source
from workbench.errors import UserError
from workbench.rewards import RewardFunctions, reasoning_gym
from workbench.rewards import gym as module

there = importlib.util.find_spec("reasoning_gym") is not None
needs_it = pytest.mark.skipif(not there, reason="reasoning-gym is not installed")
TASKS = ["basic_arithmetic", "leg_counting", "countdown", "rubiks_cube", "sudoku", "word_ladder"]


def says(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.skipif(there, reason="reasoning-gym is installed")
def test_what_is_missing_is_named():
    with pytest.raises(UserError, match=r"needs reasoning-gym .*pip install 'workbench\[reasoning-gym\]'"):
        load_source("reasoning_gym:leg_counting")


@needs_it
@pytest.mark.parametrize("task", TASKS)
def test_answers_of_a_task(task):
    """The answer that the rows show scores 1 and a wrong one less, after a round through the data set's columns."""
    rows = load_source({"path": f"reasoning_gym:{task}", "kwargs": {"size": 4}}, seed=3)
    assert rows.column_names == ["prompt", "answer", "reasoning_gym"] and len(rows) == 4
    needed, answer = rows["reasoning_gym"], rows["answer"]
    if all(answer):
        right = [says(f"<think>6</think>So \\boxed{{{a}}}") if "{" not in a else says(a) for a in answer]
        assert reasoning_gym(right, needed, answer) == [1.0] * 4
        assert reasoning_gym([f"<answer>{a}</answer>" for a in answer], needed) == [1.0] * 4
    assert max(reasoning_gym(["nonsense"] * 4, needed, answer)) < 1


@needs_it
def test_many_right_answers():
    """Countdown takes any expression that gives the target: that is what the task's own verifier is for."""
    rows = load_source({"path": "reasoning_gym:countdown", "kwargs": {"size": 1, "config": {"shuffle": False}}})
    answer = rows["answer"][0]
    assert reasoning_gym([f"({answer})"], rows["reasoning_gym"], rows["answer"]) == [1.0]


@needs_it
def test_rows_by_seed_split_and_options():
    def prompts(split="train", seed=0, **options):
        return load_source({"path": "reasoning_gym:basic_arithmetic", "kwargs": options}, split=split, seed=seed)["prompt"]

    assert prompts(size=8) == prompts(size=8)
    assert prompts(size=8, seed=1) != prompts(size=8)
    texts = [m[-1]["content"] for m in prompts(size=64)]
    held_out = [m[-1]["content"] for m in prompts("test", size=64)]
    assert not set(texts) & set(held_out)
    assert prompts(size=2, system="Be brief.")[0][0] == {"role": "system", "content": "Be brief."}
    assert isinstance(prompts(size=2, conversational=False)[0], str)
    short = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    assert max(len(m[-1]["content"]) for m in prompts(size=16, config=short)) < max(map(len, texts))
    assert len(load_source({"path": "reasoning_gym:leg_counting", "split": "train[:3]"})) == 3


@needs_it
@pytest.mark.parametrize(
    ("path", "kwargs", "told"),
    [
        ("reasoning_gym:leg_countin", {}, r"has no task 'leg_countin'\. Did you mean 'leg_counting'\?"),
        ("reasoning_gym:leg_counting", {"config": {"legs": 2}}, r"leg_counting does not take the options \{'legs': 2\}"),
        ("reasoning_gym:leg_counting", {"config": {"min_animals": -1}}, "does not take the options"),
        ("reasoning_gym:leg_counting", {"size": 0}, "size=0 must be at least 1"),
        ("reasoning_gym:leg_counting", {"seed": -1}, r"seed=-1, size=1024: a seed must lie in \[0, "),
        ("reasoning_gym:leg_counting", {"conversational": False, "system": "x"}, "system needs conversational=true"),
        ("reasoning_gym:leg_counting", {"sise": 3}, "unexpected keyword argument 'sise'"),
    ],
)
def test_mistakes(path, kwargs, told):
    with pytest.raises(UserError, match=told):
        load_source({"path": path, "kwargs": kwargs})


@needs_it
def test_rows_of_another_version_and_of_other_sources():
    rows = load_source({"path": "reasoning_gym:leg_counting", "kwargs": {"size": 2}})
    with pytest.raises(UserError, match="the rows are from another version of reasoning-gym"):
        reasoning_gym(["1", "1"], rows["reasoning_gym"], ["-5", "-5"])
    found = RewardFunctions(["reasoning_gym"])(
        ["p"] * 2,
        [rows["answer"][0], "x"],
        [[1]] * 2,
        {"reasoning_gym": [rows["reasoning_gym"][0], None], "answer": [*rows["answer"]]},
    )
    assert found.names == ["reasoning_gym"] and found.values[0, 0] == 1 and found.values[1, 0] != found.values[1, 0]


def test_the_column_is_plain_json(monkeypatch):
    """The rows carry task, options, size, seed and index; the problem is made anew from them."""

    class Problems(list):
        def score_answer(self, answer, entry):
            return float(answer == entry["answer"])

    asked = []

    def problems(key):
        asked.append(json.loads(key))
        return Problems({"question": f"q{i}", "answer": None if i else str(i)} for i in range(2))

    module._entry.cache_clear()
    monkeypatch.setattr(module, "_problems", problems)
    rows = module.load_reasoning_gym("reasoning_gym:any", size=2, seed=4, split="test", config={"depth": 2})
    assert asked == [{"task": "any", "size": 2, "seed": 4 + module.MOST, "config": {"depth": 2}}]
    assert json.loads(rows["reasoning_gym"][1]) == {**asked[0], "index": 1}
    assert rows["answer"][:] == ["0", ""] and rows["prompt"][0] == [{"role": "user", "content": "q0"}]
    assert reasoning_gym(["0", "0"], rows["reasoning_gym"], rows["answer"]) == [1.0, 0.0]
    assert asked[1:] and all(made == asked[0] for made in asked)
    module._entry.cache_clear()
