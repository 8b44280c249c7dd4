"""The commands, put together. Nothing here or in the option lists imports torch, so that ``--help`` is instant."""

from typing import Annotated

import typer

from foretoken import __version__
from foretoken.cli.bench import bench
from foretoken.cli.certify import certify
from foretoken.cli.chat import chat
from foretoken.cli.doctor import doctor
from foretoken.cli.errors import OneLineGroup
from foretoken.cli.evaluate import evaluate
from foretoken.cli.explain import explain
from foretoken.cli.export import export, vllm_args
from foretoken.cli.generate import generate
from foretoken.cli.learn import learn
from foretoken.cli.methods import methods
from foretoken.cli.pull import list_, pull, rm
from foretoken.cli.report import report
from foretoken.cli.serve import serve
from foretoken.cli.theory import theory
from foretoken.cli.train import train

app = typer.Typer(
    name="foretoken",
    cls=OneLineGroup,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    generate, chat, serve, pull, list_, rm, doctor, explain, bench, report, train, learn, evaluate, certify, methods,
    export, vllm_args,
):  # fmt: skip
    paragraphs = (command.__doc__ or "").split("\n\n")  # each one line, so that help is wrapped to the terminal
    name = "list" if command is list_ else None  # typer's own: the function's name
    app.command(name, help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))(command)
app.add_typer(theory)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foretoken {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def foretoken(
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
