"""A step of ``analysis/explain.py`` in words, for the terminal and for the server's page. Every term is introduced where it
first stands: a reader who has never heard of the method reads the paragraphs in order."""

from dataclasses import dataclass

from foretell.analysis.explain import ExplainedStep, Game, Place
from foretell.core.visible import quoted

NETWORK = "a small network, trained to continue what the target is computing"
ABOUT = {
    "draft_model": "a smaller language model",
    "eagle1": NETWORK,
    "eagle2": NETWORK,
    "eagle3": NETWORK,
    "medusa": NETWORK,
    "dflash": NETWORK,
    "mtp": "a part of the target that was trained to see further ahead",
    "kangaroo": "the lower part of the target itself, with a small trained addition",
    "ngram": "a search for what followed the same last words earlier in the text",
    "suffix": "a search for what followed the longest repeated ending, in this text or in earlier ones",
    "hybrid": "a search for repeated text, and a small trained network where it finds none",
    "prediction": "the output as the user expects it",
}
"""What a method guesses with, in plain words. A method of another package is called by its name."""


@dataclass(frozen=True)
class StepWords:
    """The paragraphs of a step, in the order in which they are read."""

    before: list[str]  # with the text so far
    guess: list[str]  # before the tree of guesses
    check: list[str]  # before the places
    verdicts: list[str]  # one for each place
    kept: str  # how many guesses, before the text that was written
    result: list[str]  # after it


def words(step: ExplainedStep) -> StepWords:
    """A step in words."""
    return StepWords(
        [_before(step)],
        _guess(step),
        _check(step),
        [verdict(step, place) for place in step.places],
        _kept(step),
        _result(step),
    )


def _before(step: ExplainedStep) -> str:
    text = "This is the prompt." if step.number == 1 else "This is the prompt, and behind it what was written since."
    sharp = "" if step.temperature > 0 else ", so the most probable token has 100%"
    return (
        f"{text} A language model writes a token at a time: a word, or a piece of one. Before each it gives every token "
        "that it knows a probability: how likely it is to come next. These probabilities together are called a law here. A "
        f"setting, the temperature, makes the law sharper (low) or flatter (high); here it is {step.temperature:g}{sharp}. "
        "To compute a law, all the numbers that the model has learned, its weights, are read once: a pass. Passes are what "
        "takes the time. Guessing ahead, so that one pass writes several tokens, is called speculative decoding. This is "
        "one step of it: guess, check, write."
    )


def _guess(step: ExplainedStep) -> list[str]:
    what = ABOUT.get(step.method)
    named = f"the method {step.method}" if what is None else f"{what} (the method {step.method})"
    said = (
        "The target is the model whose text is wanted. A drafter is something much cheaper that guesses the next tokens "
        f"ahead. Here it is {named}."
    )
    if not step.guesses:
        return [said, "In this step it found nothing to guess."]
    by_chance = step.temperature > 0 and any(guess.q is not None and guess.how != "fixed" for guess in step.guesses)
    tree = " Several guesses after the same token are alternatives: together the guesses form a tree."
    chance = " The drafter guesses by chance, so a guess may be one that it finds unlikely itself."
    return [
        said,
        "Its guesses, each after the one before; ✓ marks those that were kept in the end."
        + (tree if _branches(step) else "")
        + (chance if by_chance else ""),
    ]


def _branches(step: ExplainedStep) -> bool:
    parents = [guess.parent for guess in step.guesses]
    return len(set(parents)) < len(parents)


def _check(step: ExplainedStep) -> list[str]:
    shares = [runner.q for place in step.places for runner in place.runners if runner.q is not None]
    # At temperature 0 a draft model's guess is its most probable token, and its law is still told.
    flat = " (as at temperature 1)" if step.temperature == 0 and any(0.001 < q < 0.999 for q in shares) else ""
    first = (
        "The target reads all guesses in one pass. That takes hardly longer than a pass for one token, because its weights "
        "are read once either way. So it has its own law, p, after every guess."
        + (f" The drafter's law is q{flat}." if shares else "")
    )
    return [first, _rule(step), _legend(step)]


def _legend(step: ExplainedStep) -> str:
    """What stands in the tables of the places."""
    told = "The tables show the most probable tokens, the guesses, and the token that was written."
    if step.is_race and step.temperature > 0:
        told += " Times have no unit: it only counts which is the first."
        if any(runner.time_p is None for place in step.places for runner in place.runners):
            told += " A token of probability 0 never arrives."
    return told


def _rule(step: ExplainedStep) -> str:
    drawn = any(guess.how != "fixed" for guess in step.guesses)
    if step.is_race and step.temperature > 0:
        told = (
            "How does the target pick a token by its law? By a race: every token gets a random delay, and its time is the "
            "delay divided by its probability. The first to arrive is written. That is exactly a draw by the law: a token "
            "twice as probable wins twice as often. The delays, called noise, are made from the place in the text and the "
            "seed, a number that makes chance repeatable; they do not depend on who draws."
        )
        if any(guess.how == "coupled" for guess in step.guesses):
            few = ", or the first few as alternatives" if _branches(step) else ""
            return told + (
                " The drafter ran its own race with the same delays and guessed the token that came first"
                f"{few}. So where the laws are alike, both take the same one."
            )
        return told + (
            " The drafter ran no race: it names a token, and that is kept if the target picks the same one."
            if step.guesses
            else ""
        )
    if step.is_race:
        return (
            "At temperature 0 there is no chance: the target takes its most probable token at every place, and a guess is "
            "kept if it is that token."
        )
    if step.verifier == "rejection" and not drawn:
        return (
            "The drafter did not draw its guess by chance, so it is kept with the probability p that the target gives it. "
            "A guess that is not kept is rejected: another token is drawn from the rest of p. Together this is exactly a "
            "draw from p."
        )
    if step.verifier == "rejection":
        return (
            "A guess is kept with probability min(1, p / q), as by a weighted coin: always where the target thinks it at "
            "least as probable as the drafter does. A guess that is not kept is rejected: a token is drawn from what is "
            "left of p where q is taken away. Together this is exactly a draw from p."
            + (
                " Where guesses are alternatives, the second is tried against that rest first."
                if _branches(step)
                else ""
            )
        )
    return (
        f"The rule {step.verifier} says with which probability each guess is kept; one random draw decides. A guess that "
        "is not kept is rejected, and another token is drawn in its place."
    )


def verdict(step: ExplainedStep, place: Place) -> str:
    """What happened at a place, in a sentence or two."""
    winner = quoted(place.winner)
    if not place.guesses:
        return (
            f"There is no guess here, but the pass gave a law all the same. The target writes {winner}: this token is the "
            "bonus of the pass."
        )
    guessed = " or ".join(map(quoted, place.guesses))
    if step.is_race:
        if place.was_guessed:
            return f"The target takes {winner}, which was guessed: kept."
        return (
            f"The target takes {winner}; guessed was {guessed}. {winner} is written, and further guesses are dropped."
        )
    # The chance that is known is the first guess's.
    chance = "" if place.accept is None else f", which had a chance of {place.accept:.0%} to be kept"
    if place.was_guessed:
        is_first = bool(chance) and place.winner_token == place.guess_tokens[0]
        return f"The guess {winner}{chance}, is kept." if is_first else f"The guess {winner} is kept."
    tried = chance if len(place.guesses) == 1 else ""
    source = "from what is left" if step.verifier == "rejection" else "in its place"
    return f"Rejected: {guessed}{tried}. {winner} is drawn {source}, and further guesses are dropped."


def _kept(step: ExplainedStep) -> str:
    total = len(step.emitted)
    own = "; with the target's own token" if total > step.num_kept else "; with them"
    guesses = len(step.guesses)
    were = f"guess{'es' if guesses != 1 else ''} {'was' if step.num_kept == 1 else 'were'}"
    return f"{step.num_kept} of {guesses} {were} kept{own}, one pass wrote {_tokens(total)}:"


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count != 1 else ''}"


def _result(step: ExplainedStep) -> list[str]:
    if step.is_race:
        seed = ", with the same seed" if step.temperature > 0 else ""
        told = (
            "Every token that was written is the one that the target itself took. Guesses change how fast a text comes, "
            f"never the text: without a drafter{seed}, it is the same, token by token."
        )
    elif step.exact:
        told = (
            "The tokens are drawn exactly by the target's law. The text may differ from the one without a drafter, as two "
            "rolls of a die differ; its probabilities do not."
        )
    else:
        told = f"The rule {step.verifier} is lossy: it keeps more guesses, and the text no longer follows the target's law."
    return [
        told,
        f"Time: guessing {1e3 * step.seconds_draft:.1f} ms, the target's pass {1e3 * step.seconds_target:.1f} ms, the rest "
        f"(choosing, keeping count) {1e3 * step.seconds_rest:.1f} ms."
        + (f" Without guesses, {_tokens(len(step.emitted))} take {len(step.emitted)} passes." if step.num_kept else ""),
    ]


def game_words(game: Game) -> tuple[str, str]:
    """What is said before the first round of the game, and after it."""
    return (
        f"You and a friend each think of a number from 1 to 10, all equally likely. You agree in {game.independent:.0%} "
        f"of {game.rounds:,} rounds. Now both look at one list of ten random arrival times, and each takes the number "
        f"that arrives first. Each of you still has every number equally often, but you agree in {game.shared:.0%} of the "
        "rounds. The first round, each number with its time:",
        "You are the target, a drafter with a law of its own is your friend, and the list is the noise that both share. "
        "Where the laws differ you agree less often. How often drafter and target agree is called the acceptance rate. "
        "Nothing about the target's own choice changes.",
    )
