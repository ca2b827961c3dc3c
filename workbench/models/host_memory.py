"""What the C library does with memory that a step has freed."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of mallopt(3)
_NEVER, _NONE = -1, 0


def keep_freed_memory() -> bool:
    """Lets this process keep freed memory for its next use, where glibc would give large pieces back to the system and a CPU's
    next step would have them zeroed and mapped again, page by page; the most that is held stays what a step needs.

    Returns:
        Whether the C library can be told so.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; musl has none
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER) and mallopt(_M_MMAP_MAX, _NONE))
