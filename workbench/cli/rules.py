"""Combinations of options that cannot work, each with the way out. Only what the configuration alone can tell is here."""

from collections.abc import Callable

from workbench.errors import UserError

Rule = Callable[[dict], str | None]
_RULES: list[tuple[tuple[str, ...], Rule]] = []


def rule(*commands: str) -> Callable[[Rule], Rule]:
    """Registers a function that returns what is wrong with a plain configuration, or None."""

    def register(function: Rule) -> Rule:
        _RULES.append((commands, function))
        return function

    return register


def check(cfg: dict, command: str) -> None:
    """Raises `UserError` for the first combination in ``cfg`` that cannot work."""
    for commands, function in _RULES:
        if command in commands and (problem := function(cfg)):
            raise UserError(problem)
