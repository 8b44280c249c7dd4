"""``foretell explain``: one decode step drawn in the terminal, every term introduced where it first stands."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options as o, settings
from foretell.cli.errors import say
from foretell.cli.fields import with_group
from foretell.cli.layout import console_of
from foretell.cli.output import deliver
from foretell.core.errors import ConfigError
from foretell.core.visible import quoted

if TYPE_CHECKING:
    from rich.console import Console

    from foretell.analysis.explain import ExplainedStep, Game, Place
    from foretell.analysis.words import StepWords

PROMPT = "def add(a, b):\n    return"
BAR = 24
WIDE, NARROW = 100, 70
"""Columns of a terminal: below WIDE bars are shorter, below NARROW there are none."""
Prompt = Annotated[
    str | None,
    typer.Argument(
        metavar="[PROMPT]",
        help="The text to be continued; an instruct model gets it as a message (but with --raw). "
        "Default: the beginning of a function, as it is.",
    ),
]
Temperature = Annotated[
    float,
    typer.Option("--temperature", rich_help_panel=o.SAMPLING, help="0: the most probable token, without chance."),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        envvar="FORETELL_SEED",
        rich_help_panel=o.SAMPLING,
        help="The same number, the same chance: the same text.",
    ),
]
Step = Annotated[
    int | None,
    typer.Option("--step", metavar="N", min=1, rich_help_panel=o.OUTPUT,
                 help="Which step. Default: a likely one in which some guesses were kept and some were not."),
]  # fmt: skip


@with_group(o.Models, into="models")
@with_group(o.Guessing, into="guessing")
def explain(
    ctx: typer.Context, *, prompt: Prompt = None, raw: o.Raw = False, step: Step = None, models: o.Models,
    guessing: o.Guessing, temperature: Temperature = 0.7, seed: Seed = 0, json_: o.Json = False,
    no_color: o.NoColor = False,
) -> None:  # fmt: skip
    """Look at one step of speculative decoding: the guesses, what both models think, what is kept and why.

    The figures are those of a real step. Every term is explained where it first stands. Above temperature 0 a game of two
    people and ten numbers ends it: it shows why guesses are often right though both sides choose by chance.
    """
    if prompt == "":
        raise ConfigError("the prompt is empty: give a few words to continue")
    settings.check_text(prompt, "prompt")
    settings.sampling({"temperature": temperature, "seed": seed})  # refused before anything is loaded
    config = settings.speculation(ctx, models, guessing)
    if config["method"] == "none":
        raise ConfigError(
            "nothing guesses for this target: name a drafter by --draft NAME_OR_DIR, or a method by --method, e.g. ngram"
        )
    engine = settings.load_engine(models, config, no_color=no_color)
    from foretell.analysis.explain import explain as taken_apart, number_game
    from foretell.engine.request.conversation import takes_messages

    asked: str | list[int] = PROMPT if prompt is None else prompt
    if prompt is not None and takes_messages(engine.model.spec, engine.tokenizer, [True], raw=raw, notice=say):
        asked = engine.chat_prompt([{"role": "user", "content": prompt}])
    found = taken_apart(engine, asked, temperature=temperature, seed=seed, step=step)
    game = number_game(seed=seed)
    told = {"step": asdict(found), "game": asdict(game)}
    deliver(told, json_=json_, show=lambda: show(found, game, no_color=no_color))


def show(found: "ExplainedStep", game: "Game", *, no_color: bool) -> None:
    """Draw a step."""
    from foretell.analysis.words import words

    console = console_of(no_color)
    told = words(found)
    _before(console, found, told)
    _guesses(console, found, told)
    _check(console, found, told)
    _result(console, found, told)
    if found.is_race and found.temperature > 0:
        _game(console, game)


def _say(console: "Console", text: str, *, style: str | None = None) -> None:
    console.print(text, markup=False, style=style)


def _rule(console: "Console", title: str) -> None:
    console.print()
    console.rule(title, align="left", style="dim")


def _before(console: "Console", found: "ExplainedStep", told: "StepWords") -> None:
    _rule(console, "1 The text so far")
    shown = found.text[-300:]
    _say(console, ("..." if len(shown) < len(found.text) else "") + quoted(shown), style="bold")
    _say(console, "(Quotes show which blanks belong to a text; \\n is a line break.)", style="dim")
    for paragraph in told.before:
        _say(console, paragraph)


def _guesses(console: "Console", found: "ExplainedStep", told: "StepWords") -> None:
    from rich.text import Text
    from rich.tree import Tree

    _rule(console, "2 Guess")
    for paragraph in told.guess:
        _say(console, paragraph)
    if not found.guesses:
        return
    tree = Tree(Text("(the text so far)", style="dim"))
    branches = {0: tree}
    for guess in found.guesses:
        label = Text(quoted(guess.text) + (" ✓" if guess.kept else ""), style="bold green" if guess.kept else "dim")
        if guess.q is not None:
            share = f"{guess.q:.0%}" if guess.q >= 0.005 else "less than 1%"
            label.append(f"  the drafter gives it {share}", style="dim")
        branches[guess.node] = branches[guess.parent].add(label)
    console.print(tree)


def _check(console: "Console", found: "ExplainedStep", told: "StepWords") -> None:
    _rule(console, "3 Check")
    for paragraph in told.check:
        _say(console, paragraph)
    for place, verdict in zip(found.places, told.verdicts, strict=True):
        _place(console, found, place, verdict)


def _place(console: "Console", found: "ExplainedStep", place: "Place", verdict: str) -> None:
    from rich import box
    from rich.table import Table

    console.print()
    where = "after the text so far" if place.node == 0 else f"after the guess {quoted(place.after)}"
    _say(console, where, style="bold")
    has_q = any(runner.q is not None for runner in place.runners)
    has_time = found.is_race and found.temperature > 0
    width = BAR if console.width >= WIDE else BAR // 2 if console.width >= NARROW else 0
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("token", overflow="fold", min_width=5)
    table.add_column("p, target", min_width=6)
    if has_q:
        table.add_column("q, drafter", min_width=6)
    if has_time:
        table.add_column("time, target", min_width=6)
        if has_q:
            table.add_column("time, drafter", min_width=6)
    from rich.text import Text

    # The winner of the drafter's race may be a token that is not shown only if it was not guessed either.
    for runner in place.runners:
        won = runner.token == place.winner_token
        cells = [Text(quoted(runner.text)), Text(bar(runner.p, width))]
        if has_q:
            cells.append(Text("" if runner.q is None else bar(runner.q, width // 2)))
        if has_time:
            cells.append(Text(_time(runner.time_p, first=won)))
            if has_q:
                cells.append(Text(_time(runner.time_q, first=runner.token in place.guess_tokens)))
        table.add_row(*cells, style="bold green" if won else None)
    console.print(table)
    _say(console, verdict, style="bold")


def bar(share: float, width: int = BAR) -> str:
    """A probability as a bar and in percent; width 0: in percent alone."""
    blocks = f"{'█' * round(share * width):<{width}} " if width else ""
    return f"{blocks}{share:5.1%}"


def _time(time: float | None, *, first: bool) -> str:
    """Three figures and "first": how late a late one comes says nothing."""
    words = "never" if time is None else f"{time:.2f}" if time < 10 else f"{time:.0f}" if time < 1000 else "> 1000"
    return f"{words:>6}{' first' if first else ''}"


def _result(console: "Console", found: "ExplainedStep", told: "StepWords") -> None:
    _rule(console, "4 What came of it")
    _say(console, told.kept)
    _say(console, quoted("".join(found.emitted)), style="bold green")
    for paragraph in told.result:
        _say(console, paragraph)
    _say(console, f"This was step {found.number} of the text; --step N shows another.")


def _game(console: "Console", game: "Game") -> None:
    from foretell.analysis.words import game_words

    before, after = game_words(game)
    _rule(console, "5 Why the same delays help: guess a number from 1 to 10")
    _say(console, before)
    longest = max(game.times)
    for number, time in enumerate(game.times, start=1):
        won = number == game.winner
        dots = "·" * max(1, round(30 * time / longest))
        line = f"{number:3d} {dots} {time:.1f}{'  first: you both take it' if won else ''}"
        _say(console, line, style="bold green" if won else None)
    _say(console, after)
