"""Offline, one thread, no tracker outside the test's folder; the files that take longest first."""

import os
from collections import Counter

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
    _share_taught_weights(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(base / "cache"))
        patch.setenv("TRACKIO_DIR", str(base / "trackio"))
        yield


def _share_taught_weights(base):
    """A nano model that learns before a run (`tiny-sft`) does so once for all processes of the tests, which lock it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = base.parent / "tiny-sft"
        shared.mkdir(exist_ok=True)
        (base / "cache").mkdir()
        (base / "cache/tiny-sft").symlink_to(shared)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Files with a slow test begin first, then those with most tests: a long one that begins last leaves other cores idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    number = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -number[item.path], str(item.path)))
