"""Estimates of acceptance: they find the truth, fade, shrink towards the method, and admit what they do not know."""

import numpy as np
import pytest

from foretell.costs.table import CostTable
from foretell.planner.acceptance import PRIOR_FOUND, PRIOR_RATE, Acceptance, private
from foretell.planner.corrections import Corrections
from foretell.planner.observations import RowView
from foretell.planner.offers import Offers
from foretell.planner.shares import LightShares

DEPTH = 4


def feed(
    acceptance: Acceptance, request: str, rates: list[float], times: int, rng: np.random.Generator, found: float = 1.0
) -> None:
    """Proposals as deep as there are rates, each position kept with its rate."""
    for _ in range(times):
        drafted = len(rates) if rng.random() < found else 0
        hits = [*(rng.random(drafted) < rates[:drafted]).tolist(), False]
        acceptance.tick()
        acceptance.observe(request, "m", len(rates), drafted, hits.index(False))


def test_nothing_known_is_the_prior_and_its_upper_bound_is_above() -> None:
    kept, nodes, optimistic = Acceptance(DEPTH).curve("m", "r", DEPTH)
    assert kept[0] == pytest.approx(PRIOR_RATE)
    assert nodes == pytest.approx([PRIOR_FOUND**k for k in range(1, DEPTH + 1)])
    assert all(low < high <= 1.0 for low, high in zip(kept, optimistic, strict=True))
    assert kept == sorted(kept, reverse=True)


def test_lines_that_go_on_where_they_are_right_are_expected_to_keep_what_they_keep() -> None:
    """Half of the lines are sure: three guesses, all kept. The others stop after one guess, which is wrong. A line goes
    on in half of the cases, but behind a guess that was kept it always does."""
    acceptance = Acceptance(DEPTH)
    for number in range(800):
        sure = number % 2
        acceptance.observe("r", "m", DEPTH, 3 if sure else 1, 3 if sure else 0)
    kept, nodes, _ = acceptance.curve("m", "new", DEPTH)
    assert sum(kept) == pytest.approx(1.5, abs=0.1)
    assert sum(nodes) == pytest.approx(2.0, abs=0.1)


def test_a_nonsense_drafter_is_given_up_within_a_few_proposals() -> None:
    acceptance = Acceptance(DEPTH)
    feed(acceptance, "r", [0.0] * DEPTH, 4, np.random.default_rng(0))
    assert acceptance.curve("m", "r", 1)[0][0] < 0.2
    feed(acceptance, "r", [0.0] * DEPTH, 100, np.random.default_rng(0))
    assert acceptance.curve("m", "r", 1)[0][0] < 0.02
    assert acceptance.curve("m", "r", 1)[2][0] < 0.1


@pytest.mark.parametrize("rates", [[0.9, 0.8, 0.7, 0.6], [0.5, 0.9, 0.9, 0.9]])
def test_conditional_rates_are_found_by_position(rates: list[float]) -> None:
    rng, acceptance = np.random.default_rng(1), Acceptance(DEPTH)
    for request in range(30):
        feed(acceptance, str(request), rates, 40, rng)
    curves = acceptance.curves([str(request) for request in range(30)], ["m"] * 30)
    assert curves.kept.mean(axis=0) == pytest.approx(np.cumprod(rates), abs=0.06)
    assert curves.drafted == pytest.approx(np.ones((30, DEPTH)), abs=0.03)


def test_a_request_parts_from_its_method_as_evidence_grows() -> None:
    rng, acceptance = np.random.default_rng(2), Acceptance(DEPTH)
    for request in range(20):
        feed(acceptance, str(request), [0.8] * DEPTH, 40, rng)
    first = acceptance.curve("m", "odd", 1)[0][0]
    feed(acceptance, "odd", [0.0] * DEPTH, 2, rng)
    second = acceptance.curve("m", "odd", 1)[0][0]
    feed(acceptance, "odd", [0.0] * DEPTH, 40, rng)
    third = acceptance.curve("m", "odd", 1)[0][0]
    assert first == pytest.approx(0.8, abs=0.08)  # the method's rate, before any of its own
    assert first > second > 0.4
    assert third < 0.1
    assert acceptance.curve("m", "next", 1)[0][0] == pytest.approx(0.8, abs=0.12)  # one request does not spoil the pool


def test_what_is_seldom_found_costs_few_nodes() -> None:
    rng, acceptance = np.random.default_rng(3), Acceptance(DEPTH)
    feed(acceptance, "r", [0.9] * DEPTH, 400, rng, found=0.25)
    kept, nodes, _ = acceptance.curve("m", "r", DEPTH)
    assert nodes == pytest.approx([0.25] * DEPTH, abs=0.12)
    assert kept[0] / nodes[0] == pytest.approx(0.9, abs=0.1)


def test_a_depth_never_allowed_follows_the_one_before_and_is_not_ruled_out() -> None:
    rng, acceptance = np.random.default_rng(4), Acceptance(DEPTH)
    feed(acceptance, "r", [0.5], 200, rng)
    kept, nodes, _ = acceptance.curve("m", "r", DEPTH)
    assert kept[1] / kept[0] == pytest.approx(kept[0], abs=0.1)
    assert nodes == pytest.approx([1.0] * DEPTH, abs=0.05)


def test_it_follows_a_change() -> None:
    rng, acceptance = np.random.default_rng(5), Acceptance(DEPTH)
    feed(acceptance, "r", [0.9] * DEPTH, 200, rng)
    feed(acceptance, "r", [0.1] * DEPTH, 100, rng)
    assert acceptance.curve("m", "r", 1)[0][0] == pytest.approx(0.1, abs=0.15)


def test_hope_grows_back_while_nothing_is_tried() -> None:
    acceptance = Acceptance(DEPTH)
    feed(acceptance, "r", [0.0] * DEPTH, 60, np.random.default_rng(6))
    before = acceptance.curve("m", "r", 1)
    for _ in range(2000):
        acceptance.tick()
    after = acceptance.curve("m", "r", 1)
    assert after[0] == before[0]  # the mean does not drift by itself
    assert after[2][0] > before[2][0] + 0.2


def test_trees_are_known_by_their_nodes() -> None:
    acceptance = Acceptance(DEPTH)
    for _ in range(10):
        acceptance.observe("r", "m", 3, 3, 1, nodes=12)
    curves = acceptance.curves(["r"], ["m"])
    assert curves.nodes[0, :3].sum() == pytest.approx(curves.drafted[0, :3].sum() + 9 * curves.drafted[0, 0])


def test_chains_have_a_node_a_position() -> None:
    acceptance = Acceptance(DEPTH)
    for cap in (1, 3, 2, 4, 4):
        acceptance.observe("r", "m", cap, max(cap - 1, 1), 1)
    acceptance.observe("r", "m", 4, 0, 0, nodes=0)
    curves = acceptance.curves(["r"], ["m"])
    assert (curves.nodes == curves.drafted).all()


@pytest.mark.parametrize("seen", [(1,), (3,), (1, 3)])
def test_trees_of_a_given_size_are_not_larger_where_they_are_deeper(seen: tuple[int, ...]) -> None:
    """Six nodes, whatever the depth: one guess deep must not look like a third of three deep, nor three like eighteen
    nodes, which kept a planner at the depth that it knew."""
    acceptance = Acceptance(DEPTH)
    for _ in range(30):
        for cap in seen:
            acceptance.observe("r", "m", cap, cap, 0, nodes=6)
    together = acceptance.curves(["r"], ["m"]).nodes[0].cumsum()
    for cap in (1, 3):
        assert together[cap - 1] == pytest.approx(6.0, abs=0.3 if cap in seen else 2.5), cap


def test_forgotten_requests_leave_their_method_s_rate_and_their_place() -> None:
    acceptance = Acceptance(DEPTH)
    for request in range(50):
        feed(acceptance, str(request), [0.0] * DEPTH, 3, np.random.default_rng(7))
        acceptance.forget(str(request))
    acceptance.forget("unknown")
    assert acceptance.curve("m", "0", 1)[0][0] < 0.05
    assert acceptance.seen("m") == pytest.approx(93.0, rel=0.2)
    assert acceptance.seen("other") == 0.0
    assert len(acceptance._rows.last) <= 8


def test_methods_and_many_requests_stay_apart() -> None:
    acceptance = Acceptance(DEPTH)
    for request in range(40):  # more than the table starts with
        good = request % 2 == 0
        for _ in range(20):
            acceptance.observe(str(request), "good" if good else "bad", 2, 2, 2 if good else 0)
    rows = acceptance.curves(["0", "1", "new", "new too"], ["good", "bad", "good", "bad"])
    assert (rows.kept[[0, 2], 0] > 0.9).all()
    assert (rows.kept[[1, 3], 0] < 0.1).all()


def test_deeper_than_it_counts_is_counted_at_its_deepest_and_no_cap_says_nothing() -> None:
    acceptance = Acceptance(2)
    acceptance.observe("r", "m", 0, 0, 0)
    assert acceptance.seen("m") == 0.0
    acceptance.observe("r", "m", 9, 9, 9)
    assert acceptance.curve("m", "r", 2)[0][1] > PRIOR_RATE**2


def test_a_method_may_begin_with_a_better_prior() -> None:
    found = Acceptance(4, {"told": 0.9})
    told, other = found.curve("told", "a", 4)[0], found.curve("other", "b", 4)[0]
    assert all(mine > theirs for mine, theirs in zip(told, other, strict=True))
    for _ in range(40):
        found.observe("a", "told", 4, 4, 0)
    assert found.curve("told", "c", 4)[0][0] < 0.2, "misses count as for any other"


def test_one_row_is_reckoned_as_one_of_many() -> None:
    """Rates and counts of a batch of one, in plain Python, against those of a larger one."""
    rng, alone, beside = np.random.default_rng(0), Acceptance(5), Acceptance(5)
    for _ in range(60):
        name, method = str(rng.choice(["a", "b"])), str(rng.choice(["m", "n"]))
        cap = int(rng.integers(1, 7))
        drafted = int(rng.integers(0, cap + 1))
        seen = cap, drafted, int(rng.integers(0, drafted + 1)), int(rng.integers(drafted, 2 * drafted + 1))
        for each in (alone, beside):
            each.tick()
            each.observe(name, method, *seen)
        queued = np.array(beside._queue)
        beside._count_many(queued)
        beside._queue.clear()
        beside._pool_rates.clear()
        alone._count()
        assert np.allclose(alone._rows.table, beside._rows.table, rtol=1e-12)
        assert np.allclose(alone._pools.table, beside._pools.table, rtol=1e-12)
        one, two = alone.curves_of_one("b", "n", 0), beside.curves(["a", "b"], ["m", "n"])
        for mine, theirs in zip(one, (two.kept, two.drafted, two.optimistic, two.nodes), strict=True):
            assert np.allclose(mine, theirs[1], rtol=1e-12)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_problem_of_one_row_is_a_row_of_a_problem_of_many(batch: int) -> None:
    costs = CostTable(
        {(b, b * n): 1.0 + 0.1 * b * n for b in (1, 2, 4) for n in (1, 2, 5)},
        {"m": {(b, 4): 0.2 * b for b in (1, 2, 4)}},
    )
    acceptance = Acceptance(6)
    for depth in (4, 2, 0):
        acceptance.observe("a", "m", 4, depth, depth // 2)
    offers = Offers(costs, acceptance, Corrections(["m"]), LightShares())
    row = RowView("a", "m", 9, 3, num_unread=7)
    idle = RowView("x", "m", 0, 0)
    found = offers.several([row] + [idle] * (batch - 1), 1.1)
    problem = found.problem
    assert problem.kept.shape == (batch, 3), "no deeper than the row can use"
    assert problem.kept[0] == pytest.approx(found.curves.kept[0, :3])
    assert problem.drafted[0] == pytest.approx(found.curves.drafted[0, :3])
    assert problem.entry[0] > 0.0
    assert problem.entry[1:].sum() == 0.0
    assert problem.draft.shape == (1, 3, batch + 1)
    assert problem.method[0] == 0
    assert offers.of([idle] * batch, 1.1) is None


def test_what_was_learned_is_taken_up_where_it_stood_and_of_others_nothing() -> None:
    known, rng = Acceptance(DEPTH), np.random.default_rng(0)
    feed(known, "r", [0.9, 0.6, 0.5, 0.1], 60, rng, found=0.8)
    known.observe("other", "n", 3, 2, 1, nodes=5, heat=2)
    for _ in range(50):
        known.tick()
        known.observe("hidden", "n", 4, 4, 4, heat=private(2))
    pools, counts = known.memory()
    assert pools == [("m", 0), ("n", 2)]
    made = Acceptance(DEPTH)
    made.tick()
    made.recall(pools, counts)
    assert made.curve("m", "new", DEPTH) == known.curve("m", "new", DEPTH)
    assert made.seen("n", 2) == known.seen("n", 2) == 1.0
    assert made.seen("n", private(2)) == 0.0 < known.seen("n", private(2))
    again_pools, again = made.memory()
    assert again_pools == pools
    assert np.array_equal(again, counts)
    with pytest.raises(ValueError, match="shape"):
        Acceptance(DEPTH + 1).recall(pools, counts)
