"""How fast training is: tokens per second by two clocks, and the share of the device's peak that they come to."""

import time
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import nn

from workbench.models.work import Cost, Work
from workbench.strategies.info import gather


class Stopwatch:
    """Seconds between starts and stops; on CUDA those of the device, read without a wait before `take`."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._started: Any = None

    def start(self) -> None:
        """Starts, unless it runs."""
        if self._started is None:
            self._started = self._now()

    def stop(self) -> None:
        """Stops, if it runs."""
        if self._started is not None:
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
        work: of its policy.
        passes: seconds from each micro-batch's first forward pass with a gradient to the end of its backward pass.
        wall: seconds since the step before.
        generated: tokens of completions that were written.
        generating: seconds that took.
    """

    work: Work
    passes: float
    wall: float
    generated: int = 0
    generating: float = 0.0


def rates(ranks: list[Share], cost: Cost | None = None, peak: float | None = None) -> dict[str, float]:
    """Rates of a step over all ranks: work adds up, and the slowest rank's time counts.

    Args:
        ranks: what each did.
        cost: of the policy; None where it is not known.
        peak: operations per second that the device could do; None where that is not known.

    Returns:
        ``forwarded`` (positions of rows, padding included) and ``trained`` (tokens whose log-probability is trained) per second
        of wall-clock time, and with ``_in_passes`` per second of forward and backward passes; ``generated`` and
        ``generated_in_generation`` where completions were written; ``padding``, the share of positions without a token; ``mfu``
        and ``mfu_in_passes``, the share of the peak.
    """
    wall, passes = (max(max(getattr(rank, name) for rank in ranks), 1e-9) for name in ("wall", "passes"))
    positions, tokens, outputs = (sum(getattr(r.work, name) for r in ranks) for name in ("positions", "tokens", "outputs"))
    found = {"forwarded": positions / wall, "forwarded_in_passes": positions / passes}
    if outputs:
        found |= {"trained": outputs / wall, "trained_in_passes": outputs / passes}
    found["padding"] = 1 - tokens / positions if positions else 0.0
    if generated := sum(rank.generated for rank in ranks):
        generating = max(rank.generating for rank in ranks)
        found |= {"generated": generated / wall, "generated_in_generation": generated / max(generating, 1e-9)}
    if cost is not None and peak is not None:
        done = sum(cost(rank.work) for rank in ranks) / (peak * len(ranks))
        found |= {"mfu": done / wall, "mfu_in_passes": done / passes}
    return found


class Throughput(L.Callback):
    """Logs `rates` as ``train/throughput/...`` after every optimizer step.

    Wall-clock time holds everything between two steps, loading and generation included, but evaluation and the writing of
    checkpoints. MFU is logged on devices whose peak Lightning knows. Reference models and passes without a gradient take time and
    count as no work.
    """

    def __init__(self) -> None:
        self._watch: Stopwatch | None = None
        self._hook: Any = None
        self._cost: Cost | None = None
        self._peak: float | None = None
        self._last: float | None = None
        self._written = (0, 0.0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts to watch."""
        self._watch = Stopwatch(pl_module.device)
        self._hook = pl_module.policy.register_forward_pre_hook(self._before_forward)
        self._cost = Cost.of(pl_module.policy)
        self._peak = _peak(trainer, pl_module)
        self._last, self._written = None, _written(pl_module)
        pl_module.policy.work.take()

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        if torch.is_grad_enabled():
            self._watch.start()

    def on_train_batch_start(self, *args: Any) -> None:
        """The clock of the first step."""
        self._last = self._last or time.perf_counter()

    def on_after_backward(self, *args: Any) -> None:
        """A micro-batch is through."""
        self._watch.stop()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs, where a step ends."""
        if not batch.closes_step:
            return
        written, passes = _written(pl_module), self._watch.take()
        now, last, work, found = time.perf_counter(), self._last, pl_module.policy.work.take(), {}
        if last is not None:  # else a callback before this one has saved a checkpoint, on every rank: the time would hold that
            own = Share(work, passes, now - last, written[0] - self._written[0], written[1] - self._written[1])
            found = rates(gather(own, trainer.strategy), self._cost, self._peak)
        self._last, self._written = now, written
        # Logged without rates too: Lightning would give this hook's earlier step to the row.
        values = {f"train/throughput/{name}": value for name, value in found.items()}
        pl_module.log_dict({**values, "step": float(trainer.global_step)}, on_step=True, on_epoch=False, batch_size=1)

    def on_validation_end(self, *args: Any) -> None:
        """Evaluation is no part of a step."""
        self._last = None

    def on_save_checkpoint(self, *args: Any) -> None:
        """Nor is the writing of a checkpoint."""
        self._last = None

    def on_train_end(self, *args: Any) -> None:
        """Watches no longer."""
        if self._hook is not None:
            self._hook.remove()


def _written(pl_module: L.LightningModule) -> tuple[int, float]:
    """Tokens of completions that a method has written, and the seconds that took; 0 of one that writes none."""
    return getattr(pl_module, "generated_tokens", 0), getattr(pl_module, "generation_seconds", 0.0)


def _peak(trainer: L.Trainer, pl_module: L.LightningModule) -> float | None:
    """Operations per second of one device at the precision of the products; None where Lightning has no number for it."""
    if pl_module.device.type != "cuda":
        return None
    half = {"bf16": torch.bfloat16, "16": torch.float16}
    dtype = next((value for name, value in half.items() if str(trainer.precision).startswith(name)), None)
    return get_available_flops(pl_module.device, dtype or next(pl_module.policy.parameters()).dtype)
