"""Offline, one thread, no tracker outside the test's folder."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["COLUMNS"] = "120"  # a narrow terminal breaks the lines that tests look for

import lightning  # noqa: F401  its log handler keeps the stderr of its import, which within a test is soon closed
import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory):
    """Caches and trackers stay in a temporary folder, which the tests of a process share."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(base / "cache"))
        patch.setenv("TRACKIO_DIR", str(base / "trackio"))
        yield
