"""``foretell chat``: a conversation on the command line."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as o, settings
from foretell.cli.commands.generate import System
from foretell.cli.errors import INTERRUPTED, say
from foretell.cli.fields import with_fields, with_group
from foretell.cli.interrupt import interruptible
from foretell.cli.output import PieceWriter, has_color
from foretell.core.errors import PromptError
from foretell.core.params import SamplingParams, fresh_seed
from foretell.core.platform import forgiving

if TYPE_CHECKING:
    from foretell import Completion, Engine

PREFIX_MEMORY_GIB = 0.5
"""KV of the conversation so far, so that a turn reads its own message alone."""
HINT = "A message and Enter; /new starts again, /exit or Ctrl-D leaves (or Ctrl-C twice), Ctrl-C stops an answer."
Message = dict[str, str]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", rich_help_panel=o.OUTPUT, help="No figures after an answer, and no hint.")
]


@with_group(o.Models, into="models")
@with_group(o.Guessing, into="guessing")
@with_fields(SamplingParams, into="sampling", panel=o.SAMPLING, without=o.OF_ONE_ANSWER)
def chat(
    ctx: typer.Context,
    *,
    system: System = None,
    models: o.Models,
    lora: o.Lora = None,
    guessing: o.Guessing,
    speculation: o.Speculation = "auto",
    sampling: dict[str, Any] | None = None,
    quiet: Quiet = False,
    no_color: o.NoColor = False,
) -> None:
    """Talk with a model, turn by turn, in its chat template. Messages are read from standard input, a line each.

    Answer number i has the seed SEED + i. Earlier turns are not read again.
    """
    settings.check_text(system, "--system")
    params = settings.sampling({"seed": fresh_seed(), **(sampling or {})})
    speculative = settings.speculation(ctx, models, guessing)
    engine = settings.load_engine(
        models, speculative, no_color=no_color, prefix_memory_gib=PREFIX_MEMORY_GIB, speculation=speculation, lora=lora
    )
    engine = settings.careful(engine, no_color=no_color)
    begin: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    engine.chat_prompt([*begin, {"role": "user", "content": "a"}])  # a model without a template is refused at once
    _talk(engine, begin, params, quiet=quiet, no_color=no_color)


def _talk(engine: "Engine", begin: list[Message], params: SamplingParams, *, quiet: bool, no_color: bool) -> None:
    """Turns until the input ends."""
    from dataclasses import replace

    from foretell.cli.figures import figures

    asks = sys.stdin.isatty()
    forgiving(sys.stdin, "surrogateescape")  # other bytes are a message that is refused, not an error here
    if asks and not quiet:
        say(HINT)
    messages, turn, again = list(begin), 0, False  # again: the last thing at the prompt was Ctrl-C
    while True:
        try:
            line = _read(asks)
        except KeyboardInterrupt:
            if not asks or again:
                raise typer.Exit(INTERRUPTED) from None
            again = True
            print(file=sys.stderr)
            say("Ctrl-D or /exit leaves the chat, and so does Ctrl-C once more")
            continue
        again = False
        if line is None or line.strip() == "/exit":
            return
        if line.strip() == "/new":
            messages = list(begin)
            continue
        if not line.strip():
            continue
        if any("\ud800" <= letter <= "\udfff" for letter in line):
            say(f"the message is not UTF-8 text: {line!a}")
            if not asks:
                raise typer.Exit(1)
            continue
        seed = None if params.seed is None else params.seed + turn
        try:
            done, interrupted = _answer(
                engine, [*messages, {"role": "user", "content": line}], replace(params, seed=seed), no_color=no_color
            )
        except PromptError as error:  # the conversation no longer fits the context
            say(f"{error} (/new starts again)")
            if not asks:
                raise typer.Exit(1) from None
            continue
        turn += 1
        messages += [{"role": "user", "content": line}, {"role": "assistant", "content": done.text}]
        if not quiet:
            print(figures(done, params, tint=False, interrupted=interrupted), file=sys.stderr, flush=True)
        if interrupted and not asks:
            raise typer.Exit(INTERRUPTED)


def _read(asks: bool) -> str | None:
    """The next message; None where there is none."""
    if asks:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def _answer(
    engine: "Engine", messages: list[Message], params: SamplingParams, *, no_color: bool
) -> tuple["Completion", bool]:
    """The answer, written as it is made, and whether Ctrl-C ended it."""
    stream = engine.stream(engine.chat_prompt(messages), params)
    writer = PieceWriter(sys.stdout, tint=has_color(sys.stdout, no_color))
    interrupted = False
    try:
        with interruptible() as check:
            for piece in stream:
                writer.write(piece.text, accepted=piece.source.startswith("draft"))
                check()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        stream.close()
        writer.close()
    return stream.completion, interrupted
