"""A terminal of a given width for tests: a command runs in it, keys are typed, and what a person would see is read."""

import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from time import monotonic

ROWS = 40
START = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from foretell.cli.main import main; main()"
"""Of a process that is a session of its own: the terminal is its, so that Ctrl-C reaches it."""
CONTROL = re.compile(r"\x1b\[([?>=]?)([0-9;]*)([a-zA-Z])|\x1b[()].|\x1b[=>78M]|\x1b\][^\x07]*\x07")
PARTIAL = re.compile(r"\x1b(\[[?>=]?[0-9;]*|[()]|\][^\x07]*)?$")


class Screen:
    """What a terminal shows of what was written to it, all lines that it has scrolled away included."""

    def __init__(self, columns: int) -> None:
        self.columns, self.row, self.column = columns, 0, 0
        self.cells: list[list[str]] = [[]]
        self.held = ""
        self.asked = 0  # how often the cursor's position was asked for

    @property
    def lines(self) -> list[str]:
        """Without blanks at their ends, and up to the last that is not empty."""
        return "\n".join("".join(cells).rstrip() for cells in self.cells).rstrip("\n").split("\n")

    def write(self, text: str) -> None:
        """What a program has written."""
        text, self.held = self.held + text, ""
        if partial := PARTIAL.search(text):
            text, self.held = text[: partial.start()], partial[0]
        place = 0
        while place < len(text):
            if found := CONTROL.match(text, place):
                self._control(found[1] or "", found[2] or "", found[3] or "")
                place = found.end()
                continue
            self._letter(text[place])
            place += 1

    def _letter(self, letter: str) -> None:
        if letter == "\r":
            self.column = 0
        elif letter == "\n":
            self._down(1)
        elif letter == "\b":
            self.column = max(0, self.column - 1)
        elif letter >= " ":
            if self.column == self.columns:  # only now does a terminal begin the next line
                self._down(1)
                self.column = 0
            cells = self.cells[self.row]
            cells += [" "] * (self.column + 1 - len(cells))
            cells[self.column] = letter
            self.column += 1

    def _down(self, count: int) -> None:
        self.row += count
        self.cells += [[] for _ in range(self.row + 1 - len(self.cells))]

    def _control(self, private: str, numbers: str, kind: str) -> None:
        count = int(numbers.split(";")[0] or 0)
        if private:
            return
        if kind == "A":
            self.row = max(0, self.row - max(1, count))
        elif kind == "B":
            self._down(max(1, count))
        elif kind == "C":
            self.column = min(self.columns - 1, self.column + max(1, count))
        elif kind == "D":
            self.column = max(0, self.column - max(1, count))
        elif kind == "G":
            self.column = max(1, count) - 1
        elif kind in "JK":
            cells = self.cells[self.row]
            self.cells[self.row] = [] if count == 2 else cells[: self.column]
            if kind == "J":
                del self.cells[self.row + 1 :]
        elif kind == "n" and count == 6:
            self.asked += 1


class Terminal:
    """A command of foretell in a terminal. For use in a ``with`` block, at whose end it is killed."""

    def __init__(self, *args: object, columns: int = 80, env: Mapping[str, str] | None = None) -> None:
        import fcntl
        import struct
        import termios

        self.screen, self.raw = Screen(columns), ""
        self._mine, its = os.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, args)], stdin=its, stdout=its, stderr=its, start_new_session=True,
            env={**{name: os.environ[name] for name in os.environ if name not in ("COLUMNS", "LINES")}, "TERM": "xterm",
                 **(env or {})},
        )  # fmt: skip
        os.close(its)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._mine)

    def type(self, keys: str) -> None:
        """Press these keys."""
        os.write(self._mine, keys.encode())

    def until(self, seen: str | Callable[[list[str]], bool], timeout_s: float = 100.0) -> list[str]:
        """The screen's lines once one of them holds a text (or a condition holds, or the command has ended for "")."""
        ends = monotonic() + timeout_s
        while True:
            lines = self.screen.lines
            if seen(lines) if callable(seen) else seen and any(seen in line for line in lines):
                return lines
            if monotonic() > ends:
                raise AssertionError("\n".join([f"not seen within {timeout_s} s: {seen!r}", *lines]))
            if not self._read(0.1):
                if seen == "":
                    return self.screen.lines
                raise AssertionError("\n".join([f"it ended before {seen!r}", *self.screen.lines]))

    def _read(self, wait_s: float) -> bool:
        """Read what was written, if anything; whether the command may still write."""
        if not select.select([self._mine], [], [], wait_s)[0]:
            return True
        try:
            data = os.read(self._mine, 65536)
        except OSError:  # of Linux, where nobody holds the terminal any more
            data = b""
        self.raw += (text := data.decode(errors="replace"))
        asked = self.screen.asked
        self.screen.write(text)
        for _ in range(self.screen.asked - asked):
            self.type(f"\x1b[{ROWS};{self.screen.column + 1}R")  # the last row, as if the screen were full
        return bool(data)

    def status(self) -> int:
        """The exit status, once it has ended."""
        self.until("")
        return self.process.wait()
