"""Replays of recorded cases through the command's own code."""

import pytest

from workbench.invariants.parity import default_fixture, judge
from workbench.invariants.parity_cases import load_case
from workbench.invariants.parity_run import quiet


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """``replayed(file)``: the comparison of a case with our own run."""
    cache = tmp_path_factory.mktemp("parity")

    def replay(file):
        with quiet():
            return judge(load_case(file), default_fixture(), cache)

    return replay
