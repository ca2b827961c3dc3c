"""What the C library does with memory that a step has freed."""

import ctypes
import sys
from typing import Any

import lightning as L

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of mallopt(3)
_NEVER, _NONE, _LARGE = -1, 0, 2**17


def _mallopt() -> Any:
    """What tells glibc; None with another C library (musl has none)."""
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None


def keep_freed_memory() -> bool:
    """Lets this process keep freed memory for its next use, where glibc would give large pieces back to the system and a CPU's
    next step would have them zeroed and mapped again, page by page; the most that is held stays what a step needs.

    Returns:
        Whether the C library can be told so.
    """
    mallopt = _mallopt()
    return mallopt is not None and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER) and mallopt(_M_MMAP_MAX, _NONE))


class KeepsFreedMemory(L.Callback):
    """Calls `keep_freed_memory` once the first update has made the optimizer's states, which stay for good. Until then each large
    piece is mapped by itself: among what the first step freed the states would lie scattered, and leave holes between them that
    the activations of later steps do not fit in."""

    def __init__(self) -> None:
        self._done = False

    def on_train_start(self, trainer: L.Trainer, method: L.LightningModule) -> None:
        """Before the first step; glibc would raise the bound with the first piece that is freed."""
        if (mallopt := _mallopt()) is not None:
            mallopt(_M_MMAP_THRESHOLD, _LARGE)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """After each micro-batch."""
        if not self._done and trainer.global_step > 0:
            self._done = True
            keep_freed_memory()
