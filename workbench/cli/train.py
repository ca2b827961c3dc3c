"""``workbench train``."""

from collections.abc import Sequence

from omegaconf import DictConfig

from workbench.cli import INTERRUPTED, resume
from workbench.cli.flags import Arguments


def expand(arguments: Arguments) -> Arguments:
    """``resume=``: the overrides of the run that is continued come first."""
    arguments.overrides = resume.replay(arguments.overrides)
    return arguments


def main(cfg: DictConfig, overrides: Sequence[str] | None = None) -> int:
    """Trains; 130 if a signal stopped it."""
    from workbench.run import train_config

    run = train_config(cfg, overrides)
    return INTERRUPTED if run.interrupted else 0
