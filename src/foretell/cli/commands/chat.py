"""``foretell chat``: a conversation on the command line."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as o, settings
from foretell.cli.commands.generate import System
from foretell.cli.conversation import COMMANDS, SETTINGS, Talk
from foretell.cli.errors import INTERRUPTED
from foretell.cli.fields import with_fields, with_group
from foretell.cli.figures import cut, figures
from foretell.cli.output import PieceWriter, drain, has_color
from foretell.cli.prose import Prose, tell
from foretell.core.errors import ForetellError, PromptError
from foretell.core.params import SamplingParams, fresh_seed
from foretell.core.platform import forgiving, unechoed

if TYPE_CHECKING:
    from foretell import Piece

PREFIX_MEMORY_GIB = 0.5
"""KV of the conversation so far, so that a turn reads its own message alone."""
HINT = "Enter sends, Alt-Enter begins another line, Ctrl-C stops an answer, Ctrl-D leaves; /help says more."
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", rich_help_panel=o.OUTPUT, help="No figures after an answer, and no hint.")
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", metavar="N", envvar="FORETELL_MAX_NEW_TOKENS", rich_help_panel=o.SAMPLING,
                 help="The most tokens of an answer. Default: what the model's context has room for."),
]  # fmt: skip


@with_group(o.Models, into="models")
@with_group(o.Guessing, into="guessing")
@with_fields(SamplingParams, into="sampling", panel=o.SAMPLING, without=(*o.OF_ONE_ANSWER, "max_new_tokens"))
def chat(
    ctx: typer.Context, *, system: System = None, models: o.Models, lora: o.Lora = None, guessing: o.Guessing,
    speculation: o.Speculation = "auto", max_new_tokens: MaxNewTokens = None, sampling: dict[str, Any] | None = None,
    quiet: Quiet = False, no_color: o.NoColor = False,
) -> None:  # fmt: skip
    """Talk with a model, turn by turn, in its chat template.

    On a terminal: a line editor with a history, several lines, and commands, which /help lists. Else messages are read from
    standard input, a line each; /new begins again, /exit leaves.

    Answer number i has the seed SEED + i. Earlier turns are not read again.
    """
    settings.check_text(system, "--system")
    given = {"seed": fresh_seed(), **(sampling or {})}
    params = settings.sampling(given if max_new_tokens is None else {**given, "max_new_tokens": max_new_tokens})
    with unechoed():  # until the end: what is typed between two prompts is not shown twice
        speculative = settings.speculation(ctx, models, guessing)
        more = {"prefix_memory_gib": PREFIX_MEMORY_GIB, "speculation": speculation, "lora": lora}
        engine = settings.load_engine(models, speculative, no_color=no_color, **more)
        engine = settings.careful(engine, no_color=no_color)
        if max_new_tokens is None:
            params = replace(params, max_new_tokens=max(params.min_new_tokens, engine.model.spec.max_positions))
        talk = Talk(engine, params, system)
        engine.chat_prompt([*talk.messages, {"role": "user", "content": "a"}])  # one without a template is refused now
        (_talk if sys.stdin.isatty() else _read_lines)(talk, quiet=quiet, no_color=no_color)


def _talk(talk: Talk, *, quiet: bool, no_color: bool, read: Callable[[], str] | None = None) -> None:
    """With a person, until they leave. read: what gives messages, else an editor."""
    from foretell.cli.editor import editor

    read = read or editor([*COMMANDS, *(f"/set {name}" for name in SETTINGS)])
    if not quiet:
        tell(HINT)
    again = False  # whether the last thing at the prompt was Ctrl-C
    while True:
        try:
            line, again = read(), False
            is_command = line.startswith("/") and not line.startswith("//")
            text = talk.command(line) if is_command else line.removeprefix("/")
            if text and text.strip():
                with unechoed():
                    _answer(talk, text, quiet=quiet, no_color=no_color)
        except EOFError:
            return
        except KeyboardInterrupt:
            if again:
                raise typer.Exit(INTERRUPTED) from None
            again = True
            tell("Ctrl-D or /exit leaves the chat, and so does Ctrl-C once more")
        except ForetellError as error:
            tell(str(error))


def _read_lines(talk: Talk, *, quiet: bool, no_color: bool) -> None:
    """The messages of a pipe or a file, a line each. Raises PromptError."""
    forgiving(sys.stdin, "surrogateescape")  # other bytes are a message that is refused, not an error here
    try:
        while (line := sys.stdin.readline()) and line.strip() != "/exit":
            if line.strip() == "/new":
                talk.command("/new")
            elif line.strip() and _answer(talk, line.rstrip("\r\n"), quiet=quiet, no_color=no_color):
                raise typer.Exit(INTERRUPTED)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _answer(talk: Talk, text: str, *, quiet: bool, no_color: bool) -> bool:
    """Answer a message, written as it is made; whether Ctrl-C ended it. Raises PromptError where the conversation no longer
    fits the context, and for what is no text."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise PromptError(f"the message is not UTF-8 text: {text!a}")
    asked, answer = {"role": "user", "content": text}, ""
    seed = None if talk.params.seed is None else talk.params.seed + talk.number
    params, prompt = replace(talk.params, seed=seed), talk.engine.chat_prompt([*talk.messages, asked])
    try:
        stream = talk.engine.stream(prompt, params)
    except PromptError as error:
        raise PromptError(f"{error} (/new starts again)") from None
    kind = Prose if sys.stdin.isatty() and sys.stdout.isatty() else PieceWriter
    writer, cutter = kind(sys.stdout, tint=has_color(sys.stdout, no_color)), talk.parts(prompt)

    def show(parts: Sequence[tuple[str, str]], text: str, *, accepted: bool) -> None:
        nonlocal answer
        answer += "".join(part for phase, part in parts if phase == "answer")
        if isinstance(writer, Prose):
            writer.show(parts, accepted=accepted, folds=not talk.thoughts)
        else:
            writer.write(text, accepted=accepted)

    def take(piece: "Piece") -> None:
        parts = cutter.push([piece], piece.text) if cutter else [("answer", piece.text)]
        show(parts, piece.text, accepted=piece.source.startswith("draft"))

    interrupted = drain(stream, writer, take, last=lambda: show(cutter.finish() if cutter else (), "", accepted=False))
    done = stream.completion
    talk.last, talk.number = figures(done, params, tint=False, interrupted=interrupted), talk.number + 1
    if done.num_tokens:
        talk.turns += [asked, {"role": "assistant", "content": answer}]
    if not quiet and isinstance(writer, Prose):
        short = f"{done.num_tokens} tokens · {done.tokens_per_second:.1f} tokens/s"
        tell(" · ".join(filter(None, [short, "stopped" if interrupted else cut(done, params)])))
    elif not quiet:
        print(talk.last, file=sys.stderr, flush=True)
    return interrupted
