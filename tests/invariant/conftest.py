"""One session of runs for all tests of a process: a canonical run is made once."""

import pytest

from workbench.invariants import environment
from workbench.invariants.session import Session
from workbench.invariants.suite import Suite


@pytest.fixture(scope="session")
def suite(tmp_path_factory):
    environment.pin()
    folder = tmp_path_factory.mktemp("invariants")
    return Suite(Session(folder / "runs"), pictures=folder / "pictures")
