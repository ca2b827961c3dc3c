"""``workbench invariants parity``: recorded cases, replayed with this project's methods, and how far the two are apart.

A case file holds a trainer's options and what it logged at every optimizer step, on the model and rows of a fixture. The same
options, in our terms (`parity_trainers`), run on the same model and rows here (`parity_run`). A field that deviates is asked for
its reason: one that is known (`parity_expected`), or rounding, which further runs of ours measure.
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from workbench.cli.parser import Parser
from workbench.errors import UserError, nearest
from workbench.invariants.parity_cases import Case, load_case
from workbench.invariants.parity_compare import Comparison, compare, is_number, spread
from workbench.invariants.parity_expected import as_theirs, coarse_sums, expected
from workbench.invariants.parity_report import Json, Report, Table
from workbench.invariants.parity_run import Run, quiet, run
from workbench.invariants.parity_trainers import Replay, option_of, replay

# A deviation is one of rounding if it is no more than so many times what runs of ours that differ in rounding alone are apart,
ROUNDING = 5.0
# and no more than so many times the tolerance: beyond, a trajectory says nothing.
CHAOS = 100.0


def command(argv: Sequence[str]) -> int:
    """``workbench invariants parity CASE.json...``; the exit code is that of `main`."""
    parser = Parser(
        prog="workbench invariants parity",
        description="Replays runs that TRL logged, on the same model and rows with the same options, and prints for each field "
        "the largest relative deviation over all steps.",
        epilog="Columns: the largest |ours - TRL's| / |TRL's|; the largest |ours - TRL's| as a share of what the tolerance "
        "allows; the first step over it. Exit code 0: all cases match, or deviate as expected; 1: one deviates; 2: one is not "
        "replayed.",
    )
    parser.add_argument("cases", nargs="+", metavar="CASE.json", help="what was logged: kind, data, args, common, steps")
    parser.add_argument("--fixture", metavar="DIR", help="folder with model/ and data/ (default: tests/parity of the checkout)")
    parser.add_argument("--steps", type=int, metavar="N", help="compare the first N optimizer steps only")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = parser.parse_args(argv)
    if given.steps is not None and given.steps < 1:
        raise UserError(f"--steps {given.steps} must be at least 1.")
    return main(given.cases, given.fixture, given.steps, given.json)


def main(files: Sequence[str], fixture: str | None = None, steps: int | None = None, as_json: bool = False) -> int:
    """Replays case files and prints the comparison.

    Args:
        files: case files.
        fixture: folder with ``model`` and ``data``; None: that of the checkout.
        steps: compare no further than this step.
        as_json: print one JSON object instead of a table.

    Returns:
        0 if all match, 1 if one deviates, 2 if one cannot be replayed.

    Raises:
        UserError: there is no fixture, or the only case cannot be replayed.
    """
    folder = find_fixture(fixture)
    refused: dict[str, str] = {}
    plans = []
    for file in files:
        with _refusing(file, refused, alone=len(files) == 1):
            case = load_case(Path(file).expanduser())
            plans.append((file, case, replay(case)))
            for key in case.unread:
                print(f"workbench: {file}: nothing reads the key {key!r}.{nearest(key, _KEYS)}", file=sys.stderr)
    report: Report = Json() if as_json else Table(len(plans))
    done: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="parity_") as cache, quiet() if plans else contextlib.nullcontext():
        for file, case, plan in plans:
            report.start(case)
            with _refusing(file, refused, alone=len(files) == 1):
                done.append(judge(case, folder, Path(cache), plan, steps))
                report.add(done[-1])
    report.end(done, refused)
    for error in refused.values():
        print(f"workbench: {error}", file=sys.stderr)
    return 2 if refused else 0 if all(c.matches for c in done) else 1


_KEYS = ("margin", "columns", "lora", "attn_implementation", "common", "args", "data", "steps")


@contextlib.contextmanager
def _refusing(file: str, refused: dict[str, str], alone: bool) -> Any:
    """Keeps the mistake of one case of several; that of a single one ends the command."""
    try:
        yield
    except UserError as error:
        text = str(error) if str(error).startswith(file) else f"{file}: {error}"
        if alone:
            raise UserError(text) from error
        refused[file] = text


def default_fixture() -> Path | None:
    """The fixture of a checkout, where this package lies in one."""
    folder = Path(__file__).parents[2] / "tests" / "parity"
    return folder if (folder / "model").is_dir() and (folder / "data").is_dir() else None


def find_fixture(given: str | None) -> Path:
    """The fixture's folder.

    Raises:
        UserError: it is not there, or has no model or data.
    """
    folder = Path(given).expanduser() if given is not None else default_fixture()
    if folder is None:
        raise UserError("no fixture beside this installation: give --fixture DIR, a folder with model/ and data/ (tests/parity).")
    for part in ("model", "data"):
        if not (folder / part).is_dir():
            raise UserError(f"--fixture {folder}: there is no folder {part}/ in it; it must hold model/ and data/.")
    return folder


# -- judging --------------------------------------------------------------------------------------------------------


def judge(
    case: Case, fixture: Path, cache: Path, plan: Replay | None = None, steps: int | None = None, *, explain: bool = True
) -> Comparison:
    """Replays a case, compares, and looks for the reasons of what deviates.

    Args:
        case: the record.
        fixture: folder with ``model`` and ``data``.
        cache: folder for prepared rows.
        plan: what to run; None: what the case's options ask for.
        steps: compare no further than this step.
        explain: look for reasons, at the cost of up to five more runs.
    """
    plan = plan or replay(case)

    def again(name: str, changes: Sequence[_Change] = (), **method: Any) -> Run:
        changed = replace(plan, method={**plan.method, **method})
        with contextlib.ExitStack() as stack:
            for change in changes:
                stack.enter_context(change())
            return run(case, fixture, cache / name, changed, steps)

    first = again("exact")
    found = compare(case, first.steps, steps)
    if found.matches or not explain:
        return found
    entries = expected(case, lambda name: option_of(case, name), {**first.facts, **_facts(case, plan)})
    changes = as_theirs(entries)
    likened = again("likened", changes) if changes else first
    found = found.explained(_known(found, entries, compare(case, likened.steps, steps)))
    if found.matches or max(f.used for f in found.deviating) > CHAOS:
        return found
    packed = {"layout": "packed"} if plan.head is None else {}
    padded = {"layout": "padded", "pad_to_multiple_of": 16}
    if plan.method.get("precompute_ref_logps"):  # in other batches, so other kernels
        padded["precompute_ref_micro_batch_size"] = 5
    runs = [likened, again("packed", changes, **packed), again("padded", changes, **padded)]
    runs.append(again("coarse", [*changes, coarse_sums]))
    runs.append(again("backwards", [*changes, partial(coarse_sums, backwards=True)], **padded))
    apart = {f.name: spread(case, [r.steps for r in runs], f.name) for f in found.deviating}
    reason = "rounding: our own runs that differ in that alone are {:.1f} tolerances apart"
    return found.explained({f.name: reason.format(apart[f.name]) for f in found.deviating if f.used <= ROUNDING * apart[f.name]})


_Change = Callable[[], AbstractContextManager[Any]]


def _facts(case: Case, plan: Replay) -> dict[str, int]:
    """What of a case no option says: steps without a loss, and micro-batches of a step beyond the first."""
    no_number = sum("loss" in step and not is_number(step["loss"]) for step in case.steps)
    accumulated = plan.data["batch_size"] // plan.data["micro_batch_size"] - 1
    further = plan.method.get("steps_per_generation", 1) - 1
    return {"no_number": no_number, "accumulated": accumulated, "further_steps": further}


def _known(found: Comparison, entries: Sequence[Any], likened: Comparison) -> dict[str, str]:
    """Reasons by field: of entries that are not checked, and of those that a run as theirs confirms."""
    reasons = {}
    for deviating in found.deviating:
        for entry in entries:
            confirmed = entry.as_theirs is None or likened.field(deviating.name).used < max(1.0, deviating.used / CHAOS)
            if entry.covers(deviating.name) and confirmed:
                reasons.setdefault(deviating.name, entry.reason)
    return reasons
