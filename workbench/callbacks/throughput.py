"""How fast training is: tokens per second by two clocks, and the share of the device's peak that they come to."""

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only

from workbench.callbacks.peak_flops import peak_flops as known_peak_flops
from workbench.errors import UserError
from workbench.models.policy import Policy
from workbench.models.work import Cost, Work
from workbench.strategies.info import gather, is_deepspeed

log = logging.getLogger(__name__)


class Stopwatch:
    """Seconds between starts and stops; on CUDA those of the device, read without a wait before `take`."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._started: Any = None

    @property
    def runs(self) -> bool:
        """Whether it has been started and not stopped."""
        return self._started is not None

    def start(self) -> None:
        """Starts, unless it runs."""
        if not self.runs:
            self._started = self._now()

    def stop(self) -> None:
        """Stops, if it runs."""
        if self.runs:
            self._spans.append((self._started, self._now()))
            self._started = None

    def take(self) -> float:
        """Seconds so far; they start again at zero."""
        spans, self._spans = self._spans, []
        if not self.cuda:
            return sum(end - start for start, end in spans)
        for _, end in spans:
            end.synchronize()
        return sum(start.elapsed_time(end) for start, end in spans) / 1000  # from milliseconds

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass
class Share:
    """What one rank did in an optimizer step.

    Args:
        trained: work of its policy's passes with a gradient, forward and backward.
        passes: seconds in passes: from a micro-batch's first forward pass with a gradient to the end of its backward pass, and of
            every pass without one.
        wall: seconds since the step before.
        compared: work of passes without a gradient: of the reference, and of the policy where it is asked before a step.
        operations: floating-point operations of both; None where they cannot be told.
        generated: tokens of completions that were written.
        generating: seconds that took.
    """

    trained: Work
    passes: float
    wall: float
    compared: Work = field(default_factory=Work)
    operations: float | None = None
    generated: int = 0
    generating: float = 0.0


def rates(ranks: list[Share], peak: float | None = None) -> dict[str, float]:
    """Rates of a step over all ranks: work adds up, and the slowest rank's time counts.

    Args:
        ranks: what each did.
        peak: operations per second that one device could do; None where that is not known.

    Returns:
        ``forwarded`` (positions of rows in all passes, padding included) and ``trained`` (tokens whose log-probability is
        trained) per second of wall-clock time, and with ``_in_passes`` per second of passes; ``generated`` and
        ``generated_in_generation`` where completions were written; ``padding``, the share of positions without a token; ``mfu``
        and ``mfu_in_passes``, the share of the peak.
    """
    wall, passes = (max(max(getattr(rank, name) for rank in ranks), 1e-9) for name in ("wall", "passes"))
    done = Work()
    for rank in ranks:
        done.add(rank.trained)
        done.add(rank.compared)
    found = {"forwarded": done.positions / wall, "forwarded_in_passes": done.positions / passes}
    if outputs := sum(rank.trained.outputs for rank in ranks):
        found |= {"trained": outputs / wall, "trained_in_passes": outputs / passes}
    found["padding"] = 1 - done.tokens / done.positions if done.positions else 0.0
    if generated := sum(rank.generated for rank in ranks):
        generating = max(rank.generating for rank in ranks)
        found |= {"generated": generated / wall, "generated_in_generation": generated / max(generating, 1e-9)}
    operations = [rank.operations for rank in ranks]
    if peak is not None and None not in operations:
        share = sum(operations) / (peak * len(ranks))
        found |= {"mfu": share / wall, "mfu_in_passes": share / passes}
    return found


class Throughput(L.Callback):
    """Logs `rates` as ``train/throughput/...`` after every optimizer step.

    Work and its seconds are those of all forward and backward passes of a step: the policy's, and, at a third of the operations,
    those without a gradient (a reference that is asked in the step, of whatever weights; log-probabilities of a window before
    its first update). A reference's stored log-probabilities cost nothing. Wall-clock time holds everything between two steps,
    loading, generation and reward models included, but evaluation and the writing of checkpoints.

    Args:
        peak_flops: floating-point operations per second that one device could do at the run's precision, dense, for the MFU;
            None: as in NVIDIA's data sheets, where the device is known.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None and not peak_flops > 0:
            raise UserError(f"callbacks.throughput.peak_flops={peak_flops} must be above 0, in operations per second.")
        self.peak_flops = peak_flops
        self._hooks: list[Any] = []
        self._last: float | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Goes before the callbacks that read a step's metrics at its end."""
        trainer.callbacks = [self, *(callback for callback in trainer.callbacks if callback is not self)]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts to watch."""
        self._watch = Stopwatch(pl_module.device)
        self._peak = self.peak_flops or known_peak_flops(pl_module.device, _dtype(trainer, pl_module))
        self._last, self._written = None, _written(pl_module)
        self._trained, self._compared, self._operations = Work(), Work(), 0.0
        self._knows_costs, self._awaits_backward = True, False
        for policy in _policies(pl_module):
            self._follow(policy, trainer)
        if self._peak is None or not self._knows_costs:
            _note_missing(pl_module.device, self._peak)

    def _follow(self, policy: Policy, trainer: L.Trainer) -> None:
        """Books what a policy does in training, and its seconds."""
        policy.work.take()
        costs = {backward: Cost.of(policy, backward=backward) for backward in (True, False)}
        self._knows_costs &= costs[True] is not None

        def before(*_: Any) -> None:
            if trainer.training:
                self._awaits_backward |= torch.is_grad_enabled()
                self._watch.start()

        def after(*_: Any) -> None:
            done, backward = policy.work.take(), torch.is_grad_enabled()
            if not trainer.training:
                return
            (self._trained if backward else self._compared).add(done)
            self._operations += costs[backward](done) if self._knows_costs else 0.0
            if not self._awaits_backward:
                self._watch.stop()

        self._hooks += [policy.register_forward_pre_hook(before, prepend=True), policy.register_forward_hook(after)]

    def on_train_batch_start(self, *args: Any) -> None:
        """The clock of the first step."""
        self._last = self._last or time.perf_counter()

    def on_after_backward(self, *args: Any) -> None:
        """A micro-batch is through."""
        self._awaits_backward = False
        self._watch.stop()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds to a step's metrics, where it ends."""
        if not batch.closes_step:
            return
        now, last, own = time.perf_counter(), self._last, self._take(pl_module)
        found = {}
        if last is not None:  # else a checkpoint was saved within the step, on every rank: the time would hold that
            own.wall = now - last
            found = rates(gather(own, trainer.strategy), self._peak)
        self._last = now
        values = {f"train/throughput/{name}": value for name, value in found.items()}
        pl_module.step_metrics |= values
        if not is_deepspeed(trainer.strategy):  # where the method logs the step's metrics after this
            # Logged without rates too: Lightning would give this hook's earlier step to the row.
            pl_module.log_dict({**values, "step": float(trainer.global_step)}, on_step=True, on_epoch=False, batch_size=1)

    def _take(self, pl_module: L.LightningModule) -> Share:
        """What this rank has done since it was asked before."""
        operations, self._operations = self._operations if self._knows_costs else None, 0.0
        before, self._written = self._written, _written(pl_module)
        tokens, seconds = (now - then for now, then in zip(self._written, before, strict=True))
        return Share(self._trained.take(), self._watch.take(), 0.0, self._compared.take(), operations, tokens, seconds)

    def on_validation_end(self, *args: Any) -> None:
        """Evaluation is no part of a step."""
        self._last = None

    def on_save_checkpoint(self, *args: Any) -> None:
        """Nor is the writing of a checkpoint."""
        self._last = None

    def on_train_end(self, *args: Any) -> None:
        """Watches no longer."""
        while self._hooks:
            self._hooks.pop().remove()

    def on_exception(self, *args: Any) -> None:
        """As `on_train_end`."""
        self.on_train_end()


def _policies(pl_module: L.LightningModule) -> list[Policy]:
    """The policy, and a reference's own model where it has one."""
    own = getattr(getattr(pl_module, "reference", None), "policy", None)
    return [pl_module.policy] if own is None else [pl_module.policy, own]


def _written(pl_module: L.LightningModule) -> tuple[int, float]:
    """Tokens of completions that a method has written, and the seconds that took; 0 of one that writes none."""
    return getattr(pl_module, "generated_tokens", 0), getattr(pl_module, "generation_seconds", 0.0)


def _dtype(trainer: L.Trainer, pl_module: L.LightningModule) -> torch.dtype:
    """Of the products."""
    half = {"bf16": torch.bfloat16, "16": torch.float16}
    found = next((dtype for name, dtype in half.items() if str(trainer.precision).startswith(name)), None)
    return found or next(pl_module.policy.parameters()).dtype


@rank_zero_only
def _note_missing(device: torch.device, peak: float | None) -> None:
    """Says why there is no MFU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type}"
    what = "the operations of this model (experts, 4-bit weights) are not counted"
    if peak is None:
        what = f"the peak of {name} is not known; give it as callbacks.throughput.peak_flops, in operations per second"
    log.info("train/throughput/mfu is left out: %s.", what)
