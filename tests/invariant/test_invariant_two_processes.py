"""Members and bugs that need two processes: all in one launch, since starting takes longer than the runs; DeepSpeed apart."""

import cells
import pytest

from workbench.invariants.classes import load_class
from workbench.invariants.commands import suite_under
from workbench.invariants.compare import Mismatch
from workbench.invariants.session import missing_package

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
MEMBERS, MUTANTS = cells.members(two_processes=True), cells.mutants(two_processes=True)


def skip_if_missing(cls, name):
    if package := missing_package(cls.members[name]):
        pytest.skip(f"{package} is not installed")


@pytest.fixture(scope="module")
def launched(suite):
    wanted = [(*param.values, None) for param in MEMBERS]
    wanted += [(load_class(bug.killer), bug.member, bug.name) for (bug,) in (param.values for param in MUTANTS)]
    suite.session.launch(entry for entry in wanted if not missing_package(entry[0].members[entry[1]]))
    return suite


@pytest.mark.parametrize(("cls", "name"), MEMBERS)
def test_member_follows_its_class(launched, cls, name):
    skip_if_missing(cls, name)
    launched.check_member(cls, name)


@pytest.mark.parametrize("bug", MUTANTS)
def test_mutant_is_killed(launched, bug):
    cls = load_class(bug.killer)
    skip_if_missing(cls, bug.member)
    with pytest.raises(Mismatch):
        suite_under(bug, launched.session).check_member(cls, bug.member)
