"""From a command's arguments to its work: flags, composition, check, then the command's own module."""

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TextIO

from omegaconf import DictConfig, OmegaConf

from workbench.cli import check as checker
from workbench.cli import config, rundir
from workbench.cli.flags import Arguments, parse
from workbench.cli.settings import COMMAND_SETTINGS
from workbench.errors import UserError


def run_command(command: str, argv: Sequence[str]) -> int:
    """Composes and checks the configuration of ``command``, then prints it, sweeps over it or runs it."""
    _set_up_logging()
    module = _module(command)
    arguments = parse(module.rewrite(list(argv)) if hasattr(module, "rewrite") else argv)
    if hasattr(module, "expand"):  # such as resume=, which brings the overrides of the run it continues
        arguments = module.expand(arguments)
    name = arguments.config_name or COMMAND_SETTINGS[command][0]
    if arguments.info:
        return _info(arguments, name)
    if _is_sweep(arguments, name):
        if command != "train":
            raise UserError(f"-m sweeps over training runs: workbench train -m, not {command}.")
        from workbench.cli import sweep

        return sweep.main(arguments, name)
    composed = config.load(arguments.overrides, name, arguments.config_dir)
    _refuse_hydra_overrides(composed)
    checker.check(composed.cfg, command)
    if arguments.cfg:
        return _print_config(composed, arguments)
    if command == "train":
        return module.main(composed.cfg, None if arguments.config_name else composed.overrides)
    return module.main(composed.cfg) or 0


class _StderrHandler(logging.StreamHandler):
    """Writes to what stderr is when something is logged, since notebooks and tests replace it between two commands."""

    @property
    def stream(self) -> TextIO:
        """The current stderr."""
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def _set_up_logging() -> None:
    """Our own notices and everybody's warnings, as lines on stderr; of the first process alone."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, handlers=[_StderrHandler()])
    logging.getLogger("workbench").setLevel(logging.INFO if rundir.is_first() else logging.ERROR)


def _module(command: str) -> ModuleType:
    name = f"workbench.cli.{command}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UserError(f"{command} is not part of this version yet.") from None


def _is_sweep(arguments: Arguments, name: str) -> bool:
    """Asked for by -m, by hydra.mode=MULTIRUN or by an option of the group ``sweep``."""
    if arguments.multirun:
        return True
    if not any(o.lstrip("+").startswith(("sweep=", "hydra.mode=")) for o in arguments.overrides):
        return False
    mode = config.load(arguments.overrides, name, arguments.config_dir, sweep=True).hydra.mode
    return mode is not None and mode.name == "MULTIRUN"


def _refuse_hydra_overrides(composed: config.Composed) -> None:
    """A single run makes its folder itself, so that all its processes share it: Hydra's options would do nothing."""
    instead = {"hydra.run.dir": "paths.run_dir", "hydra.sweep.dir": "paths.sweep_dir", "hydra.job.name": "name"}
    for override in composed.hydra_overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key in ("hydra.mode", "hydra.searchpath"):
            continue
        way_out = f"set {instead[key]}" if key in instead else "it matters to sweeps only (-m)"
        raise UserError(f"{key} has no effect on a single run: {way_out}.")


def _print_config(composed: config.Composed, arguments: Arguments) -> int:
    cfg = {"job": composed.cfg, "hydra": DictConfig({"hydra": composed.hydra})}.get(arguments.cfg)
    if cfg is None:
        cfg = OmegaConf.merge(composed.cfg, {"hydra": composed.hydra})
    if arguments.package:
        cfg = OmegaConf.select(cfg, arguments.package)
        if cfg is None:
            raise UserError(f"--package {arguments.package}: the configuration has no such node.")
    text = OmegaConf.to_yaml(cfg, resolve=arguments.resolve) if OmegaConf.is_config(cfg) else f"{cfg}\n"
    print(text, end="")
    return 0


def _info(arguments: Arguments, name: str) -> int:
    from hydra._internal.hydra import Hydra

    hydra = Hydra(task_name="workbench", config_loader=config.make_loader(arguments.config_dir))
    try:
        with _logging_restored():
            hydra.show_info(arguments.info, config_name=name, overrides=arguments.overrides)
    except Exception as error:
        raise UserError(config.explain(error, arguments.overrides)) from None
    return 0


@contextlib.contextmanager
def _logging_restored() -> Iterator[None]:
    """Hydra shows itself through a handler of its own, which would stay on, keep the stdout of now and print everything."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
