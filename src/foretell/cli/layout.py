"""What commands draw alike: tables that stay readable (on a terminal too narrow for the words of their cells, each row is a
block of lines), consoles, and the bar of a measurement."""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

from foretell.cli.errors import say
from foretell.cli.output import has_color

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDEST = 10_000  # columns, no limit
LINE_S = 10.0
"""Between two lines of progress where there is no terminal."""


def print_table(console: "Console", table: "Table") -> None:
    """Print a table, or where a word (or a cell of a column that is not to wrap) would be cut, its rows as ``column: cell``
    lines, empty cells left out."""
    from rich.cells import cell_len
    from rich.measure import Measurement
    from rich.text import Text

    for column in table.columns:
        if column.no_wrap:  # rich takes its longest word for its least width, and then cuts its cells
            shown = [Text.from_markup(str(cell), emoji=False).plain for cell in (column.header, *column.cells)]
            column.min_width = max(map(cell_len, shown))
    options = console.options.update(max_width=WIDEST)
    if Measurement.get(console, options, table).minimum <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(table.title, style="bold")
    names = [str(column.header) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        shown = [Text.from_markup(str(cell), emoji=False).plain for cell in cells]
        label = "" if names[0] in ("name", "method", "") else f"{names[0]}: "
        console.print(label + (shown[0].strip() or "-"), style="bold", markup=False, soft_wrap=True)
        for name, cell in zip(names[1:], shown[1:], strict=True):
            if cell.strip():
                console.print(f"  {name}: {cell.strip()}", markup=False)
    console.print()


def new_table(
    columns: Sequence[str], *, left: Collection[str] = (), title: str | None = None, wraps: bool = False
) -> "Table":
    """An empty table of figures. left: columns of words, as the first one is; title: as markup; wraps: whether cells may
    have several lines."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in (columns[0], *left) else "right", no_wrap=not wraps)
    return table


def print_line(console: "Console", text: str, style: str | None = None) -> None:
    """Print a line as it is: it may hold what looks like markup, and only the terminal wraps it."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def console_of(no_color: bool, width: int | None = None, **more: Any) -> "Console":
    """Standard output, on which names such as ``auto:echo:4`` stay as they are. width: where it is no terminal; None: as
    COLUMNS says. more: as ``rich`` takes it."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else width
    plain = not has_color(sys.stdout, no_color)
    return Console(no_color=plain, highlight=False, emoji=False, width=wide, **more)


def console_of_errors(no_color: bool) -> "Console":
    """Standard error."""
    from rich.console import Console

    return Console(stderr=True, emoji=False, no_color=not has_color(sys.stderr, no_color))


@contextmanager
def status_line(first: str, no_color: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with console_of_errors(no_color).status(first) as line:
        yield lambda text: line.update(text)


@contextmanager
def progress_bar(no_color: bool, what: str = "decoding") -> Iterator[Callable[..., None]]:
    """A bar on stderr while runs are made: its function takes how many are done, of how many, and what runs, if that is to
    be said. Nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, what=None: None
        return
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = [*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console_of_errors(no_color), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, what=None: bar.update(task, completed=done, total=total, description=what)


class ProgressLines:
    """Progress as lines where stderr is no terminal: one in LINE_S seconds, also while one thing goes on for longer."""

    def __init__(self, what: str) -> None:
        self._what, self._since, self._told = what, monotonic(), monotonic()
        self._is_first, self._ended = True, Event()

    def __enter__(self) -> "ProgressLines":
        if not sys.stderr.isatty():
            Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(LINE_S / 10):
            if monotonic() - self._told >= LINE_S:
                self._told = monotonic()
                say(f"{self._what}: for {self._told - self._since:.0f} s")

    def now(self, what: str) -> None:
        """That it is done now."""
        self._what, self._since = what, monotonic()

    def __call__(self, what: str) -> None:
        """The same, and it is said, unless something was a moment ago."""
        self.now(what)
        if self._is_first or self._since - self._told >= LINE_S:
            self._is_first, self._told = False, self._since
            say(self._what)
