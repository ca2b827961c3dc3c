"""Which checkpoints are written, which are kept, and which one a run resumes from."""

import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint as CheckpointBase
from lightning.pytorch.trainer.states import TrainerFn

from workbench.callbacks.progress import phase
from workbench.callbacks.steps import closes_step, ends_epoch, gather, is_last_step, metrics, validation_follows
from workbench.errors import UserError, check_choice, nearest
from workbench.loggers.tables import rewind
from workbench.strategies.checkpoint_io import is_intact

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
LAST, BEST = "last.ckpt", "best.ckpt"


class Checkpoint(CheckpointBase):
    """Saves at the end of optimizer steps: every n of them (else every epoch), where a metric is best, and at the end.

    The files are ``step-000120.ckpt``, and ``last.ckpt`` and ``best.ckpt``, which are further names of two of them. A step
    that is followed by a validation is saved after it, together with its metric. New files are complete before old ones
    are removed.

    Args:
        dirpath: folder; null is ``checkpoints`` in the run's folder.
        every_n_steps: save every so many optimizer steps; null saves at the end of every epoch.
        keep: how many of the newest checkpoints stay; null keeps all.
        monitor: metric that ranks checkpoints, by its printed name (``val/loss``, ``train/reward``); null ranks none.
        mode: whether a low or a high metric is best.
        keep_best: how many of the best checkpoints stay, besides the newest.
        weights_only: leave out the optimizer's state; such checkpoints cannot be resumed from.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        every_n_steps: int | None = None,
        keep: int | None = 1,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep_best: int = 1,
        weights_only: bool = False,
    ) -> None:
        super().__init__()
        check_choice("mode", mode, ("min", "max"))
        for name, value in (("every_n_steps", every_n_steps), ("keep", keep), ("keep_best", keep_best)):
            if value is not None and value < 1:
                raise UserError(f"checkpoint {name}={value} must be at least 1 (null: {_NULL.get(name, 'not allowed')}).")
        self.dirpath = dirpath
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.monitor = monitor
        self.mode = mode
        self.keep_best = keep_best
        self.weights_only = weights_only
        self._folder = Path(dirpath or FOLDER)
        self._saved: list[str] = []  # Names of existing step files, oldest first.
        self._scores: dict[str, float] = {}  # The metric of those that have one.
        self._saved_step = 0
        self._due = False

    # -- when ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: "L.Trainer", pl_module: "L.LightningModule", stage: str) -> None:
        """Fixes the folder."""
        self._folder = Path(self.dirpath or Path(trainer.default_root_dir) / FOLDER)

    def on_train_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Aligns everything with the step that training (re)starts from."""
        self._check_measured(trainer)
        self._saved_step, self._due = trainer.global_step, False
        present = trainer.strategy.broadcast(sorted(p.name for p in self._folder.glob("step-*.ckpt")))
        self._saved = [name for name in self._saved if name in present]
        self._scores = {name: score for name, score in self._scores.items() if name in present}
        if present and not trainer.global_step and trainer.is_global_zero:
            log.warning("%s holds checkpoints of an earlier run; this run replaces them step by step", self._folder)
        rewind(trainer)

    def on_train_batch_end(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves where one is due and no validation follows."""
        if not closes_step(trainer):
            return
        if self.every_n_steps is None:
            self._due |= ends_epoch(trainer)
        else:
            self._due |= trainer.global_step % self.every_n_steps == 0
        self._due |= is_last_step(trainer)
        if self._due and not validation_follows(trainer):
            self._save(trainer, self._score(trainer) if self._monitors_training else None)

    def on_validation_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Saves where one is due or the metric is among the best."""
        if not self._is_training(trainer) or trainer.sanity_checking:
            return
        score = self._score(trainer)
        if self._due or (score is not None and not self._monitors_training and self._is_among_best(score)):
            self._save(trainer, score)

    def on_train_epoch_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Saves where that is still due, or where a callback decided to stop only after the step."""
        stops = trainer.should_stop and trainer.fit_loop._can_stop_early
        if (self._due or stops) and self._saved_step != trainer.global_step:
            self._save(trainer, None)

    def _is_training(self, trainer: "L.Trainer") -> bool:
        return trainer.state.fn == TrainerFn.FITTING and not trainer.fast_dev_run

    # -- which --------------------------------------------------------------------------------------------------------

    @property
    def _monitors_training(self) -> bool:
        """Metrics of training are known at every step, all others only after a validation."""
        return self.monitor is not None and self.monitor.startswith("train/")

    def _check_measured(self, trainer: "L.Trainer") -> None:
        if self.monitor is None or self._monitors_training:
            return
        loop = trainer.fit_loop.epoch_loop.val_loop
        empty = loop._combined_loader is not None and not sum(trainer.num_val_batches)
        if empty or not trainer.enable_validation:
            raise UserError(
                f"checkpoint monitor={self.monitor!r} is never measured: there is no validation; give an evaluation set "
                "or monitor a metric of training (train/...)."
            )

    def _score(self, trainer: "L.Trainer") -> float | None:
        """The monitored metric as it is now, the same on every process."""
        if self.monitor is None:
            return None
        available = metrics(trainer)
        if self.monitor not in available:
            raise UserError(
                f"checkpoint monitor={self.monitor!r} is not among the metrics.{nearest(self.monitor, available)} "
                f"Available: {', '.join(sorted(available))}."
            )
        return trainer.strategy.broadcast(available[self.monitor])

    def _rank(self, score: float) -> float:
        """Lower is better; NaN is worst."""
        if math.isnan(score):
            return math.inf
        return score if self.mode == "min" else -score

    def _best_names(self) -> list[str]:
        """Names of the best checkpoints, best first; of equal ones the earlier."""
        return sorted(self._scores, key=lambda name: self._rank(self._scores[name]))[: self.keep_best]

    def _is_among_best(self, score: float) -> bool:
        best = self._best_names()
        return len(best) < self.keep_best or self._rank(score) < self._rank(self._scores[best[-1]])

    # -- writing ------------------------------------------------------------------------------------------------------

    def _save(self, trainer: "L.Trainer", score: float | None) -> None:
        self._due = False
        if not self._is_training(trainer):
            return
        name = f"step-{trainer.global_step:06d}.ckpt"
        self._saved = [*(n for n in self._saved if n != name), name]
        if score is not None:
            self._scores[name] = score
        best = self._best_names()
        newest = self._saved if self.keep is None else self._saved[-self.keep :]
        dropped = [n for n in self._saved if n not in newest and n not in best]
        self._saved = [n for n in self._saved if n not in dropped]
        self._scores = {n: s for n, s in self._scores.items() if n not in dropped}

        with phase(trainer, "saving"):
            self._write(trainer, self._folder / name)
        self._saved_step = trainer.global_step
        if trainer.is_global_zero:
            _link(self._folder / name, LAST)
            if best:
                _link(self._folder / best[0], BEST)
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)
        for old in dropped:
            trainer.strategy.remove_checkpoint(str(self._folder / old))

    def _write(self, trainer: "L.Trainer", path: Path) -> None:
        """`Trainer.save_checkpoint`, but an error on one process is raised on all of them instead of blocking the others."""
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(self.weights_only)
        failure = None
        try:
            trainer.strategy.save_checkpoint(checkpoint, str(path))
        except Exception as error:
            failure = error
        messages = [m for m in gather(failure and str(failure), trainer) if m]
        if failure is not None:
            raise failure
        if messages:
            raise UserError(messages[0])

    # -- what others ask for ------------------------------------------------------------------------------------------

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint, or an empty string."""
        return str(self._folder / self._saved[-1]) if self._saved else ""

    @property
    def best_model_path(self) -> str:
        """The best checkpoint (without ``monitor``: the newest), or an empty string."""
        best = self._best_names()
        return str(self._folder / best[0]) if best else self.last_model_path

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """The metric of the best checkpoint."""
        best = self._best_names()
        return torch.tensor(self._scores[best[0]]) if best else None

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """The metrics of the best checkpoints by path."""
        return {str(self._folder / name): torch.tensor(self._scores[name]) for name in self._best_names()}

    @property
    def current_score(self) -> torch.Tensor | None:
        """The metric of the newest checkpoint, if it has one."""
        score = self._scores.get(self._saved[-1]) if self._saved else None
        return None if score is None else torch.tensor(score)

    @property
    def save_top_k(self) -> int:
        """What Lightning's loggers call ``keep_best``."""
        return self.keep_best

    def state_dict(self) -> dict[str, Any]:
        """Names and metrics; names are relative, so that a run's folder can be moved."""
        return {"saved": list(self._saved), "scores": dict(self._scores)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what the resumed checkpoint knows of earlier ones."""
        self._saved = list(state_dict["saved"])
        self._scores = dict(state_dict["scores"])


_NULL = {"every_n_steps": "at the end of every epoch", "keep": "keep all"}


def _link(target: Path, name: str) -> None:
    """Makes ``name`` a further name of ``target``; readers find the old or the new file at any moment."""
    temporary = target.with_name(f".{name}.tmp")
    temporary.unlink(missing_ok=True)
    if target.is_dir():
        os.symlink(target.name, temporary)
    else:
        try:
            os.link(target, temporary)
        except OSError:  # A file system without hard links.
            shutil.copyfile(target, temporary)
    os.replace(temporary, target.with_name(name))
    temporary.unlink(missing_ok=True)  # Renaming onto another name of the same file leaves both.


def resolve_checkpoint(spec: str | int | Path | None, run_dir: str | Path | None) -> Path | None:
    """The checkpoint that ``resume=<spec>`` means.

    Args:
        spec: ``last``, ``best``, a step number, a file name in the run's checkpoints, the path of a checkpoint, a
            checkpoints folder or a run's folder; ``auto`` is ``last`` if there is one; None is none.
        run_dir: the run's folder, for specs that are no path.

    Raises:
        UserError: there is no such checkpoint (with those that are there), or it is cut short.
    """
    if spec is None:
        return None
    spec = str(spec)
    folder = None if run_dir is None else _checkpoints_in(Path(run_dir))
    if spec == "auto":
        return None if folder is None or not (folder / LAST).exists() else resolve_checkpoint("last", run_dir)
    path = _find(spec, folder)
    if path is None:
        raise UserError(f"resume={spec} names no checkpoint. {_present(Path(spec), folder)}")
    if path.is_file() and not is_intact(path):
        raise UserError(f"resume={spec}: {path} is damaged or cut short. {_present(Path(spec), path.parent)}")
    return path


def _find(spec: str, folder: Path | None) -> Path | None:
    name = f"step-{int(spec):06d}.ckpt" if spec.isdecimal() else spec
    names = [name, f"{name}.ckpt"]
    candidates = [folder / n for n in names] if folder is not None and len(Path(spec).parts) == 1 else []
    path = Path(spec).expanduser()
    if not spec.isdecimal():
        candidates += [_checkpoints_in(path) / LAST, path]
    for candidate in candidates:
        if candidate.is_file() or (candidate.is_dir() and candidate.suffix == ".ckpt"):
            return candidate
    return None


def _checkpoints_in(folder: Path) -> Path:
    """The checkpoints of a run's folder, which may also be given directly."""
    return folder / FOLDER if (folder / FOLDER).is_dir() else folder


def _present(path: Path, folder: Path | None) -> str:
    if path.is_dir():
        folder = _checkpoints_in(path)
    elif len(path.parts) > 1 and path.parent.is_dir():
        folder = path.parent
    if folder is None:
        return "Give the path of a checkpoint or of a run's folder."
    intact = sorted(p.name for p in folder.glob("*.ckpt") if p.is_dir() or is_intact(p)) if folder.is_dir() else []
    return f"In {folder}: {', '.join(intact) or 'none'}."
