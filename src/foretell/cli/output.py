"""Output of results: files that are checked before the work starts, and tinted text on terminals only."""

import json
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from foretell.cli.interrupt import interruptible
from foretell.core.errors import ConfigError
from foretell.core.platform import unechoed
from foretell.core.progress import listening
from foretell.core.visible import VISIBLE as VISIBLE

if TYPE_CHECKING:
    from foretell import Piece
    from foretell.engine.engine import Stream

TINT, RESET = "\x1b[32m", "\x1b[0m"


def check_writable(file: str | None, option: str = "--output") -> None:
    """Raise ConfigError unless file can be written: now, not after minutes of work. Leaves it as it was."""
    if file is None:
        return
    path = Path(file)
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        expected = "expected a file in a folder that exists and that you may write to"
        raise ConfigError(f"{option} {file!r} cannot be written: {error.strerror}; {expected}") from None


def write(text: str, file: str | None) -> None:
    """Write text to a file, or to standard output. Raises OSError that names where."""
    try:
        if file is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        path = Path(file)
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            path.write_text(text, encoding="utf-8")  # a device or a pipe
            return
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, file or "standard output") from None


def as_json(value: Any, *, pretty: bool = False) -> str:
    """One JSON object and a newline. Numbers that JSON does not have become null."""
    return json.dumps(_finite(value), ensure_ascii=False, indent=2 if pretty else None, allow_nan=False) + "\n"


def deliver(report: dict[str, Any], file: str | None = None, *, json_: bool, show: Callable[[], None]) -> None:
    """A report, as JSON in a file where one is given, and on standard output as JSON or as ``show`` prints it."""
    if file is not None:
        write(as_json(report, pretty=True), file)
    if json_:
        write(as_json(report, pretty=sys.stdout.isatty()), None)
    else:
        show()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def has_color(stream: TextIO, no_color: bool) -> bool:
    """Whether to tint what goes to a stream (https://no-color.org)."""
    return not no_color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


@contextmanager
def waiting(what: str, *, no_color: bool) -> Iterator[None]:
    """A line on stderr while something takes seconds, with the time, and with the share of what is loaded; nothing where
    stderr is no terminal. What is typed meanwhile is not shown. A Ctrl-C ends the command, wherever Python was."""
    if not sys.stderr.isatty():
        with interruptible() as check:
            yield
            check()
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, emoji=False, no_color=not has_color(sys.stderr, no_color))
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with unechoed(), Progress(*columns, console=console, transient=True) as shown:
        line = shown.add_task(what)

        def update(name: str, share: float) -> None:
            shown.update(line, description=f"loading {name}, {share:.0%}" if share < 1 else what)

        with listening(update), interruptible() as check:
            yield
            check()


class PieceWriter:
    """Writes a completion piece by piece, guessed and accepted tokens tinted on a terminal."""

    def __init__(self, stream: TextIO, *, tint: bool) -> None:
        self.stream, self.tint = stream, tint
        self.terminal = stream.isatty()
        self.tinted = False
        self.last = "\n"

    def write(self, text: str, *, accepted: bool) -> None:
        """One piece, at once."""
        if not text:
            return
        shown = text.translate(VISIBLE) if self.terminal else text
        self.last = text[-1]
        if self.tint and accepted:
            shown = shown if self.tinted else TINT + shown
            self.tinted = True  # before the tint is written, so that ``close`` resets it after any interrupt
        elif self.tinted:
            shown = RESET + shown
        self.stream.write(shown)
        self.stream.flush()
        self.tinted = self.tint and accepted

    def close(self) -> None:
        """Reset the terminal's colours and end the line."""
        if self.tinted:
            self.stream.write(RESET)
            self.tinted = False
        if self.last != "\n":
            self.stream.write("\n")
            self.last = "\n"
        self.stream.flush()


def drain(
    stream: "Stream", writer: PieceWriter, take: "Callable[[Piece], None]", *, last: Callable[[], None] = lambda: None
) -> bool:
    """Give each piece of a completion to ``take``, call ``last``, and close both; whether Ctrl-C ended it."""
    try:
        with interruptible() as check:
            for piece in stream:
                take(piece)
                check()
    except KeyboardInterrupt:
        return True
    finally:
        stream.close()
        last()
        writer.close()
    return False
