"""How ``foretell train auto`` spends its time: the size of the head and the number of answers, from measured speeds.

The rule: take the largest head of ``SIZES`` whose five guesses cost at most a fifth of a plain pass and that has at most
``PARAMETERS`` weights to learn for each token that is read; have as many prompts answered as can be read ``EPOCHS`` times
in what is left of the time. A head that is too dear for its target loses in decoding whatever it learned; one that is too
large for its text does not learn it. Both limits are rules of thumb; what the head is worth is measured at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foretell.core.errors import ConfigError

GUESSES = 5
"""Guesses of a step that a head is sized for."""
MOST_COST = 0.2
"""Of these guesses together, in plain passes."""
EPOCHS, MOST_EPOCHS = 3.0, 10.0
PARAMETERS = 64
LEAST_PROMPTS, MOST_PROMPTS = 48, 20_000
USABLE = 0.85
"""Share of the time for prompts, answers and training; what is left is for measuring, before and after."""
QUESTION = 48
"""Tokens that are written for a prompt, beside its answer, where the target makes its own: half of them are questions, and
half of what it writes is none."""


@dataclass(frozen=True)
class Task:
    """What was asked of ``foretell train auto``."""

    target: str
    hours: float
    data: str | None
    out: Path
    seed: int
    device: str
    dtype: str | None
    no_color: bool


@dataclass(frozen=True)
class Size:
    """Of an ``eagle3`` head."""

    intermediate: float  # as a share of the target's own
    draft_vocab_size: int


SIZES = (Size(1.0, 16384), Size(1.0, 8192), Size(0.5, 8192), Size(0.5, 4096), Size(0.25, 2048))
"""From the largest on."""


@dataclass(frozen=True)
class Speeds:
    """What was measured here, in seconds."""

    read: float  # a token of many prompts at once
    answer: float  # a token of their answers
    label: float  # a token of the target's outputs on a text
    learn: float  # a token that the head learns from
    guess_cost: float  # of one guess, in plain passes
    num_parameters: int  # that are learned


@dataclass(frozen=True)
class TrainPlan:
    """What is done."""

    size: Size
    num_prompts: int
    epochs: float
    seconds: float  # that prompts, answers and training should take
    why: str


def choose(
    hours: float,
    measured: Callable[[Size], Speeds],
    *,
    estimated: Callable[[Size], float],
    prompt_tokens: float,
    answer_tokens: float,
    most_prompts: int = MOST_PROMPTS,
) -> tuple[TrainPlan, Speeds]:
    """The plan for so many hours, and the speeds of its head. measured: takes seconds; asked for few sizes. estimated: the
    cost of a guess in plain passes, by the weights that are read: no guess costs less. most_prompts: that there are. Raises
    ConfigError with the least hours."""
    dear = [size for size in SIZES if GUESSES * estimated(size) > MOST_COST]
    left = [size for size in SIZES if size not in dear] or [SIZES[-1]]
    for size in left:
        speeds = measured(size)
        made = _plan(hours, size, speeds, prompt_tokens, answer_tokens, most_prompts)
        tokens = made.num_prompts * made.epochs * (prompt_tokens + answer_tokens)
        if size is left[-1]:
            break
        if GUESSES * speeds.guess_cost <= MOST_COST and speeds.num_parameters <= PARAMETERS * tokens:
            break
    fewest = min(LEAST_PROMPTS, most_prompts)
    if made.num_prompts < fewest:
        least = fewest * _text(speeds, prompt_tokens, answer_tokens, EPOCHS) / USABLE / 3600
        raise ConfigError(
            f"--hours {hours:g} is too little here: {made.num_prompts} prompts could be answered and learned from, and "
            f"{fewest} are the least: give --hours {_up(least)}"
        )
    return made, speeds


def check_least(hours: float, speeds: Speeds, most: int, *, prompt_tokens: float, answer_tokens: float) -> float:
    """Hours that the fewest prompts, of ``most``, take by what is known so far. Raises ConfigError where they are more than
    ``hours``."""
    fewest = min(LEAST_PROMPTS, most)
    least = fewest * _text(speeds, prompt_tokens, answer_tokens, EPOCHS) / USABLE / 3600
    if least > hours:
        raise ConfigError(
            f"--hours {hours:g} is too little here: {fewest} prompts, the fewest, take {_up(least)} hours at least: give "
            f"--hours {_up(2 * least)} or more"
        )
    return least


def _plan(
    hours: float, size: Size, speeds: Speeds, prompt_tokens: float, answer_tokens: float, most_prompts: int
) -> TrainPlan:
    usable = USABLE * 3600 * hours
    number = min(int(usable / _text(speeds, prompt_tokens, answer_tokens, EPOCHS)), most_prompts)
    epochs = EPOCHS
    if number == most_prompts:  # the time allows more
        once = _text(speeds, prompt_tokens, answer_tokens, 0.0)
        epochs = (usable / number - once) / ((prompt_tokens + answer_tokens) * speeds.learn)
        epochs = min(MOST_EPOCHS, round(epochs, 1))
    share = GUESSES * speeds.guess_cost
    why = f"{GUESSES} guesses cost {share:.2f} of a plain pass"
    why += "" if share <= MOST_COST else f", more than {MOST_COST:g}, and no smaller head is tried"
    seconds = number * _text(speeds, prompt_tokens, answer_tokens, epochs)
    return TrainPlan(size, number, epochs, seconds, why)


def _text(speeds: Speeds, prompt_tokens: float, answer_tokens: float, epochs: float) -> float:
    """Seconds for one text: its prompt and answer are written, the target reads it once, the head learns from it."""
    tokens = prompt_tokens + answer_tokens
    written = prompt_tokens * speeds.read + (answer_tokens + QUESTION) * speeds.answer
    return written + tokens * (speeds.label + epochs * speeds.learn)


def _up(hours: float) -> str:
    """Hours with two digits, rounded up."""
    digits = 2
    while hours < 10 ** (1 - digits):
        digits += 1
    return f"{int(hours * 10**digits) / 10**digits + 10**-digits:.{digits}f}"
