"""Averages of the weights over training: EMA and BEMA."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor

from workbench.callbacks.steps import closes_step
from workbench.errors import UserError
from workbench.strategies.shards import local, shard_like, whole

log = logging.getLogger(__name__)

Weights = dict[str, Tensor]


class WeightAverage(Callback):
    """Base of averages: keeps fp32 copies of the trained parameters outside the module, in a checkpoint under this callback.

    A subclass defines `update`, which moves ``self.average`` (and any further weights that it lists in ``kept``).

    Args:
        update_freq: update every so many optimizer steps.
        update_after: step at which the average starts, from the weights of that step.
        device: where the averages are kept; null is beside each parameter.
        evaluate: validate with the average instead of the current weights.
        apply_at_end: leave the average in the module when training ends, so that it is what is saved.
        export_dir: also write the averaged model there in the end (``save_pretrained``).
        update_ref_model: let the reference of a preference method be the average.
        ref_model_update_freq: optimizer steps between two updates of the reference.
        ref_model_update_after: step of its first update.
    """

    kept: tuple[str, ...] = ("average",)

    def __init__(
        self,
        update_freq: int = 1,
        update_after: int = 0,
        device: str | None = None,
        evaluate: bool = False,
        apply_at_end: bool = True,
        export_dir: str | None = None,
        update_ref_model: bool = False,
        ref_model_update_freq: int = 400,
        ref_model_update_after: int = 0,
    ) -> None:
        if update_freq < 1 or update_after < 0:
            raise UserError(f"update_freq={update_freq} must be at least 1 and update_after={update_after} at least 0.")
        self.update_freq = update_freq
        self.update_after = update_after
        self.device = device
        self.evaluate = evaluate
        self.apply_at_end = apply_at_end
        if ref_model_update_freq < 1 or ref_model_update_after < 0:
            raise UserError(
                f"ref_model_update_freq={ref_model_update_freq} must be at least 1 and ref_model_update_after="
                f"{ref_model_update_after} at least 0."
            )
        if not update_ref_model and (ref_model_update_freq, ref_model_update_after) != (400, 0):
            raise UserError("ref_model_update_freq and ref_model_update_after have no effect with update_ref_model=false.")
        self.export_dir = export_dir
        self.update_ref_model = update_ref_model
        self.ref_model_update_freq = ref_model_update_freq
        self.ref_model_update_after = ref_model_update_after
        self.average: Weights = {}
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._loaded: dict[str, Weights] = {}
        self._current: Weights | None = None

    @property
    def state_key(self) -> str:
        """One entry per kind of average."""
        return type(self).__name__

    @property
    def is_applied(self) -> bool:
        """Whether the module's parameters are the average just now."""
        return self._current is not None

    def start(self, weights: Weights) -> None:
        """Begins the average at ``weights`` (on this rank: its shards), which may be kept."""
        self.average = weights

    def update(self, weights: Weights, step: int) -> None:
        """Moves the average towards ``weights`` after optimizer step ``step``."""
        raise NotImplementedError

    # -- training -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: "L.Trainer", pl_module: "L.LightningModule", stage: str) -> None:
        """Forgets what an earlier run of this callback left."""
        self._loaded = {}

    def on_train_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Continues the average of a checkpoint, or starts one where that is due."""
        if isinstance(trainer.strategy, DeepSpeedStrategy) and trainer.strategy.zero_stage_3:
            raise UserError(
                f"{type(self).__name__} cannot average weights that DeepSpeed stage 3 has split up; use strategy=fsdp2 or "
                "deepspeed_stage_2."
            )
        if self.update_ref_model and getattr(pl_module, "reference", None) is None:
            raise UserError(
                f"callbacks: {type(self).__name__}.update_ref_model=true needs a method with a reference that can move, and "
                f"{type(pl_module).__name__} has none (or has precomputed it); set it to false."
            )
        self._parameters = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        for attribute in self.kept:
            setattr(self, attribute, {})
        if self._loaded:
            self._take_over()
        elif trainer.global_step >= self.update_after:
            self.start(self._copy())

    def on_train_batch_end(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Updates the average after an optimizer step."""
        if not closes_step(trainer):
            return
        step = trainer.global_step
        if not self.average and step >= self.update_after:
            self.start(self._copy())
        elif self.average and (step - self.update_after) % self.update_freq == 0:
            self.update(self._read(), step)
        past = step - self.ref_model_update_after
        if self.update_ref_model and self.average and past >= 0 and past % self.ref_model_update_freq == 0:
            pl_module.move_reference({name.removeprefix("policy."): weight for name, weight in self.average.items()})

    def on_train_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Exports the average, and leaves it in the module where that is asked for."""
        if not self.average:
            log.warning(
                "%s has no average: training ended at step %d, update_after=%d",
                type(self).__name__,
                trainer.global_step,
                self.update_after,
            )
            return
        if self.export_dir is not None:
            with self.applied():
                pl_module.save_pretrained(self.export_dir)
        if self.apply_at_end:
            self._write(self.average)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it, the module's trained parameters are the average (if there is one yet)."""
        self._swap_in()
        try:
            yield
        finally:
            self._swap_out()

    def on_validation_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Evaluates with the average."""
        if self.evaluate and not trainer.sanity_checking:
            self._swap_in()

    def on_validation_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Goes on training with the current weights."""
        self._swap_out()

    def on_exception(self, trainer: "L.Trainer", pl_module: "L.LightningModule", exception: BaseException) -> None:
        """Leaves the current weights in the module."""
        self._swap_out()

    def _swap_in(self) -> None:
        if self.average and self._current is None:
            self._current = {name: local(p).detach().clone() for name, p in self._parameters.items()}
            self._write(self.average)

    def _swap_out(self) -> None:
        if self._current is not None:
            self._write(self._current)
            self._current = None

    # -- weights ------------------------------------------------------------------------------------------------------

    def _read(self) -> Weights:
        """The trained parameters, on this rank its shards, in fp32 on the average's device; not copied where it need not be."""
        return {n: local(p).detach().to(self.device or p.device, torch.float32) for n, p in self._parameters.items()}

    def _copy(self) -> Weights:
        return {name: weight.clone() for name, weight in self._read().items()}

    @torch.no_grad()
    def _write(self, weights: Weights) -> None:
        for name, parameter in self._parameters.items():
            local(parameter).copy_(weights[name])

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Whole tensors, so that any number of processes can resume; every rank must call it, rank 0 gets them."""
        return {attribute: self._gather(getattr(self, attribute)) for attribute in self.kept if self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state until training starts, when the parameters are there."""
        self._loaded = dict(state_dict)

    def _gather(self, weights: Weights) -> Weights:
        return {name: whole(weight, self._parameters[name]) for name, weight in weights.items()}

    def _take_over(self) -> None:
        loaded, self._loaded = self._loaded, {}
        missing = self._parameters.keys() ^ loaded["average"].keys()
        if missing:
            raise UserError(
                f"the checkpoint's {type(self).__name__} is of other trained parameters than this run's: "
                f"{', '.join(sorted(missing)[:3])}{' ...' if len(missing) > 3 else ''}."
            )
        for attribute in self.kept:
            shards = {n: shard_like(loaded[attribute][n], p) for n, p in self._parameters.items()}
            setattr(self, attribute, {n: w.to(self.device or self._parameters[n].device) for n, w in shards.items()})


class EMA(WeightAverage):
    """Exponential moving average: ``average <- decay * average + (1 - decay) * weights``.

    Args:
        decay: share of the old average that an update keeps.
        update_freq: update every so many optimizer steps.
        update_after: step at which the average starts, from the weights of that step.
        device: where the average is kept; null is beside each parameter.
        evaluate: validate with the average instead of the current weights.
        apply_at_end: leave the average in the module when training ends, so that it is what is saved.
        export_dir: also write the averaged model there in the end (``save_pretrained``).
        update_ref_model: let the reference of a preference method be the average.
        ref_model_update_freq: optimizer steps between two updates of the reference.
        ref_model_update_after: step of its first update.
    """

    def __init__(
        self,
        decay: float = 0.999,
        update_freq: int = 1,
        update_after: int = 0,
        device: str | None = None,
        evaluate: bool = False,
        apply_at_end: bool = True,
        export_dir: str | None = None,
        update_ref_model: bool = False,
        ref_model_update_freq: int = 400,
        ref_model_update_after: int = 0,
    ) -> None:
        shared = (update_freq, update_after, device, evaluate, apply_at_end, export_dir)
        super().__init__(*shared, update_ref_model, ref_model_update_freq, ref_model_update_after)
        if not 0 <= decay < 1:
            raise UserError(f"EMA decay={decay} must be at least 0 and below 1.")
        self.decay = decay

    def update(self, weights: Weights, step: int) -> None:
        """One step of the average."""
        for name, weight in weights.items():
            self.average[name].lerp_(weight, 1 - self.decay)


class BEMA(WeightAverage):
    """Bias-corrected exponential moving average (Block & Zhang 2025, arXiv:2508.00180, Algorithm 1).

    With ``t`` the optimizer step and ``w_0`` the weights at step ``update_after``, every ``update_freq`` steps:

        alpha = (lag + multiplier * t) ** -bias_power
        beta  = max((lag + multiplier * t) ** -ema_power, min_ema_multiplier)
        ema   = (1 - beta) * ema + beta * w_t
        bema  = alpha * (w_t - w_0) + ema

    Args:
        update_freq: update every so many optimizer steps (phi in the paper).
        ema_power: power of the averaging weight beta (kappa); 0 disables averaging.
        bias_power: power of the correction's weight alpha (eta); 0 never lets the correction fade.
        lag: offset of both schedules (rho).
        update_after: step at which the average starts, from the weights of that step (tau).
        multiplier: speed of both schedules (gamma).
        min_ema_multiplier: lower bound of beta.
        device: where the three copies are kept; null is beside each parameter.
        evaluate: validate with the average instead of the current weights.
        apply_at_end: leave the average in the module when training ends, so that it is what is saved.
        export_dir: also write the averaged model there in the end (``save_pretrained``).
        update_ref_model: let the reference of a preference method be the average.
        ref_model_update_freq: optimizer steps between two updates of the reference.
        ref_model_update_after: step of its first update.
    """

    kept = ("average", "ema", "initial")

    def __init__(
        self,
        update_freq: int = 400,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: int = 10,
        update_after: int = 0,
        multiplier: float = 1.0,
        min_ema_multiplier: float = 0.0,
        device: str | None = "cpu",
        evaluate: bool = False,
        apply_at_end: bool = True,
        export_dir: str | None = None,
        update_ref_model: bool = False,
        ref_model_update_freq: int = 400,
        ref_model_update_after: int = 0,
    ) -> None:
        shared = (update_freq, update_after, device, evaluate, apply_at_end, export_dir)
        super().__init__(*shared, update_ref_model, ref_model_update_freq, ref_model_update_after)
        if lag < 0 or multiplier < 0 or lag + multiplier <= 0 or not 0 <= min_ema_multiplier <= 1:
            raise UserError(
                f"BEMA needs lag={lag} and multiplier={multiplier} not negative and not both 0, and "
                f"min_ema_multiplier={min_ema_multiplier} between 0 and 1."
            )
        self.ema_power = ema_power
        self.bias_power = bias_power
        self.lag = lag
        self.multiplier = multiplier
        self.min_ema_multiplier = min_ema_multiplier
        self.ema: Weights = {}
        self.initial: Weights = {}

    def start(self, weights: Weights) -> None:
        """The snapshot that the correction is relative to, and both averages."""
        self.initial = weights
        self.ema = {name: weight.clone() for name, weight in weights.items()}
        self.average = {name: weight.clone() for name, weight in weights.items()}

    def update(self, weights: Weights, step: int) -> None:
        """One step of the average."""
        age = self.lag + self.multiplier * step
        alpha = age**-self.bias_power
        beta = min(max(age**-self.ema_power, self.min_ema_multiplier), 1.0)
        for name, weight in weights.items():
            ema = self.ema[name].lerp_(weight, beta)
            self.average[name] = torch.add(ema, weight - self.initial[name], alpha=alpha)
