"""Single rules of planning that long runs do not show."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from foretell.planner.allocation import price
from foretell.planner.observations import RowView
from tests.planner.test_layered import Text
from tests.planner.test_planner import Run, planner, problem


@pytest.mark.parametrize("phase", range(8))
def test_room_is_never_exceeded_while_a_decision_stands(phase: int) -> None:
    """A decision stands for some steps: a row's room may shrink in any of them."""
    run = Run(planner(), [0.95, 0.9]).steps(100 + phase)
    assert max(run.step()) > 1
    for depth_limit in (1, 0, -1):
        assert max(run.step(depth_limit=depth_limit)) <= max(depth_limit, 0)


def test_a_decision_does_not_stand_for_another_row_of_the_same_name() -> None:
    """Whoever leaves a stream in the middle ends no request: the next one has its name."""
    run = Run(planner(), [0.95]).steps(100)
    while max(run.step()) < 4:
        pass
    assert run.planner.plan([RowView("0", "m", 2, 99)]).caps[0] <= 2
    while max(run.step()) < 4:
        pass
    assert run.planner.plan([RowView("0", "none", 0, 99)]).caps == [0]


def test_what_a_row_lags_behind_is_part_of_its_price() -> None:
    given = problem(np.random.default_rng(4), 3, 2)
    depths = [min(2, int((row > 0).sum())) for row in given.kept]
    assert sum(depths) > 0
    late = replace(given, entry=np.array([0.5, 0.25, 0.125]))
    extra = sum(float(late.entry[row]) for row, depth in enumerate(depths) if depth)
    assert price(late, depths).seconds == pytest.approx(price(given, depths).seconds + extra)
    assert price(late, [0, 0, 0]).seconds == price(given, [0, 0, 0]).seconds


def test_nothing_changes_where_a_planner_is_looked_at() -> None:
    """Its properties, and those of what it has learned, may be read at any time."""
    layered = Text(0.3, found=0.3, light=0.6, second=0.5).steps(100).planner
    for made in (Run(planner(), [0.8]).steps(100).planner, Run(planner(0.4), [0.2]).steps(93).planner, layered):
        looked_at = [
            made, made.corrections, made._speed, made._decisions, made._budget, made.costs, made.standing
        ]  # fmt: skip
        before, count = pickle.dumps(looked_at), 0
        for one in looked_at:
            for name in [name for name, what in vars(type(one)).items() if isinstance(what, property)]:
                getattr(one, name)
                count += 1
        assert count > 5
        assert pickle.dumps(looked_at) == before
