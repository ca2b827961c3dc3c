"""Under each planted bug the class recorded as its killer fails, also on hardware that its reference was not recorded on."""

import cells
import pytest

from workbench.invariants.classes import class_names, load_class
from workbench.invariants.commands import run_under
from workbench.invariants.compare import Mismatch
from workbench.invariants.mutants import CANONICAL, Mutant, function_at, planted
from workbench.invariants.planted_bugs import MUTANTS

LAYERS = {
    "losses",
    "terms",
    "masks",
    "collators",
    "layouts",
    "plan",
    "normalisation",
    "reference",
    "rollouts",
    "rewards",
    "windows",
    "optimiser",
    "schedule",
    "resume",
    "processes",
    "metrics",
}


@pytest.mark.parametrize("bug", cells.mutants(two_processes=False))
def test_mutant_is_killed(bug):
    with pytest.raises(Mismatch):
        run_under(bug, load_class(bug.killer), bug.member)


def test_there_are_enough_mutants_in_every_layer():
    assert len(MUTANTS) >= 60
    assert {bug.layer for bug in MUTANTS.values()} == LAYERS


def test_every_class_kills_a_mutant_or_holds_a_loss_of_its_own():
    assert set(class_names()) == {bug.killer for bug in MUTANTS.values()}


@pytest.mark.quick
@pytest.mark.parametrize("bug", MUTANTS.values(), ids=list(MUTANTS))
def test_mutant_can_be_planted_and_leaves_nothing_behind(bug):
    """A change of the code under a bug shows here first: the bug has to be planted anew."""
    function = function_at(bug.target)
    before = function.__code__
    with planted(bug):
        assert function.__code__ is not before
    assert function.__code__ is before
    assert bug.member == CANONICAL or bug.member in load_class(bug.killer).members


def test_a_bug_that_is_not_there_is_refused():
    bug = Mutant("stale", "losses", "workbench.losses.sft:nll_loss", "return 2 * logps", "return logps", "sft")
    with pytest.raises(ValueError, match="holds 'return 2 \\* logps' 0 times"), planted(bug):
        pass


def test_a_method_keeps_its_class():
    """``super()`` within rewritten code finds the class that the method belongs to."""
    with planted("tokens_counted_anew"), planted("reference_follows_every_step"):
        pass
