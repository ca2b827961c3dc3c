"""`train`: from a configuration to a trained model. The command line and notebooks call the same function."""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from workbench.cli import check as checker
from workbench.cli import notebook, resume, rundir
from workbench.cli.check import FROM_GROUPS
from workbench.cli.schema import OWN, locate
from workbench.cli.schema import describe as describe_signature
from workbench.errors import UserError

if TYPE_CHECKING:
    import lightning as L
    import matplotlib.figure
    import pandas as pd
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
RESULT_FILE = "result.json"
MODEL_FOLDER = "model"
_FOLDER = "<run_dir>"


@dataclasses.dataclass
class Run:
    """A finished or interrupted training run.

    Args:
        dir: its folder: config.yaml, checkpoints, metrics.csv, model.
        config: what ran.
        metrics: the last value of every logged metric, and steps and seconds.
        interrupted: stopped by a signal before its end, with a checkpoint to go on from.
        method: the trained module; None if another process trained it.
        trainer: its trainer; None likewise.
    """

    dir: pathlib.Path
    config: DictConfig
    metrics: dict[str, float]
    interrupted: bool = False
    method: "L.LightningModule | None" = None
    trainer: "L.Trainer | None" = None

    @property
    def history(self) -> "pd.DataFrame":
        """Logged metrics, one row per optimizer step, one column per metric."""
        from workbench.loggers.csv import read_history

        return read_history(self.dir)

    @property
    def model(self) -> "PreTrainedModel":
        """The trained transformers model; read from the run's folder if another process trained it."""
        if self.method is not None and self.method.policy is not None:
            return self.method.policy.hf
        from workbench.models.heads import load_classifier
        from workbench.models.load import load_model

        folder, method = str(self.dir / MODEL_FOLDER), locate(self.config.method._target_)
        return load_model(folder) if method.generates else load_classifier(folder, kind=method.kind, num_labels=method.num_labels)

    def generate(self, prompts: str | Sequence[Any], chat: bool | None = None, **options: Any) -> list[str]:
        """Answers texts or conversations with the trained model.

        Args:
            prompts: one, or several.
            chat: take a text for a user's message; None does so if the tokenizer has a chat template.
            options: see `workbench.methods.generate.generate_texts`.
        """
        if self.method is None:
            raise UserError(f"another process trained this model: workbench generate run={self.dir}")
        chat = self.method.tokenizer.chat_template is not None if chat is None else chat
        asked = [prompts] if isinstance(prompts, str) else prompts
        asked = [[{"role": "user", "content": p}] if chat and isinstance(p, str) else p for p in asked]
        return self.method.generate(asked, **options)

    def plot(self, *metrics: str) -> "matplotlib.figure.Figure":
        """Curves of the named metrics over optimizer steps; of the main ones by default."""
        return plot_history(self.history, metrics)

    def __repr__(self) -> str:
        state = "interrupted" if self.interrupted else "finished"
        shown = {k: round(v, 4) for k, v in self.metrics.items() if k.startswith("val/") or k in ("train/loss", "steps")}
        return f"Run({str(self.dir)!r}, {state}, {shown})"


def plot_history(history: "pd.DataFrame", metrics: Sequence[str] = ()) -> "matplotlib.figure.Figure":
    """One panel per metric; ``train/x`` and ``val/x`` share one."""
    from matplotlib.figure import Figure

    names = list(metrics) or [
        c for c in ("train/loss", "val/loss", "train/mean_token_accuracy", "train/grad_norm") if c in history
    ]
    unknown = [n for n in names if n not in history]
    if unknown:
        raise UserError(f"{unknown[0]} was not logged. Logged: {', '.join(c for c in history if c != 'step')}.")
    panels: dict[str, list[str]] = {}
    for name in names:
        panels.setdefault(name.partition("/")[2] or name, []).append(name)
    figure = Figure(figsize=(4 * max(1, len(panels)), 3), layout="constrained")
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axis, (title, columns) in zip(axes, panels.items(), strict=False):
        for column in columns:
            points = history[["step", column]].dropna()
            axis.plot(points["step"], points[column], marker="o" if len(points) < 20 else "", label=column)
        axis.set(title=title, xlabel="step")
        if len(columns) > 1:
            axis.legend()
    return figure


def train(*config: DictConfig | str, **objects: Any) -> Run:
    """Trains what a configuration describes.

    Args:
        config: one composed configuration, or overrides as on the command line (``"model=hf"``, ``"optim.lr=1e-5"``).
        objects: built parts that replace the configured ones: ``model`` (a transformers model), ``tokenizer``, ``data`` (a
            `DataModule`, or a data set for its ``train``), ``eval`` (a data set), ``callbacks`` (a list, added), ``logger``
            (a list, instead), and any argument of the method, such as ``compute_metrics``.

    Raises:
        UserError: for a mistake in the configuration or the data, in one line.
    """
    cfg, overrides = _as_config(config)
    return train_config(cfg, overrides, **objects)


def train_config(cfg: DictConfig, overrides: Sequence[str] | None = None, **objects: Any) -> Run:
    """`train` with a configuration that has been checked; ``overrides`` are what a later ``resume=`` starts from."""
    if notebook.needs_processes(cfg):
        return notebook.train_in_processes(cfg, objects)
    folder = resume.folder_to_continue(cfg) or rundir.run_dir(cfg)
    cfg.paths.run_dir = str(folder)
    record = functools.partial(_record, cfg, overrides, folder)
    if cfg.resume is None:
        record()
    else:  # a resume that fails leaves the run as it was
        objects["callbacks"] = [*objects.get("callbacks", []), _at_start(record)]
    checkpoint = resume.find_checkpoint(cfg, folder)
    with rundir.published(folder, checkpoint):
        return _train_here(cfg, folder, checkpoint, objects)


def _as_config(config: Sequence[DictConfig | str]) -> tuple[DictConfig, list[str] | None]:
    """The configuration, and the overrides that made it where they say it all."""
    if len(config) == 1 and not isinstance(config[0], str):
        cfg, overrides = OmegaConf.create(OmegaConf.to_container(OmegaConf.create(config[0]))), None
    else:
        from workbench.cli.config import load

        if not all(isinstance(c, str) for c in config):
            raise UserError("train takes one configuration (from workbench.compose), or overrides as texts, not both.")
        composed = load(resume.replay(config))
        cfg, overrides = composed.cfg, composed.overrides
    checker.check(cfg)
    return cfg, overrides


def _record(cfg: DictConfig, overrides: Sequence[str] | None, folder: pathlib.Path) -> None:
    """Writes what a later process starts from into the run's folder."""
    if rundir.is_first():
        folder.mkdir(parents=True, exist_ok=True)
        rundir.write(folder / CONFIG_FILE, OmegaConf.to_yaml(reusable(cfg)))
        if overrides is not None:
            resume.save_overrides(folder, overrides)


def _at_start(function: Callable[[], None]) -> Any:
    """A callback that calls ``function`` once training goes on, with its checkpoint read."""
    from lightning.pytorch.callbacks import LambdaCallback

    return LambdaCallback(on_train_start=lambda trainer, module: function())


def reusable(cfg: DictConfig) -> DictConfig:
    """The resolved configuration, except for its folder: run again, it describes a new run and not this one."""
    unresolved = OmegaConf.to_container(cfg)
    unresolved["paths"]["run_dir"] = _FOLDER
    unresolved["resume"] = None
    resolved = _replace(OmegaConf.to_container(OmegaConf.create(unresolved), resolve=True), _FOLDER, "${paths.run_dir}")
    resolved["paths"]["run_dir"] = None
    return OmegaConf.create(resolved)


def _replace(value: Any, old: str, new: str) -> Any:
    """A value with ``old`` replaced in all of its texts."""
    if isinstance(value, dict):
        return {key: _replace(inner, old, new) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replace(inner, old, new) for inner in value]
    return value.replace(old, new) if isinstance(value, str) else value


def read(folder: pathlib.Path, cfg: DictConfig | None = None) -> Run:
    """The result of a run that another process did, from its folder."""
    file = folder / RESULT_FILE
    if not file.is_file():
        raise UserError(f"{folder} holds no finished run ({RESULT_FILE} is missing).")
    result = json.loads(file.read_text())
    if cfg is None:
        cfg = OmegaConf.load(folder / CONFIG_FILE)
        cfg.paths.run_dir = str(folder)
    return Run(folder, cfg, result["metrics"], result["interrupted"])


def _train_here(cfg: DictConfig, folder: pathlib.Path, checkpoint: str | None, objects: dict[str, Any]) -> Run:
    checker.check_targets(cfg)
    parts = build(cfg, **objects)
    first = rundir.is_first()
    if first:
        _announce(cfg, folder, checkpoint)
    if checkpoint is None:
        _note_untrained(parts.method)
    if parts.trainer.strategy.root_device.type == "cpu":
        from workbench.models.host_memory import KeepsFreedMemory

        parts.trainer.callbacks.append(KeepsFreedMemory())
    started = time.perf_counter()
    with _children_end_with_us(parts.trainer), _interrupt_stays_one():
        parts.trainer.fit(parts.method, datamodule=parts.data, ckpt_path=checkpoint, weights_only=True)
    run = Run(folder, cfg, final_metrics(parts.trainer), is_interrupted(parts.trainer), parts.method, parts.trainer)
    run.metrics |= {"steps": parts.trainer.global_step, "seconds": round(time.perf_counter() - started, 1)}
    if not run.interrupted and cfg.save_model:
        with _save_can_be_repeated(run):
            _save_model(run)
    if first:
        result = {"interrupted": run.interrupted, "metrics": run.metrics}
        rundir.write(folder / RESULT_FILE, json.dumps(result, indent=1))
        print(report(run), flush=True)
    return run


@dataclasses.dataclass
class Parts:
    """What a configuration builds."""

    method: Any
    data: Any
    trainer: Any


def build(cfg: DictConfig, **objects: Any) -> Parts:
    """Builds method, data and trainer; opens no weights (the method does that when training starts)."""
    import lightning as L
    import torch

    _quiet_libraries()
    node = checker.to_plain(cfg)
    L.seed_everything(node["seed"], workers=True, verbose=False)
    torch.set_float32_matmul_precision(node["matmul_precision"])
    data = build_data(node, objects)
    callbacks = [*_build_named(node["callbacks"]), *_exact_match(node["exact_match"]), *objects.pop("callbacks", [])]
    loggers = objects.pop("logger", None) or _build_named(node["logger"])
    method = build_method(node, objects)
    _refuse_writing(method, callbacks)
    return Parts(method, data, build_trainer(node, callbacks, loggers))


def _refuse_writing(method: Any, callbacks: Sequence[Any]) -> None:
    """Raises `UserError` for a callback that asks a model to write which cannot."""
    asking = [type(callback).__name__ for callback in callbacks if getattr(callback, "generates", False)]
    if asking and not method.generates:
        raise UserError(
            f"{asking[0]} needs a model that writes, and {type(method).__name__} trains one that scores: leave out exact_match, "
            "callbacks.samples and other callbacks that generate."
        )


def _note_untrained(method: Any) -> None:
    """Says so where a method that only refines a model is given one that has learnt nothing."""
    from workbench.methods.referenced import Referenced
    from workbench.models.load import ModelSpec

    spec, refines = method.model_spec, isinstance(method, Referenced) or getattr(method, "cpo_alpha", 1) == 0
    untrained = isinstance(spec, ModelSpec) and (spec.init == "random" or spec.name.partition(":")[0] == "tiny")
    if refines and untrained:
        log.warning(
            "model.name=%s starts untrained, and %s refines what a model can do already: run SFT first (workbench train), then "
            "give model.name=<its folder>/model.",
            spec.name,
            type(method).__name__,
        )


def _quiet_libraries() -> None:
    """Leaves out what Lightning says about itself at every start."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    warnings.filterwarnings("ignore", message=r"The '\w+_dataloader' does not have many workers")
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\(.*sync_dist=True")  # they are reduced already


def build_data(node: Mapping[str, Any], objects: dict[str, Any]) -> Any:
    """The data module; objects of the caller's own take the place of its sources, or its own."""
    given = objects.pop("data", None)
    if hasattr(given, "setup"):
        return given
    own = {k: v for k, v in (("train", given), ("eval", objects.pop("eval", None))) if v is not None}
    return instantiate(node["data"], **own)


def build_method(node: Mapping[str, Any], objects: Mapping[str, Any]) -> Any:
    """The method, given the groups that are its arguments."""
    target = node["method"]["_target_"]
    known = describe_signature(locate(target))["properties"]
    given = {
        key: instantiate(node[key]) if key != "seed" else node[key] for key in FROM_GROUPS["method"] if node.get(key) is not None
    }
    unused = [key for key in given if key not in known]
    if "peft" in unused:
        raise UserError(f"peft has no effect: {target.rsplit('.', 1)[-1]} trains no adapters. Use peft=none.")
    given = {key: value for key, value in given.items() if key in known}
    return instantiate(node["method"], **(given | dict(objects)))


def build_trainer(node: Mapping[str, Any], callbacks: Sequence[Any], loggers: Sequence[Any]) -> Any:
    """The Lightning trainer."""
    from lightning.pytorch.callbacks import Checkpoint, ProgressBar

    from workbench.strategies.checkpoint_io import AtomicCheckpointIO

    strategy = instantiate(node["strategy"]) if isinstance(node["strategy"], dict) else node["strategy"]
    owns_io = hasattr(strategy, "fsdp_kwargs") or "deepspeed" in type(strategy).__name__.lower()
    plugins = [] if owns_io else [AtomicCheckpointIO()]
    own = {"strategy": strategy, "callbacks": list(callbacks), "logger": list(loggers), "plugins": plugins}
    own["enable_checkpointing"] = any(isinstance(c, Checkpoint) for c in callbacks)
    own["enable_progress_bar"] = any(isinstance(c, ProgressBar) for c in callbacks)
    own["logger"] = own["logger"] or False
    trainer = instantiate(node["trainer"], default_root_dir=node["paths"]["run_dir"], **own)
    if node["trainer"].get("precision") == "16-mixed" and trainer.precision != "16-mixed":
        raise UserError("trainer.precision=16-mixed needs a GPU; on a CPU use trainer.precision=bf16-mixed or 32-true.")
    return trainer


def _build_named(nodes: Mapping[str, Any] | None) -> list[Any]:
    return [instantiate(node) for node in (nodes or {}).values() if node is not None]


def _exact_match(rows: int) -> list[Any]:
    if not rows:
        return []
    from workbench.callbacks.exact_match import ExactMatch

    return [ExactMatch(rows)]


def instantiate(node: Any, **arguments: Any) -> Any:
    """Builds a node with plain containers; ``arguments`` are objects, which never become part of a configuration."""
    import hydra.utils

    if node is None:
        return None
    try:
        factory = hydra.utils.instantiate({**node, "_convert_": "all", "_partial_": True})
        return functools.partial(factory, **arguments) if node.get("_partial_") else factory(**arguments)
    except hydra.errors.InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise
    except Exception as error:
        if isinstance(error, UserError) or node["_target_"].startswith(OWN) or not _is_refusal(error):
            raise
        how = "needs a package that is missing" if isinstance(error, ImportError) else "refuses its options"
        raise UserError(f"{node['_target_'].rsplit('.', 1)[-1]} {how}: {_first_sentence(error)}") from error


def _is_refusal(error: Exception) -> bool:
    """Whether another package's class has refused what it was given, or lacks a package."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    return isinstance(error, (ValueError, TypeError, ImportError, MisconfigurationException))


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split("\n")[0].split()) or type(error).__name__


@contextlib.contextmanager
def _interrupt_stays_one() -> Iterator[None]:
    """Ctrl-C before training starts: Lightning would ignore further ones for good and end the process, a notebook's too."""
    import signal

    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def _children_end_with_us(trainer: Any) -> Iterator[None]:
    """If this process fails, the ones it started would wait for it in a collective."""
    import signal

    try:
        yield
    except BaseException:
        launcher = getattr(trainer.strategy, "launcher", None)
        if getattr(launcher, "procs", None):
            launcher.kill(signal.SIGTERM)
        raise


def final_metrics(trainer: Any) -> dict[str, float]:
    """The last value of every metric of a trainer."""
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k != "step"}
    return metrics | getattr(trainer.lightning_module, "step_metrics", {})


def is_interrupted(trainer: Any) -> bool:
    """Whether a signal stopped the run."""
    return any(getattr(callback, "interrupted", False) for callback in trainer.callbacks)


@contextlib.contextmanager
def _save_can_be_repeated(run: Run) -> Iterator[None]:
    """Says how to go on where a signal ends the last save."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and rundir.is_first():
            print(f"Interrupted while the model was saved. To save it: workbench train resume={_short(run.dir)}", flush=True)
        raise


def _save_model(run: Run) -> None:
    """Writes <run_dir>/model with a card; every process takes part, since weights may be sharded."""
    folder = run.dir / MODEL_FOLDER
    run.method.save_pretrained(folder, card=_card(run), **({"merge": True} if run.config.merge_adapter else {}))
    if run.config.push_to_hub and rundir.is_first():
        from workbench.models.save import push_to_hub

        push_to_hub(folder, run.config.push_to_hub, private=run.config.hub_private)


def _card(run: Run) -> str:
    from workbench.models.card import model_card
    from workbench.models.papers import papers_of

    plain = checker.to_plain(run.config)
    return model_card(
        name=run.config.push_to_hub or run.config.name,
        method=plain["method"]["_target_"].rsplit(".", 1)[-1].lower(),
        papers=papers_of(plain),
        base_model=plain["model"].get("name"),
        datasets=source_names(plain["data"].get("train")),
        hyperparameters={
            key: plain[key] for key in ("method", "data", "optim", "scheduler", "peft", "trainer", "seed") if plain.get(key)
        },
        metrics={k: v for k, v in run.metrics.items() if "/" in k},
        adapter=plain.get("peft") is not None,
        auto_class=run.method.auto_class,
        num_labels=getattr(run.method, "num_labels", None),
    )


def source_names(source: Any) -> list[str]:
    """Names of the data sets in a training source."""
    if isinstance(source, list):
        return [name for item in source for name in source_names(item)]
    if isinstance(source, dict):
        return source_names(source.get("sources", source.get("path")))
    return [source] if isinstance(source, str) else []


# -- what is printed ---------------------------------------------------------------------------------------------------


def _announce(cfg: DictConfig, folder: pathlib.Path, checkpoint: str | None) -> None:
    print(describe(cfg), flush=True)
    if checkpoint:
        print(f"resuming from {checkpoint}", flush=True)
    print(f"folder      {_short(folder)}", flush=True)


def describe(cfg: DictConfig) -> str:
    """The effective configuration, a line per group; options left at null are not listed."""
    lines = []
    plain = checker.to_plain(cfg)
    top = {k: v for k, v in plain.items() if not isinstance(v, dict) and v is not None}
    lines.append(_described("run", top))
    for group, node in plain.items():
        if group in ("callbacks", "logger") and node:
            lines.append(f"{group:<11} {' '.join(k for k, v in node.items() if v is not None)}")
        elif isinstance(node, dict):
            lines.append(_described(group, node))
    return "\n".join(lines)


def _described(group: str, node: dict) -> str:
    target = node.get("_target_", "").rsplit(".", 1)[-1]
    words = [f"{k}={_value(v)}" for k, v in node.items() if not k.startswith("_") and v is not None]
    return f"{group:<11} {' '.join([target, *words]).strip()}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + " ".join(f"{k}={_value(v)}" for k, v in value.items() if not str(k).startswith("_") and v is not None) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return value if value and value.isprintable() and not value.isspace() else json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def report(run: Run) -> str:
    """The last lines of a run: what came out, where it is, how to go on."""
    folder = _short(run.dir)
    shown = [k for k in run.metrics if k.endswith("/loss")]
    shown += [run.config.metric] if run.config.metric in run.metrics and run.config.metric not in shown else []
    losses = "  ".join(f"{k} {run.metrics[k]:.4f}" for k in shown)
    state = "interrupted" if run.interrupted else "finished"
    lines = [f"{state}    {run.metrics['steps']} steps in {run.metrics['seconds']:.0f} s  {losses}".rstrip()]
    before_after = exact_match(run.trainer)
    if before_after is not None:
        lines[0] += "  exact match {:.3f} -> {:.3f}".format(*before_after)
    if run.interrupted:
        return "\n".join([*lines, f"folder      {folder}"])
    if run.config.save_model:
        lines.append(f"model       {folder}/{MODEL_FOLDER}  ({run.method.auto_class}.from_pretrained)")
    return "\n".join([*lines, f"folder      {folder}", "next        " + "\n            ".join(next_commands(run))])


def exact_match(trainer: Any) -> tuple[float, float] | None:
    """Share of right answers before and after training, where it was measured."""
    measured = [c for c in trainer.callbacks if hasattr(c, "before") and c.before is not None and c.after is not None]
    return (measured[0].before, measured[0].after) if measured else None


def next_commands(run: Run) -> list[str]:
    """Commands that lead on from this run."""
    folder = _short(run.dir)
    lr = OmegaConf.select(run.config, "optim.lr")
    values = ",".join(f"{lr * f:g}" for f in (0.5, 1, 2)) if isinstance(lr, float) else None
    return [
        *[f"workbench generate run={folder}"] * run.method.generates,
        f"workbench evaluate run={folder}",
        f"workbench train -m optim.lr={values}" if values else "workbench train -m seed=0,1,2",
        *_preferences_next(run),
    ]


def _preferences_next(run: Run) -> list[str]:
    """What follows SFT in the embedded world."""
    name, target = OmegaConf.select(run.config, "model.name"), run.config.method._target_
    if not run.config.save_model or not str(name).startswith("tiny") or not target.endswith(".SFT"):
        return []
    return [f"workbench train method=dpo model.name={_short(run.dir)}/{MODEL_FOLDER}"]


def _short(path: pathlib.Path) -> str:
    """Relative to the working folder where that is shorter."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
