"""The flags of the commands, and how what was typed is sorted into flags and overrides."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench.errors import UserError, nearest

# flag -> (name, whether a value follows, what it does); Hydra's own names where Hydra has the flag
FLAGS = {
    "-m": ("multirun", False, "sweep: one job for every combination of comma-separated values"),
    "--multirun": ("multirun", False, ""),
    "-c": ("cfg", True, "print the composed configuration and stop: job, hydra or all"),
    "--cfg": ("cfg", True, ""),
    "-p": ("package", True, "with --cfg: print this node alone"),
    "--package": ("package", True, ""),
    "--resolve": ("resolve", False, "with --cfg: replace ${...} by its value"),
    "-i": ("info", True, "print how the configuration is composed: defaults, defaults-tree, searchpath, plugins, all"),
    "--info": ("info", True, ""),
    "-cd": ("config_dir", True, "folder with groups and experiments of your own, searched first"),
    "--config-dir": ("config_dir", True, ""),
    "-cp": ("config_dir", True, ""),
    "--config-path": ("config_dir", True, ""),
    "-cn": ("config_name", True, "another primary file: with -cd <run folder> -cn config, a saved configuration"),
    "--config-name": ("config_name", True, ""),
}
CFG_KINDS = ("job", "hydra", "all")
INFO_KINDS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


@dataclass
class Arguments:
    """What was typed after the command."""

    overrides: list[str] = field(default_factory=list)
    multirun: bool = False
    resolve: bool = False
    cfg: str | None = None
    package: str | None = None
    info: str | None = None
    config_dir: list[str] = field(default_factory=list)
    config_name: str | None = None


def parse(argv: Sequence[str]) -> Arguments:
    """Sorts flags from overrides; raises `UserError` for an unknown flag or a missing value."""
    arguments, words = Arguments(), list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if not flag.startswith("-"):
            arguments.overrides.append(word)
            continue
        if flag not in FLAGS:
            raise UserError(f"{flag} is not a flag.{nearest(flag, FLAGS)} Overrides have no dashes: {flag.lstrip('-')}=...")
        name, takes_value, _ = FLAGS[flag]
        if not takes_value:
            setattr(arguments, name, True)
            continue
        if not equals:
            value = _flag_value(flag, words)
        _set_flag(arguments, name, value)
    return arguments


def _flag_value(flag: str, words: list[str]) -> str:
    if flag in ("-i", "--info") and (not words or words[0] not in INFO_KINDS):
        return "all"
    if not words:
        raise UserError(f"{flag} needs a value: {FLAGS[flag][2] or FLAGS[flag][0]}.")
    return words.pop(0)


def _set_flag(arguments: Arguments, name: str, value: str) -> None:
    choices = {"cfg": CFG_KINDS, "info": INFO_KINDS}.get(name)
    if choices and value not in choices:
        raise UserError(f"--{name} {value}: not known.{nearest(value, choices)} Allowed: {', '.join(choices)}.")
    if name == "config_dir":
        arguments.config_dir.append(value)
    else:
        setattr(arguments, name, value)


def quote(value: str) -> str:
    """A value that Hydra's override grammar and OmegaConf read as this very text."""
    text = value.replace("${", "\\${")
    text = re.sub(r'(\\*)"', r'\1\1\\"', text)  # backslashes count before a quote only
    return '"' + re.sub(r"(\\+)$", r"\1\1", text) + '"'
