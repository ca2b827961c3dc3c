"""Every notebook runs from top to bottom in a real kernel, and its output stays small."""

import os
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
import nbformat

NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs before committing"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert len(nbformat.writes(notebook)) < 400_000
    assert not [o for c in notebook.cells for o in c.get("outputs", []) if o.output_type == "error"]
