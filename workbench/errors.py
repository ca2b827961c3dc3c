"""Errors that a user can act on, and the wording they share."""

import difflib
from collections.abc import Iterable


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
