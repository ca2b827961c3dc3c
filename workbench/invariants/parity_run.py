"""Our own run of a recorded case, on a bare ``L.Trainer``, quietly and in this process."""

import contextlib
import functools
import importlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from workbench.errors import check_choice
from workbench.invariants import parity_online
from workbench.invariants.parity_cases import Case, Row, load_rows
from workbench.invariants.parity_rows import Fixture
from workbench.invariants.parity_trainers import Replay, replay, warmup_steps

_PEFT_NAMES = {"lora_alpha": "alpha", "lora_dropout": "dropout"}  # what we call otherwise
# The adapter that ``"lora": true`` stands for; under its seed peft draws the record's weights.
LORA: dict[str, Any] = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}

Steps = list[dict[str, float]]


@dataclass(frozen=True)
class Run:
    """What a run came to.

    Args:
        steps: metrics of every optimizer step, by the names of the record.
        facts: rows that preparing left out (``cut_away``) or cut (``truncated``).
    """

    steps: Steps
    facts: dict[str, int]


def run(case: Case, fixture: Path, cache: Path, plan: Replay | None = None, steps: int | None = None) -> Run:
    """Runs a case.

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
    last = int(case.steps[-1]["step"])
    recorder = _recorder(last if steps is None else min(steps, last))
    data = DataModule(_rows(case, plan, fixture), cache_dir=str(cache), **plan.data)
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
    trainer.fit(_method(case, plan, fixture), data)
    report = data.reports["train"]
    facts = {"cut_away": report.dropped.get("cut_away", 0), "truncated": report.truncated}
    return Run([_per_label(s) for s in recorder.steps] if plan.per_label else recorder.steps, facts)


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
    from workbench.models.tokenizer import load_tokenizer

    module, name = plan.target.split(":")
    arguments = {"optim": _optim(plan), "scheduler": _scheduler(plan), **plan.method}
    if "lora" in case.extras:
        arguments["peft"] = _peft(case.extras["lora"])
    model = _spec(plan, fixture)
    if "ref_model_scale" in case.extras:
        arguments["ref_model"] = _scaled(model, case.extras["ref_model_scale"])
    if plan.matched_prompts:
        arguments["embedding_model"] = _embedding(model)
    if plan.head is not None:
        arguments["tokenizer"], model = _with_head(model, *plan.head)
    if plan.online:
        arguments |= parity_online.arguments(case, load_tokenizer(model))
    method = getattr(importlib.import_module(module), name)(model, **arguments)
    if "orders" in case.extras:
        parity_online.follow_orders(method, case.extras["orders"])
    return method


def _peft(asked: Any) -> Any:
    from workbench.models.peft import PeftSpec

    given = {_PEFT_NAMES.get(name, name): value for name, value in asked.items()} if isinstance(asked, dict) else {}
    known = {field.name for field in fields(PeftSpec)}
    for name in given:
        check_choice("lora", name, sorted(known))
    return PeftSpec(**{**LORA, **given})


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


# -- models that a record begins with -------------------------------------------------------------------------------


def _scaled(spec: Any, factor: float) -> Any:
    """The model with its head times ``factor``."""
    from workbench.models.load import load_model

    model = load_model(spec)
    model.get_output_embeddings().weight.data.mul_(factor)
    return model


def _embedding(spec: Any) -> Any:
    """From texts to the mean of their tokens' input embeddings, those of the model as it is."""
    import torch

    from workbench.models.load import load_model
    from workbench.models.tokenizer import load_tokenizer

    embeddings, tokenizer = load_model(spec).get_input_embeddings(), load_tokenizer(spec)

    @torch.no_grad()
    def embed(texts: list[str]) -> Any:
        ids = [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        return torch.stack([embeddings(i).mean(0) for i in ids])

    return embed


def _with_head(spec: Any, kind: Any, outputs: int) -> tuple[Any, Any]:
    """The tokenizer, and the model under the head that the fixture's records begin with."""
    import torch

    from workbench.models.heads import classification_head, load_classifier
    from workbench.models.tokenizer import load_tokenizer

    model = load_classifier(spec, kind=kind, num_labels=outputs)
    head = classification_head(model)
    head.weight.data = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(3)) * 0.1
    return load_tokenizer(spec), model


# -- watching -------------------------------------------------------------------------------------------------------


def _callbacks(case: Case) -> list[Any]:
    from workbench.callbacks.averaging import BEMA

    if "bema" not in case.extras:
        return []
    known = inspect.signature(BEMA.__init__).parameters
    for name in case.extras["bema"]:
        check_choice("bema", name, [parameter for parameter in known if parameter != "self"])
    return [BEMA(**{"apply_at_end": False, **case.extras["bema"]})]


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


def _per_label(step: dict[str, float]) -> dict[str, float]:
    """A step with means over all its rows of a label, where means of micro-batches' means are averaged otherwise."""
    step = {name: value for name, value in step.items() if name != "rewards/margins"}
    for side in ("chosen", "rejected"):
        if count := step.get(f"count/{side}"):
            step |= {f"{name}/{side}": step[f"{name}/{side}_sum"] / count for name in ("rewards", "logps")}
    if step.get("count/chosen") and step.get("count/rejected"):
        step["rewards/margins"] = step["rewards/chosen"] - step["rewards/rejected"]
    return step


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
