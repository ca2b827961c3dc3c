"""Class files, and what a canonical configuration must make binding."""

import importlib
import inspect
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from workbench import losses
from workbench.cli.config_files import config_dir
from workbench.errors import UserError
from workbench.invariants import environment, execute, record
from workbench.invariants.classes import ONLINE_ROWS, class_names, load_class
from workbench.invariants.members import MEMBERS

NAMES = class_names()
# Functions of the losses that no run computes: they judge options before one.
NOT_RUN = {"balance", "recommended_weights", "_readers"}


def trajectory(name):
    return record.read(record.path_of(name)).trajectory


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_is_a_member_or_a_reason(name):
    cls = load_class(name)
    assert cls.members.keys() | cls.absent.keys() == MEMBERS.keys()
    assert all(len(reason) > 10 for reason in cls.absent.values())


def test_every_method_has_a_class():
    files = (config_dir() / "method").glob("*.yaml")
    methods = {target for file in files for target in re.findall(r"_target_: (workbench\.methods\.\S+)", file.read_text())}
    assert methods == {execute.composed(load_class(name).config).method._target_ for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_the_canonical_run_binds(name):
    """Otherwise its members prove little."""
    cfg, run = execute.composed(load_class(name).config), trajectory(name)
    assert min(run.steps["grad_norm"]) > cfg.trainer.gradient_clip_val
    assert all(a != b for a, b in pairwise(run.steps["lr"]))  # the rate changes with every step
    assert cfg.optim.weight_decay > 0
    assert tuple(cfg.optim.betas) != (0.9, 0.999)
    sizes = [len(rows) for rows in run.rows]
    assert len(set(sizes)) == 2  # an epoch ends within the run, on a shorter step
    tokens = [b - a for a, b in pairwise([0, *run.steps["num_tokens"]])]
    assert len(set(tokens)) > len(tokens) // 2  # rows of unequal lengths
    assert all(len(set(values)) > 1 for values in run.steps.values() if set(values) != {0.0})


def test_both_sides_of_what_a_loss_tells_apart_are_there():
    for name in ("dpo", "kto", "reward"):
        steps = trajectory(name).steps
        shares = steps.get("rewards/accuracies") or steps.get("accuracy") or [0.5]
        assert any(0 < share < 1 for share in shares)
    counts = trajectory("kto").steps
    assert min(counts["count/chosen"]) > 0
    assert 0 in counts["count/rejected"]  # a step without one of the labels too
    assert 0 in counts["kl"][2:]  # a baseline that is held at 0
    assert max(counts["kl"]) > 0


def test_what_online_methods_tell_apart_is_there():
    """Ratios on both sides of the bounds, groups without spread, truncated completions, both answers of a target."""
    for name in ("grpo", "grpo_sequence", "gmpo", "rloo"):
        steps = trajectory(name).steps
        assert max(steps["clip_ratio/low_mean"]) > 0 and max(steps["clip_ratio/high_mean"]) > 0
        assert min(steps["clip_ratio/region_mean"]) == 0
    assert 0 < trajectory("grpo").steps["completions/clipped_ratio"][0] < 1
    assert trajectory("grpo_sequence").steps["dynamic_sampling/replaced"][0] > 0
    assert 0 < trajectory("grpo_sequence").steps["frac_reward_zero_std"][0] < 1
    coefs = trajectory("grpo_cispo").steps["entropy_coef"]
    assert {a < b for a, b in pairwise(coefs)} == {True, False}


def test_completions_of_a_window_are_those_of_its_steps():
    """Windows of four steps, the second cut short by the end of the pass; a resumed run lies within one, or begins one."""
    for name in (n for n in NAMES if load_class(n).rows == ONLINE_ROWS):
        windows = trajectory(name).completions
        assert [a == b for a, b in pairwise(windows)] == [True, True, True, False, True, True, True, False, True]


def test_every_loss_is_computed_in_a_class(tmp_path):
    """A change of any function of the losses can be seen by a class at all: in its first two steps."""
    environment.pin()
    folder = Path(losses.__file__).parent
    modules = [
        importlib.import_module(f"workbench.losses.{file.stem}") for file in folder.glob("*.py") if file.stem != "__init__"
    ]
    functions = {
        f"{module.__name__}.{name}": function.__code__
        for module in modules
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and name not in NOT_RUN
    }
    seen = set()

    def note(frame, event, argument):
        if event == "call":
            seen.add(frame.f_code)

    for name in NAMES:
        config = (*load_class(name).config, "trainer.max_steps=2")
        execute.compose(config, tmp_path, tmp_path)  # kept, and read in many more calls than the run takes
        sys.setprofile(note)
        try:
            execute.run_here(config, tmp_path / name, tmp_path / "cache")
        finally:
            sys.setprofile(None)
    missing = sorted(name for name, code in functions.items() if code not in seen)
    assert not missing


def test_unknown_classes_are_refused_with_the_nearest_one():
    with pytest.raises(UserError, match=r"'dpoo' is no invariant class\. Did you mean 'dpo'"):
        load_class("dpoo")
