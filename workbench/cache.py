"""Where files that can be made again are kept, and what helps to make them."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_home() -> Path:
    """``$WORKBENCH_CACHE``, else ``$XDG_CACHE_HOME/workbench``, else ``~/.cache/workbench``."""
    if own := os.environ.get("WORKBENCH_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "workbench"


@contextmanager
def many_objects() -> Iterator[None]:
    """Leaves what lives already out of the garbage collections within, also in processes forked there.

    Where millions of small objects come and go, going through all that the libraries hold takes a tenth of the time.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
