"""Flags of commands that compose no configuration."""

import argparse
from typing import NoReturn

from workbench.errors import UserError


class Parser(argparse.ArgumentParser):
    """As argparse's, with mistakes as `UserError`: one line and exit code 2, like everywhere else."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong, and where help is."""
        raise UserError(f"{message}. See {self.prog} --help.")
