"""`Session`: the runs of classes and their members, each made once."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from workbench.invariants import execute
from workbench.invariants.classes import InvariantClass
from workbench.invariants.members import Member
from workbench.invariants.trajectory import Trajectory

_TIMEOUT = 1800  # seconds for all jobs of a launch
_WAYS: dict[str, Callable[..., Trajectory]] = {
    "here": execute.run_here,
    "bare": execute.run_bare,
    "command": execute.run_command,
    "notebook": execute.run_notebook,
    "plan": execute.run_plan,
    "scripted": execute.run_scripted,
    "separate": execute.run_separate,
}
TWO_PROCESSES = ("pair", "deepspeed")


class MemberError(Exception):
    """A member's run ended in an error."""


def missing_package(member: Member) -> str | None:
    """The package that a member needs and that is not installed."""
    return member.needs if member.needs and find_spec(member.needs) is None else None


class Session:
    """Runs of classes and members, kept for the next that needs them.

    Args:
        folder: for checkpoints, prepared rows and run folders.
        mutant: bug that is planted in processes that the session starts; the caller plants it in this one.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, folder: Path, mutant: str | None = None, device: str = "cpu") -> None:
        self.folder = folder
        self.mutant = mutant
        self.device = ("trainer.accelerator=gpu",) if device == "cuda" else ()
        self.cache_dir = folder / "cache"
        self._runs: dict[tuple, Trajectory] = {}
        self._pairs: dict[tuple[str, str, str | None], Trajectory | str] = {}

    def canonical(self, cls: InvariantClass) -> Trajectory:
        """The class's own run."""
        return self._run(cls, "here", ())

    def base(self, cls: InvariantClass, name: str) -> Trajectory | None:
        """The run that a member is compared with, where that is not the canonical one."""
        against = cls.members[name].against
        return None if against is None else self._run(cls, "here", against)

    def trajectory(self, cls: InvariantClass, name: str) -> Trajectory:
        """A member's run, whole: of a resumed one, the first part is that of the run that it goes on from.

        Raises:
            MemberError: it ended in an error in other processes.
        """
        member = cls.members[name]
        if member.way in TWO_PROCESSES:
            return self._of_pair(cls, name)
        if name == "repeat":
            return self._start("here", (*cls.config, *self.device), {}, None)
        if member.resume_from is None:
            return self._run(cls, member.way, member.overrides)
        first = self._run(cls, "here", member.saved_by)
        checkpoint = checkpoint_of(self.folder, cls.name, member.saved_by, member.resume_from)
        return first.continued(self._start("here", (*cls.config, *self.device, *member.overrides), {}, checkpoint))

    def _run(self, cls: InvariantClass, way: str, overrides: tuple[str, ...]) -> Trajectory:
        key = (cls.name, way, overrides)
        if key not in self._runs:
            save = saved_by(self.folder, cls, way, overrides)
            self._runs[key] = self._start(way, (*cls.config, *self.device, *overrides), save, None)
        return self._runs[key]

    def _start(self, way: str, overrides: Sequence[str], save: dict[int, Path], checkpoint: Path | None) -> Trajectory:
        self.folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{way}-", dir=self.folder))
        options = {"save": save, "checkpoint": checkpoint} if way == "here" else {}
        return _WAYS[way](overrides, folder, self.cache_dir, **options)

    # -- two processes ----------------------------------------------------------------------------------------------

    def launch(self, wanted: Iterable[tuple[InvariantClass, str, str | None]]) -> None:
        """Runs members of two processes, ``(class, member, mutant)`` each, all in one pair; DeepSpeed, whose engine keeps state
        in the process, in a pair for each."""
        wanted = [entry for entry in wanted if (entry[0].name, entry[1], entry[2]) not in self._pairs]
        pair = [entry for entry in wanted if entry[0].members[entry[1]].way == "pair"]
        alone = [[entry] for entry in wanted if entry[0].members[entry[1]].way == "deepspeed"]
        for entries in ([pair] if pair else []) + alone:
            self._launch(entries)

    def _launch(self, entries: Sequence[tuple[InvariantClass, str, str | None]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="pair-", dir=self.folder))
        jobs = [job for cls, name, mutant in entries for job in jobs_of(folder, self.cache_dir, cls, name, mutant)]
        unique = {job["file"]: job for job in jobs}
        (folder / "jobs.json").write_text(json.dumps(list(unique.values())))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command += ["-m", "workbench.invariants.worker", str(folder / "jobs.json")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT, check=False)
        for cls, name, mutant in entries:
            *_, job = jobs_of(folder, self.cache_dir, cls, name, mutant)
            self._pairs[(cls.name, name, mutant)] = _result(Path(job["file"]), folder, done.stderr)

    def _of_pair(self, cls: InvariantClass, name: str) -> Trajectory:
        self.launch([(cls, name, self.mutant)])
        found = self._pairs[(cls.name, name, self.mutant)]
        if isinstance(found, str):
            raise MemberError(found)
        return found


def saved_by(folder: Path, cls: InvariantClass, way: str, overrides: tuple[str, ...]) -> dict[int, Path]:
    """By step the checkpoints that members of the class go on from and that this run has to save."""
    members = [m for m in cls.members.values() if m.resume_from and m.saved_by == overrides and m.way == way]
    return {m.resume_from: checkpoint_of(folder, cls.name, overrides, m.resume_from) for m in members}


def checkpoint_of(folder: Path, cls: str, overrides: tuple[str, ...], step: int) -> Path:
    """Where the run of these overrides saves its checkpoint of a step."""
    name = "_".join(overrides).replace("/", "-")
    return folder / "checkpoints" / cls / name / f"{step}.ckpt"


def jobs_of(folder: Path, cache_dir: Path, cls: InvariantClass, name: str, mutant: str | None) -> list[dict]:
    """What the two processes have to do for a member: the run that saves its checkpoint, if any, then its own."""
    member = cls.members[name]
    where = folder / (mutant or "none")
    common = {"mutant": mutant, "cache_dir": str(where / "cache" if mutant else cache_dir), "config": list(cls.config)}

    def job(overrides: tuple[str, ...], checkpoint: Path | None, first: str | None) -> dict:
        label = "_".join([*overrides, f"from{member.resume_from}" if checkpoint else ""])
        save = {} if checkpoint else saved_by(where, cls, member.way, overrides)
        return {
            **common,
            "file": str(where / cls.name / f"{label}.json"),
            "overrides": list(overrides),
            "save": {str(step): str(path) for step, path in save.items()},
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "continues": first,
            "deepspeed": int(name[-1]) if member.way == "deepspeed" else None,
        }

    if member.resume_from is None:
        return [job(member.overrides, None, None)]
    first = job(member.saved_by, None, None)
    checkpoint = checkpoint_of(where, cls.name, member.saved_by, member.resume_from)
    return [first, job(member.overrides, checkpoint, first["file"])]


def _result(file: Path, folder: Path, stderr: str) -> Trajectory | str:
    if not file.is_file():
        return f"the two processes left no result in {folder}: {stderr[-3000:]}"
    result = json.loads(file.read_text())
    return result["error"] if "error" in result else Trajectory.from_dict(result["trajectory"])
