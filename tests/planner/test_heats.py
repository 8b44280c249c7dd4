"""Greedy and drawn text side by side: guesses of either are learned apart, and each begins with what the other says."""

import numpy as np
import pytest

from foretell.core.params import SamplingParams
from foretell.costs.table import CostTable
from foretell.planner.acceptance import LENT_WEIGHT, PRIOR_RATE, Acceptance
from foretell.planner.observations import RowStep, RowView, StepObservation
from foretell.planner.planner import Planner

DEPTH = 4
GREEDY, DRAWN = 0, 3
RATES = {GREEDY: 0.9, DRAWN: 0.1}


def table(batches: tuple[int, ...] = (1, 2, 4)) -> CostTable:
    """A guess takes .3 of a pass: worth it for greedy text, a loss for drawn text."""
    verify = {(b, b * (1 + d)): 1.0 + 0.02 * b * (1 + d) for b in batches for d in (0, 1, 2, 4)}
    return CostTable(verify, {"m": {(b, d): 0.3 * d for b in batches for d in (1, 2, 4)}}, {"m": 0.0})


def serve(
    planner: Planner, batch: int, *, told: bool, requests: int = 60, length: float = 24.0, seed: int = 0
) -> float:
    """Expected tokens a second over those of plain decoding, where short requests follow each other in each row: greedy and
    drawn ones in turn in a single row, else of one kind in each row. told: whether the planner is told which is which."""
    costs, rng = planner.costs, np.random.default_rng(seed)
    heats = [[GREEDY, DRAWN][row % 2] for row in range(batch)]
    numbers, written = list(range(batch)), [0.0] * batch
    tokens = seconds = 0.0
    while numbers[0] < requests:
        said = [heat if told else GREEDY for heat in heats]
        names = [f"{row}.{number}" for row, number in enumerate(numbers)]
        plan = planner.plan([RowView(name, "m", DEPTH, 99, heat=heat) for name, heat in zip(names, said, strict=True)])
        rows, caps = [], plan.caps
        for row, cap in enumerate(caps):
            rate = RATES[heats[row]]
            kept = int(np.argmin([*(rng.random(cap) < rate), False]))
            rows.append(RowStep(names[row], "m", cap, cap, kept, heat=said[row]))
            expected = 1.0 + sum(rate**k for k in range(1, cap + 1))
            tokens, written[row] = tokens + expected, written[row] + expected
        draft, verify = (
            costs.draft("m", sum(cap > 0 for cap in caps), max(caps)),
            costs.verify(batch, batch + sum(caps)),
        )
        seconds += draft + verify
        planner.observe(plan, StepObservation(batch, rows, draft, verify, 0.0))
        for row in range(batch):
            if written[row] >= length:
                planner.forget(names[row])
                numbers[row], written[row] = numbers[row] + batch, 0.0
                if batch == 1:
                    heats[row] = DRAWN if heats[row] == GREEDY else GREEDY
    return tokens / seconds * costs.verify(batch, batch) / batch


@pytest.mark.parametrize(("batch", "least"), [(1, 1.12), (4, 1.01)])
def test_a_mixed_stream_is_planned_better_by_a_planner_that_knows_which_is_which(batch: int, least: float) -> None:
    for seed in (0, 1):
        told, mixed = (
            serve(Planner(table(), Acceptance(DEPTH)), batch, told=told, seed=seed) for told in (True, False)
        )
        assert told > least * mixed, (told, mixed)


def feed(acceptance: Acceptance, heat: int, kept: int, times: int, request: str = "") -> None:
    for number in range(times):
        acceptance.tick()
        acceptance.observe(request or f"{heat}.{number}", "m", DEPTH, DEPTH, kept, heat=heat)


def first(acceptance: Acceptance, heat: int, request: str = "new") -> tuple[float, float]:
    """The chance of a new request's first guess, and what is hoped for."""
    kept, _, hopes = acceptance.curve("m", request, DEPTH, heat)
    acceptance.forget(request)
    return kept[0], hopes[0]


def test_what_is_kept_of_greedy_text_is_a_weak_prior_of_drawn_text_and_its_own_counts_decide() -> None:
    acceptance = Acceptance(DEPTH)
    feed(acceptance, GREEDY, DEPTH, 200)
    greedy, _ = first(acceptance, GREEDY)
    drawn, _ = first(acceptance, DRAWN)
    assert greedy > 0.95
    assert PRIOR_RATE < drawn < greedy, "better than a method of which nothing is known, if not as good"
    feed(acceptance, DRAWN, 0, 8)
    assert first(acceptance, DRAWN)[0] < 0.5
    assert first(acceptance, GREEDY)[0] == pytest.approx(greedy, abs=0.03), (
        "eight drawn steps say little of greedy text"
    )
    feed(acceptance, DRAWN, 0, 100)
    assert first(acceptance, DRAWN)[0] < 0.1
    assert first(acceptance, GREEDY)[0] > 0.93
    assert acceptance.seen("m", GREEDY) > 90.0
    assert acceptance.seen("m") == acceptance.seen("m", GREEDY)
    assert 50.0 < acceptance.seen("m", DRAWN) < 108.0


def test_misses_at_one_heat_leave_hope_at_another() -> None:
    acceptance = Acceptance(DEPTH)
    feed(acceptance, DRAWN, 0, 200)
    (drawn, hope_drawn), (greedy, hope_greedy) = first(acceptance, DRAWN), first(acceptance, GREEDY)
    assert drawn < greedy < 0.35
    assert hope_greedy > 0.6 > 0.4 > hope_drawn, "so it is tried"


def test_one_heat_alone_is_reckoned_as_before_there_were_several() -> None:
    """Pools of one method at heats that nobody used, and other methods, change nothing."""
    alone, beside = Acceptance(DEPTH), Acceptance(DEPTH)
    for heat, acceptance in ((GREEDY, alone), (DRAWN, beside)):
        feed(acceptance, heat, 2, 30, "r")
        acceptance.observe("r", "m", 3, 0, 0, heat=heat)
    beside.observe("x", "other", 4, 4, 0, heat=GREEDY)
    first(beside, 5)  # asked, not fed
    one, two = alone.curves(["r"], ["m"]), beside.curves(["r"], ["m"], [DRAWN])
    for mine, theirs in ((one.kept, two.kept), (one.drafted, two.drafted), (one.nodes, two.nodes)):
        assert np.allclose(mine, theirs, rtol=1e-12)


def test_what_is_lent_is_scaled_position_by_position_and_never_more_than_it_was() -> None:
    acceptance = Acceptance(2)
    acceptance.observe("a", "m", 2, 2, 1, nodes=6, heat=1)  # little is lent as it is
    lent = acceptance.curves(["new"], ["m"], [2])
    assert lent.nodes[0].sum() == pytest.approx(lent.drafted[0].sum() + 4 * lent.drafted[0, 0])
    assert lent.kept[0, 0] == pytest.approx((1 + 2 * PRIOR_RATE) / 3)
    for _ in range(50):
        acceptance.observe("a", "m", 1, 1, 1, heat=1)
    acceptance.forget("new")
    rate = (LENT_WEIGHT + 2 * PRIOR_RATE) / (LENT_WEIGHT + 2)
    assert acceptance.curve("m", "new", 1, 2)[0][0] == pytest.approx(rate)


def test_rows_of_a_batch_have_the_rates_of_their_own_heat() -> None:
    acceptance = Acceptance(DEPTH)
    feed(acceptance, GREEDY, DEPTH, 60)
    feed(acceptance, DRAWN, 0, 60)
    both = acceptance.curves(["a", "b"], ["m", "m"], [GREEDY, DRAWN])
    for row, (name, heat) in enumerate([("a", GREEDY), ("b", DRAWN)]):
        one = acceptance.curves([name], ["m"], [heat])
        for mine, theirs in ((one.kept, both.kept), (one.optimistic, both.optimistic), (one.drafted, both.drafted)):
            assert np.allclose(mine[0], theirs[row], rtol=1e-12)
    assert both.kept[0, 0] > 0.9 > 0.15 > both.kept[1, 0]


def test_a_planner_whose_new_kind_of_row_is_unknown_plans_every_step() -> None:
    planner = Planner(table(), Acceptance(DEPTH))
    planned, rows = [], [RowView("a", "m", DEPTH, 99)]
    decisions, decide = planner._decisions, planner._decisions.decide
    decisions.decide = lambda *given, **more: planned.append(rows[0].heat) or decide(*given, **more)  # type: ignore[method-assign, func-returns-value]
    for step in range(160):
        if step == 120:
            rows = [RowView("b", "m", DEPTH, 99, heat=DRAWN)]
        plan = planner.plan(rows)
        (cap,) = plan.caps
        row = RowStep(rows[0].request_id, "m", cap, cap, cap, heat=rows[0].heat)
        planner.observe(plan, StepObservation(1, [row], 0.3 * cap, 1.0 + 0.02 * cap, 0.0))
    assert planned.count(GREEDY) < 80
    assert planned.count(DRAWN) > 20


def test_light_parts_learn_by_heat_too() -> None:
    costs = CostTable({(1, 1): 1.0, (1, 5): 1.1}, {"whole": {(1, 4): 1.0}, "light": {(1, 4): 0.0}})
    planner = Planner(costs, Acceptance(DEPTH), {"whole": "light"})
    for _ in range(20):
        plan = planner.plan([RowView("a", "whole", DEPTH, 99, heat=DRAWN)])
        (cap,) = plan.caps
        row = RowStep("a", "whole", cap, cap, cap, light=(cap, cap, cap), heat=DRAWN)
        planner.observe(plan, StepObservation(1, [row], 0.0, 1.1, 0.0))
    assert planner.acceptance.seen("light", DRAWN) > 0.0
    assert planner.acceptance.seen("light", GREEDY) == planner.acceptance.seen("whole", GREEDY) == 0.0


def test_heats_are_temperatures_that_are_alike() -> None:
    assert SamplingParams(temperature=0).heat == SamplingParams(temperature=1.7, top_k=1).heat == GREEDY
    assert SamplingParams().heat == SamplingParams(temperature=0.8, top_k=2).heat == DRAWN
    heats = [SamplingParams(temperature=degrees).heat for degrees in (5e-324, 0.3, 0.6, 1.0, 1.3, 9.0, 1.7e308)]
    assert heats == [1, 1, 2, 3, 4, 5, 5]
