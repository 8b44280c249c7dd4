"""The rule by which ``foretell train auto`` spends its time."""

import re
from collections.abc import Callable

import pytest

from foretell.core.errors import ConfigError
from foretell.train.plan import (
    EPOCHS,
    LEAST_PROMPTS,
    MOST_EPOCHS,
    PARAMETERS,
    SIZES,
    USABLE,
    Size,
    Speeds,
    TrainPlan,
    check_least,
    choose,
)

LARGE, MEDIUM = SIZES[:2]


def planned(
    hours: float,
    *,
    cost: Callable[[Size], float] = lambda size: 0.04,
    estimated: Callable[[Size], float] = lambda size: 0.0,
    parameters: Callable[[Size], int] = lambda size: 1000,
    **more: int,
) -> tuple[TrainPlan, list[Size]]:
    """The plan where a text of 50 + 100 tokens takes 1 s to answer and 3 passes of 0.75 s each, and the sizes measured."""
    tried: list[Size] = []

    def measured(size: Size) -> Speeds:
        tried.append(size)
        return Speeds(
            read=0.0, answer=1 / 148, label=0.0, learn=0.005, guess_cost=cost(size), num_parameters=parameters(size)
        )

    made, _ = choose(hours, measured, estimated=estimated, prompt_tokens=50, answer_tokens=100, **more)
    return made, tried


def test_the_time_is_for_as_many_texts_as_can_be_read_three_times() -> None:
    made, tried = planned(2.0)
    assert (made.size, tried, made.epochs) == (LARGE, [LARGE], EPOCHS)
    assert made.num_prompts == int(USABLE * 7200 / (1 + 3 * 0.75))
    assert made.seconds == pytest.approx(USABLE * 7200, rel=0.001)


def test_what_few_prompts_leave_of_the_time_is_for_more_passes() -> None:
    made, _ = planned(0.1, most_prompts=60)
    assert made.num_prompts == 60
    assert made.epochs == pytest.approx((USABLE * 360 / 60 - 1) / 0.75, abs=0.06)
    assert planned(10.0, most_prompts=60)[0].epochs == MOST_EPOCHS


def test_the_largest_head_whose_guesses_are_cheap_enough() -> None:
    """What its weights alone rule out is not measured; what was measured too dear is left for the next."""
    made, tried = planned(2.0, estimated=lambda size: 0.041 if size is LARGE else 0.0)
    assert (made.size, tried) == (MEDIUM, [MEDIUM])
    made, tried = planned(2.0, cost=lambda size: 0.041 if size in SIZES[:2] else 0.04)
    assert (made.size, tried) == (SIZES[2], list(SIZES[:3]))
    made, tried = planned(2.0, cost=lambda size: 0.5)
    assert (made.size, tried) == (SIZES[-1], list(SIZES))
    assert made.why.startswith("5 guesses cost 2.50 of a plain pass, more than 0.2")


def test_a_head_has_text_enough_to_learn_from() -> None:
    tokens = 150 * EPOCHS * planned(2.0)[0].num_prompts
    assert planned(2.0, parameters=lambda size: int(PARAMETERS * tokens))[0].size is LARGE
    made, _ = planned(2.0, parameters=lambda size: int(PARAMETERS * tokens) + (1000 if size is LARGE else -1000))
    assert made.size is MEDIUM


@pytest.mark.parametrize("hours", [1e-6, 0.01, 0.04])
def test_too_little_time_names_the_least_which_is_enough(hours: float) -> None:
    with pytest.raises(ConfigError, match=f"--hours {hours:g} is too little here") as caught:
        planned(hours)
    least = float(re.findall(r"give --hours (\S+)", str(caught.value))[0])
    assert planned(least)[0].num_prompts >= LEAST_PROMPTS
    assert least < 1.2 * LEAST_PROMPTS * (1 + EPOCHS * 0.75) / USABLE / 3600 + 0.01


def test_a_few_answers_tell_that_the_time_is_too_little() -> None:
    """Minutes of timing heads came first. By hand: 48 answers of 100 tokens, with 48 of a question, at 0.1 s a token."""
    answers = Speeds(0.0, 0.1, 0.0, 0.0, 0.0, 0)
    sizes = {"prompt_tokens": 200.0, "answer_tokens": 100.0}
    least = 48 * 148 * 0.1 / 0.85 / 3600
    assert check_least(0.3, answers, 1000, **sizes) == pytest.approx(least)
    with pytest.raises(ConfigError, match=r"--hours 0.05 is too little here: .* give --hours 0.47 or more"):
        check_least(0.05, answers, 1000, **sizes)
    assert check_least(0.05, answers, 8, **sizes) == pytest.approx(least / 6)
