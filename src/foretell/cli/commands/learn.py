"""``foretell learn``: a drafter learns from a file of prompts, as a server's learns from its requests."""

import sys
from typing import Annotated, Any

import typer

from foretell.cli import options as o, settings
from foretell.cli.errors import say
from foretell.cli.fields import with_fields, with_group
from foretell.cli.output import as_json, check_writable, write
from foretell.core.params import SamplingParams
from foretell.core.prompts import read_text
from foretell.learn.options import LearnOptions

LEARNING = "Learning"
Data = Annotated[
    str, typer.Option("--data", metavar="FILE", show_default=False, rich_help_panel=LEARNING,
                      help="Prompts, in their order, as 'foretell train' reads them: the target answers each.")
]  # fmt: skip
Epochs = Annotated[int, typer.Option("--epochs", min=1, rich_help_panel=LEARNING, help="How often the file is read.")]


@with_group(o.Models, into="models")
@with_group(o.Guessing, into="guessing")
@with_fields(LearnOptions, into="learning", panel=LEARNING, without=("learn_share", "learn_busy_share"))  # nobody waits
@with_fields(SamplingParams, into="sampling", panel=o.SAMPLING, without=o.OF_ONE_ANSWER)
def learn(
    ctx: typer.Context, *, data: Data, epochs: Epochs = 1, raw: o.Raw = False, models: o.Models, guessing: o.Guessing,
    learning: dict[str, Any] | None = None, sampling: dict[str, Any] | None = None, json_: o.Json = False,
    output: o.Output = None, no_color: o.NoColor = False,
) -> None:  # fmt: skip
    """Answer the prompts of a file and let the drafter learn from the answers, as 'serve --learn' does from requests.

    With --learn-dir what was learned is kept there, for --learn-dir of a server, and as a checkpoint that --draft or
    --speculative-config load.
    """
    check_writable(output)
    params = settings.sampling({"seed": 0, **(sampling or {})})
    options = settings.learn_options({**(learning or {}), "where": "inline"})
    read_text(data, f"data {data!r}")
    speculative = settings.speculation(ctx, models, guessing)
    settings.check_learning([speculative], models.target)
    engine = settings.load_engine(models, speculative, no_color=no_color)
    from foretell.learn.session import learn_from

    def progress(done: int, total: int, acceptance: float) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total}: {acceptance:.2f} of the guesses kept ", end="", file=sys.stderr)

    state = learn_from(engine, data, options, params, epochs=epochs, raw=raw, progress=progress, notice=say)
    write(as_json(state, pretty=True) if json_ else summary(state), output)


def summary(state: dict[str, Any]) -> str:
    """A few lines: acceptance at the beginning and the end, and what the gate let through."""
    history, figures = state["history"], state["figures"]
    size = max(1, len(history) // 4)

    def rate(part: list[dict[str, Any]]) -> float:
        return float(sum(one["kept"] for one in part) / max(1, sum(one["guessed"] for one in part)))

    lines = [
        f"first guesses kept: {rate(history[:size]):.3f} in the first quarter of the requests, "
        f"{rate(history[-size:]):.3f} in the last",
        f"updates {figures['num_updates']}, swapped in {figures['num_swaps']}, refused {figures['num_refused']}, taken "
        f"back {figures['num_reverts']}; {figures['seconds_learning']:.1f} s of learning",
    ]
    lines += [f"saved: {event['folder']}" for event in state["events"] if event["event"] == "saved"]
    lines += [f"not saved: {event['reason']}" for event in state["events"] if event["event"] == "save failed"]
    return "".join(f"{line}\n" for line in lines)
