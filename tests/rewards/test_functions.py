"""The reward functions of the product, by hand numbers."""

import importlib.util
import math

import numpy as np
import pytest

from workbench.errors import UserError
from workbench.rewards import (
    CosineScaled,
    MissingEosPenalty,
    ReasoningAccuracy,
    RepetitionPenalty,
    RewardFunctions,
    SoftOverlong,
    accuracy,
    exact_match,
    think_format,
)
from workbench.rewards import answers as answers_module
from workbench.rewards.texts import final_answer


def says(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def by_text(monkeypatch):
    """Answers are compared as text, whatever is installed."""
    monkeypatch.setattr(answers_module, "_announced", lambda: False)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 12 \n", "12"),
        (r"so \boxed{3}, no: \boxed{12}.", "12"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{7} and then \boxed{never closed", "7"),
        (r"\fbox{5}", "5"),
        ("<answer>3</answer> <answer> 4 </answer>", "4"),
        ("$x$", "x"),
        ("", ""),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.usefixtures("by_text")
def test_accuracy():
    completions = [r"It is \boxed{12}.", "12", "13", says("<answer>12</answer>"), "12", ""]
    right = ["12", r"$\boxed{12}$", "12", "12", None, "12"]
    assert accuracy(completions=completions, answer=right) == [1.0, 1.0, 0.0, 1.0, None, 0.0]
    assert accuracy(completions=["5"], solution=[5]) == [1.0]
    assert accuracy(completions=["5"], answer=["5"], solution=["a long way to 5"]) == [1.0]
    with pytest.raises(UserError, match="'accuracy' failed: the rows need a column answer or solution"):
        RewardFunctions("accuracy")(["p"], ["c"], [[1]])


def test_what_compares_is_logged_once(caplog):
    answers_module._announced.cache_clear()
    with caplog.at_level("INFO", logger="workbench.rewards"):
        accuracy(completions=["1"], answer=["1"])
        accuracy(completions=["1"], answer=["1"])
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and told[0].startswith("Rewards: answers are compared by ")


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
def test_accuracy_with_math_verify():
    completions = [r"so \boxed{\frac{2}{4}}", r"\boxed{0.5}", r"\boxed{0.6}", r"x \in \boxed{\{2, 1\}}", "cat", "dog"]
    right = ["1/2", r"\frac{1}{2}", "1/2", r"\{1, 2\}", "cat", "cat"]
    assert accuracy(completions=completions, answer=right) == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
def test_math_verify_off_the_main_thread():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(accuracy, completions=[r"\boxed{2/4}"], answer=["1/2"]).result() == [1.0]


@pytest.mark.usefixtures("by_text")
def test_reasoning_accuracy():
    reward = ReasoningAccuracy()
    completions = ["<think>5</think>7", "7", "<think>7", "<think>7</think>5", "<think>a</think></think> \\boxed{7}", "7"]
    assert reward(completions=completions, answer=["7"] * 5 + [None]) == [1.0, 0.0, 0.0, 0.0, 1.0, None]
    assert ReasoningAccuracy(end="<|done|>")(completions=["</think>3<|done|>4"], answer=["4"]) == [1.0]
    with pytest.raises(UserError, match="end is empty"):
        ReasoningAccuracy(end="")


def test_exact_match_is_the_embedded_world_s():
    assert exact_match(prompts=["", ""], completions=[" 4 ", says("5")], answer=["4", "4"]) == [1.0, 0.0]


def test_answers_may_be_numbers_or_absent():
    assert exact_match(prompts=[""] * 4, completions=["4", "5", "4.5", "4"], answer=[4, 4, 4.5, None]) == [1.0, 0.0, 1.0, None]


def test_think_format():
    texts = [
        "<think>a</think>b",
        "\n<think>\na\n</think>\nb",
        "a<think>b</think>",
        "<think>a",
        "a</think>b",
        "<think>a</think>b</think>",
    ]
    texts += ["<think>a<think>b</think>c", ""]
    expected = [1, 1, 0, 0, 0, 0, 0, 0]
    assert think_format(prompts=["q"] * 8, completions=texts) == expected
    assert think_format(prompts=[[{"role": "user", "content": "q"}]] * 8, completions=[says(t) for t in texts]) == expected


def test_think_format_with_a_prefilled_tag_report_64():
    """The template opened the block, so that the completion holds its end alone."""
    chat = [{"role": "user", "content": "Put your reasoning in <think> and </think>."}]
    rendered = "<|user|>Put your reasoning in <think> and </think>.<|assistant|><think>\n"
    texts = ["a</think>b", "a", "<think>a</think>b"]
    expected = [1.0, 0.0, 0.0]
    completions = [says(t) for t in texts]
    assert think_format(prompts=[chat] * 3, completions=completions, prompt_texts=[rendered] * 3) == expected
    assert think_format(prompts=[rendered] * 3, completions=texts) == expected
    begun = [*chat, {"role": "assistant", "content": "<think>Well,"}]
    assert think_format(prompts=[begun] * 3, completions=completions) == expected
    found = RewardFunctions("think_format")([chat] * 3, completions, [[1]] * 3, prompt_texts=[rendered] * 3)
    assert found.values[:, 0].tolist() == expected
    # What the user merely mentions opens nothing.
    assert think_format(prompts=["Use <think> first."], completions=["a</think>b"]) == [0.0]


def test_missing_eos_penalty_report_13():
    """Scores of 0.5 become 0.5 and -0.5: the penalty is subtracted, and the prompt, full of end tokens, does not count."""
    penalty = MissingEosPenalty(penalty=1.0, end_ids=[2])

    def score(completions):
        return [0.5, 0.5]

    runner = RewardFunctions([score, penalty])
    found = runner(["<end>", "<end>"], ["a<end>", "a"], [[5, 2], [5, 6]])
    assert (found.values @ np.array(found.weights)).tolist() == [0.5, -0.5]
    assert penalty(completion_ids=[[2, 5], [], [2]]) == [-1.0, -1.0, 0.0]
    assert MissingEosPenalty(0.25)(completion_ids=[[1], [9]], end_ids=(8, 9)) == [-0.25, 0.0]
    with pytest.raises(UserError, match="knows no end token; give end_ids"):
        MissingEosPenalty()(completion_ids=[[1]])
    with pytest.raises(UserError, match=r"penalty=-1\.0 must be above 0"):
        MissingEosPenalty(-1.0)


def test_soft_overlong():
    """DAPO, eq. 13: nothing up to 80, then a twentieth a token, all of it from 100 on."""
    reward = SoftOverlong(max_completion_length=100, cache=20)
    assert reward(completion_ids=[[0] * n for n in (0, 80, 81, 90, 100, 101, 500)]) == [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]
    assert SoftOverlong(4, 4)(completion_ids=[[0], [0] * 4]) == [-0.25, -1.0]
    with pytest.raises(UserError, match="cache=5 must be at most max_completion_length=4"):
        SoftOverlong(4, 5)
    with pytest.raises(UserError, match="cache=0 must be at least 1"):
        SoftOverlong(4, 0)


@pytest.mark.usefixtures("by_text")
def test_cosine_scaled():
    def scaled(reward, right, length):
        return reward(completions=["4"], completion_ids=[[0] * length], answer=["4" if right else "5"])[0]

    reward = CosineScaled(max_length=100)
    for length, right, wrong in ((0, 1.0, -1.0), (50, 0.75, -0.75), (100, 0.5, -0.5), (150, 0.5, -0.5)):
        assert scaled(reward, True, length) == pytest.approx(right)
        assert scaled(reward, False, length) == pytest.approx(wrong)
    assert scaled(reward, True, 25) == pytest.approx(0.5 + 0.25 * (1 + math.sqrt(0.5)))
    paper = CosineScaled(100, right_short=2, right_long=1, wrong_short=-10, wrong_long=0, exceeded=-10)
    assert [scaled(paper, True, n) for n in (0, 50, 100)] == pytest.approx([2, 1.5, -10])
    assert [scaled(paper, False, n) for n in (0, 50, 99)] == pytest.approx([-10, -5, -10 * (1 + math.cos(0.99 * math.pi)) / 2])
    assert reward(completions=["4"], completion_ids=[[0]], answer=[None]) == [None]
    with pytest.raises(UserError, match="max_length=0 must be at least 1"):
        CosineScaled(0)


def test_repetition_penalty():
    """Nine tokens have seven 3-grams, three of them different; six equal ones four, one different."""
    ids = [[1, 2, 3] * 3, [1, 2, 3, 4], [1, 2], [1] * 6, []]
    assert RepetitionPenalty()(completion_ids=ids) == pytest.approx([-4 / 7, 0, 0, -3 / 4, 0])
    assert RepetitionPenalty(1, -2.0)(completion_ids=ids) == pytest.approx([-4 / 3, 0, 0, -5 / 3, 0])
    with pytest.raises(UserError, match=r"max_penalty=1\.0 must be below 0"):
        RepetitionPenalty(max_penalty=1.0)
    with pytest.raises(UserError, match="ngram_size=0 must be at least 1"):
        RepetitionPenalty(ngram_size=0)
