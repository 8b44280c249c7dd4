"""Tables that stay readable: on a terminal too narrow for the words of their cells, each row is a block of lines."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDEST = 10_000  # columns, no limit


def print_table(console: "Console", table: "Table") -> None:
    """Print a table, or where a word would be cut, its rows as ``column: cell`` lines, empty cells left out."""
    from rich.measure import Measurement
    from rich.text import Text

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
