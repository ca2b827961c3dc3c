"""Rewards as they are written in YAML: checked before anything is built, then built."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from workbench.cli import check, schema
from workbench.errors import UserError
from workbench.rewards import SHORT_NAMES, RewardFunctions, SoftOverlong
from workbench.rewards.naming import resolve

OVERLONG = "{_target_: workbench.rewards.SoftOverlong, max_completion_length: 512, cache: 64}"


def method(rewards: str | Callable[..., Any] | Sequence[Any]):
    """An online method's option."""


def checked(text):
    """The node's value after both checks: the cheap one, and that against the signatures."""
    values = OmegaConf.to_container(OmegaConf.create(f"rewards: {text}"))
    cheap = check._Walker(functools.partial(check._cheap_definition, schema.load()))
    cheap.keys("method", values, schema.describe(method), "Method")
    check.check_keys("method", values, schema.describe(method), "Method")
    return values["rewards"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("accuracy", ["accuracy"]),
        ("[accuracy, think_format]", ["accuracy", "think_format"]),
        (f"[accuracy, {OVERLONG}]", ["accuracy", "soft_overlong"]),
        (OVERLONG, ["soft_overlong"]),
        ("{_target_: workbench.rewards.length.CosineScaled, max_length: 64}", ["cosine_scaled"]),
        ("[{_target_: workbench.rewards.RewardModel, model: some/reward-model, max_length: 64}]", ["reward-model"]),
        ("[some/reward-model, {_target_: workbench.rewards.RepetitionPenalty}]", ["reward-model", "repetition_penalty"]),
        ("[{_target_: workbench.tiny.tasks.exact_match, _partial_: true}]", ["exact_match"]),
    ],
)
def test_what_can_be_written(text, names):
    """Hydra builds nodes within a list; no weight is opened before the first call."""
    node = OmegaConf.create({"_target_": "workbench.rewards.RewardFunctions", "_convert_": "all", "specs": checked(text)})
    assert instantiate(node).names == names


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"[accuracy, {OVERLONG.replace('cache', 'cash')}]", r"method\.rewards\[1\]\.cash is not an option of SoftOverlong"),
        ("[{_target_: workbench.rewards.SoftOverlong, cache: 3}]", r"method\.rewards\[0\]\.max_completion_length is required"),
        (f"[{OVERLONG.replace('64', 'long')}]", r"method\.rewards\[0\]\.cache='long': expects an integer"),
        (
            "[{_target_: workbench.rewards.SoftOverlang, cache: 3}]",
            r"method\.rewards\[0\]: _target_ .*SoftOverlang' does not exist",
        ),
        ("[accuracy, '???']", r"method\.rewards\[1\] is required"),
        ("3", r"method\.rewards=3: expects text or a list"),
    ],
)
def test_mistakes_before_anything_is_built(text, told):
    with pytest.raises(UserError, match=told) as error:
        checked(text)
    assert "\n" not in str(error.value)


def test_every_short_name():
    for name in SHORT_NAMES:
        if name in ("soft_overlong", "cosine_scaled"):  # whose lengths nobody can guess
            with pytest.raises(UserError, match="has options without a default: write"):
                resolve(name)
        else:
            assert RewardFunctions(name).names == [name]
    assert RewardFunctions(SoftOverlong(4, 2)).names == ["soft_overlong"]
