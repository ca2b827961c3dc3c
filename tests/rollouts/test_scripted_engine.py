"""The engine that replays a script."""

import json

import numpy as np
import pytest

from workbench.errors import UserError
from workbench.rollouts.scripted import ScriptedEngine
from workbench.rollouts.types import Request, Sampling

SAMPLING = Sampling(max_new_tokens=3, end_ids=(2,))
ASKED = [Request([5, 6], (0, 0, 0, 0, s)) for s in range(3)]


def test_completions_come_in_the_order_of_the_calls(tmp_path):
    script = [[7, 8, 2], {"token_ids": [9, 9, 9], "logps": [-0.5, None, float("nan")]}, {"token_ids": [4], "finish": "length"}]
    path = tmp_path / "script.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in script))
    for engine in (ScriptedEngine(script), ScriptedEngine(path)):
        engine.sync_weights(None, 4)
        first, second = engine.generate(ASKED[:2], SAMPLING)
        (third,) = engine.generate(ASKED[2:], SAMPLING)
        assert [r.token_ids for r in (first, second, third)] == [[7, 8, 2], [9, 9, 9], [4]]
        assert [r.finish for r in (first, second, third)] == ["stop", "length", "length"]
        assert (first.logps, third.logps, first.version) == (None, None, 4)
        assert np.array_equal(second.logps, [-0.5, np.nan, np.nan], equal_nan=True)
        with pytest.raises(UserError, match=r"3 completions are used up.*repeat=true"):
            engine.generate(ASKED[:1], SAMPLING)


def test_a_script_may_begin_again():
    engine = ScriptedEngine([[1], [3]], repeat=True)
    assert [r.token_ids for r in engine.generate(ASKED, SAMPLING)] == [[1], [3], [1]]
    with pytest.raises(UserError, match="0 completions are used up"):
        ScriptedEngine([], repeat=True).generate(ASKED, SAMPLING)


def test_a_function_sees_prompt_and_key():
    engine = ScriptedEngine(lambda prompt, key: [sum(prompt), key[-1]])
    assert [r.token_ids for r in engine.generate(ASKED, SAMPLING)] == [[11, 0], [11, 1], [11, 2]]


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ({"token_ids": [1, 2], "logps": [0.0]}, "2 tokens and 1 logps"),
        ({"token_ids": [1], "support": []}, "1 tokens and 0 support"),
        ({"token_ids": [1], "logprobs": [0.0]}, "logprobs.*Did you mean 'logps'"),
        ({"token_ids": [1], "finish": "eos"}, "finish='eos' is not known.*stop, length"),
    ],
)
def test_a_malformed_completion_is_refused(completion, message):
    with pytest.raises(UserError, match=message):
        ScriptedEngine([completion]).generate(ASKED[:1], SAMPLING)


def test_supports_are_passed_on():
    (rollout,) = ScriptedEngine([{"token_ids": [1, 2], "support": [[1, 3], [2]]}]).generate(ASKED[:1], SAMPLING)
    assert [ids.tolist() for ids in rollout.support] == [[1, 3], [2]]


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="cannot read the script"):
        ScriptedEngine(str(tmp_path / "none.jsonl"))
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(UserError, match="not JSON Lines"):
        ScriptedEngine(str(tmp_path / "bad.jsonl"))
