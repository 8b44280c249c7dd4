"""``foretell report``: a bench report read again: its table, CSV, or two of them compared."""

import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options as o
from foretell.cli.layout import console_of, new_table, print_line, print_table
from foretell.cli.output import check_writable, deliver, write
from foretell.core.errors import ConfigError

if TYPE_CHECKING:
    from foretell.bench.record import Comparison

File = Annotated[str, typer.Argument(metavar="FILE", help="What 'foretell bench --output FILE' wrote.")]
Other = Annotated[
    str | None, typer.Argument(metavar="[OTHER]", help="A second report: what changed from FILE to OTHER.")
]
Csv = Annotated[
    str | None,
    typer.Option("--csv", metavar="FILE", rich_help_panel=o.OUTPUT, help="Write the figures as CSV; -: to stdout."),
]
Command = Annotated[
    bool, typer.Option("--command", rich_help_panel=o.OUTPUT, help="Print only the command that measures it again.")
]


def report(
    file: File, other: Other = None, csv: Csv = None, command: Command = False, json_: o.Json = False,
    no_color: o.NoColor = False,
) -> None:  # fmt: skip
    """Show a bench report that was written before, without measuring anything: the same table, or CSV.

    With two reports: speedups and intervals side by side, which changes are clear, and which settings differ.
    """
    check_writable(csv if csv != "-" else None, "--csv")
    if other is not None and (csv is not None or command):
        raise ConfigError("two reports are compared; --csv and --command are of one: drop one of them")
    if command and (csv is not None or json_):
        raise ConfigError("--command prints the command alone: drop it, or drop --csv and --json")
    if json_ and csv == "-":
        raise ConfigError("--csv - and --json both print to standard output: drop one, or give --csv FILE")
    for one in filter(None, (file, other)):
        if not Path(one).exists():  # said before torch is imported
            raise ConfigError(f"{one} cannot be read: no such file")
    from foretell.bench.record import compare, csv_of, made_by, read_report
    from foretell.cli.tables import show

    found = read_report(file)
    if other is not None:
        compared = compare(found, read_report(other))
        deliver(asdict(compared), json_=json_, show=lambda: show_comparison(compared, file, other, no_color=no_color))
        return
    if command:
        words = made_by(found)
        if not words:
            raise ConfigError(f"{file} does not say by which command it was made")
        typer.echo(" ".join(map(shlex.quote, words)))
        return
    if csv is not None:
        write(csv_of(found), None if csv == "-" else csv)
    if json_ or csv is None:
        deliver(found.to_dict(), json_=json_, show=lambda: show(found, no_color=no_color))


def show_comparison(found: "Comparison", file: str, other: str, *, no_color: bool) -> None:
    """Two reports as a table, and what differs."""
    from rich.markup import escape

    console = console_of(no_color, 120)
    columns = ("method", "T", "speedup before", "after", "change", "clear", "tokens/s", "length")
    table = new_table(columns, title=escape(f"{file} -> {other}"))
    for one in found.changes:
        before, after = one.speedup
        plain = one.method == "none"
        change = "" if plain or math.isnan(one.ratio) else f"{one.ratio - 1:+.0%}"
        table.add_row(
            escape(one.method), f"{one.temperature:g}",
            "1" if plain else str(before),
            "1" if plain else str(after),
            change, "" if plain else ("yes" if one.is_clear else "no"),
            f"{one.tokens_per_second[0]:.1f} -> {one.tokens_per_second[1]:.1f}",
            f"{one.mean_acceptance_length[0]:.2f} -> {one.mean_acceptance_length[1]:.2f}",
        )  # fmt: skip
    print_table(console, table)
    print_line(console, "clear: the 95 % intervals have nothing in common.")
    for name, which in zip((file, other), found.only, strict=True):
        if which:
            print_line(console, f"only in {name}: {', '.join(which)}")
    for name, (before_value, after_value) in found.differing.items():
        print_line(console, f"! {name} differs: {before_value} and {after_value}")
    clear = [one for one in found.changes if one.is_clear and one.method != "none"]
    said = ", ".join(f"{one.method} at temperature {one.temperature:g} {one.ratio - 1:+.0%}" for one in clear)
    console.print(escape(f"Clearly changed: {said}." if clear else "No speedup changed clearly."), style="bold")
