"""The commands, put together. Nothing here or in the option lists imports torch, so that ``--help`` is instant."""

from typing import Annotated

import typer

from foretell import __version__
from foretell.cli.commands.bench import bench
from foretell.cli.commands.cache import cache
from foretell.cli.commands.certify import certify
from foretell.cli.commands.chat import chat
from foretell.cli.commands.doctor import doctor
from foretell.cli.commands.explain import explain
from foretell.cli.commands.export import export
from foretell.cli.commands.generate import generate
from foretell.cli.commands.launch import launch
from foretell.cli.commands.learn import learn
from foretell.cli.commands.methods import methods
from foretell.cli.commands.pull import list_, pull, rm
from foretell.cli.commands.report import report
from foretell.cli.commands.serve import serve
from foretell.cli.commands.train import train
from foretell.cli.errors import OneLineGroup

app = typer.Typer(
    name="foretell",
    cls=OneLineGroup,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
GROUPS = {
    "Use": (generate, chat, serve, launch, pull, list_, rm, cache, methods),
    "Measure": (doctor, bench, report),
    "Train": (train, learn, export),
    "Check": (certify, explain),
}
"""The commands as ``--help`` lists them, by what they are for."""
for group, commands in GROUPS.items():
    for command in commands:
        paragraphs = (command.__doc__ or "").split("\n\n")  # each one line, so that help is wrapped to the terminal
        name = "list" if command is list_ else None  # typer's own: the function's name
        help_text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        app.command(name, help=help_text, rich_help_panel=group)(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foretell {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def foretell(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Speculative decoding that you can trust: guess the next tokens cheaply, check them in one pass, keep what is right.

    Exit status: 0 success, 1 a model or prompt that cannot be used, 2 a wrong option, 130 interrupted.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
