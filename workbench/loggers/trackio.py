"""Metrics, tables and configuration in Trackio: local, without an account."""

import contextlib
import getpass
import io
import json
import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from workbench.errors import UserError, check_choice
from workbench.loggers.tables import plain_cell

log = logging.getLogger(__name__)

IDENTITY = "trackio.json"  # In the run's folder: which Trackio run it is, so that a resumed run continues that one.


class TrackioLogger(Logger):
    """Logs to Trackio (``trackio show --project NAME`` opens the dashboard).

    Everything stays in a local folder: ``dir``, else ``TRACKIO_DIR``, else Trackio's own default. (With
    ``TRACKIO_SPACE_ID`` or ``TRACKIO_SERVER_URL`` set, Trackio itself logs to that space or server instead; nothing is
    rewound there.)

    Steps are what the caller says they are. A value that is logged again for a step replaces that of an earlier
    process, and `rewind` drops later steps, so that a resumed run has one point per step and metric.

    Args:
        project: dashboards show one project.
        name: name of the run, the folder's by default; a taken name gets a number.
        save_dir: the run's folder. The run that was logged from there before is continued.
        resume: ``auto`` continues the folder's run (without a folder, the run of that name) if there is one; ``must``
            fails if there is none; ``never`` starts a new one.
        dir: where Trackio keeps its data.
        config: shown with the run; `log_hyperparams` adds to it.
        group: runs of one group can be shown and hidden together.
        system_metrics: also log the use of processors, GPUs and memory.
    """

    def __init__(
        self,
        project: str = "workbench",
        name: str | None = None,
        save_dir: str | None = None,
        resume: Literal["auto", "must", "never"] = "auto",
        dir: str | None = None,
        config: dict[str, Any] | None = None,
        group: str | None = None,
        system_metrics: bool = False,
    ) -> None:
        super().__init__()
        check_choice("resume", resume, ("auto", "must", "never"))
        self.project = project
        self.group = group
        self.resume = resume
        self.system_metrics = system_metrics
        self._dir = dir
        self._save_dir = save_dir
        self._name = name or (Path(save_dir).resolve().name if save_dir else None)
        self._config = _plain_config(config or {})
        self._run: Any = None
        self._earlier = _Earlier()

    @property
    def name(self) -> str:
        """The project."""
        return self.project

    @property
    def version(self) -> str | None:
        """Name of the run."""
        return self._name

    @property
    def save_dir(self) -> str | None:
        """The run's folder."""
        return self._save_dir

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The Trackio run, started (or continued) on first use; ``trackio.log`` logs to it as well."""
        if self._run is None:
            _import_trackio(self._dir)
            name = self._known_name()
            if name is None and self.resume == "must":
                raise UserError(
                    f"no Trackio run to continue: project {self.project!r} has none named {self._name!r}; "
                    "use resume=auto to start one."
                )
            self._start(name or self._free_name(), resume=name is not None)
        return self._run

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs numbers at ``step`` (None: the next one). NaN and infinities are kept as such."""
        self._log({name: float(value) for name, value in metrics.items() if name != "step"}, step)

    @rank_zero_only
    def log_table(self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None) -> None:
        """Logs a table at ``step``; cells that are no text or numbers become JSON."""
        _import_trackio(self._dir)
        import trackio

        rows = [[plain_cell(cell) for cell in row] for row in data]
        self._log({key: trackio.Table(columns=list(columns), data=rows)}, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Adds to the run's configuration."""
        self._config |= _plain_config(params)
        if self._run is not None:
            with self._run._client_lock:  # Of one batch of metrics, Trackio keeps the first configuration only.
                self._run._flush_queues_inline()
            self._run.config.update(self._config)
            self._run._config_logged = False  # It goes with the next metrics.

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """Forgets everything after ``step``, which a run is about to train again. A run from the beginning, where
        another one was logged from the same folder, becomes a new run instead."""
        _ = self.experiment
        dropped = self._earlier.after(step)
        if dropped and step == 0:
            self._stop()
            self._start(self._free_name(), resume=False)
        elif dropped:
            log.info("resuming from step %d: %d later points of Trackio run %s are dropped", step, dropped, self._name)
            self._earlier.drop_after(step)

    @rank_zero_only
    def save(self) -> None:
        """Nothing to do: Trackio writes twice a second."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes what is pending. What is logged later continues the run."""
        self._stop()

    def _log(self, values: dict[str, Any], step: int | None) -> None:
        run = self.experiment
        step = None if step is None else int(step)
        if step is not None:
            self._earlier.replace(step, values)
        run.log(values, step=step)

    def _known_name(self) -> str | None:
        """Name of the run that is to be continued."""
        if self.resume == "never":
            return None
        identity = self._identity_file()
        if identity is None:
            return self._name if self._name in self._names() else None
        if not identity.exists():
            return None
        saved = json.loads(identity.read_text())
        return saved["name"] if saved["project"] == self.project and saved["name"] in self._names() else None

    def _identity_file(self) -> Path | None:
        return None if self._save_dir is None else Path(self._save_dir) / IDENTITY

    def _names(self) -> set[str]:
        from trackio.sqlite_storage import SQLiteStorage

        return {record["name"] for record in SQLiteStorage.get_run_records(self.project)}

    def _free_name(self) -> str | None:
        taken = self._names()
        name, n = self._name, 2
        while name in taken:
            name, n = f"{self._name}-{n}", n + 1
        return name

    def _start(self, name: str | None, *, resume: bool) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        earlier = SQLiteStorage.get_run_config(self.project, name) if resume else None
        with _quiet(), _no_login():
            self._run = trackio.init(
                project=self.project,
                name=name,
                group=self.group,
                config=_plain_config(earlier or {}, private=False) | self._config,
                resume="must" if resume else "never",
                embed=False,
                auto_log_cpu=self.system_metrics,
                auto_log_gpu=self.system_metrics,
            )
        self._name = self._run.name
        self._earlier = _Earlier(self.project, self._run) if resume else _Earlier()
        if (identity := self._identity_file()) is not None:
            identity.parent.mkdir(parents=True, exist_ok=True)
            identity.write_text(json.dumps({"project": self.project, "name": self._name}))

    def _stop(self) -> None:
        if self._run is None:
            return
        from trackio import context_vars

        with _quiet():
            self._run.finish()
        if context_vars.current_run.get() is self._run:
            context_vars.current_run.set(None)
        self._run = None
        self.resume = "must" if self._name in self._names() else self.resume


class _Earlier:
    """What earlier processes stored for a run, and how to take parts of it back. Trackio itself only ever adds rows, so
    that a step that is logged twice would be drawn twice."""

    def __init__(self, project: str | None = None, run: Any = None) -> None:
        self._project, self._run = project, run
        self._last_row = self._last_step = -1
        if run is not None and run._is_local and run._storage_mode == "sqlite":
            with self._rows() as cursor:
                query = "SELECT COALESCE(MAX(id), -1), COALESCE(MAX(step), -1) FROM metrics WHERE run_id = ?"
                self._last_row, self._last_step = tuple(cursor.execute(query, (run.id,)).fetchone())

    def after(self, step: int) -> int:
        """How many rows lie after ``step``."""
        if self._last_step <= step:
            return 0
        with self._rows() as cursor:
            query = "SELECT COUNT(*) FROM metrics WHERE run_id = ? AND id <= ? AND step > ?"
            return cursor.execute(query, (self._run.id, self._last_row, step)).fetchone()[0]

    def drop_after(self, step: int) -> None:
        """Deletes the rows after ``step``."""
        with self._rows() as cursor:
            condition = "WHERE run_id = ? AND id <= ? AND step > ?"
            cursor.execute(f"DELETE FROM metrics {condition}", (self._run.id, self._last_row, step))
        self._last_step = min(self._last_step, step)

    def replace(self, step: int, names: Mapping[str, Any]) -> None:
        """Takes ``names`` out of the rows of ``step``, since they are about to be logged again."""
        if step > self._last_step:
            return
        with self._rows() as cursor:
            query = "SELECT id, metrics FROM metrics WHERE run_id = ? AND id <= ? AND step = ?"
            for row, text in cursor.execute(query, (self._run.id, self._last_row, step)).fetchall():
                kept = {name: value for name, value in json.loads(text).items() if name not in names}
                if kept:
                    cursor.execute("UPDATE metrics SET metrics = ? WHERE id = ?", (json.dumps(kept).encode(), row))
                else:
                    cursor.execute("DELETE FROM metrics WHERE id = ?", (row,))

    @contextlib.contextmanager
    def _rows(self) -> Iterator[Any]:
        from trackio.sqlite_storage import SQLiteStorage

        path = SQLiteStorage.get_project_db_path(self._project)
        with SQLiteStorage._get_process_lock(self._project), SQLiteStorage._get_connection(path) as connection:
            yield connection.cursor()


def _import_trackio(folder: str | None) -> None:
    """Imports trackio with its data in ``folder``, which it reads from the environment once, when it is imported."""
    if folder is not None:
        folder = str(Path(folder).expanduser().resolve())
        if "trackio" not in sys.modules:
            os.environ["TRACKIO_DIR"] = folder
        elif Path(sys.modules["trackio"].TRACKIO_DIR).resolve() != Path(folder):
            raise UserError(
                f"trackio already keeps its data in {sys.modules['trackio'].TRACKIO_DIR} in this process and cannot "
                f"change to dir={folder}; set TRACKIO_DIR before Python starts."
            )
    import trackio  # noqa: F401


def _plain_config(params: Any, *, private: bool = True) -> dict[str, Any]:
    """Plain containers; Trackio reserves leading underscores at the top level."""
    if params is None:
        return {}
    if "omegaconf" in sys.modules and sys.modules["omegaconf"].OmegaConf.is_config(params):
        params = sys.modules["omegaconf"].OmegaConf.to_container(params, resolve=True)
    params = vars(params) if isinstance(params, Namespace) else params
    named = {str(key): value for key, value in params.items()}
    return {key.lstrip("_"): value for key, value in named.items() if private or not key.startswith("_")}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Trackio reports on standard output; here that goes to the debug log."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
    for line in filter(None, text.getvalue().splitlines()):
        log.debug("trackio: %s", line)


@contextlib.contextmanager
def _no_login() -> Iterator[None]:
    """Keeps Trackio from asking the hub for the user's name, which it does wherever a token is stored."""
    from trackio import run, utils

    if any(os.environ.get(name) for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")):
        yield
        return
    original = utils._get_default_namespace
    run._get_default_namespace = _local_user
    try:
        yield
    finally:
        run._get_default_namespace = original


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "local"
