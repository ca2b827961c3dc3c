"""Composes configurations from ``conf/`` and turns Hydra's errors into one line each.

`compose` keeps no state in the process, so that it can be called any number of times, in a notebook too.
"""

import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from omegaconf import DictConfig, OmegaConf, open_dict

from workbench.cli import check as checker
from workbench.cli.config_files import config_dir
from workbench.cli.flags import quote
from workbench.cli.settings import COMMAND_SETTINGS
from workbench.errors import UserError, nearest

__all__ = ["Composed", "compose", "config_dir", "explain", "load", "make_loader"]

PRIMARY = {name: command for command, (name, _) in COMMAND_SETTINGS.items()}


@dataclass
class Composed:
    """A composed configuration, Hydra's own node, and the overrides of both as Hydra takes them."""

    cfg: DictConfig
    hydra: DictConfig
    overrides: list[str]
    hydra_overrides: list[str]
    choices: dict[str, str | None] = field(default_factory=dict)


def compose(
    *overrides: str, config_name: str = "train", config_dirs: Sequence[str | pathlib.Path] = (), check: bool = True
) -> DictConfig:
    """The configuration that ``workbench train <overrides>`` would run, checked.

    Args:
        overrides: as on the command line: ``"model=hf"``, ``"optim.lr=1e-5"``, ``"+experiment=mine"``.
        config_name: the primary file: train, inspect, evaluate, generate, or one in ``config_dirs``.
        config_dirs: folders with own groups and experiments, searched before the shipped ones.
        check: refuse unknown keys, wrong types and impossible combinations.

    Raises:
        UserError: for a mistake in the overrides or files, in one line.
    """
    composed = load(list(overrides), config_name, config_dirs)
    if check:
        checker.check(composed.cfg, PRIMARY.get(config_name, "train"))
    return composed.cfg


def load(
    overrides: list[str], config_name: str = "train", config_dirs: Sequence[str | pathlib.Path] = (), sweep: bool = False
) -> Composed:
    """Composes without checking; with ``sweep`` overrides may hold several values."""
    loader = make_loader(config_dirs)
    try:
        cfg = _load_relaxed(loader, config_name, overrides, sweep)
    except UserError:
        raise
    except Exception as error:
        raise UserError(explain(error, overrides)) from None
    hydra = cfg.hydra
    choices = dict(hydra.runtime.choices)
    typed = OmegaConf.to_container(hydra.overrides)  # not resolved: ${...} in an override is the configuration's
    with open_dict(cfg):
        del cfg["hydra"]
        if "name" in cfg and OmegaConf.to_container(cfg)["name"] is None:  # unresolved: ${...} is judged by the check
            cfg.name = run_name(choices)
    OmegaConf.set_readonly(cfg, False)
    return Composed(cfg, hydra, typed["task"], typed["hydra"], choices)


def run_name(choices: dict) -> str:
    """Name of a run that was given none: its experiment, else method and model."""
    if choices.get("experiment"):
        return str(choices["experiment"]).replace("/", "_")
    parts = [choices.get("method"), choices.get("model")]
    return "_".join(str(p).replace("/", "_") for p in parts if p) or "run"


def make_loader(config_dirs: Sequence[str | pathlib.Path] = ()):
    """Hydra's loader over ``config_dirs`` and the shipped files."""
    from hydra import version
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.utils import JobRuntime, setup_globals

    version.setbase("1.3")
    setup_globals()
    JobRuntime.instance().set("name", "workbench")
    search_path = create_config_search_path(str(config_dir()))
    for folder in reversed([pathlib.Path(f).resolve() for f in config_dirs]):
        if not folder.is_dir():
            raise UserError(f"configuration folder {str(folder)!r} does not exist.")
        # Before Hydra's structured schemas, so that a file here wins over a shipped one of the same name.
        search_path.prepend(provider="command-line", path=f"file://{folder}", anchor=SearchPathQuery(provider="main"))
    return ConfigLoaderImpl(config_search_path=search_path)


def _load_relaxed(loader, config_name: str, overrides: list[str], sweep: bool) -> DictConfig:
    """Loads; a key that no file has is added, for the check to judge it with the schema's nearest name."""
    from hydra.errors import ConfigCompositionException
    from hydra.types import RunMode

    mode = RunMode.MULTIRUN if sweep else RunMode.RUN
    overrides = list(overrides)
    for _ in range(len(overrides) + 1):
        try:
            return loader.load_configuration(config_name, overrides, mode, from_shell=False)
        except ConfigCompositionException as error:
            key = _key_not_found(error)
            position = next((i for i, o in enumerate(overrides) if key and o.split("=")[0] == key), None)
            if position is None:
                raise
            overrides[position] = f"++{overrides[position]}"
    raise AssertionError("every override was relaxed and composition still fails")


def _key_not_found(error: Exception) -> str | None:
    found = re.match(r"Could not override '([^'@]+)'", str(error))
    return found.group(1) if found else None


def explain(error: Exception, overrides: Sequence[str] = ()) -> str:
    """One line for an error of Hydra, OmegaConf or the YAML reader."""
    import yaml
    from hydra.errors import MissingConfigException, OverrideParseException

    if isinstance(error, OverrideParseException):
        return _explain_parse(error.override)
    if isinstance(error, MissingConfigException):
        return _explain_missing(error, overrides)
    text = str(error) or str(error.__cause__ or "")
    if found := re.search(r"Config group override must be a string or a list\. Got (\w+)", text):
        return _explain_group(overrides) or text
    cause = error if isinstance(error, yaml.YAMLError) else error.__cause__
    if isinstance(cause, yaml.YAMLError):
        mark = getattr(cause, "problem_mark", None)
        where = f"{mark.name.strip()}, line {mark.line + 1}" if mark else "a configuration file"
        return f"{where} is not valid YAML: {getattr(cause, 'problem', cause)}."
    if "requires --multirun" in text or "Ambiguous value" in text:
        return _explain_sweep(re.search(r"'(.+?)'(?: requires|\n|$)", text).group(1))
    if found := re.search(r"Could not append to config. An item is already at '([^']+)'", text):
        return f"+{found.group(1)} adds a key that is there already: leave the + out to change it."
    if found := re.search(r"In '([\w/]+)': Could not override '(\w+)'\. No match", text):
        chooser, group = found.groups()
        return f"{chooser} chooses an option of {group!r}, a group that this command does not have: write model.name=... instead."
    if found := re.search(r"force-add of config groups is not supported: '\+\+([\w/]+)=", text):
        group = found.group(1)
        of = " It belongs to methods that generate, such as method=grpo." if group == "engine" else ""
        return f"{group} is a group that neither this command nor its method has: leave it out.{of}"
    return re.sub(r"\s+", " ", text).strip() or type(error).__name__


def _explain_parse(override: str) -> str:
    key, equals, value = override.partition("=")
    if not equals:
        return f"cannot read {override!r}: an override is written key=value."
    quoted = quote(value.strip("\"'"))
    return (
        f"cannot read {override!r}: a value with = , : ( ) [ ] {{ }} # % @ or quotes in it must be quoted, twice on a shell's "
        f"command line: '{key}={quoted}'"
    )


def _explain_missing(error, overrides: Sequence[str]) -> str:
    wanted = error.missing_cfg_file or ""
    group, _, option = wanted.rpartition("/")
    if error.options is None or not group:
        return re.sub(r"\s+", " ", str(error).split("\nSearch path")[0]).strip()
    options = sorted(o for o in error.options)
    hint = nearest(option, options)
    typed = f"{group}={option}"
    return f"{typed} is not an option of the group {group!r}.{hint} Options: {', '.join(options)}."


def _explain_group(overrides: Sequence[str]) -> str | None:
    """An override that chooses no option of its group."""
    for override in overrides:
        key, _, value = override.partition("=")
        if not key.strip("+~"):
            return f"cannot read {override!r}: an override is written key=value."
        folder = config_dir() / key.lstrip("+~").partition("@")[0]
        if value in ("null", "") or not value.isidentifier():
            options = sorted(p.stem for p in folder.glob("*.yaml"))
            if options:
                return f"{override} chooses no option of the group {folder.name!r}. Options: {', '.join(options)}."
    return None


def _explain_sweep(override: str) -> str:
    key, _, value = override.partition("=")
    return (
        f"{override!r} holds several values: add -m to run one job for each, or write {key}=[{value}] for a list "
        f"or '{key}=\"{value}\"' for text."
    )
