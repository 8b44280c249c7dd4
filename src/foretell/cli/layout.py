"""What commands draw alike: tables that stay readable (on a terminal too narrow for the words of their cells, each row is a
block of lines), and the bar of a measurement."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from foretell.cli.output import has_color

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDEST = 10_000  # columns, no limit


def print_table(console: "Console", table: "Table") -> None:
    """Print a table, or where a word (or a cell of a column that is not to wrap) would be cut, its rows as ``column: cell``
    lines, empty cells left out."""
    from rich.cells import cell_len
    from rich.measure import Measurement
    from rich.text import Text

    for column in table.columns:
        if column.no_wrap:  # rich takes its longest word for its least width, and then cuts its cells
            shown = [Text.from_markup(str(cell)).plain for cell in (column.header, *column.cells)]
            column.min_width = max(map(cell_len, shown))
    options = console.options.update(max_width=WIDEST)
    if Measurement.get(console, options, table).minimum <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(table.title, style="bold")
    names = [str(column.header) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        shown = [Text.from_markup(str(cell)).plain for cell in cells]
        label = "" if names[0] in ("name", "method", "") else f"{names[0]}: "
        console.print(label + (shown[0].strip() or "-"), style="bold", markup=False, soft_wrap=True)
        for name, cell in zip(names[1:], shown[1:], strict=True):
            if cell.strip():
                console.print(f"  {name}: {cell.strip()}", markup=False)
    console.print()


@contextmanager
def progress_bar(no_color: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while runs are made; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True, no_color=not has_color(sys.stderr, no_color))
    columns = [*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("decoding", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
