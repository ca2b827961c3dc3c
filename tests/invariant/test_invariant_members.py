"""Every class against its reference, every member against its class; `test_invariant_two_processes.py` has the other members."""

import cells
import pytest

from workbench.invariants.classes import class_names, load_class


@pytest.mark.quick
@pytest.mark.parametrize("name", class_names())
def test_canonical_run_meets_its_reference(suite, name):
    suite.check_recorded(load_class(name))


@pytest.mark.parametrize(("cls", "name"), cells.members(two_processes=False))
def test_member_follows_its_class(suite, cls, name):
    suite.check_member(cls, name)
