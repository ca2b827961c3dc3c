"""``workbench invariants <subcommand>``. Imports nothing heavy: a subcommand's module is imported when it is called."""

import importlib
from collections.abc import Sequence
from typing import NamedTuple

from workbench.errors import UserError, nearest


class Subcommand(NamedTuple):
    """One subcommand: what it does in a line, and ``module:function``, which takes the arguments after its name and returns the
    exit code."""

    about: str
    function: str


SUBCOMMANDS = {
    "check": Subcommand("run classes with their members against their references", "workbench.invariants.commands:check_command"),
    "record": Subcommand("record the references of classes", "workbench.invariants.commands:record_command"),
    "compare": Subcommand("compare two runs, reference files or commits", "workbench.invariants.commands:compare_command"),
    "mutants": Subcommand("plant bugs and show which class rejects them", "workbench.invariants.commands:mutants_command"),
    "parity": Subcommand("replay runs that another trainer logged and compare every step", "workbench.invariants.parity:command"),
}


def main(argv: Sequence[str]) -> int:
    """Runs a subcommand and returns its exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(page())
        return 0
    name, *rest = argv
    if name not in SUBCOMMANDS:
        raise UserError(
            f"invariants {name}: there is no such subcommand.{nearest(name, SUBCOMMANDS)} Known: {', '.join(SUBCOMMANDS)}."
        )
    module, function = SUBCOMMANDS[name].function.split(":")
    try:
        return getattr(importlib.import_module(module), function)(rest)
    except SystemExit as stop:  # of argparse, after it has printed a page
        return int(stop.code or 0)


def page() -> str:
    """The page of ``workbench invariants --help``."""
    width = max(map(len, SUBCOMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {subcommand.about}" for name, subcommand in SUBCOMMANDS.items())
    return (
        f"usage: workbench invariants <subcommand> [flags]\n\n{lines}\n\nworkbench invariants <subcommand> --help lists its flags"
    )
