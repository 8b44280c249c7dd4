"""What is possible for the rows of now, by what the planner expects and costs say."""

from types import SimpleNamespace
from typing import Any

import pytest

from foretell.costs.table import CostTable
from foretell.planner.acceptance import Acceptance
from foretell.planner.allocation import Allocation
from foretell.planner.decisions import Decision
from foretell.planner.plan import Option
from foretell.planner.planner import Planner
from foretell.service.snapshot import possible_now
from foretell.theory.possible import NAN, Possible

VERIFY = {(b, b * (1 + d)): 1.0 + 0.05 * b * (1 + d) for b in (1, 2) for d in (0, 1, 2, 4, 8)}
COSTS = CostTable(VERIFY, {"m": {(b, d): 0.1 * d for b in (1, 2) for d in (1, 2, 4)}})


def planner_of(caps: list[int], have: float, *, mode: str = "auto", nodes: int | None = None) -> Planner:
    """After proposals of four, two of which were kept; its rows may guess so deep."""
    made = Planner(COSTS, Acceptance(8), mode=mode)
    for _ in range(500):
        made.acceptance.observe("a", "m", 4, 4, 2, nodes)
        made.acceptance.tick()
    made.acceptance.curves(["a"], ["m"])
    stands = Option.WHOLE if any(caps) else Option.PLAIN
    made.standing = Decision(caps, stands, stands, Allocation(caps, 1.0, 1.0) if any(caps) else None)
    made._speed.count(have, 1.0)
    made._decisions._corrections._cov = [[0.0] * len(row) for row in made._decisions._corrections._cov]
    assert made.speedup == (pytest.approx(have) if mode == "auto" else None)
    return made


def rows(count: int) -> list[Any]:
    return [SimpleNamespace(method="m", length=16) for _ in range(count)]


def test_one_row() -> None:
    """Of guesses in a line, two of four kept: three tokens a step of 1.25 seconds and .4 for guessing; 1.05 plain."""
    one = possible_now(planner_of([4], 3 * 1.05 / 1.65), rows(1))
    assert one is not None
    assert one.possible == pytest.approx(9 * 1.05 / 1.45, rel=0.03), "as wide as passes were measured"
    assert one.candidates == pytest.approx(3 * 1.05 / 1.15, rel=0.03)
    assert one.stopped == pytest.approx(3 * 1.05 / 1.35, rel=0.03)
    assert one.guesses + one.shape + one.time + one.width == pytest.approx(one.possible - one.have)
    assert one.shape == pytest.approx(0.0, abs=0.01)


def test_a_tree_has_guesses_beside_the_kept_ones() -> None:
    one = possible_now(planner_of([4], 3 * 1.05 / 1.85, nodes=8), rows(1))
    assert one is not None
    assert one.shape > 0.1


def test_a_row_that_does_not_guess_shares_the_passes() -> None:
    """Five rows of one pass in place of six: four tokens of two rows, of which the one guesses alone."""
    have = 4 * (1.1 / 2) / (1.3 + 0.4)
    one = possible_now(planner_of([4, 0], have), rows(2))
    assert one is not None
    assert one.possible == pytest.approx(9 * 1.1 / 1.9, rel=0.1)
    assert one.have < one.stopped < one.candidates < one.possible


def test_where_nobody_guesses_all_is_lost_by_that() -> None:
    one = possible_now(planner_of([0], 1.0), rows(1))
    assert one is not None
    assert one.guesses == pytest.approx(one.possible - 1.0)
    assert (one.shape, one.time, one.width) == pytest.approx((0.0, 0.0, 0.0))


def test_what_is_not_known_is_said() -> None:
    assert possible_now(planner_of([4], 2.0), []) is None
    always = possible_now(planner_of([4], 2.0, mode="on"), rows(1))
    assert always == Possible(NAN, unknown="plain steps are not measured")
    other = planner_of([4], 2.0)
    other.acceptance = Acceptance(8)
    unseen = possible_now(other, rows(1))
    assert unseen == Possible(2.0, unknown="how many guesses are kept was not seen yet")
    odd = possible_now(planner_of([4], 9.0), rows(1))
    assert odd is not None
    assert "does not explain" in odd.unknown
