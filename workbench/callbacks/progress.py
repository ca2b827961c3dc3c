"""One progress bar, in optimizer steps."""

import html
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from workbench.callbacks.steps import closes_step, metrics
from workbench.errors import check_choice

log = logging.getLogger(__name__)

Style = Literal["auto", "bar", "notebook", "lines", "off"]

# What tells most comes first: the loss of a policy gradient is about zero by construction, its reward is not.
_SHOWN = (
    "train/reward",
    "train/rewards/margins",
    "train/rewards/accuracies",
    "train/loss",
    "train/grad_norm",
    "train/mean_token_accuracy",
    "train/kl",
    "train/tokens_per_second",
    "val/loss",
    "val/exact_match",
    "val/reward",
)


@dataclass
class State:
    """What is shown."""

    step: int = 0
    total: int | None = None
    values: dict[str, float] = field(default_factory=dict)
    phase: str = ""
    elapsed: float = 0.0
    remaining: float | None = None

    @property
    def share(self) -> float:
        """Share of the steps that are done, 0 where the total is not known."""
        return self.step / self.total if self.total else 0.0

    def counter(self) -> str:
        """``step 120/500``; outside training there are no steps to count."""
        if not self.step and not self.total:
            return "evaluation"
        return f"step {self.step}" + (f"/{self.total}" if self.total else "")

    def info(self) -> str:
        """Metrics, time and phase in one line."""
        parts = [f"{_short_name(name)} {_number(value)}" for name, value in self.values.items()]
        parts.append(_clock(self.elapsed) + (f" +{_clock(self.remaining)}" if self.remaining is not None else ""))
        return "  ".join([*parts, self.phase] if self.phase else parts)


class Display(Protocol):
    """A place to show a `State`."""

    interval: float  # Seconds between two showings.

    def show(self, state: State) -> None:
        """Shows it."""

    def close(self) -> None:
        """Leaves the last one as it is."""


class StepProgress(ProgressBar):
    """One bar that counts optimizer steps over all epochs, a resumed run's from where it continues, with the latest
    metrics and what is going on between steps (validating, generating, saving).

    In a terminal it is a bar, in a notebook one line that is replaced, elsewhere a line of text every so often.

    Args:
        style: ``auto`` chooses; ``off`` shows nothing.
        log_seconds: seconds between lines of text, where there is no bar.
        metrics: names of metrics to show, in this order; null chooses.
    """

    def __init__(self, style: Style = "auto", log_seconds: float = 10.0, metrics: list[str] | None = None) -> None:
        super().__init__()
        check_choice("progress style", style, ("auto", "bar", "notebook", "lines", "off"))
        self.style = style
        self.log_seconds = log_seconds
        self.metrics = metrics
        self.state = State()
        self._display: Display | None = None
        self._enabled = True
        self._first_step = 0
        self._started = self._shown = 0.0

    def disable(self) -> None:
        """Shows nothing on this process."""
        self._enabled = False

    def enable(self) -> None:
        """Undoes `disable`."""
        self._enabled = True

    # -- training -----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Starts at the step that training continues from."""
        total = trainer.estimated_stepping_batches
        self._open(trainer.global_step, None if math.isinf(total) else int(total))

    def on_train_batch_end(
        self, trainer: "L.Trainer", pl_module: "L.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts an optimizer step."""
        if self._display is not None and closes_step(trainer):
            self.state.step = trainer.global_step
            self._update(trainer, force=self.state.step in (self._first_step + 1, self.state.total))

    def on_train_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Leaves the final state."""
        self._update(trainer, force=True)
        self._close()

    def on_exception(self, trainer: "L.Trainer", pl_module: "L.LightningModule", exception: BaseException) -> None:
        """Gives the terminal back."""
        self._close()

    # -- validation ---------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Shows a validation, also one outside training."""
        if self._display is None and not trainer.sanity_checking:
            self._open(0, None)
        self._enter("validating")

    def on_validation_batch_end(
        self,
        trainer: "L.Trainer",
        pl_module: "L.LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Counts its batches."""
        total = trainer.num_val_batches[dataloader_idx] if trainer.num_val_batches else math.inf
        self._enter("validating" + (f" {batch_idx + 1}/{total:.0f}" if not math.isinf(total) else ""), force=False)

    def on_validation_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        """Shows its results."""
        self.state.phase = ""
        self._update(trainer, force=True)
        if trainer.state.fn != TrainerFn.FITTING:
            self._close()

    # -- anything else ------------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Shows ``name`` as what is going on; gives a function that adds how much of it is done."""
        before = self.state.phase
        self._enter(name)
        try:
            yield lambda done, total: self._enter(f"{name} {done}/{total}", force=False)
        finally:
            self._enter(before, force=False)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints above the bar, which looks after that itself."""
        print(*args, **kwargs)

    def _open(self, step: int, total: int | None) -> None:
        self._close()
        self.state = State(step, total)
        self._first_step, self._started, self._shown = step, time.monotonic(), 0.0
        if self._enabled and self.style != "off":
            self._display = _display(self.style, self.log_seconds)
            if not isinstance(self._display, Lines):
                self._show(force=True)
            self._shown = self._started

    def _close(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None

    def _enter(self, phase: str, *, force: bool = True) -> None:
        if self._display is not None:
            self.state.phase = phase
            self._show(force=force and not isinstance(self._display, Lines))

    def _update(self, trainer: "L.Trainer", *, force: bool) -> None:
        if self._display is not None:
            known = metrics(trainer)
            names: Sequence[str] = _SHOWN if self.metrics is None else self.metrics
            self.state.values = {name: known[name] for name in names if name in known}
            self._show(force=force)

    def _show(self, *, force: bool) -> None:
        now = time.monotonic()
        if not force and now - self._shown < self._display.interval:
            return
        self._shown = now
        state, done = self.state, self.state.step - self._first_step
        state.elapsed = now - self._started
        state.remaining = state.elapsed / done * (state.total - state.step) if state.total and done else None
        self._display.show(state)


@contextmanager
def phase(trainer: "L.Trainer", name: str) -> Iterator[Callable[[int, int], None]]:
    """Shows ``name`` (``generating``, ``saving``) in the trainer's `StepProgress`, if it has one; see `StepProgress.phase`."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, StepProgress):
        with bar.phase(name) as report:
            yield report
    else:
        yield lambda done, total: None


# -- displays ----------------------------------------------------------------------------------------------------------


class Bar:
    """A bar in a terminal; what others print appears above it."""

    interval = 0.1

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[info]}"),
            console=Console(stderr=True),
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # Where it goes to a file, it is not for the terminal.
        )
        self._task = self._progress.add_task("", info="", total=None)
        self._progress.start()

    def show(self, state: State) -> None:
        """Redraws the bar."""
        self._progress.update(self._task, description=state.counter(), completed=state.step, total=state.total, info=state.info())
        self._progress.refresh()

    def close(self) -> None:
        """Ends the live display."""
        self._progress.stop()


class Notebook:
    """One output of a cell, replaced; it neither grows with the steps nor needs widgets."""

    interval = 1.0

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, state: State) -> None:
        """Replaces the line."""
        from IPython.display import HTML, display

        bar = f'<progress value="{state.step}" max="{state.total}"></progress> ' if state.total else ""
        content = HTML(f"{bar}<code>{html.escape(f'{state.counter()}  {state.info()}')}</code>")
        if self._handle is None:
            self._handle = display(content, display_id=True)
        else:
            self._handle.update(content)

    def close(self) -> None:
        """Nothing to end."""


class Lines:
    """Plain lines on the error stream, for files and pipes."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._last = ""

    def show(self, state: State) -> None:
        """Writes a line, unless it says nothing new."""
        line = f"{state.counter()} ({state.share:.0%})" if state.total else state.counter()
        line = f"{line}  {state.info()}"
        if line != self._last:
            print(line, file=sys.stderr, flush=True)
        self._last = line

    def close(self) -> None:
        """Nothing to end."""


def _display(style: Style, log_seconds: float) -> Display:
    if style == "auto":
        style = "notebook" if _in_notebook() else "bar" if sys.stderr.isatty() else "lines"
    return Notebook() if style == "notebook" else Bar() if style == "bar" else Lines(log_seconds)


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _short_name(name: str) -> str:
    name = name.removeprefix("train/")
    return "tok/s" if name == "tokens_per_second" else name


def _number(value: float) -> str:
    if not math.isfinite(value) or abs(value) < 10_000:
        return f"{value:.4g}"
    return f"{value / 1e6:.3g}M" if abs(value) >= 1e6 else f"{value / 1e3:.3g}k"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
