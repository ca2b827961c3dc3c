"""Running a configuration in every way there is, and taking down its trajectory."""

import contextlib
import copy
import functools
import importlib
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

import workbench
from workbench import run as runs
from workbench.cli import check as checker
from workbench.cli import config, main
from workbench.data.loader import row_sizes
from workbench.data.plan import Planner
from workbench.data.prompts import Geometry, PromptPlanner
from workbench.invariants.trajectory import Recorder, Trajectory, parameter_marks, plain_name
from workbench.loggers.csv import read_history
from workbench.rollouts.types import Request, Rollout, Sampling

WORLD_SIZES = (2, 3, 4, 8)
_QUIET = ("logger=none",)


class SaveAt(L.Callback):
    """Writes a checkpoint after given steps.

    Args:
        paths: by step the file.
    """

    def __init__(self, paths: Mapping[int, Path]) -> None:
        self.paths = paths

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Saves where a step that is asked for has ended."""
        if batch.closes_step and trainer.global_step in self.paths:
            trainer.save_checkpoint(self.paths[trainer.global_step])


@cache
def composed(overrides: tuple[str, ...]) -> DictConfig:
    """A checked configuration; the same object for the same overrides, not to be changed."""
    cfg = config.load(overrides).cfg
    checker.check(cfg)
    return cfg


def compose(overrides: Sequence[str], folder: Path, cache_dir: Path) -> DictConfig:
    """The configuration of a run in ``folder``, which keeps prepared rows in ``cache_dir``."""
    cfg = copy.deepcopy(composed((*overrides, *_QUIET)))
    cfg.paths.run_dir = str(folder)
    cfg.paths.cache_dir = str(cache_dir)
    return cfg


def run_here(
    overrides: Sequence[str],
    folder: Path,
    cache_dir: Path,
    *,
    save: Mapping[int, Path] | None = None,
    checkpoint: Path | None = None,
    deepspeed: int | None = None,
) -> Trajectory:
    """Builds the parts that ``workbench train`` builds, and fits.

    Args:
        overrides: of ``workbench train``.
        folder: of the run.
        cache_dir: of prepared rows.
        save: by step the checkpoint to write.
        checkpoint: to go on from.
        deepspeed: ZeRO stage.
    """
    cfg = compose(overrides, folder, cache_dir)
    if deepspeed:
        target = "workbench.invariants.deepspeed_cpu.DeepSpeedOnCPU"
        OmegaConf.update(cfg, "strategy", {"_target_": target, "stage": deepspeed}, merge=False, force_add=True)
    recorder = Recorder()
    parts = runs.build(cfg, callbacks=[recorder, *([SaveAt(save)] if save else [])])
    with quiet():
        parts.trainer.fit(parts.method, datamodule=parts.data, ckpt_path=checkpoint, weights_only=True)
    return recorder.trajectory


def run_bare(overrides: Sequence[str], folder: Path, cache_dir: Path) -> Trajectory:
    """Method and data by their constructors, on a plain ``L.Trainer``: no Hydra, no plugin, no seed for the process."""
    node = checker.to_plain(compose(overrides, folder, cache_dir))
    wanted = ("accelerator", "devices", "max_steps", "max_epochs", "gradient_clip_val")
    recorder = Recorder()
    trainer = L.Trainer(
        **{name: node["trainer"][name] for name in wanted},
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    objects = {name: _made(node[name]) for name in ("model", "optim", "scheduler", "peft") if node.get(name)}
    if "engine" in node["method"]:
        objects |= {"engine": _made(node["method"]["engine"]), "seed": node["seed"]}
    with quiet():
        trainer.fit(_made({**node["method"], **objects}), _made(node["data"]))
    return recorder.trajectory


def _made(node: dict[str, Any]) -> Any:
    module, _, name = node["_target_"].rpartition(".")
    made = getattr(importlib.import_module(module), name)
    arguments = {key: value for key, value in node.items() if not key.startswith("_")}
    return functools.partial(made, **arguments) if node.get("_partial_") else made(**arguments)


def run_command(overrides: Sequence[str], folder: Path, cache_dir: Path) -> Trajectory:
    """``workbench train``; read from its ``metrics.csv`` and the model that it saves."""
    ways = ("logger=csv", "save_model=true", f"paths.run_dir={folder}", f"paths.cache_dir={cache_dir}")
    with quiet():
        code = main(["train", *overrides, *ways])
    if code:
        raise RuntimeError(f"workbench train {' '.join(overrides)} ended with exit code {code}")
    run = Trajectory.of_metrics(read_history(folder).to_dict("records"))
    for file in sorted((folder / "model").glob("*.safetensors")):
        for name, weights in load_file(file).items():
            run.parameters[plain_name(name)] = parameter_marks(plain_name(name), weights)
    return run


def run_notebook(overrides: Sequence[str], folder: Path, cache_dir: Path) -> Trajectory:
    """``workbench.train``; metrics from ``run.history``."""
    recorder = Recorder()
    ways = ("logger=csv", f"paths.run_dir={folder}", f"paths.cache_dir={cache_dir}")
    with quiet():
        run = workbench.train(*overrides, *ways, callbacks=[recorder])
    recorder.trajectory.steps = Trajectory.of_metrics(run.history.to_dict("records")).steps
    return recorder.trajectory


def run_plan(overrides: Sequence[str], folder: Path, cache_dir: Path) -> Trajectory:
    """The rows of every step, as several numbers of processes would get them; of the first that differs, if one does."""
    cfg = compose(overrides, folder, cache_dir)
    parts = runs.build(cfg)
    data, method = parts.data, parts.method
    with quiet():
        prepared = data.prepare_train(method.tokenizer, method.data_types)
    geometry = method.geometry(data.batch_size)
    if geometry is not None:
        return Trajectory(rows=_planned_completions(len(prepared), geometry, data, cfg.trainer.max_steps))
    sizes = row_sizes(prepared)
    options = {"batch_size": data.batch_size, "seed": data.seed, "shuffle": data.shuffle, "total_steps": cfg.trainer.max_steps}
    one = Planner(sizes, **options)
    others = [Planner(sizes, world_size=n, micro_batch_size=m, **options) for n in WORLD_SIZES for m in (None, 1, 2)]
    rows = []
    for step in range(cfg.trainer.max_steps):
        at = divmod(step, one.steps_per_epoch)
        dealt = [sorted(row for rank in other.step(*at).micro for micro in rank for row in micro) for other in others]
        here = sorted(one.step(*at).rows)
        rows.append(next((other for other in dealt if other != here), here))
    return Trajectory(rows=rows)


def _planned_completions(num_rows: int, geometry: Geometry, data: Any, steps: int) -> list[list[int]]:
    """The same of an online method's completions, whose lengths are made up."""
    options = {"seed": data.seed, "shuffle": data.shuffle}
    one = PromptPlanner(num_rows, geometry, **options)
    others = [
        PromptPlanner(num_rows, geometry, world_size=n, micro_batch_size=m, **options)
        for n in WORLD_SIZES
        for m in (None, 1, 2, 4)
    ]
    rows = []
    for step in range(steps):
        epoch, within = divmod(step, one.steps_per_epoch)
        numbers = [(p, g) for p in one.window(epoch, within).prompts for g in range(geometry.num_generations)]
        count, size = len(numbers), geometry.batch_size
        of_step = range(count)[
            (within - one.window(epoch, within).first) % geometry.sweep(count // geometry.num_generations) * size :
        ]
        lengths = [1 + (7 * p + 3 * g + step) % 11 for p, g in numbers]
        known = {"tokens": lengths, "weight": lengths, "group": [p for p, _ in numbers], "counted": [True] * count, "longest": 12}
        dealt = [
            other.plan_step(of_step[:size], **known)
            for other in others
            if other.window(epoch, within) == one.window(epoch, within)
        ]
        ids = [[sorted(i for rank in plan.micro for micro in rank for i in micro)] for plan in dealt]
        here = list(of_step[:size])
        found = next((other for (other,) in ids if other != here), here) if len(ids) == len(others) else []
        rows.append(sorted(numbers[i][0] * geometry.num_generations + numbers[i][1] for i in found))
    return rows


def run_scripted(overrides: Sequence[str], folder: Path, cache_dir: Path) -> Trajectory:
    """A run whose engine replays what that of an equal run before it has written."""
    script = folder / "script.jsonl"
    parts = runs.build(compose(overrides, folder / "written", cache_dir))
    written: list[Rollout] = []
    generate = parts.method.engine.generate

    def noted(requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        written.extend(found := generate(requests, sampling))
        return found

    parts.method.engine.generate = noted
    with quiet():
        parts.trainer.fit(parts.method, datamodule=parts.data)
    script.write_text("".join(json.dumps(_completion(rollout)) + "\n" for rollout in written))
    return run_here((*overrides, "engine=scripted", f"method.engine.completions={script}"), folder / "replayed", cache_dir)


def run_separate(overrides: Sequence[str], folder: Path, cache_dir: Path) -> Trajectory:
    """A run whose engine has a copy of the weights, and knows of a step what it is sent."""
    from workbench.invariants.separate_engine import SeparateEngine

    recorder = Recorder()
    parts = runs.build(compose(overrides, folder, cache_dir), callbacks=[recorder])
    parts.method.engine = SeparateEngine()
    with quiet():
        parts.trainer.fit(parts.method, datamodule=parts.data)
    return recorder.trajectory


def _completion(rollout: Rollout) -> dict[str, Any]:
    """As `ScriptedEngine` reads it."""
    given = {"token_ids": rollout.token_ids, "logps": rollout.logps.tolist(), "finish": rollout.finish}
    return given if rollout.support is None else {**given, "support": [ids.tolist() for ids in rollout.support]}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what runs print."""
    root = logging.getLogger("workbench")
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        root.setLevel(level)
