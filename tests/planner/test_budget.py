"""The budget of trials: a share of the time served, never overdrawn by what was foreseen."""

import sys

import pytest

from foretell.planner.allocation import Allocation
from foretell.planner.budget import (
    ASKED_AGAIN,
    BUDGET,
    MAX_CREDIT_PASSES,
    MAX_EXTRA_PASSES,
    MAX_READING_PASSES,
    PROMISE,
    START_CREDIT_PASSES,
    WON_SHARE,
    Budget,
    Trial,
)
from foretell.planner.plan import Option

WHOLE, LIGHT = Option.WHOLE, Option.LIGHT


def opened(*options: Option) -> Budget:
    budget = Budget()
    budget.open(1.0, options or [WHOLE])
    return budget


def trial(loss: float, reading: float = 0.0, of: str = "", *, by: Option = WHOLE) -> Trial:
    """of: the names of its requests, a letter each."""
    return Trial(by, Allocation([1], 1.0, 1.0), loss, reading, tuple(of))


def credit(budget: Budget, plain: float = 1.0, by: Option = WHOLE) -> float:
    budget.open(plain, [by])
    return budget._credit[by]


def most(budget: Budget, seconds: float, reading: float = 0.0, of: str = "") -> bool:
    """Whether a trial may lose just so much."""
    less, more = (trial(seconds - reading + by, reading, of) for by in (-1e-9, 1e-9))
    return budget.covers(less) and not budget.covers(more)


def test_it_opens_with_a_pass_earns_its_share_and_is_bounded() -> None:
    budget = Budget()
    budget.earn(100.0)  # before it is opened nothing is earned
    assert credit(budget, 2.0) == START_CREDIT_PASSES * 2.0
    budget.earn(100.0)
    assert credit(budget, 2.0) == pytest.approx(2.0 + BUDGET * 100.0)
    budget.earn(1e6)
    assert credit(budget, 2.0) == MAX_CREDIT_PASSES * 2.0


def test_a_trial_that_cannot_be_paid_is_due_once_it_can() -> None:
    budget = Budget()
    assert not budget.is_due
    assert budget.rests == 0, "not known"
    assert credit(budget) == 1.0
    assert budget.rests == sys.maxsize
    assert not budget.covers(trial(1.5))
    assert not budget.covers(trial(1.2))  # the cheapest counts
    assert not budget.is_due
    assert budget.rests == int(0.5 / (4 * PROMISE))
    budget.earn(0.2 / BUDGET)
    assert not budget.is_due, "it will be weighed again, and its loss have grown"
    assert budget.covers(trial(1.2))
    budget.earn((ASKED_AGAIN - 1.0) * 1.2 / BUDGET)
    assert budget.is_due
    assert budget.rests == 0
    budget.open(1.0, [WHOLE])
    assert not budget.is_due


def test_deciding_is_charged_and_reckoned_with() -> None:
    budget = opened()
    budget.charge_deciding(0.25, [WHOLE])
    assert (budget.trials, budget.seconds, credit(budget)) == (0, 0.25, 0.75)
    assert budget.covers(trial(0.5))
    assert not budget.is_due, "0.625 and another 0.25"
    budget.earn(0.13 / BUDGET)
    assert budget.is_due
    both = opened(LIGHT, WHOLE)
    both.charge_deciding(0.5, [LIGHT, WHOLE])
    assert (both.seconds, both._credit) == (0.5, {LIGHT: 0.75, WHOLE: 0.75})


def test_charges_are_counted_and_extra_ones_limited() -> None:
    budget = opened()
    budget.charge(trial(0.25))
    budget.charge(trial(-0.5))  # a trial that gains is not paid for
    assert (budget.trials, budget.seconds, credit(budget)) == (2, 0.25, 0.75)
    budget.charge_extra(0.5, 0.25, 1.0)
    assert (budget.seconds, credit(budget)) == (0.5, 0.5)
    budget.charge_extra(0.1, 0.25, 1.0)  # cheaper than foreseen: nothing is given back
    assert budget.seconds == 0.5
    budget.charge_extra(1000.0, 0.25, 1.0)
    assert credit(budget) == 0.5 - MAX_EXTRA_PASSES
    assert budget.trials == 2


def test_options_share_what_trials_may_lose() -> None:
    """Half each: what one does not spend does not wait for the other, and both together lose no more."""
    budget, counts = opened(LIGHT, WHOLE), {LIGHT: 0, WHOLE: 0}
    assert budget._credit == {LIGHT: START_CREDIT_PASSES, WHOLE: START_CREDIT_PASSES}
    for _ in range(2100):
        budget.earn(1.0)
        for one in (trial(0.01, by=LIGHT), trial(3.0)):
            budget.open(1.0, [LIGHT, WHOLE])
            if budget.covers(one):
                budget.charge(one)
                counts[one.option] += 1
    assert counts[WHOLE] == 2, "saved for, whatever the other spends"
    assert counts[LIGHT] > 200
    assert budget.trials == sum(counts.values())
    assert budget.seconds == pytest.approx(0.01 * counts[LIGHT] + 3.0 * counts[WHOLE])
    assert budget.seconds <= BUDGET * 2100 + 2 * START_CREDIT_PASSES


def test_what_a_trial_costs_later_and_what_is_given_back_is_its_own_options() -> None:
    budget = opened(LIGHT, WHOLE)
    budget.charge(trial(0.5, by=LIGHT))
    budget.charge_extra(0.75, 0.5, 1.0)
    assert budget._credit == {LIGHT: 0.25, WHOLE: 1.0}
    budget.refund(0.5)
    assert budget._credit == {LIGHT: 0.75, WHOLE: 1.0}
    assert not budget.covers(trial(2.0, by=LIGHT))
    assert budget.covers(trial(0.7))
    budget.earn(0.6 * 2 / BUDGET)
    assert budget.is_due, "whichever is"


def test_reading_a_text_may_overdraw_it_by_what_a_run_can_bear() -> None:
    """So much that the run stays within the promise of plain decoding; and once, until that is paid."""
    budget = opened()
    assert not budget.covers(trial(2.0, 3.0))
    assert not budget.is_due
    budget.earn(100.0)
    budget.won = 4.0 / WON_SHARE
    assert most(budget, 1.0 + 100.0 * BUDGET), "a trial that reads nothing is paid from the credit alone"
    over = 100.0 * PROMISE + 4.0
    assert most(budget, over, 3.0)
    budget.won = 1e6
    assert most(budget, MAX_READING_PASSES, 3.0), "however much was won"
    budget.charge(trial(4.0, 3.0, "ab"))
    assert credit(budget) == pytest.approx(1.5 - 4.0)
    assert most(budget, 1.5 - 4.0, 3.0), "none that reads, until it is paid"
    assert budget.goes_on(["b"])
    assert most(budget, 3.0, of="b"), "but as much again, to put to use what was read"
    assert most(budget, credit(budget), of="bc"), "of c nothing was read"
    budget.open(1.0, [LIGHT, WHOLE])
    assert not budget.covers(trial(START_CREDIT_PASSES + 1.0, of="b", by=LIGHT)), "a light part reads nothing"
    budget.charge(trial(0.5, of="b", by=LIGHT))
    budget.charge(trial(2.5, of="b"))
    budget.charge(trial(0.25, of="c"))
    budget.forget("b")
    assert most(budget, 0.5, of="a"), "another request has ended, and another's trial lost something"
    budget.charge(trial(1.0, of="a"))
    assert not budget.goes_on(["a"])
    assert most(budget, credit(budget), of="a")


def test_what_was_read_is_of_no_use_behind_its_request() -> None:
    budget = opened()
    budget.charge(trial(4.0, 3.0, "a"))
    budget.forget("b")
    assert budget.goes_on(["a"])
    budget.forget("a")
    assert not budget.goes_on(["a"])


def test_what_was_overdrawn_is_paid_by_what_the_guesses_win() -> None:
    budget = opened()
    budget.charge(trial(4.0, 3.0))
    budget.repay(-1.0)
    budget.repay(2.0)
    assert credit(budget) == -1.0
    budget.repay(50.0)
    assert credit(budget) == 0.0, "no more than that"
    budget.charge_extra(1.0, 0.0, 1.0)
    budget.repay(50.0)
    assert credit(budget) == -1.0, "other losses are earned back"


def test_a_trial_that_did_not_take_place_is_given_back() -> None:
    budget = opened()
    budget.charge(trial(4.0, 3.0, "a"))
    budget.refund(4.0)
    assert (credit(budget), budget.seconds, budget.goes_on(["a"])) == (1.0, 0.0, False)
    budget.charge(trial(4.0, 3.0, "a"))
    budget.charge(trial(0.5, of="a"))
    budget.refund(0.5)
    assert (credit(budget), budget.goes_on(["a"])) == (-3.0, True), "the text has been read"
