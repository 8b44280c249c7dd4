"""``foretell generate``: one completion, streamed."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli import options as o, settings
from foretell.cli.errors import INTERRUPTED
from foretell.cli.fields import with_fields, with_group
from foretell.cli.output import PieceWriter, as_json, check_writable, drain, has_color, write
from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams, fresh_seed

if TYPE_CHECKING:
    from foretell import Engine, Piece

Prompt = Annotated[
    str | None, typer.Argument(metavar="PROMPT|-", help="The text to continue; '-' reads standard input.")
]
PromptFile = Annotated[
    str | None, typer.Option("--prompt-file", metavar="FILE", help="Take the prompt from a file, exactly as it is.")
]
Chat = Annotated[bool, typer.Option("--chat", help="The prompt is a message: put it into the model's chat template.")]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message; implies --chat.")]
JsonSchema = Annotated[
    str | None,
    typer.Option("--json-schema", metavar="FILE", rich_help_panel=o.SAMPLING, help="The text is JSON of this schema."),
]
Grammar = Annotated[
    str | None,
    typer.Option("--grammar", metavar="FILE", rich_help_panel=o.SAMPLING,
                 help="The text is of this grammar: Lark in llguidance's dialect, or GBNF."),
]  # fmt: skip
PredictionText = Annotated[
    str | None,
    typer.Option("--prediction", metavar="TEXT", rich_help_panel=o.SPECULATION,
                 help="Your guess of the output, e.g. the file to be edited; implies --method prediction."),
]  # fmt: skip
PredictionFile = Annotated[
    str | None,
    typer.Option("--prediction-file", metavar="FILE", rich_help_panel=o.SPECULATION, help="The same from a file."),
]


@with_group(o.Models, into="models")
@with_group(o.Guessing, into="guessing")
@with_fields(SamplingParams, into="sampling", panel=o.SAMPLING, without=o.OF_FILES)
def generate(
    ctx: typer.Context, *, prompt: Prompt = None, prompt_file: PromptFile = None, chat: Chat = False,
    system: System = None, models: o.Models, lora: o.Lora = None, guessing: o.Guessing,
    speculation: o.Speculation = "on", prediction: PredictionText = None, prediction_file: PredictionFile = None,
    sampling: dict[str, Any] | None = None, json_schema: JsonSchema = None, grammar: Grammar = None,
    json_: o.Json = False, output: o.Output = None, no_color: o.NoColor = False,
) -> None:  # fmt: skip
    """Continue a text. The output goes to standard output as it is made, the figures to standard error.

    On a terminal the tokens that were guessed and accepted are tinted. Whatever the method, the text is the one that
    plain decoding with the same seed gives (--verify rejection: another text of the same distribution).
    """
    check_writable(output)
    text = settings.one_text(prompt, prompt_file, "prompt")
    if text is None:
        raise ConfigError("no prompt: give it as an argument, '-' for standard input, or --prompt-file FILE")
    settings.check_text(system, "--system")
    if [prompt, prompt_file, prediction, prediction_file, json_schema, grammar].count("-") > 1:
        raise ConfigError("standard input holds one text: give the others by files")
    guess = settings.one_text(prediction, prediction_file, "prediction")
    held = {"json_schema": json_schema, "grammar": grammar}
    held = {name: settings.read_text(file, f"--{name}".replace("_", "-")) for name, file in held.items() if file}
    params = settings.sampling({"seed": fresh_seed(), **(sampling or {}), **held})
    if params.logprobs is not None and not json_:
        raise ConfigError("--logprobs: log probabilities are written by --json: add it, or drop --logprobs")
    speculative = settings.speculation(ctx, models, guessing, has_prediction=guess is not None)
    engine = settings.load_engine(models, speculative, no_color=no_color, speculation=speculation, lora=lora)
    engine = settings.careful(engine, no_color=no_color)
    ids_or_text: Any = text
    if chat or system is not None:
        messages = [{"role": "system", "content": system}] if system is not None else []
        ids_or_text = engine.chat_prompt([*messages, {"role": "user", "content": text}])
    _run(engine, ids_or_text, params, guess, json=json_, output=output, no_color=no_color)


def _run(
    engine: "Engine", prompt: Any, params: SamplingParams, guess: str | None, *,
    json: bool, output: str | None, no_color: bool,
) -> None:  # fmt: skip
    """Decode and report. JSON, and what goes to a file, is not streamed but written whole."""
    from foretell.cli.figures import as_object, figures

    silent = json or output is not None
    tint = not silent and has_color(sys.stdout, no_color)
    stream = engine.stream(prompt, params, prediction=guess)
    writer = PieceWriter(sys.stdout, tint=tint)

    def take(piece: "Piece") -> None:
        if not silent:
            writer.write(piece.text, accepted=piece.source.startswith("draft"))

    interrupted = drain(stream, writer, take)
    completion = stream.completion
    if silent and not interrupted:
        pretty = output is None and sys.stdout.isatty()
        whole = as_json(as_object(completion, params), pretty=pretty) if json else completion.text
        write(whole, output)
    if interrupted or not json:
        legend = tint and has_color(sys.stderr, no_color)
        with suppress(OSError):
            print(figures(completion, params, tint=legend, interrupted=interrupted), file=sys.stderr)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
