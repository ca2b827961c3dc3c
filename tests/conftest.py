"""Offline, one thread, no tracker outside the test's folder."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory, monkeypatch):
    """Caches and trackers stay in a temporary folder, shared by a test session where that saves time."""
    base = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("WORKBENCH_CACHE", str(base / "cache"))
    monkeypatch.setenv("TRACKIO_DIR", str(base / "trackio"))
