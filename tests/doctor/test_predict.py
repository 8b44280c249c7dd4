"""The prediction: exact steps of a text, costs between and beyond what was timed, intervals that cover."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from foretell.bench.stats import Interval
from foretell.doctor.predict import (
    TextAcceptance,
    TextTimes,
    at_one_speed,
    believed,
    num_steps,
    pool,
    predicted,
    predictions,
    step_cost_of,
)
from foretell.theory.run_costs import step_costs


@dataclass(frozen=True)
class Timing:
    seconds_draft: float
    seconds_target: float
    seconds_rest: float
    num_draft_tokens: int


def timing(guesses: int, cost: float) -> Timing:
    return Timing(0.0 if not guesses else 0.2 * cost, 0.8 * cost if guesses else cost, 0.0, guesses)


def steps_by_enumeration(rates: list[float], num_tokens: int) -> float:
    """Expected steps over all outcomes of all guesses, in order."""
    if num_tokens <= 0:
        return 0.0
    total, outcomes = 0.0, itertools.product((0, 1), repeat=len(rates))
    for outcome in outcomes:
        chance = 1.0
        for kept, rate in zip(outcome, rates, strict=True):
            chance *= rate if kept else 1.0 - rate
        accepted = next((k for k, kept in enumerate(outcome) if not kept), len(rates))
        total += chance * (1.0 + steps_by_enumeration(rates, num_tokens - 1 - accepted))
    return total


@pytest.mark.parametrize("rates", [[], [0.5], [0.9, 0.4], [0.7, 0.8, 0.3], [1.0, 1.0], [0.0, 0.6]])
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_steps_of_a_text_by_enumeration(rates: list[float], num_tokens: int) -> None:
    assert num_steps(rates, num_tokens) == pytest.approx(steps_by_enumeration(rates, num_tokens), abs=1e-12)


def test_plain_decoding_takes_a_step_a_token() -> None:
    assert num_steps([], 37) == pytest.approx(37.0)
    assert num_steps([1.0] * 4, 50) == pytest.approx(10.0)


def test_costs_between_and_beyond_the_timed_numbers_of_guesses() -> None:
    costs = step_costs([timing(0, 2.0)] * 3, [timing(2, 3.0)] * 3 + [timing(4, 4.0)] * 3, split=True)
    assert step_cost_of(costs, {3: 1.0}) == pytest.approx(1.75)
    assert step_cost_of(costs, {1: 0.5, 4: 0.5}) == pytest.approx((1.25 + 2.0) / 2)
    assert step_cost_of(costs, {6: 1.0}) == pytest.approx(2.5)
    assert step_cost_of(costs, {}) == 0.0


def texts(rate: float, count: int, steps: int, seed: int) -> list[TextAcceptance]:
    """Texts of a drafter with one rate and two slots, each step drawn."""
    generator = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        first = generator.random(steps) < rate
        second = generator.random(int(first.sum())) < rate
        tokens = steps + int(first.sum()) + int(second.sum())
        kept = (float(first.sum()), float(second.sum()))
        out.append(TextAcceptance((steps, int(first.sum())), kept, {2: steps}, tokens))
    return out


def times(count: int, cost: float, first: float = 0.0) -> list[TextTimes]:
    return [TextTimes([timing(0, 1.0)] * 5, [timing(2, cost)] * 5, first) for _ in range(count)]


def test_a_known_cost_and_rate_give_the_known_speedup() -> None:
    made = [TextAcceptance((10, 5), (5.0, 2.5), {2: 10}, 17)]
    (found,) = predictions(made, times(1, 1.25), [2], num_tokens=100)
    assert found.cost == pytest.approx(1.25)
    assert found.tokens_per_step == pytest.approx(100 / num_steps([0.5, 0.5], 100))
    assert found.speedup.value == pytest.approx(found.tokens_per_step / 1.25)
    late = predicted(pool(made, times(1, 1.25, first=8.0), split=True), 2, 100)
    assert late is not None
    assert late[2] == pytest.approx(100 / (8.0 + 1.25 * num_steps([0.5, 0.5], 100)))


def test_methods_that_find_few_guesses_cost_less() -> None:
    made = [TextAcceptance((10, 5), (5.0, 2.5), {0: 5, 2: 5}, 17)]
    (found,) = predictions(made, times(1, 1.5), [2], num_tokens=50)
    assert found.cost == pytest.approx(1.25)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """60 repetitions at 95 %: fewer than 51 hits has a chance below 1 in 1000 (binomial)."""
    truth = 60 / num_steps([0.6, 0.6], 60) / 1.2
    hits = narrow = 0
    for seed in range(60):
        (found,) = predictions(texts(0.6, 12, 30, seed), times(4, 1.2), [2], num_tokens=60, seed=seed)
        hits += found.speedup.low <= truth <= found.speedup.high
        middle = (found.speedup.low + found.speedup.high) / 2
        narrow += middle * 0.999 <= truth <= middle * 1.001
    assert hits >= 51
    assert narrow < 51  # the control: an interval of a thousandth would not


def test_nothing_timed_predicts_nothing() -> None:
    assert predictions(texts(0.5, 3, 10, 0), [], [1, 2], num_tokens=20) == []


def test_any_seed_is_taken() -> None:
    """A negative one ended the command in an internal error, after all that it had measured."""
    for seed in (-1, 10**24):
        (found,) = predictions(texts(0.6, 12, 30, 0), times(4, 1.2), [2], num_tokens=60, seed=seed)
        assert found.speedup.low <= found.speedup.value <= found.speedup.high


def test_a_light_part_costs_what_its_own_steps_cost() -> None:
    """Two steps of three are paid, with 4 guesses at 3 plain steps; the others find 8 for next to nothing. Were every step
    one of 8 guesses, a step would cost 1.25."""
    made = [TextAcceptance((9, 6), (6.0, 3.0), {4: 6}, 18, {8: 3})]
    timed = [TextTimes([timing(0, 1.0)] * 5, [timing(4, 3.0)] * 5, 0.0, [timing(8, 1.25)] * 5)]
    (found,) = predictions(made, timed, [8], num_tokens=60)
    assert found.cost == pytest.approx((2 * 3.0 + 1.25) / 3)


def test_kinds_of_steps_that_were_not_timed_cost_as_the_others() -> None:
    made = [TextAcceptance((9, 6), (6.0, 3.0), {4: 6}, 18, {4: 3})]
    for light in (False, True):
        steps = [timing(4, 2.0)] * 5
        timed = [TextTimes([timing(0, 1.0)] * 5, [] if light else steps, 0.0, steps if light else [])]
        (found,) = predictions(made, timed, [4], num_tokens=60)
        assert found.cost == pytest.approx(2.0)


def test_a_step_that_had_no_more_guesses_costs_no_more() -> None:
    """The second of a method's steps made 2 guesses of the 4 that it may make."""
    made = [TextAcceptance((10, 5), (5.0, 2.5), {2: 5, 4: 5}, 17)]
    timed = [TextTimes([timing(0, 1.0)] * 5, [timing(2, 1.5)] * 5 + [timing(4, 2.0)] * 5, 0.0)]
    found = predictions(made, timed, [1, 2, 4], num_tokens=60)
    assert [one.cost for one in found] == pytest.approx([1.25, 1.5, 1.75])


def test_a_machine_that_is_busy_for_one_text_changes_no_cost() -> None:
    """Pooled as they came, the plain steps of one text stood beside another one's guesses: 1.25 times became anything."""
    quiet, busy = times(3, 1.25), [TextTimes([timing(0, 7.0)] * 5, [timing(2, 7.0 * 1.25)] * 20, 0.0)] * 2
    made = [TextAcceptance((10, 5), (5.0, 2.5), {2: 10}, 17)] * 5
    for given in (quiet, quiet + busy, busy):
        (found,) = predictions(made, given, [2], num_tokens=60)
        assert found.cost == pytest.approx(1.25)
        assert found.speedup.high - found.speedup.low < 0.01
    assert [one.plain[0].seconds_target for one in at_one_speed(quiet + busy)] == pytest.approx([1.0] * 5)
    assert at_one_speed([TextTimes([], [], 0.0)]) == [TextTimes([], [], 0.0)]


def test_a_speedup_of_few_prompts_is_drawn_towards_1_and_has_no_interval() -> None:
    """Of two prompts: 0.09 to 29.55 was printed, and 1.56 that was 1.29 on fifteen."""
    two = believed(Interval(1.56, 0.09, 29.55), 2)
    assert two.is_point
    assert two.value == pytest.approx(1.289, abs=1e-3)
    assert believed(Interval(0.8, 0.7, 0.9), 1).value == pytest.approx(0.8**0.4)
    many = believed(Interval(1.5, 1.48, 1.6), 20)
    assert (many.low, many.high) == (many.value, 1.6), "the figure stays within"
    assert 1.45 < many.value < 1.48
    assert believed(Interval(0.0, 0.0, 0.0), 9).value == 0.0
