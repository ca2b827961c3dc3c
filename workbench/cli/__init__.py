"""The command line: ``workbench <command> [options] [overrides]``.

This module and `help` import nothing heavy, so that ``workbench --help`` answers at once.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

COMMANDS = {
    "train": "train a model (add -m to sweep over comma-separated values)",
    "inspect": "show what a configuration would train on: tokens, masks, lengths, steps, memory",
    "evaluate": "measure a model or a finished run on the evaluation data",
    "generate": "write completions with a model or a finished run, or chat with it",
    "invariants": "check that numbers are what they should be: against another trainer's runs",
    "env": "versions, devices and folders on one screen",
}
OWN_FLAGS = ("invariants",)  # commands that read all their arguments themselves, --help included
USAGE = 2  # exit code of a mistake in what was asked for
INTERRUPTED = 130  # exit code of a run stopped by Ctrl-C or SIGTERM
TERMINATED = 143  # exit code after SIGTERM outside of training, where there is nothing to save


class Terminated(BaseException):
    """Raised by SIGTERM before and after training, so that temporary files and started processes do not outlive this one."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code; ``argv`` defaults to what was typed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    from workbench.errors import UserError

    try:
        with _sigterm_raises():
            return _dispatch(argv)
    except Terminated:
        _tell("workbench: terminated")
        return TERMINATED
    except UserError as error:
        _tell(f"workbench: {error}")
        return USAGE
    except BrokenPipeError:  # the reader of our output has gone (| head)
        sys.stderr.close()
        return 0
    except OSError as error:
        line = _disk_error(error)
        if line is None:
            raise
        _tell(f"workbench: {line}")
        return USAGE
    except KeyboardInterrupt:
        print("workbench: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BaseException as error:
        if not _is_abort(error):
            raise
        print(f"workbench: {error}", file=sys.stderr)
        return INTERRUPTED


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """`Terminated` on SIGTERM where nobody else handles it; training replaces this by a graceful stop."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process as it is
        if os.getpid() != owner:  # a worker forked from this process ends as it always did
            os.kill(os.getpid(), number)
        else:
            raise Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _tell(message: str) -> None:
    """Prints an error once: a process that another one started says it only if that one has not ended it meanwhile."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(3)
        message = f"[rank {os.environ['LOCAL_RANK']}] {message}"
    print(message, file=sys.stderr, flush=True)


def _disk_error(error: OSError) -> str | None:
    """The line for a full disk or a file that may not be touched; None for what only a traceback explains."""
    from workbench.errors import FULL, REFUSED, explain_os_error

    if error.errno not in FULL | REFUSED or (error.filename is None and error.errno in REFUSED):
        return None
    return explain_os_error(error, f"use {error.filename}" if error.filename else "write")


def _is_abort(error: BaseException) -> bool:
    """Whether a second signal ended training; the class is not imported here, since it brings torch."""
    module = sys.modules.get("workbench.callbacks.interrupt")
    return module is not None and isinstance(error, module.Aborted)


def _dispatch(argv: list[str]) -> int:
    import importlib

    from workbench.cli import help as pages

    if not argv or argv[0] in ("-h", "--help", "help"):
        print(pages.overview())
        return 0
    if argv[0] in ("-V", "--version", "version"):
        from workbench import __version__

        print(f"workbench {__version__}")
        return 0
    command, *rest = argv
    _check_command(command)
    if command in OWN_FLAGS:
        return importlib.import_module(f"workbench.cli.{command}").main(rest)
    if any(flag in rest for flag in ("-h", "--help")):
        print(pages.command(command, rest))
        return 0
    if command == "env":
        return importlib.import_module("workbench.cli.env").main(rest) or 0
    from workbench.cli.app import run_command

    return run_command(command, rest)


def _check_command(command: str) -> None:
    from workbench.errors import UserError, nearest

    if command in COMMANDS:
        return
    hint = nearest(command, COMMANDS)
    if not hint and "=" in command:
        hint = f" Overrides follow a command: workbench train {command}."
    raise UserError(f"{command!r} is not a command.{hint} Commands: {', '.join(COMMANDS)}.")
