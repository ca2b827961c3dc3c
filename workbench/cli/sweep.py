"""Sweeps: ``workbench train -m optim.lr=1e-5,1e-4 seed=0,1`` runs one process per job and ends with a table and a
plot.

Hydra's sweepers choose the jobs; `SubprocessLauncher` runs each as the command a person would type, with a folder of
its own. A job's own processes (DDP) therefore repeat that job's command and never the sweep. A failed job is
recorded, and the rest go on.
"""

import contextlib
import itertools
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf

from workbench.cli import check as checker
from workbench.cli import config, rundir, schema
from workbench.cli.flags import quote
from workbench.errors import UserError

RESULT_FILE = "result.json"
TABLE_FILE = "sweep.csv"
PLUGIN = "hydra_plugins.workbench.SubprocessLauncher"  # Hydra builds classes of this package alone; no such module exists
MAX_CHECKED = 24  # compositions checked before the first job starts


class JobFailed(RuntimeError):
    """A job ended with another exit code than 0."""


class FailedReturn(JobReturn):
    """A failed job for Hydra, whose own class also prints all the overrides to stderr."""

    @property
    def return_value(self) -> Any:
        """Raises what went wrong."""
        raise self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


class SubprocessLauncher(Launcher):
    """Runs every job of a sweep in a process of its own.

    Args:
        n_jobs: jobs that run at the same time.
        devices: one entry per concurrent job, given to it as CUDA_VISIBLE_DEVICES; null leaves that as it is.
    """

    def __init__(self, n_jobs: int = 1, devices: list[str] | None = None):
        self.n_jobs = n_jobs
        self.devices = devices
        self.config: DictConfig | None = None
        self.running: list[subprocess.Popen] = []
        self.varied: list[str] = []

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        """Called by Hydra with the sweep's configuration; jobs are commands, so that the task function is not needed."""
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Runs the jobs and returns their metrics, in order."""
        from hydra.core.utils import filter_overrides

        folder = pathlib.Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        slots = list(self.devices or [None] * self.n_jobs)
        jobs = [(initial_job_idx + i, list(filter_overrides(o))) for i, o in enumerate(job_overrides)]
        self.varied = _varied_keys([overrides for _, overrides in jobs])
        print(f"{len(jobs)} jobs, {min(len(slots), len(jobs))} at a time", flush=True)

        def run(job: tuple[int, list[str]]) -> JobReturn:
            slot = slots.pop()
            try:
                return self._run_job(folder, *job, devices=slot)
            finally:
                slots.append(slot)

        pool = ThreadPoolExecutor(len(slots))
        with self._stop_by_signal():
            try:
                return list(pool.map(run, jobs))
            finally:  # after Ctrl-C: running jobs save and stop, waiting ones do not start
                pool.shutdown(wait=True, cancel_futures=True)

    @contextlib.contextmanager
    def _stop_by_signal(self) -> Iterator[None]:
        """Ctrl-C reaches the jobs by itself, since they share the terminal; SIGTERM is passed on to them."""

        def stop(*_: Any) -> None:
            for process in self.running:
                process.terminate()
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _run_job(self, folder: pathlib.Path, number: int, overrides: list[str], devices: str | None) -> JobReturn:
        run_dir = folder / str(number)
        run_dir.mkdir(parents=True, exist_ok=True)
        command = job_command(overrides, run_dir)
        environment = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": str(devices)} if devices is not None else {})
        values = " ".join(o for o in overrides if _split(o)[0] in self.varied)
        print(f"job {number}: {values}".rstrip(": "), flush=True)
        started = time.time()
        with (run_dir / "log.txt").open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            self.running.append(process)
            code = process.wait()
            self.running.remove(process)
        record = _record(run_dir, number, overrides, code, time.time() - started)
        state = "ok" if code == 0 else f"failed with exit code {code}: {record['error']}"
        print(f"job {number}: {state} ({record['seconds']:.0f} s)", flush=True)
        return _job_return(record, self.config)


def job_command(overrides: Sequence[str], run_dir: pathlib.Path) -> list[str]:
    """The command of one job: what a person would type to run it alone."""
    return [sys.executable, "-m", "workbench", "train", *overrides, "hydra.mode=RUN", f"paths.run_dir={quote(str(run_dir))}"]


def _record(run_dir: pathlib.Path, number: int, overrides: list[str], code: int, seconds: float) -> dict:
    result_file = run_dir / RESULT_FILE
    metrics = json.loads(result_file.read_text()).get("metrics", {}) if result_file.is_file() else {}
    lines = [line for line in (run_dir / "log.txt").read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("workbench: ")] or lines or ["no output"]
    error = "" if code == 0 else told[-1]
    record = {"job": number, "overrides": overrides, "exit_code": code, "error": error, "seconds": seconds, "metrics": metrics}
    (run_dir / "job.json").write_text(json.dumps(record, indent=1))
    return record


def _job_return(record: dict, cfg: DictConfig) -> JobReturn:
    """What Hydra's sweepers look at; an optimising sweeper (Optuna, Ax) minimises the value."""
    kind = JobReturn if record["exit_code"] == 0 else FailedReturn
    result = kind(overrides=record["overrides"], cfg=cfg, working_dir=os.getcwd())
    if record["exit_code"] == 0:
        result.status = JobStatus.COMPLETED
        value = record["metrics"].get(cfg.metric)
        result.return_value = -value if value is not None and cfg.metric_goal == "max" else value
    else:
        result.status = JobStatus.FAILED
        result.return_value = JobFailed(f"job {record['job']}: {record['error']}")
    return result


def main(arguments, config_name: str) -> int:
    """Checks the jobs, runs them through Hydra's sweeper, prints the table; 1 if a job failed."""
    composed = config.load(arguments.overrides, config_name, arguments.config_dir, sweep=True)
    check_hydra(composed)
    check_jobs(composed, arguments, config_name)
    folder = rundir.sweep_dir(composed.cfg)
    print(f"sweep in {folder}")
    try:
        _sweep(composed, arguments, config_name, folder)
    except JobFailed:  # told in the table
        pass
    finally:
        records = read_records(folder)
        print(summary(records, composed.cfg.metric, composed.cfg.metric_goal, folder, composed.overrides))
    return 1 if any(r["exit_code"] for r in records) else 0


def _sweep(composed: config.Composed, arguments, config_name: str, folder: pathlib.Path) -> None:
    from hydra._internal.hydra import Hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins

    Plugins.instance().class_name_to_class[PLUGIN] = SubprocessLauncher
    hydra = Hydra(task_name="workbench", config_loader=config.make_loader(arguments.config_dir))
    overrides = [*composed.overrides, *composed.hydra_overrides, f"hydra.sweep.dir={quote(str(folder))}"]
    overrides = [o for o in overrides if not o.startswith("hydra.mode=")] + ["hydra.mode=MULTIRUN"]
    GlobalHydra.instance().clear()
    GlobalHydra.instance().initialize(hydra)
    try:
        hydra.multirun(config_name, _no_task, overrides, with_log_configuration=False)
    except JobFailed:
        raise
    except Exception as error:
        raise UserError(config.explain(error, overrides)) from error
    finally:
        GlobalHydra.instance().clear()


def _no_task(cfg: DictConfig) -> None:
    raise RuntimeError("a sweep needs hydra/launcher=subprocess, which starts the jobs as commands")


def check_hydra(composed: config.Composed) -> None:
    """Raises `UserError` for options of Hydra's that a sweep takes from elsewhere, and for unknown ones of the launcher."""
    for override in composed.hydra_overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key in ("hydra.sweep.dir", "hydra.run.dir"):
            raise UserError(f"{key} is not read: set paths.sweep_dir.")
    launcher = OmegaConf.to_container(composed.hydra.launcher)
    if launcher.get("_target_") == PLUGIN:
        checker.check_keys("hydra.launcher", launcher, schema.describe(SubprocessLauncher), "the launcher")


def check_jobs(composed: config.Composed, arguments, config_name: str) -> None:
    """Composes and checks the jobs before the first one starts: all of a small grid, else every value once."""
    for overrides in job_overrides(composed):
        job = config.load(overrides, config_name, arguments.config_dir)
        checker.check(job.cfg)


def job_overrides(composed: config.Composed) -> list[list[str]]:
    """Overrides of the jobs to check."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parameters = composed.hydra.sweeper.get("params") or {}
    typed = [*(f"{key}={value}" for key, value in parameters.items()), *composed.overrides]
    parser = OverridesParser.create(config_loader=config.make_loader())
    axes: dict[str, list[str]] = {}
    for override in parser.parse_overrides(typed):
        axes[override.get_key_element()] = _values(override)
    lists = [[f"{key}={value}" if value is not None else key for value in values] for key, values in axes.items()]
    size = 1
    for values in lists:
        size *= len(values)
    if size <= MAX_CHECKED:
        return [list(job) for job in itertools.product(*lists)]
    first = [values[0] for values in lists]
    varied = [[*first[:i], value, *first[i + 1 :]] for i, values in enumerate(lists) for value in values[1:]]
    return [first, *varied]


def _values(override) -> list[str | None]:
    if override.is_delete():
        return [override.get_value_element_as_str() if override.value() is not None else None]
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if override.is_discrete_sweep():
        return list(override.sweep_string_iterator())
    return [str(override.value().start)]  # an interval


def read_records(folder: pathlib.Path) -> list[dict]:
    """The jobs' records, by number."""
    records = [json.loads(file.read_text()) for file in folder.glob("*/job.json")]
    return sorted(records, key=lambda r: r["job"])


def summary(records: list[dict], metric: str, goal: str, folder: pathlib.Path, typed: Sequence[str] = ()) -> str:
    """Writes ``sweep.csv`` and ``sweep.png`` and returns the table to print, best job first."""
    if not records:
        return "no job was run"
    varied = _varied_keys([r["overrides"] for r in records])
    rows = [_row(r, varied) for r in _ranked(records, metric, goal)]
    columns = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    _write_csv(folder / TABLE_FILE, columns, rows)
    shown = ["job", *varied, *_shown_metrics(rows, metric, varied), "status"]
    lines = [_table([c for c in shown if c in columns], rows)]
    best = _ranked(records, metric, goal)[0]
    if best["exit_code"] == 0 and metric in best["metrics"]:
        lines.append(f"best {metric}: job {best['job']}, {folder / str(best['job'])}")
        lines.append(f"again: workbench train {shlex.join(_as_typed(best['overrides'], varied, typed))}")
    elif metric not in best["metrics"]:
        lines.append(f"no job logged metric={metric}; logged: {', '.join(sorted(best['metrics'])) or 'nothing'}")
    plotted = _plot(records, varied, metric, folder / "sweep.png")
    lines.append(f"table: {folder / TABLE_FILE}" + (f"  plot: {folder / 'sweep.png'}" if plotted else ""))
    return "\n".join(lines)


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.lstrip("+").partition("=")
    return key, value


def _as_typed(overrides: list[str], varied: list[str], typed: Sequence[str]) -> list[str]:
    """A job's overrides with those that all jobs share as the user wrote them."""
    shared = [o for o in typed if _split(o)[0] not in (*varied, "sweep")]
    return [*shared, *(o for o in overrides if _split(o)[0] in varied)]


def _varied_keys(jobs: list[list[str]]) -> list[str]:
    values: dict[str, set] = {}
    for overrides in jobs:
        for override in overrides:
            key, value = _split(override)
            values.setdefault(key, set()).add(value)
    return [key for key, seen in values.items() if len(seen) > 1]


def _ranked(records: list[dict], metric: str, goal: str) -> list[dict]:
    sign = -1 if goal == "max" else 1

    def order(record: dict) -> tuple:
        value = record["metrics"].get(metric) if record["exit_code"] == 0 else None
        is_number = value is not None and value == value
        return (not is_number, sign * value if is_number else 0, record["job"])

    return sorted(records, key=order)


def _row(record: dict, varied: list[str]) -> dict:
    values = dict(map(_split, record["overrides"]))
    row = {"job": record["job"]} | {key: values.get(key, "") for key in varied}
    status = "ok" if record["exit_code"] == 0 else f"exit {record['exit_code']}"
    return row | record["metrics"] | {"seconds": round(record["seconds"], 1), "status": status, "error": record["error"]}


def _shown_metrics(rows: list[dict], metric: str, varied: list[str]) -> list[str]:
    logged = [k for k in dict.fromkeys(itertools.chain.from_iterable(rows)) if "/" in k and k not in varied]
    wanted = [metric, "val/exact_match", "exact_match", "val/loss", "train/loss"]
    return list(dict.fromkeys(k for k in wanted if k in logged))


def _write_csv(file: pathlib.Path, columns: list[str], rows: list[dict]) -> None:
    import csv

    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)


def _table(columns: list[str], rows: list[dict]) -> str:
    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    text = [columns, *([cell(row.get(c, "")) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in text) for i in range(len(columns))]
    return "\n".join("  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)).rstrip() for line in text)


def _plot(records: list[dict], varied: list[str], metric: str, file: pathlib.Path) -> bool:
    """The metric against each varied option."""
    done = [r for r in records if r["exit_code"] == 0 and metric in r["metrics"]]
    if not done or not varied:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(varied), figsize=(4 * len(varied), 3.2), squeeze=False, sharey=True)
    for axis, key in zip(axes[0], varied, strict=True):
        values = [dict(map(_split, r["overrides"])).get(key, "") for r in done]
        places, is_log = _places(values)
        axis.plot(places, [r["metrics"][metric] for r in done], "o")
        axis.set_xlabel(key)
        if is_log:
            axis.set_xscale("log")
    axes[0][0].set_ylabel(metric)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return True


def _places(values: list[str]) -> tuple[list, bool]:
    """Numbers where all values are numbers (on a log axis if they span a decade), else the texts."""
    try:
        numbers = [float(v) for v in values]
    except ValueError:
        return values, False
    return numbers, min(numbers) > 0 and max(numbers) / min(numbers) >= 10
