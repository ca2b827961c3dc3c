"""``workbench invariants record | check | compare | mutants``."""

import argparse
import contextlib
import copy
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from workbench.cli.config_files import config_dir
from workbench.errors import UserError
from workbench.invariants import environment, record, report
from workbench.invariants.classes import InvariantClass, class_names, load_class
from workbench.invariants.compare import Comparison, Mismatch, Tolerance, compare
from workbench.invariants.members import MEMBERS
from workbench.invariants.mutants import CANONICAL, Mutant, planted
from workbench.invariants.session import TWO_PROCESSES, Session, missing_package
from workbench.invariants.suite import RECORDED, Suite
from workbench.invariants.trajectory import Trajectory

PICTURES = "invariant_pictures"


def record_command(argv: Sequence[str]) -> int:
    """Records the references of classes, all by default."""
    parser = _parser("record", "Record the reference of each class, from a tree without changes.")
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="all by default")
    _add_device(parser)
    arguments = parser.parse_args(argv)
    classes = _classes(arguments.classes)
    if not _has_device(arguments.device):
        raise UserError("device=cuda: there is no GPU here to record references of.")
    record.refuse_dirty_tree()
    with _session(arguments.device) as session:
        for cls in classes:
            path = record.path_of(cls.name, arguments.device)
            record.write(cls, session.canonical(cls), path, arguments.device)
            print(f"{cls.name:<20} {os.path.relpath(path)}", flush=True)
    return 0


def check_command(argv: Sequence[str]) -> int:
    """Runs classes with their members and prints the table; exit code 1 if a cell fails."""
    parser = _parser("check", "Run classes with their members against their references.")
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="all by default")
    parser.add_argument("--all", action="store_true", help="all classes")
    parser.add_argument("--member", action="append", help="only this member (repeat for several)")
    parser.add_argument("--pictures", default=PICTURES, help="folder for curves of what differs")
    _add_device(parser)
    arguments = parser.parse_args(argv)
    if arguments.all and arguments.classes:
        raise UserError(f"--all and {arguments.classes[0]} exclude each other; leave one of them out.")
    classes = _classes(arguments.classes)
    if not _has_device(arguments.device):
        print("cuda references skipped: there is no GPU here")
        return 0
    rows = _rows(arguments.member)
    with _session(arguments.device) as session:
        suite = Suite(session, arguments.device, Path(arguments.pictures))
        session.launch((cls, name, None) for cls in classes for name in rows if _of_two_processes(cls, name))
        cells: dict[str, dict[str, str]] = {}
        for cls in classes:
            cells[cls.name] = {name: _cell(suite, cls, name) for name in rows}
    print(report.table(cells, rows))
    return int(any(cell == "FAIL" for column in cells.values() for cell in column.values()))


def _rows(members: Sequence[str] | None) -> list[str]:
    rows = [RECORDED, *MEMBERS]
    for name in members or []:
        if name not in rows:
            raise UserError(f"--member {name}: there is no such member. Members: {', '.join(rows)}.")
    return members or rows


def _of_two_processes(cls: InvariantClass, name: str) -> bool:
    member = cls.members.get(name)
    return member is not None and member.way in TWO_PROCESSES and not missing_package(member)


def _cell(suite: Suite, cls: InvariantClass, name: str) -> str:
    """``pass``, ``FAIL`` (the message goes to stderr), or why there is nothing to run."""
    if reason := skip_reason(suite, cls, name):
        return reason
    try:
        suite.check_recorded(cls) if name == RECORDED else suite.check_member(cls, name)
    except Mismatch as error:
        print(error, file=sys.stderr, flush=True)
    except Exception:  # the other cells are still worth knowing
        print(f"{cls.name}/{name} ended in an error:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    else:
        return "pass"
    return "FAIL"


def skip_reason(suite: Suite, cls: InvariantClass, name: str) -> str | None:
    """Why a cell of the table is not run."""
    if name == RECORDED:
        path = record.path_of(cls.name, suite.device)
        return None if path.is_file() else f"no reference is recorded in {environment.folder_of(suite.device)}"
    if reason := cls.reason(name):
        return reason
    if package := missing_package(cls.members[name]):
        return f"{package} is not installed"
    if suite.device == "cuda" and cls.members[name].way in TWO_PROCESSES:
        return "two processes share one GPU"
    return None


def compare_command(argv: Sequence[str]) -> int:
    """Compares two runs, reference files or commits; exit code 1 if they differ."""
    parser = _parser("compare", "Compare two runs (folders with metrics.csv), reference files or commits.")
    parser.add_argument("a", metavar="RUN_A")
    parser.add_argument("b", metavar="RUN_B")
    parser.add_argument("--class", dest="classes", action="append", metavar="CLASS", help="of commits: only this class")
    parser.add_argument("--tolerance", type=float, help="largest relative residual allowed; the mean may be a tenth of it")
    parser.add_argument("--pictures", default=PICTURES, help="folder for curves of what differs")
    arguments = parser.parse_args(argv)
    sides = [_trajectories(name, arguments.classes) for name in (arguments.a, arguments.b)]
    shared = [name for name in sides[0] if name in sides[1]]
    if not shared:
        raise UserError(f"{arguments.a} and {arguments.b} have no class in common.")
    bound = arguments.tolerance
    tolerance = Tolerance() if bound is None else Tolerance(bound, bound / 10, (bound, bound / 10), bound)
    failed = False
    for name in shared:
        ours, theirs = sides[0][name], sides[1][name]
        found = compare(ours, theirs, tolerance, _common_fields(ours, theirs))
        what = f"{name}: {arguments.a} and {arguments.b}" if name else f"{arguments.a} and {arguments.b}"
        print(_residual_table(found, what))
        if not found.same:
            failed = True
            print(found.message(what))
            title = f"{name or 'runs'} {Path(arguments.a).name} {Path(arguments.b).name}"
            print(f"  curves: {report.save_picture(found, ours, theirs, title, Path(arguments.pictures))}")
    return int(failed)


def _common_fields(ours: Trajectory, theirs: Trajectory) -> list[str] | None:
    """All that both have: a run's folder holds its metrics alone."""
    parts = [name for name in ("grad_norms", "rows", "parameters") if getattr(ours, name) and getattr(theirs, name)]
    return ["loss", "grad_norm", "lr", "num_tokens", "metrics", *parts]


def _residual_table(comparison: Comparison, what: str) -> str:
    own = [r for r in comparison.residuals if " of " not in r.field and not r.field.startswith("parameter ")]
    width = max((len(r.field) for r in own), default=5)
    lines = [what, f"{'field':<{width}}  largest rel.  mean rel.  largest abs.  mean abs."]
    for r in own:
        sizes = f"{r.largest:>12.1e} {r.mean:>10.1e} {r.largest_absolute:>13.1e} {r.mean_absolute:>10.1e}"
        lines.append(f"{r.field:<{width}}  {sizes}{f'  from step {r.step}' if r.exceeds and r.step else ''}")
    return "\n".join(lines)


def _trajectories(name: str, classes: Sequence[str] | None) -> dict[str, Trajectory]:
    """By class the trajectories that an argument names; a run of no class is called ``""``."""
    path = Path(name)
    if path.is_dir():
        from workbench.loggers.csv import FILENAME, read_history

        if not (path / FILENAME).is_file():
            raise UserError(f"{path} holds no run: there is no {FILENAME} in it.")
        return {"": Trajectory.of_metrics(read_history(path).to_dict("records"))}
    if path.suffix == ".json" and path.is_file():
        return {"": record.read(path).trajectory}
    return _of_commit(name, classes)


def _of_commit(revision: str, classes: Sequence[str] | None) -> dict[str, Trajectory]:
    """The canonical runs of a commit, made with its own code in a copy of its tree."""
    root = config_dir().parent
    git = ["git", "-C", str(root)]
    known = subprocess.run([*git, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"], capture_output=True, check=False)
    if known.returncode:
        raise UserError(f"{revision!r} is no run folder, no reference file (.json) and no commit of {root}.")
    with tempfile.TemporaryDirectory(prefix="workbench-commit-") as folder:
        tree, out = Path(folder) / "tree", Path(folder) / "out"
        tree.mkdir()
        archive = subprocess.run([*git, "archive", revision], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
        if not (tree / "workbench" / "invariants" / "commands.py").is_file():
            raise UserError(f"commit {revision} has no invariant classes to run.")
        command = [sys.executable, "-m", "workbench.invariants.commands", "dump", str(out), *(classes or [])]
        env = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"the classes of commit {revision} cannot be run: {done.stderr.strip().splitlines()[-1]}")
        return {file.stem: Trajectory.from_dict(json.loads(file.read_text())) for file in sorted(out.glob("*.json"))}


def _dump(folder: str, *classes: str) -> None:
    """Writes the canonical trajectories of classes, all by default."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with _session("cpu") as session:
        for cls in _classes(classes):
            (Path(folder) / f"{cls.name}.json").write_text(json.dumps(session.canonical(cls).to_dict()))


def mutants_command(argv: Sequence[str]) -> int:
    """Plants every bug and prints which class rejects it; exit code 1 if one survives."""
    from workbench.invariants.planted_bugs import MUTANTS

    parser = _parser("mutants", "Plant every bug in turn and show which class rejects it.")
    parser.add_argument("mutants", nargs="*", metavar="MUTANT", help="all by default")
    parser.add_argument("--class", dest="classes", action="append", metavar="CLASS", help="columns; all by default")
    parser.add_argument("--killers", action="store_true", help="run each mutant on the class recorded as its killer alone")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    arguments = parser.parse_args(argv)
    for name in arguments.mutants:
        if name not in MUTANTS:
            raise UserError(f"there is no mutant {name!r}; workbench invariants mutants --list shows them.")
    bugs = [MUTANTS[name] for name in arguments.mutants] or list(MUTANTS.values())
    if arguments.list:
        print("\n".join(f"{bug.name:<40} {bug.layer:<14} {bug.killer}/{bug.member:<20} {bug.target}" for bug in bugs))
        return 0
    classes = _classes(arguments.classes or ())
    cells = {cls.name: {} for cls in classes}
    survivors = []
    for bug in bugs:
        columns = [cls for cls in classes if not arguments.killers or cls.name == bug.killer]
        verdicts = {cls.name: verdict(bug, cls) for cls in columns}
        for name, word in verdicts.items():
            cells[name][bug.name] = word
        killers = [name for name, word in verdicts.items() if word == "KILLED"]
        survivors += [] if killers else [bug.name]
        print(f"{bug.name:<44} {'killed by ' + ', '.join(killers) if killers else 'SURVIVED'}", flush=True)
    last = f" Survivors: {', '.join(survivors)}." if survivors else ""
    print(f"\n{len(bugs) - len(survivors)} of {len(bugs)} mutants killed.{last}")
    return int(bool(survivors))


def verdict(bug: Mutant, cls: InvariantClass) -> str:
    """``KILLED`` if the class rejects the bug: in its canonical run or, where the bug needs one, in the bug's member."""
    if bug.member != CANONICAL and bug.member not in cls.members:
        return "-"
    try:
        run_under(bug, cls, bug.member)
    except Mismatch:
        return "KILLED"
    except Exception as error:  # a bug that ends a run shows itself
        return f"ends: {type(error).__name__}"
    return "survives"


def run_under(bug: Mutant, cls: InvariantClass, member: str) -> None:
    """Runs one cell of the table under a bug, as on hardware that the reference was not recorded on.

    Raises:
        Mismatch: the cell fails.
    """
    with tempfile.TemporaryDirectory(prefix="workbench-mutant-") as folder, planted(bug):
        suite = Suite(Session(Path(folder), bug.name), strict=False)
        suite.check_recorded(cls) if member == CANONICAL else suite.check_member(cls, member)


def suite_under(bug: Mutant, session: Session) -> Suite:
    """A suite on the runs that other processes made under a bug."""
    planted_session = copy.copy(session)
    planted_session.mutant = bug.name
    return Suite(planted_session, strict=False)


# -- arguments ----------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UserError(f"{message} ({self.format_usage().strip()})")


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    return _Parser(prog=f"workbench invariants {name}", description=about)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose references (default: cpu)")


def _has_device(device: str) -> bool:
    return device == "cpu" or torch.cuda.is_available()


def _classes(names: Sequence[str]) -> list[InvariantClass]:
    return [load_class(name) for name in names or class_names()]


@contextlib.contextmanager
def _session(device: str) -> Iterator[Session]:
    environment.pin()
    with tempfile.TemporaryDirectory(prefix="workbench-invariants-") as folder:
        yield Session(Path(folder), device=device)


if __name__ == "__main__":
    if sys.argv[1] == "dump":
        _dump(*sys.argv[2:])
    else:
        sys.exit(globals()[f"{sys.argv[1]}_command"](sys.argv[2:]))
