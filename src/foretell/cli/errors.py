"""Errors of commands: one line on stderr and an exit status, without a traceback.

Set FORETELL_TRACEBACK=1 to see where an internal error came from.
"""

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

from foretell.cli import hints
from foretell.cli.interrupt import Terminated
from foretell.core.errors import ConfigError, ForetellError
from foretell.core.platform import free_memory, is_closed_pipe

BROKEN_PIPE, INTERRUPTED = 1, 130  # as typer has it for a closed pipe; what a shell reports after SIGINT
TERMINATED = 143  # what a shell reports after SIGTERM


class OneLineGroup(TyperGroup):
    """Typer's group of commands, its errors said in one line."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run a command; in standalone mode (the default), leave by SystemExit with its status."""
        if not extra.pop("standalone_mode", True):
            return super().main(args, *rest, **{**extra, "standalone_mode": False})
        try:
            returned = super().main(args, *rest, **{**extra, "standalone_mode": False})
            status = returned if isinstance(returned, int) else 0
            sys.stdout.flush()
        except BaseException as error:
            line, status = explain(error, sys.argv[1:] if args is None else args)
            if line is not None:
                say(line)
        _drop_unwritten(sys.stdout)
        _drop_unwritten(sys.stderr)
        sys.exit(status)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Name the nearest command."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise ConfigError(f"unknown command {args[0]!r}{hints.of_command(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


def explain(error: BaseException, args: Sequence[str] = ()) -> tuple[str | None, int]:
    """(one line or None for silence, exit status). args: of the command line."""
    if isinstance(error, ForetellError):
        return str(error), 2 if isinstance(error, ConfigError) else 1
    if isinstance(error, typer.Exit):
        return None, error.exit_code
    if isinstance(error, Terminated):
        return None, TERMINATED
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return None, INTERRUPTED
    if isinstance(error, BrokenPipeError) or is_closed_pipe(error):
        return None, BROKEN_PIPE
    if hasattr(error, "format_message"):  # of click, whichever copy of it this typer uses
        return _usage(error, args), 2
    if isinstance(error, SystemExit):
        return None, error.code if isinstance(error.code, int) else 1
    if is_out_of_memory(error):
        left = f"{free_memory() / 1e9:.1f} GB are left to this process"
        return f"out of memory: {_first_line(error)} ({left}); try --dtype bfloat16, or a shorter --max-new-tokens", 1
    if isinstance(error, OSError):
        where = f" {error.filename!r}" if error.filename else " standard output" if _is_stuck(sys.stdout) else ""
        return f"cannot read or write{where}: {error.strerror or error}", 1
    if isinstance(error, ModuleNotFoundError) and (name := (error.name or "foretell").partition(".")[0]) != "foretell":
        return f"the package {name} is not installed: pip install {name}", 1
    if os.environ.get("FORETELL_TRACEBACK"):
        traceback.print_exception(error)
    return f"internal error: {type(error).__name__}: {_first_line(error)}; FORETELL_TRACEBACK=1 shows where", 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the system, torch or a kernel has refused memory."""
    refused = "allocate memory" in str(error) or "out of memory" in str(error)
    return refused or isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM


def say(line: str) -> None:
    """One line on stderr."""
    try:
        sys.stderr.write(f"foretell: {' '.join(line.splitlines())}\n")
        sys.stderr.flush()
    except OSError:
        pass  # stderr is closed: the message cannot be shown


def _usage(error: Any, args: Sequence[str]) -> str:
    ctx = getattr(error, "ctx", None)
    see = f"; see '{ctx.command_path} --help'" if ctx is not None else ""
    if ctx is not None and hasattr(error, "possibilities"):
        return hints.of_option(error.option_name, ctx, args)
    message = str(error.format_message()).strip().rstrip(".")
    if message.startswith("Missing") and (about := getattr(getattr(error, "param", None), "help", None)):
        message += f" ({about.rstrip('.')})"
    return f"{message[:1].lower()}{message[1:]}{see}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def _is_stuck(stream: Any) -> bool:
    """Whether what was printed cannot be written: an error of a full disk does not say whose it is."""
    try:
        stream.flush()
    except OSError:
        return True
    except ValueError:
        pass  # it is closed
    return False


def _drop_unwritten(stream: Any) -> None:
    """Flush; where that fails, write nothing at the interpreter's end, whose error message cannot be suppressed."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
