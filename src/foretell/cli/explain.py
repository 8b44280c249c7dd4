"""``foretell explain``: one decode step drawn in the terminal, every term introduced where it first stands."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options as o
from foretell.cli import settings
from foretell.cli.output import VISIBLE, as_json, has_color
from foretell.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from foretell.analysis.explain import ExplainedStep, Game, Place

PROMPT = "def add(a, b):\n    return"
BAR = 24
Prompt = Annotated[str, typer.Argument(metavar="[PROMPT]", help="The text to be continued.")]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", min=0.0, rich_help_panel=o.SAMPLING, help="0: the most probable token, without chance."
    ),
]
Seed = Annotated[int, typer.Option("--seed", envvar="FORETELL_SEED", rich_help_panel=o.SAMPLING, help="Of the chance.")]
Step = Annotated[
    int | None,
    typer.Option("--step", metavar="N", min=1, rich_help_panel=o.OUTPUT,
                 help="Which step. Default: a likely one in which some guesses were kept and some were not."),
]  # fmt: skip


def explain(
    ctx: typer.Context,
    prompt: Prompt = PROMPT,
    step: Step = None,
    target: o.Target = o.AUTO,
    revision: o.Revision = None,
    trust_remote_code: o.TrustRemoteCode = False,
    draft: o.Draft = None,
    device: o.Device = "cpu",
    dtype: o.Dtype = None,
    device_map: o.DeviceMap = None,
    implementation: o.Implementation = "auto",
    weights: o.Weights = "auto",
    draft_weights: o.DraftWeights = None,
    width: o.Width = 0,
    method: o.Method = None,
    num_speculative_tokens: o.NumSpeculativeTokens = None,
    verify: o.Verify = None,
    shape: o.Shape = None,
    draws: o.Draws = None,
    speculative_config: o.SpeculativeConfig = None,
    temperature: Temperature = 0.7,
    seed: Seed = 0,
    json_: o.Json = False,
    no_color: o.NoColor = False,
) -> None:
    """Look at one step of speculative decoding: the guesses, what both models think, the race, what is kept and why.

    The figures are those of a real step. Every term is explained where it first stands; a game of two people and ten
    numbers shows why the text stays the same.
    """
    if not prompt:
        raise ConfigError("the prompt is empty: give a few words to continue")
    config = settings.speculation(ctx)
    if config["method"] == "none":
        raise ConfigError(
            "nothing guesses for this target: name a drafter by --draft NAME_OR_DIR, or a method by --method, e.g. ngram"
        )
    engine = settings.load_engine(ctx.params, config)
    from foretell.analysis.explain import explain as taken_apart
    from foretell.analysis.explain import number_game

    found = taken_apart(engine, prompt, temperature=temperature, seed=seed, step=step)
    game = number_game(seed=seed)
    if json_:
        typer.echo(as_json({"step": asdict(found), "game": asdict(game)}, pretty=sys.stdout.isatty()), nl=False)
        return
    show(found, game, no_color=no_color)


def show(found: "ExplainedStep", game: "Game", *, no_color: bool) -> None:
    """Draw a step."""
    from rich.console import Console

    console = Console(no_color=not has_color(sys.stdout, no_color), highlight=False)
    _before(console, found)
    _guesses(console, found)
    _check(console, found)
    _result(console, found)
    if found.is_race and found.temperature > 0:
        _game(console, game)


def quoted(text: str) -> str:
    """A token as it is seen: spaces and line breaks visible."""
    return "'" + text.replace("\n", "\\n").translate(VISIBLE) + "'"


def _say(console: "Console", text: str, *, style: str | None = None) -> None:
    console.print(text, markup=False, style=style)


def _rule(console: "Console", title: str) -> None:
    console.print()
    console.rule(title, align="left", style="dim")


def _before(console: "Console", found: "ExplainedStep") -> None:
    _rule(console, "1 The text so far")
    shown = found.text[-300:]
    _say(console, ("..." if len(shown) < len(found.text) else "") + quoted(shown), style="bold")
    _say(
        console,
        "A language model writes a token at a time: a word, or a piece of one. Before each it gives every token that it "
        "knows a probability. These probabilities together are called a law here. To compute them, all the numbers that "
        "the model has learned, its weights, are read once: a pass. Passes are what takes the time.",
    )


def _guesses(console: "Console", found: "ExplainedStep") -> None:
    from rich.text import Text
    from rich.tree import Tree

    _rule(console, "2 Guess")
    _say(
        console,
        f"The target is the model whose text is wanted. A drafter, here the method {found.method}, is something much "
        "cheaper. It guesses the next tokens ahead:",
    )
    if not found.guesses:
        _say(console, "In this step it found nothing to guess.")
        return
    tree = Tree(Text("(the text so far)", style="dim"))
    branches = {0: tree}
    for guess in found.guesses:
        label = Text(quoted(guess.text), style="bold green" if guess.kept else "dim")
        if guess.q is not None:
            label.append(f"  the drafter gives it {guess.q:.0%}", style="dim")
        branches[guess.node] = branches[guess.parent].add(label)
    console.print(tree)


def _check(console: "Console", found: "ExplainedStep") -> None:
    _rule(console, "3 Check")
    _say(
        console,
        "The target reads all guesses in one pass. That takes hardly longer than a pass for one token, because its weights "
        "are read once either way. So it has its own law, p, after every guess. The drafter's law is q.",
    )
    if found.is_race and found.temperature > 0:
        _say(
            console,
            "How does the target pick a token by its law? By a race: every token gets a random delay, and its time is the "
            "delay divided by its probability. The first to arrive is written. That is exactly a draw by the law: twice "
            "as probable wins twice as often. The delays, called noise, are made from the place in the text and the seed, "
            "a number that makes chance repeatable; they do not depend on who draws. The drafter ran its own race with the "
            "same delays, so where the laws are alike the same token won.",
        )
    elif found.is_race:
        _say(console, "At temperature 0 there is no chance: the target takes its most probable token at every place.")
    elif found.verifier == "rejection":
        _say(
            console,
            "A guess is accepted by a coin that shows heads with probability min(1, p / q): always where the target "
            "thinks the guess at least as probable as the drafter does. After tails a token is drawn from what is left of "
            "p where q is taken away. Together this is exactly a draw from p.",
        )
    else:
        _say(console, f"The rule {found.verifier} says how probably each guess is kept; one draw decides.")
    for place in found.places:
        _place(console, found, place)


def _place(console: "Console", found: "ExplainedStep", place: "Place") -> None:
    from rich import box
    from rich.table import Table

    console.print()
    where = "after the text so far" if place.node == 0 else f"after the guess {quoted(place.after)}"
    _say(console, where, style="bold")
    has_q = any(runner.q is not None for runner in place.runners)
    has_time = found.is_race and found.temperature > 0
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("token")
    table.add_column("p, the target's law", no_wrap=True)
    if has_q:
        table.add_column("q, the drafter's", no_wrap=True)
    if has_time:
        table.add_column("target's race", justify="right")
        if has_q:
            table.add_column("drafter's", justify="right")
    from rich.text import Text

    # The winner of the drafter's race may be a token that is not shown only if it was not guessed either.
    for runner in place.runners:
        won = runner.text == place.winner
        cells = [Text(quoted(runner.text)), Text(bar(runner.p))]
        if has_q:
            cells.append(Text("" if runner.q is None else bar(runner.q, 12)))
        if has_time:
            cells.append(Text(_time(runner.time_p, first=won)))
            if has_q:
                cells.append(Text(_time(runner.time_q, first=runner.text in place.guesses)))
        table.add_row(*cells, style="bold green" if won else None)
    console.print(table)
    _say(console, verdict(found, place), style="bold")


def bar(share: float, width: int = BAR) -> str:
    """A probability as a bar and in percent."""
    return f"{'█' * round(share * width):<{width}} {share:5.1%}"


def _time(time: float | None, *, first: bool) -> str:
    return "never" if time is None else f"{time:.2f}{' first' if first else '      '}"


def verdict(found: "ExplainedStep", place: "Place") -> str:
    """What happened at a place, in a sentence."""
    winner = quoted(place.winner)
    if not place.guesses:
        return f"There is no guess here. The target writes {winner}: this token is the bonus of the pass."
    guessed = " or ".join(map(quoted, place.guesses))
    if found.is_race:
        if place.was_guessed:
            return f"The target takes {winner}, which was guessed: kept."
        return (
            f"The target takes {winner}; guessed was {guessed}. {winner} is written, and further guesses are dropped."
        )
    chance = "" if place.accept is None else f" (it is accepted with probability {place.accept:.0%})"
    if place.was_guessed:
        return f"The guess {guessed} is accepted{chance}: kept."
    return f"The guess {guessed} is rejected{chance}: {winner} is drawn from what is left, and further guesses are dropped."


def _result(console: "Console", found: "ExplainedStep") -> None:
    _rule(console, "4 What came of it")
    text = "".join(found.emitted)
    total = len(found.emitted)
    kept = f"{found.num_kept} of {len(found.guesses)} guesses were kept"
    _say(console, f"{kept}; with the target's own token, one pass wrote {total} token{'s' if total > 1 else ''}:")
    _say(console, quoted(text), style="bold green")
    if found.is_race:
        _say(
            console,
            "Every token that was written is the one that the target itself took. Guesses change how fast a text comes, "
            "never the text: without a drafter, with the same seed, it is the same, token by token.",
        )
    _say(
        console,
        f"Time: guessing {1e3 * found.seconds_draft:.1f} ms, the target's pass {1e3 * found.seconds_target:.1f} ms, the "
        f"rest {1e3 * found.seconds_rest:.1f} ms. (Step {found.number} of this text; --step shows another.)",
    )


def _game(console: "Console", game: "Game") -> None:
    _rule(console, "5 Why the same delays help: guess a number from 1 to 10")
    _say(
        console,
        f"You and a friend each think of a number from 1 to 10, all equally likely. You agree in {game.independent:.0%} "
        f"of {game.rounds:,} rounds. Now both look at one list of ten random arrival times, and each takes the number "
        f"that arrives first. Each of you still has every number equally often, but you agree in {game.shared:.0%} of the "
        "rounds. The first round:",
    )
    longest = max(game.times)
    for number, time in enumerate(game.times, start=1):
        won = number == game.winner
        dots = "·" * max(1, round(30 * time / longest))
        line = f"{number:3d} {dots} {time:.1f}{'  first: you both take it' if won else ''}"
        _say(console, line, style="bold green" if won else None)
    _say(
        console,
        "Drafter and target are these two. Where their laws differ a little they agree a little less often; that is the "
        "acceptance rate. Nothing about the target's own choice changes.",
    )
