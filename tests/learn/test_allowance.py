"""What trials and learning may take of the time served."""

import random

import pytest
from hypothesis import given, strategies as st

from foretell.engine.threads import Allowance
from foretell.learn.options import LearnOptions
from foretell.planner.allocation import Allocation
from foretell.planner.budget import BUDGET, LEARN_SHARE, PROMISE, Budget, Trial
from foretell.planner.plan import Option


@given(st.integers(0, 2**32), st.floats(1e-3, 0.1))
def test_trials_and_learning_together_stay_within_what_the_planner_promises(seed: int, plain: float) -> None:
    """All always spend what they may, whatever a step takes: two options and a learner. The sum is 2 % of the time served,
    and what budgets begin with (a plain pass each, and 0.025 s) and may overdraw (the last charge of the learner)."""
    assert LearnOptions().learn_share == LEARN_SHARE == pytest.approx(PROMISE - BUDGET)
    r, trials, learning = random.Random(seed), Budget(), Allowance(LearnOptions().learn_share)
    options = Option.LIGHT, Option.WHOLE
    served, largest = 0.0, 0.0
    trials.open(plain, options)
    for _ in range(400):
        seconds = plain * r.uniform(0.5, 3.0)
        served += seconds
        trials.earn(seconds)
        learning.earn(seconds)
        for option in options:
            trials.open(plain, options)
            trial = Trial(option, Allocation([1], 1.0, plain), r.uniform(0.0, 2.0) * plain)
            if trials.covers(trial):
                trials.charge(trial)
        work = r.uniform(0.0, 0.01)
        if learning.covers(work):
            learning.charge(work)
            largest = max(largest, work)
        assert trials.seconds + learning.seconds <= PROMISE * served + 2 * plain + 0.025 + largest + 1e-9


def test_an_allowance_pays_its_share_and_no_more() -> None:
    allowance, spent = Allowance(0.01), 0.0
    for _ in range(10_000):
        allowance.earn(0.01)
        if allowance.covers(0.002):
            allowance.charge(0.002)
            spent += 0.002
    assert 0.9 < spent / (0.01 * 10_000 * 0.01 + 0.025) <= 1.0
    assert allowance.seconds == spent
