"""`Trajectory`: what a run is known by, and the callback that takes it down.

Per optimizer step: loss, gradient norm before clipping, learning rate, tokens so far, the method's signed metrics, the norm of
every parameter's gradient, and the rows. At the end, of every parameter: its norm and its product with a fixed random vector of
signs; of every group of the optimizer: an exact hash.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from workbench.data.prompts import Ticket
from workbench.methods.optim import parameter_groups
from workbench.strategies.info import data_parallel, gather, is_deepspeed

# How fast it was, and what is nothing but rounding where sampler and trainer agree.
_NOT_NUMBERS_OF_THE_RUN = (
    "tokens_per_second",
    "throughput/",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
)
# What wrappers add to a parameter's name.
_WRAPPERS = ("policy.hf.", "base_model.model.", "base_layer.", "_checkpoint_wrapped_module.", "default.")


@dataclass
class Trajectory:
    """A run, or the part of it after ``first - 1`` optimizer steps.

    Args:
        first: number of the first step in it.
        steps: by metric its values, one per step; None where a step has no value.
        grad_norms: by parameter the norm of its gradient, one per step; empty where a strategy does not show gradients.
        rows: the rows of each step in ascending order, of an online method the completions (row of the prompt times completions
            of each, plus which one it is); None where rows have no number (streams).
        completions: of each step a hash of the tokens of all completions of its window; None where there are none.
        parameters: by parameter its final ``[norm, product with a vector of signs]``.
        hashes: by group of the optimizer a hash of its parameters' final bits.
    """

    first: int = 1
    steps: dict[str, list[float | None]] = field(default_factory=dict)
    grad_norms: dict[str, list[float]] = field(default_factory=dict)
    rows: list[list[int]] | None = None
    completions: list[str] | None = None
    parameters: dict[str, list[float]] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return max(map(len, self.steps.values()), default=0)

    def continued(self, rest: "Trajectory") -> "Trajectory":
        """This run up to where ``rest`` begins, then ``rest``."""
        kept = rest.first - self.first

        def joined(ours: dict[str, list], theirs: dict[str, list]) -> dict[str, list]:
            names = [*ours, *(name for name in theirs if name not in ours)]
            nothing = [None] * kept, [None] * rest.num_steps
            return {name: ours.get(name, nothing[0])[:kept] + theirs.get(name, nothing[1]) for name in names}

        def both(ours: list | None, theirs: list | None) -> list | None:
            return None if ours is None or theirs is None else ours[:kept] + theirs

        rows, completions = both(self.rows, rest.rows), both(self.completions, rest.completions)
        steps, grad_norms = joined(self.steps, rest.steps), joined(self.grad_norms, rest.grad_norms)
        return Trajectory(self.first, steps, grad_norms, rows, completions, rest.parameters, rest.hashes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; completions only where there are some."""
        values = asdict(self)
        return values if self.completions is not None else {k: v for k, v in values.items() if k != "completions"}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Trajectory":
        """The inverse of `to_dict`."""
        return cls(**values)

    @classmethod
    def read(cls, path: Path) -> "Trajectory":
        """From a JSON file."""
        return cls.from_dict(json.loads(path.read_text()))

    @classmethod
    def of_metrics(cls, rows: Iterable[dict[str, float]]) -> "Trajectory":
        """From metrics by step, as loggers keep them; those of training alone."""
        rows = [row for row in rows if any(name.startswith("train/") for name in row)]
        names = sorted({name for row in rows for name in row if name.startswith("train/")})
        kept = [name for name in names if not name.removeprefix("train/").startswith(_NOT_NUMBERS_OF_THE_RUN)]
        steps = {name.removeprefix("train/"): [_value(row.get(name)) for row in rows] for name in kept}
        return cls(first=int(rows[0]["step"]) if rows else 1, steps=steps)


def _value(value: float | None) -> float | None:
    return None if value is None or value != value else float(value)


class Recorder(L.Callback):
    """Takes down the trajectory of a run of a `Method`; the same on every rank, gradients and parameters whole."""

    def __init__(self) -> None:
        self.trajectory = Trajectory()
        self._metrics: list[dict[str, float]] = []
        self._norms: list[dict[str, float]] = []
        self._rows: list[list[int]] = []
        self._step_rows: list[int] = []
        self._completions: list[str] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        """Gradients before clipping."""
        if not is_deepspeed(trainer.strategy):
            named = ((plain_name(n), p.grad) for n, p in module.named_parameters() if p.requires_grad)
            self._norms.append({name: 0.0 if g is None else _norm(_whole(g)) for name, g in named})

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Metrics at the end of a step."""
        online = isinstance(batch, Ticket)
        if online:
            self._step_rows += _completion_rows(trainer, module, batch)
        elif not batch.is_empty:
            self._step_rows += torch.unique_consecutive(batch.row).tolist()
        if batch.closes_step:
            self._completions += [_hash_of(module.window)] if online else []
            self._metrics.append({**module.step_metrics, "step": trainer.global_step})
            self._rows.append(self._step_rows)
            self._step_rows = []

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Parameters, and the rows of all ranks."""
        run = Trajectory.of_metrics(self._metrics)
        run.grad_norms = {name: [step[name] for step in self._norms] for name in (self._norms or [{}])[0]}
        if not trainer.datamodule.streaming:
            ranks = gather(self._rows, trainer.strategy)
            run.rows = [sorted(row for rows in step for row in rows) for step in zip(*ranks, strict=True)]
        run.completions = self._completions or None
        run.parameters, run.hashes = fingerprint(module)
        self.trajectory = run


def _completion_rows(trainer: L.Trainer, module: Any, ticket: Ticket) -> list[int]:
    """Numbers of the completions that this rank trained."""
    window, size = module.window, module.num_generations
    micro = window.plans[ticket.offset % len(window.plans)].micro[data_parallel(trainer.strategy).rank][ticket.k]
    return [ticket.plan.prompts[window.group[i]] * size + i % size for i in micro]


def _hash_of(window: Any) -> str:
    """Of the tokens of a window's completions, in plan order."""
    digest = hashlib.sha256(np.int64(window.lengths).tobytes())
    digest.update(np.concatenate(window.token_ids).astype(np.int64).tobytes())
    return digest.hexdigest()[:16]


def fingerprint(module: nn.Module) -> tuple[dict[str, list[float]], dict[str, str]]:
    """``parameters`` and ``hashes`` of a `Trajectory`; a collective where parameters are sharded."""
    names = {id(p): plain_name(n) for n, p in module.named_parameters()}
    parameters, hashes = {}, {}
    for group in parameter_groups(module):
        digest = hashlib.sha256()
        for parameter in group["params"]:
            weights = _whole(parameter.detach())
            name = names[id(parameter)]
            parameters[name] = parameter_marks(name, weights)
            digest.update(weights.cpu().contiguous().flatten().view(torch.uint8).numpy())
        hashes["undecayed" if group.get("weight_decay") == 0.0 else "decayed"] = digest.hexdigest()[:32]
    return parameters, hashes


def parameter_marks(name: str, weights: Tensor) -> list[float]:
    """Norm of a parameter, and its product with a vector of signs drawn for its name."""
    return [_norm(weights), _projection(name, weights)]


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _norm(tensor: Tensor) -> float:
    return tensor.double().norm().item()


def _projection(name: str, weights: Tensor) -> float:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    signs = torch.from_numpy(np.random.default_rng(seed).integers(0, 2, weights.numel()) * 2.0 - 1.0)
    return (weights.cpu().double().flatten() @ signs).item()
