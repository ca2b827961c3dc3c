"""Flags and overrides as typed."""

import pytest

from workbench.cli import flags, generate, resume
from workbench.errors import UserError


def test_flags_and_overrides_may_be_mixed():
    parsed = flags.parse(["a=1", "-m", "--cfg", "job", "b=2", "--resolve", "-cd", "x", "--config-dir=y"])
    assert parsed.overrides == ["a=1", "b=2"]
    assert (parsed.multirun, parsed.cfg, parsed.resolve, parsed.config_dir) == (True, "job", True, ["x", "y"])


def test_info_takes_an_optional_kind():
    assert flags.parse(["--info"]).info == "all"
    assert flags.parse(["--info", "defaults", "a=1"]).info == "defaults"
    assert flags.parse(["--info", "a=1"]).overrides == ["a=1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--multrun"], "Did you mean '--multirun'?"),
        (["--lr=1"], "Overrides have no dashes: lr=..."),
        (["--cfg", "jobb"], "Did you mean 'job'?"),
        (["--cfg"], "--cfg needs a value"),
    ],
)
def test_mistakes(argv, message):
    with pytest.raises(UserError) as caught:
        flags.parse(argv)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("prompt=What is 12+34?", "What is 12+34?"),
        ('prompt=a=b, "c" (d) \\ #e', 'a=b, "c" (d) \\ #e'),
        ("prompt='quoted'", "quoted"),
        ("prompt=[a,b]", ["a", "b"]),
        ("prompt=${x}", "${x}"),
        ('prompt=say "\\', 'say "\\'),
    ],
)
def test_prompts_need_no_quoting(typed, value):
    from workbench.cli import check, config

    overrides = generate.rewrite([typed, "model.name=x"])
    assert check.to_plain(config.load(overrides, "generate").cfg)["prompt"] == value


def test_typed_overrides_replace_saved_ones_of_the_same_key():
    saved = ["experiment=a", "+x.y=1", "optim.lr=1"]
    assert resume.merge(saved, ["optim.lr=2", "x.y=3"]) == ["experiment=a", "optim.lr=2", "x.y=3"]
