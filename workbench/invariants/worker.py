"""One of two processes that work through a list of jobs: ``torchrun -m workbench.invariants.worker <jobs.json>``.

The same processes run all jobs, since starting them takes longer than a run.
"""

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The trajectory of a job, or its error."""
    from workbench.invariants.execute import run_here
    from workbench.invariants.mutants import planted
    from workbench.invariants.trajectory import Trajectory

    file = Path(job["file"])
    try:
        with planted(job["mutant"]) if job["mutant"] else contextlib.nullcontext():
            ours = run_here(
                (*job["config"], *job["overrides"]),
                file.with_suffix(""),
                Path(job["cache_dir"]),
                save={int(step): Path(path) for step, path in job["save"].items()},
                checkpoint=job["checkpoint"],
                deepspeed=job["deepspeed"],
            )
    except Exception:  # the next job is another run
        return {"error": traceback.format_exc(limit=-6)}
    if job["continues"]:
        first = json.loads(Path(job["continues"]).read_text())
        if "error" in first:
            return first
        ours = Trajectory.from_dict(first["trajectory"]).continued(ours)
    return {"trajectory": ours.to_dict()}


def main(path: str) -> None:
    """Works through the jobs of a file; the first process writes what comes out."""
    from workbench.invariants.environment import pin

    pin()
    for job in json.loads(Path(path).read_text()):
        result = run(job)
        if os.environ.get("RANK", "0") == "0":
            file = Path(job["file"])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
