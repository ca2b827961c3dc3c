"""``workbench invariants parity``: recorded cases, replayed with this project's methods, and how far the two are apart.

A case file holds a trainer's options and what it logged at every optimizer step, on the model and rows of a fixture. The same
options, in our terms (`parity_options`), run on the same model and rows here, on a bare ``L.Trainer``.
"""

import contextlib
import functools
import importlib
import json
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from workbench.cli.parser import Parser
from workbench.errors import UserError, nearest
from workbench.invariants.parity_cases import BESIDE, Case, Row, load_case, load_rows
from workbench.invariants.parity_expected import expected
from workbench.invariants.parity_rows import Fixture
from workbench.invariants.parity_trainers import Replay, replay, warmup_steps

# A field matches where |ours - theirs| <= relative * |theirs| + absolute at every step.
TOLERANCES: dict[str, tuple[float, float]] = {"loss": (1e-5, 1e-6), "grad_norm": (1e-4, 0.0)}
METRICS = (1e-4, 1e-6)
# The adapter that ``"lora": true`` stands for.
LORA: dict[str, Any] = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}

Verdict = Literal["matches", "expected", "deviates"]
Steps = list[dict[str, float]]


@dataclass(frozen=True)
class Field:
    """How far one field of a case is from the record.

    Args:
        name: of the field.
        deviation: largest ``|ours - theirs| / |theirs|`` over the steps (values below 1e-6 count as that); infinite where we
            have no value.
        used: largest ``|ours - theirs|`` as a share of what the tolerance allows.
        first_over: first step that is over tolerance.
        verdict: whether it matches, deviates, or deviates as expected.
        reason: why, where it does not match.
    """

    name: str
    deviation: float
    used: float
    first_over: int | None
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """A case, replayed: its fields, and the number of steps compared."""

    case: Case
    steps: int
    fields: list[Field]

    @property
    def matches(self) -> bool:
        """Whether nothing deviates but what is expected to."""
        return all(f.verdict != "deviates" for f in self.fields)


# -- running --------------------------------------------------------------------------------------------------------


def run(case: Case, fixture: Path, cache: Path, plan: Replay | None = None, steps: int | None = None) -> Steps:
    """The steps of our own run of a case, with the metrics that the record has names for.

    Args:
        case: the record.
        fixture: folder with ``model`` and ``data``.
        cache: folder for prepared rows.
        plan: what to run; None: what the case's options ask for.
        steps: optimizer steps to run; None: all that are recorded.
    """
    import lightning as L

    from workbench.data.module import DataModule

    plan = plan or replay(case)
    rows = _rows(case, plan, fixture)
    recorder = _recorder(case.steps[-1]["step"] if steps is None else steps)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*_callbacks(case), recorder],
        **plan.trainer,
    )
    trainer.fit(_method(case, plan, fixture), DataModule(rows, cache_dir=str(cache), **plan.data))
    return recorder.steps


def _rows(case: Case, plan: Replay, fixture: Path) -> list[Row]:
    from workbench.models.tokenizer import load_tokenizer

    rows = load_rows(case, fixture)
    around = Fixture(load_tokenizer(_spec(plan, fixture)), lambda name: load_rows(replace(case, data=name, extras={}), fixture))
    for change in plan.rows:
        rows = change(rows, around)
    return rows


def _spec(plan: Replay, fixture: Path) -> Any:
    from workbench.models.load import ModelSpec

    return ModelSpec(str(fixture / "model"), **plan.model)


def _method(case: Case, plan: Replay, fixture: Path) -> Any:
    from workbench.models.peft import PeftSpec

    module, name = plan.target.split(":")
    arguments = {"optim": _optim(plan), "scheduler": _scheduler(plan), **plan.method}
    if "lora" in case.extras:
        asked = case.extras["lora"]
        arguments["peft"] = PeftSpec(**{**LORA, **(asked if isinstance(asked, dict) else {})})
    model = _spec(plan, fixture)
    if "ref_model_scale" in case.extras:
        arguments["ref_model"] = _scaled(model, case.extras["ref_model_scale"])
    if plan.head is not None:
        arguments["tokenizer"], model = _with_head(model, *plan.head)
    return getattr(importlib.import_module(module), name)(model, **arguments)


def _scaled(spec: Any, factor: float) -> Any:
    """The model with its head times ``factor``."""
    from workbench.models.load import load_model

    model = load_model(spec)
    model.get_output_embeddings().weight.data.mul_(factor)
    return model


def _with_head(spec: Any, kind: Any, outputs: int) -> tuple[Any, Any]:
    """The tokenizer, and the model under the head that the fixture's records begin with."""
    import torch

    from workbench.models.heads import classification_head, load_classifier
    from workbench.models.tokenizer import load_tokenizer

    model = load_classifier(spec, kind=kind, num_labels=outputs)
    head = classification_head(model)
    head.weight.data = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(3)) * 0.1
    return load_tokenizer(spec), model


def _callbacks(case: Case) -> list[Any]:
    from workbench.callbacks.averaging import BEMA

    return [BEMA(**{"apply_at_end": False, **case.extras["bema"]})] if "bema" in case.extras else []


def _optim(plan: Replay) -> Any:
    import torch

    from workbench.methods.optim import adamw

    name, arguments = plan.optim
    return functools.partial(adamw if name == "adamw" else getattr(torch.optim, name), **arguments)


def _scheduler(plan: Replay) -> Any:
    from workbench.methods.optim import schedule

    def build(optimizer: Any, num_training_steps: int) -> Any:
        asked = {**plan.schedule, "warmup_steps": warmup_steps(plan.schedule["warmup_steps"], num_training_steps)}
        return schedule(optimizer, num_training_steps, **asked)

    return build


def _recorder(last: int) -> Any:
    """A callback that keeps every step's metrics, and stops after step ``last``."""
    from lightning.pytorch.callbacks import Callback

    class Recorder(Callback):
        def __init__(self) -> None:
            self.steps: Steps = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch.closes_step:
                self.steps.append({name.removeprefix("train/"): value for name, value in module.step_metrics.items()})
                trainer.should_stop = len(self.steps) >= last

    return Recorder()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No notices, warnings or bars, and one thread: the models are small, and a sum's order depends on the threads."""
    import datasets
    import lightning  # noqa: F401  which sets its loggers' levels when it is imported
    import torch

    names = ("workbench", "lightning.pytorch", "lightning.fabric", "datasets")
    levels = {name: logging.getLogger(name).level for name in names}
    bars, threads = datasets.are_progress_bars_disabled(), torch.get_num_threads()
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        datasets.disable_progress_bars()
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
        torch.set_num_threads(threads)


# -- comparing ------------------------------------------------------------------------------------------------------


def compare(case: Case, ours: Steps, steps: int | None = None) -> Comparison:
    """How far our steps are from the record's.

    A record that logs every n-th step holds means over the n steps up to it, of the gradient norm the last value.

    Args:
        case: the record.
        ours: our steps from the first one on.
        steps: compare no further than this step.
    """
    theirs = [step for step in case.steps if steps is None or step["step"] <= steps]
    names = dict.fromkeys(name for step in theirs for name in step if name not in BESIDE)
    starts = [0, *(int(step["step"]) for step in theirs)]
    logged = [ours[start : int(step["step"])] for start, step in zip(starts, theirs, strict=False)]
    return Comparison(case, len(theirs), [_field(case, name, theirs, logged) for name in names])


def _field(case: Case, name: str, theirs: Sequence[Mapping[str, Any]], ours: Sequence[Steps]) -> Field:
    relative, absolute = TOLERANCES.get(name, METRICS)
    deviation, used, first_over, missing = 0.0, 0.0, None, False
    for step, window in zip(theirs, ours, strict=True):
        if step.get(name) is None:
            continue
        value = _logged(name, window)
        missing = missing or value is None
        apart = math.inf if value is None else abs(value - step[name])
        apart = math.inf if math.isnan(apart) else apart
        allowed = relative * abs(step[name]) + absolute
        share = apart / allowed if allowed else math.inf if apart else 0.0
        deviation, used = max(deviation, apart / max(abs(step[name]), 1e-6)), max(used, share)
        if share > 1 and first_over is None:
            first_over = int(step["step"])
    if used <= 1:
        return Field(name, deviation, used, None, "matches")
    entry = expected(case, name)
    if entry is not None and (entry.within is None or deviation <= entry.within):
        return Field(name, deviation, used, first_over, "expected", entry.reason)
    reason = "not logged here" if missing else ""
    return Field(name, deviation, used, first_over, "deviates", reason)


def _logged(name: str, window: Steps) -> float | None:
    values = [step[name] for step in window if name in step]
    if not values:
        return None
    return values[-1] if name == "grad_norm" else sum(values) / len(values)


# -- the command ----------------------------------------------------------------------------------------------------


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


def command(argv: Sequence[str]) -> int:
    """``workbench invariants parity CASE.json...``; the exit code is that of `main`."""
    parser = Parser(
        prog="workbench invariants parity",
        description="Replays runs that TRL logged, on the same model and rows with the same options, and prints for each field "
        "the largest relative deviation over all steps.",
        epilog="Exit code 0: all cases match; 1: one deviates; 2: one cannot be replayed.",
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

    Returns:
        0 if all match, 1 if one deviates, 2 if one cannot be replayed.
    """
    folder = find_fixture(fixture)
    plans: list[tuple[Case, Replay]] = []
    refused = {}
    for file in files:
        try:
            case = load_case(Path(file).expanduser())
            plans.append((case, replay(case)))
            for key in case.unread:
                print(f"workbench: {file}: nothing reads the key {key!r}.{nearest(key, case.extras)}", file=sys.stderr)
        except UserError as error:
            refused[file] = str(error)
    if len(files) == 1 and refused:
        raise UserError(_about(*refused.popitem()))
    report = _Json() if as_json else _Table(len(plans))
    done = []
    with tempfile.TemporaryDirectory(prefix="parity_") as cache:
        if plans:
            with quiet():
                for case, plan in plans:
                    report.start(case)
                    try:
                        ours = run(case, folder, Path(cache), plan, steps)
                    except UserError as error:
                        if len(files) == 1:
                            raise UserError(_about(str(case.path), str(error))) from error
                        refused[str(case.path)] = str(error)
                        continue
                    done.append(compare(case, ours, steps))
                    report.add(done[-1])
    report.end(done, refused)
    for file, error in refused.items():
        print(f"workbench: {_about(file, error)}", file=sys.stderr)
    return 2 if refused else 0 if all(c.matches for c in done) else 1


def _about(file: str, error: str) -> str:
    """The error, naming its file."""
    return error if error.startswith(file) else f"{file}: {error}"


class _Json:
    """One object on stdout, in the end."""

    def start(self, case: Case) -> None:
        """Nothing yet."""

    def add(self, comparison: Comparison) -> None:
        """Nothing yet."""

    def end(self, done: Sequence[Comparison], refused: Mapping[str, str]) -> None:
        """Prints it."""
        cases = [
            {
                "case": c.case.name,
                "file": str(c.case.path),
                "kind": c.case.kind,
                "steps": c.steps,
                "matches": c.matches,
                "fields": {f.name: {k: _number(v) for k, v in asdict(f).items() if k != "name"} for f in c.fields},
            }
            for c in done
        ]
        matches = not refused and all(c.matches for c in done)
        print(json.dumps({"matches": matches, "cases": cases, "refused": dict(refused)}, indent=1))


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and math.isinf(value) else value


class _Table:
    """A line for each field as cases finish, and a last line that counts."""

    def __init__(self, cases: int) -> None:
        self.cases = cases
        self.started = 0

    def start(self, case: Case) -> None:
        """On a terminal, what is being run."""
        if not self.started:
            print(f"{'case':<28} {'field':<20} {'deviation':>10} {'of tolerance':>13} {'over from step':>15}  verdict")
        self.started += 1
        if self.cases > 1 and sys.stderr.isatty():
            print(f"\r\033[K{self.started}/{self.cases} {case.name}", end="", file=sys.stderr, flush=True)

    def add(self, comparison: Comparison) -> None:
        """The fields of a case."""
        if self.cases > 1 and sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        name = comparison.case.name
        for found in comparison.fields:
            over = "" if found.first_over is None else str(found.first_over)
            verdict = f"{found.verdict}: {found.reason}" if found.reason else found.verdict
            print(f"{name:<28} {found.name:<20} {found.deviation:>10.1e} {found.used:>13.1%} {over:>15}  {verdict}", flush=True)
            name = ""

    def end(self, done: Sequence[Comparison], refused: Mapping[str, str]) -> None:
        """How many match, and which do not."""
        deviating = [c.case.name for c in done if not c.matches]
        text = f"{len(done) - len(deviating)} of {self.cases + len(refused)} cases match"
        text += f"; deviating: {', '.join(deviating)}" if deviating else ""
        text += f"; not replayed: {len(refused)}" if refused else ""
        print(f"\n{text}. Tolerances: loss 1e-5 |x| + 1e-6, grad_norm 1e-4 |x|, others 1e-4 |x| + 1e-6.")
