"""Errors that a user can act on, and the wording they share."""

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # no room left on a disk, of a quota, in a file
REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}


class UserError(ValueError):
    """A mistake in what the user asked for, told in one line: the value, what is allowed, and the way out.

    The command line prints the message alone and exits with code 2; from Python it is a ``ValueError``.
    """


def nearest(value: str, allowed: Iterable[str]) -> str:
    """``" Did you mean 'beta'?"`` for the allowed name closest to ``value``, or an empty string if none is close."""
    matches = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raises `UserError` naming ``name``, ``value`` and the ``allowed`` ones unless ``value`` is one of them."""
    allowed = list(allowed)
    if value not in allowed:
        listed = ", ".join(str(a) for a in allowed)
        raise UserError(f"{name}={value!r} is not known.{nearest(str(value), map(str, allowed))} Allowed: {listed}.")


def check_at_least(low: float, **values: float | None) -> None:
    """Raises `UserError` for a value below ``low``; a dot in a name is written as ``__``; None passes."""
    for name, value in values.items():
        if value is not None and not value >= low:
            raise UserError(f"{name.replace('__', '.')}={value} must be at least {low}.")


def explain_os_error(error: OSError, doing: str) -> str:
    """``"cannot <doing>: <reason>. <way out>"``."""
    way_out = ""
    if error.errno in FULL:
        way_out = " Free some space."
    elif error.errno in REFUSED:
        way_out = " Choose another place, or change its permissions."
    return f"cannot {doing}: {error.strerror or error}.{way_out}"


@contextlib.contextmanager
def file_errors(doing: str) -> Iterator[None]:
    """Turns an `OSError` of the block into a `UserError`; ``doing`` names what was to be done, and where."""
    try:
        yield
    except OSError as error:
        raise UserError(explain_os_error(error, doing)) from error
