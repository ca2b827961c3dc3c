"""What reward functions are called with, what they may return, and what becomes of mistakes."""

import asyncio
import functools
import math
import pickle
import threading
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from workbench.errors import UserError
from workbench.rewards import RewardFunctions, RewardResult, SoftOverlong
from workbench.rewards.naming import distinct, name_of

PROMPTS, COMPLETIONS = ["The sky is", "The sun is"], [" blue.", " in the sky."]
IDS = [[6303, 13], [304, 279, 12884, 13]]
STATE = SimpleNamespace(global_step=3, max_steps=10, epoch=0.5)


def call(*functions, columns=None, weights=None, **options):
    runner = RewardFunctions(list(functions), weights)
    try:
        return runner(PROMPTS, COMPLETIONS, IDS, columns or {}, STATE, **options)
    finally:
        runner.close()


def values(*functions, **options):
    return [[None if math.isnan(v) else v for v in row] for row in call(*functions, **options).values.tolist()]


def by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def by_characters(completions, **kwargs):
    return [float(len(text)) for text in completions]


async def slowly(completions, **kwargs):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


def test_values_names_and_weights():
    found = call(by_tokens, by_characters, slowly, weights=[1, 2, 0.5])
    assert found.values.tolist() == [[2.0, 6.0, 0.5], [4.0, 12.0, 0.5]] and found.values.dtype == np.float64
    assert found.names == ["by_tokens", "by_characters", "slowly"] and found.weights == [1, 2, 0.5]
    assert call(by_tokens, by_characters, weights={"by_characters": 3, "by_tokens": 0}).weights == [0, 3]


def test_arguments():
    seen = {}

    def everything(**kwargs):
        seen.update(kwargs)
        return [0, 0]

    def some(prompts, answer, *, level=None):
        seen["some"] = (prompts, answer, level)
        return [0, 0]

    columns = {"answer": ["a", "b"], "level": [1, 2], "unused": [0, 0]}
    call(everything, some, columns=columns, prompt_texts=["x", "y"], end_ids=[7])
    assert seen["some"] == (PROMPTS, ["a", "b"], [1, 2])
    assert seen["trainer_state"] is STATE and seen["completion_ids"] == IDS and seen["completions"] == COMPLETIONS
    assert seen["prompt_texts"] == ["x", "y"] and seen["end_ids"] == [7] and seen["unused"] == [0, 0]
    assert callable(seen["log_extra"]) and callable(seen["log_metric"])


def test_a_function_cannot_change_what_another_gets():
    def spoils(completions, answer, **kwargs):
        completions.reverse()
        answer.clear()
        return [0, 0]

    def reads(completions, answer):
        return [float(c == " blue." and a == "a") for c, a in zip(completions, answer, strict=True)]

    assert values(spoils, reads, columns={"answer": ["a", "b"]}) == [[0, 1], [0, 0]]


def test_a_function_cannot_change_what_is_trained():
    ids, chats, told = [[1, 2], [3]], [[{"role": "assistant", "content": "a"}], []], [["x"], ["y"]]

    def spoils(completion_ids, completions, told, **kwargs):
        for tokens, chat, words in zip(completion_ids, completions, told, strict=True):
            tokens.clear(), words.append("z")
            for message in chat:
                message["content"] = ""
        return [0, 0]

    RewardFunctions([spoils])(PROMPTS, chats, ids, {"told": told}, STATE)
    assert (ids, told) == ([[1, 2], [3]], [["x"], ["y"]])
    assert chats == [[{"role": "assistant", "content": "a"}], []]


def test_logged_columns_and_metrics():
    def logs(completions, log_extra=None, log_metric=None):
        log_extra("golden", ["g", "[none]"])
        log_metric("accuracy", np.float32(0.5))
        log_metric("accuracy", 1)
        return [0, 0]

    async def later(completions, log_metric, **kwargs):
        log_metric("late", 2.0)
        return [1, 1]

    found = call(logs, later)
    assert found.extras == {"golden": ["g", "[none]"]}
    assert found.metrics == {"accuracy": [0.5, 1.0], "late": [2.0]}


@pytest.mark.parametrize(
    "given",
    [
        [1, 2],
        (1.0, 2.0),
        [np.float32(1), np.int64(2)],
        np.array([1, 2]),
        torch.tensor([1.0, 2.0], requires_grad=True),
        torch.tensor([1, 2], dtype=torch.bfloat16),
        [torch.tensor(1), torch.tensor(2.0)],
        [True, Fraction(2)],
    ],
    ids=lambda given: type(given).__name__ + str(given)[:20],
)
def test_kinds_of_values_report_45(given):
    async def late(completions):
        return given

    assert values(lambda completions: given, late) == [[1.0, 1.0], [2.0, 2.0]]


def test_none_abstains_report_44():
    assert values(lambda completions: [None, 1], by_tokens) == [[None, 2.0], [1.0, 4.0]]
    assert values(lambda completions: [None, None]) == [[None], [None]]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([1.0], "returned 1 value for 2 completions; it must give one for each"),  # would be spread over all
        ((1.0, 2.0, 3.0), "returned 3 values for 2 completions"),
        ([], "returned 0 values for 2 completions"),
        (np.array([1.0]), "returned 1 value for 2 completions"),
        (torch.ones(3), "returned 3 values for 2 completions"),
        (torch.ones(2, 1), r"returned a tensor of shape \[2, 1\], not a list of 2 numbers"),
        (np.float64(1.0), "returned the single number 1.0, not a list of 2 numbers"),
        (1.0, "returned the single number 1.0"),
        (None, "returned None, not a list"),
        ("ab", "returned the text 'ab', not a list"),
        ({"a": 1, "b": 2}, "returned a dict, not a list"),
        ((x for x in (1, 2)), "returned a generator, not a list"),
        (["1", "2"], "returned the text '1' for completion 0, not a number or None"),
        ([0.0, [1.0]], "returned a list for completion 1"),
        ([0.0, 1j], "returned a complex for completion 1"),
        ([0.0, math.nan], "returned nan for completion 1; give None where there is no reward"),
        ([math.inf, 0.0], "returned inf for completion 0"),
        ([0.0, -math.inf], "returned -inf for completion 1"),
        (torch.tensor([0.0, math.nan]), "returned nan for completion 1"),
        ([10**400, 0], "returned inf for completion 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # no addresses: every process has the same names
)
def test_wrong_values_report_45(given, told):
    def bad(completions):
        return given

    async def bad_later(completions):
        return given

    for function in (bad, bad_later):
        with pytest.raises(UserError, match=told) as error:
            call(by_tokens, function)
        assert f"Reward function {function.__name__!r} " in str(error.value) and "\n" not in str(error.value)


def test_failures_are_told_in_one_line():
    def fails(completions):
        raise KeyError("solution\nand more")

    async def fails_later(completions):
        raise TimeoutError

    async def gives_coroutines(completions):
        return [slowly(completions), slowly(completions)]

    async def streams(completions):
        yield 1.0

    for function, told in (
        (fails, r"'fails' failed: KeyError: "),
        (fails_later, r"'fails_later' failed: TimeoutError$"),
        (gives_coroutines, "'gives_coroutines' returned a coroutine for completion 0"),
        (streams, "'streams' returned a async_generator|'streams' returned an async_generator"),
    ):
        with pytest.raises(UserError, match=told) as error:
            call(by_tokens, function)
        assert "\n" not in str(error.value)


def test_a_failure_leaves_the_runner_usable():
    answers = iter([[1.0], [1.0, 2.0]])

    async def unsteady(completions):
        return next(answers)

    runner = RewardFunctions([unsteady, slowly])
    with pytest.raises(UserError, match="'unsteady' returned 1 value"):
        runner(PROMPTS, COMPLETIONS, IDS)
    assert runner(PROMPTS, COMPLETIONS, IDS).values.tolist() == [[1, 0.5], [2, 0.5]]
    runner.close()


def test_arguments_that_are_missing_or_taken():
    def needs(completions, solution, level):
        return [0, 0]

    with pytest.raises(UserError, match=r"'needs' needs 'solution', 'level', which the rows do not have\. Their columns: answer"):
        call(needs, columns={"answer": ["a", "b"]})

    def by_position(completions, /):
        return [0, 0]

    with pytest.raises(UserError, match="takes 'completions' by position"):
        call(by_position)
    with pytest.raises(UserError, match="have a column 'trainer_state'"):
        call(by_tokens, columns={"trainer_state": [1, 2]})
    with pytest.raises(UserError, match="answer holds 1 values for 2 completions"):
        call(by_tokens, columns={"answer": ["a"]})


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda extra, metric: extra("c", [1]), r"log_extra\('c'\) got 1 values for 2 completions"),
        (lambda extra, metric: extra("c", "ab"), r"log_extra\('c'\) got 'ab' for 2 completions"),
        (lambda extra, metric: metric("m", "high"), r"log_metric\('m'\) got 'high', which is no number"),
    ],
)
def test_wrong_logs(act, told):
    def logs(completions, log_extra, log_metric):
        act(log_extra, log_metric)
        return [0, 0]

    with pytest.raises(UserError, match=f"'logs'.*{told}"):
        call(logs)


def test_two_functions_log_one_column():
    def one(completions, log_extra):
        log_extra("c", [1, 2])
        return [0, 0]

    def two(completions, log_extra):
        log_extra("c", [1, 2])
        return [0, 0]

    with pytest.raises(UserError, match="'one' and 'two' both log the column 'c'"):
        call(one, two)


def test_async_functions_wait_together():
    """Each waits for the other; one after the other they would never end."""
    events = [asyncio.Event(), asyncio.Event()]

    async def first(completions):
        events[0].set()
        await asyncio.wait_for(events[1].wait(), 5)
        return [1, 1]

    async def second(completions):
        events[1].set()
        await asyncio.wait_for(events[0].wait(), 5)
        return [2, 2]

    assert values(first, by_tokens, second) == [[1, 2, 2], [1, 4, 2]]


def test_inside_a_running_loop_and_on_one_loop_of_its_own():
    """A notebook's main thread runs a loop; clients that a function keeps belong to the loop of the first call."""
    loops = []

    async def remembers(completions):
        loops.append((asyncio.get_running_loop(), threading.current_thread()))
        return [1, 2]

    async def notebook():
        runner = RewardFunctions(remembers)
        found = [runner(PROMPTS, COMPLETIONS, IDS).values.tolist() for _ in range(2)]
        runner.close()
        return found

    assert asyncio.run(notebook()) == [[[1], [2]]] * 2
    assert loops[0] == loops[1] and loops[0][1] is not threading.main_thread()


def test_awaitables_of_other_callables():
    class Judge:
        async def __call__(self, completions, scale):
            return [scale[0], 2]

    assert values(lambda completions: slowly(completions), Judge(), columns={"scale": [3, 3]}) == [[0.5, 3], [0.5, 2]]


def test_no_completion():
    """A rank without prompts calls nothing."""
    found = RewardFunctions([by_tokens, slowly])([], [], [], {"answer": []})
    assert found.values.shape == (0, 2) and found.names == ["by_tokens", "slowly"]


def test_parts_of_a_result():
    """Split by groups, sent around and joined again, each value and each metric is there once."""

    def logs(completions, log_extra, log_metric):
        log_extra("c", list(completions))
        log_metric("m", len(completions))
        return [1.0, None, 3.0, 4.0, 5.0, 6.0][: len(completions)]

    runner = RewardFunctions([logs, by_tokens], [1, 2])
    one = runner(["p"] * 6, list("abcdef"), [[0]] * 6)
    other = RewardFunctions([lambda completions: [0.0, 0.0], by_tokens], [1, 2])(["p"] * 2, list("gh"), [[0]] * 2)
    parts = [*one.split(2), *other.split(2)]
    assert [len(part.values) for part in parts] == [2, 2, 2, 2] and parts[1].extras == {"c": ["c", "d"]}
    both = RewardResult.joined(pickle.loads(pickle.dumps(parts)))
    assert both.extras == {"c": [*"abcdef", None, None]} and both.metrics == {"m": [6.0]}
    np.testing.assert_array_equal(both.values[:6], one.values)
    found = both.statistics(np.repeat(np.arange(4), 2))
    assert found["rewards/logs/mean"] == pytest.approx(19 / 7) and found["rewards/by_tokens/std"] == 0
    assert found["reward"] == pytest.approx((19 + 16) / 8) and found["frac_reward_zero_std"] == 0.25


def test_names():
    class HTTPJudge:
        def __call__(self, **kwargs):
            return []

    class LengthScore(HTTPJudge):
        pass

    assert name_of(functools.partial(functools.partial(by_tokens))) == "by_tokens"
    assert name_of(LengthScore()) == "length_score" and name_of(SoftOverlong(8, 2)) == "soft_overlong"
    assert name_of(lambda: 0) == "lambda"
    assert distinct(["a", "b", "a", "a_2", "a"]) == ["a", "b", "a_2", "a_2_2", "a_3"]
    assert RewardFunctions([by_tokens, by_tokens]).names == ["by_tokens", "by_tokens_2"]


def test_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def one(completions):\n    return [1] * len(completions)\n"
        "class Two:\n    def __call__(self, completions):\n        return [2] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    found = call(
        "my_rewards:one", "my_rewards.Two", "exact_match", "workbench.tiny.tasks.exact_match", columns={"answer": ["blue.", ""]}
    )
    assert found.names == ["one", "two", "exact_match", "exact_match_2"]
    assert found.values.tolist() == [[1, 2, 1, 1], [1, 2, 0, 0]]
    for spec, told in (
        ("my_rewards:three", "my_rewards has no 'three'"),
        ("acuracy", r"'acuracy' is not known\. Did you mean 'accuracy'\?"),
        ("soft_overlong", r"_target_: workbench\.rewards\.length\.SoftOverlong, max_completion_length: \.\.\., cache: \.\.\."),
        ("my_rewards:__name__", "is a str, which cannot be called"),
        (3, "is a int, which cannot be called"),
        ("no.such.module", "cannot import no.such"),
    ):
        with pytest.raises(UserError, match=told):
            RewardFunctions(spec)


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ([1], "has 1 weights for 2 reward functions: by_tokens, by_characters"),
        ([1, 2, 3], "has 3 weights"),
        ({"by_tokens": 1}, "'by_characters' has no weight"),
        ({"by_token": 1, "by_characters": 1}, r"there is no reward function 'by_token'\. Did you mean 'by_tokens'\?"),
        ([1, math.nan], "by_characters=nan is not a number"),
        ([1, "2"], "by_characters='2' is not a number"),
    ],
)
def test_wrong_weights(weights, told):
    with pytest.raises(UserError, match=told):
        RewardFunctions([by_tokens, by_characters], weights)


@pytest.mark.parametrize("empty", [[], None, ()])
def test_no_function_report_44(empty):
    with pytest.raises(UserError, match=r"method\.rewards is empty"):
        RewardFunctions(empty)


def test_survives_pickling():
    runner = RewardFunctions([by_tokens, slowly])
    runner(PROMPTS, COMPLETIONS, IDS)
    copy = pickle.loads(pickle.dumps(runner))
    assert copy(PROMPTS, COMPLETIONS, IDS).values.tolist() == [[2, 0.5], [4, 0.5]]
    runner.close()
    copy.close()
