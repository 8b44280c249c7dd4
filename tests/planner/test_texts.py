"""The length of a row's text as an axis of cost: measured, and what plans make of it."""

import random

import numpy as np
import pytest

from foretell.costs.measure import StepSeconds, measure_texts
from foretell.costs.table import PASS, CostTable, TextCosts
from foretell.planner.acceptance import Acceptance
from foretell.planner.observations import RowStep, RowView, StepObservation
from foretell.planner.planner import Planner

DEPTH = 4


def table(texts: dict[str, TextCosts], guess: float = 0.1, slope: float = 0.02) -> CostTable:
    """Passes of a second, for texts of 64 tokens."""
    verify = {(b, b * (1 + d)): 1.0 + slope * b * (1 + d) for b in (1, 2, 4, 8) for d in (0, 1, 2, 4)}
    draft = {"m": {(b, d): guess * d for b in (1, 2, 4, 8) for d in (1, 2, 4)}}
    return CostTable(verify, draft, {"m": 0.001}, texts, 64.0)


DEAR = {PASS: TextCosts(1e-4, 2e-5), "m": TextCosts(0.0, 2e-4, 1e-6)}
"""A draft whose attention grows much faster than the target's: it wins with short texts alone."""
CHEAP = {PASS: TextCosts(1e-3, 1e-5), "m": TextCosts(0.0, 1e-6)}
"""A pass that reads long texts once for all nodes: guesses that are too dear for short texts win with long ones."""


def test_texts_add_to_passes_and_proposals_in_proportion() -> None:
    costs = table({PASS: TextCosts(1e-3, 1e-4), "m": TextCosts(2e-3, 1e-3, 1e-6)})
    assert costs.verify(2, 6, 1064) == pytest.approx(costs.verify(2, 6) + 1000 * (2 * 1e-3 + 6 * 1e-4))
    assert costs.verify(2, 6, 10) == costs.verify(2, 6), "shorter ones are not cheaper than what was measured"
    assert costs.draft("m", 2, 3, 1064) == pytest.approx(costs.draft("m", 2, 3) + 1000 * 2 * (2e-3 + 3 * 1e-3))
    assert costs.catch_up("m", 100, 1000) == pytest.approx(0.1 + 1e-6 * sum(place + 0.5 for place in range(900, 1000)))
    assert costs.catch_up("m", 100) == costs.catch_up("m", 100, 100) < costs.catch_up("m", 100, 200)
    assert CostTable.from_json(costs.to_json()) == costs
    other = table({PASS: TextCosts(5e-4, 2e-4)})
    assert costs.least(other).texts == {PASS: TextCosts(5e-4, 1e-4)}


def test_what_texts_add_is_found_in_steps_that_are_noisy() -> None:
    true = table({PASS: TextCosts(1e-3, 2e-4), "m": TextCosts(1e-5, 2e-4)})
    rng, asked = random.Random(1), []

    def step(method: str, depth: int, is_long: bool) -> StepSeconds:
        asked.append((method, depth, is_long))
        length = 1064 if is_long else 64
        noise = 1.0 + rng.random() ** 3  # a shared machine: some steps take twice as long
        drafted = true.draft(method, 1, depth, length) if depth else 0.0
        return StepSeconds(drafted * noise, true.verify(1, 1 + depth, length) * noise, 0.0, 1 + depth)

    found = measure_texts(step, {"m": DEPTH}, (64, 1064), clock=lambda: 0.0)
    assert found[PASS].once + 3 * found[PASS].each == pytest.approx(1e-3 + 3 * 2e-4, rel=0.05)
    assert found["m"].once + 3 * found["m"].each == pytest.approx(6.1e-4, rel=0.05)
    assert set(asked) == {("m", depth, is_long) for depth in (0, 1, DEPTH) for is_long in (False, True)}


def test_steps_of_another_size_and_a_falling_line_say_nothing_false() -> None:
    def step(_: str, depth: int, is_long: bool) -> StepSeconds:
        """Nodes of long and short texts differ at depth 1; a wider pass takes less more time."""
        rows = {0: 1, 1: 3 if is_long else 2, DEPTH: 5}[depth]
        return StepSeconds(0.0, 1.0 + is_long * {0: 0.4, 1: 99.0, DEPTH: 0.2}[depth], 0.0, rows)

    found = measure_texts(step, {"m": DEPTH}, (0, 1000), clock=lambda: 0.0)
    assert found[PASS] == TextCosts(pytest.approx(3e-4), 0.0), "their mean: no part is below 0"
    assert found["m"] == TextCosts(0.0, 0.0)


class Run:
    """Rows with drawn acceptance, timed by the true table; their texts stay as long as they are."""

    def __init__(self, costs: CostTable, lengths: list[int], rate: float = 0.8, told: CostTable | None = None) -> None:
        self.true, self.lengths, self.rate = costs, lengths, rate
        self.planner = Planner(told or costs, Acceptance(DEPTH))
        self.rng = np.random.default_rng(0)
        self.caps: list[list[int]] = []
        self.seconds: list[float] = []
        self.tokens: list[float] = []

    def step(self) -> None:
        lengths, batch = self.lengths, len(self.lengths)
        views = [RowView(str(row), "m", DEPTH, 99, length=length) for row, length in enumerate(lengths)]
        plan = self.planner.plan(views)
        kept = [int(np.argmin([*(self.rng.random(cap) < self.rate), False])) for cap in plan.caps]
        seconds = self.true.verify(batch, batch + sum(plan.caps))
        drafted = self.true.draft("m", sum(cap > 0 for cap in plan.caps), max(plan.caps))
        for cap, length in zip(plan.caps, lengths, strict=True):
            beyond = self.true.beyond(length)
            seconds += beyond * (self.true.text(PASS).once + self.true.text(PASS).each * (1 + cap))
            drafted += beyond * (self.true.text("m").once + self.true.text("m").each * cap) if cap else 0.0
        rows = [RowStep(str(row), "m", cap, cap, kept[row], length=lengths[row]) for row, cap in enumerate(plan.caps)]
        mean = sum(lengths) / batch
        self.planner.observe(plan, StepObservation(batch, rows, drafted, seconds, 0.0, mean))
        self.caps.append(plan.caps)
        self.seconds.append(seconds + drafted)
        self.tokens.append(sum(self.rate**place for cap in plan.caps for place in range(cap + 1)))  # expected

    def rate_of(self, steps: int) -> float:
        for _ in range(steps):
            self.step()
        return sum(self.tokens[-steps:]) / sum(self.seconds[-steps:])

    def best_fixed(self) -> tuple[int, float]:
        """(depth, tokens a second) of what is best for all rows at the length that they have."""
        length, batch = sum(self.lengths) / len(self.lengths), len(self.lengths)
        rates = [batch / self.true.verify(batch, batch, length)]
        for depth in range(1, DEPTH + 1):
            seconds = self.true.verify(batch, batch * (1 + depth), length) + self.true.draft("m", batch, depth, length)
            rates.append(batch * sum(self.rate**kept for kept in range(depth + 1)) / seconds)
        best = int(np.argmax(rates))
        return best, rates[best]


@pytest.mark.parametrize("lengths", [[64], [8000], [64] * 4, [8000] * 4])
@pytest.mark.parametrize("kind", ["dear", "cheap"])
def test_at_every_length_and_batch_the_plan_is_as_good_as_the_best_fixed_depth(lengths: list[int], kind: str) -> None:
    costs = table(DEAR) if kind == "dear" else table(CHEAP, guess=1.2)
    run = Run(costs, lengths)
    best, rate = run.best_fixed()
    assert (best > 0) == ((kind == "dear") == (lengths[0] < 1000)), "the case is what it is meant to be"
    run.rate_of(50)
    assert run.rate_of(400) > 0.975 * rate


def test_a_plan_follows_a_text_that_grows() -> None:
    """Guesses that win at first are dropped where the text has grown too long for them, without a wrong factor."""
    run = Run(table(DEAR), [64])
    run.rate_of(100)
    assert all(cap > 0 for (cap,) in run.caps[-50:])
    run.lengths = [8000]
    run.rate_of(100)
    assert sum(cap > 0 for (cap,) in run.caps[-80:]) <= 2, "trials at most"
    assert run.planner.corrections.plain == pytest.approx(1.0, abs=0.03)
    assert run.planner.corrections.draft["m"] == pytest.approx(1.0, abs=0.1)


def test_a_row_with_a_long_text_does_not_guess_beside_others_that_do() -> None:
    run = Run(table(DEAR), [64, 8000, 64, 64])
    run.rate_of(60)
    by_row = np.array(run.caps[-40:])
    assert by_row[:, [0, 2, 3]].min() > 0
    assert (by_row[:, 1] > 0).sum() <= 2, "a trial at most"


def test_without_what_texts_add_a_table_leads_to_losses() -> None:
    """The control: a factor for all proposals cannot know of which rows they became dear."""
    known, blind = (Run(table(DEAR), [64, 9000, 64, 64], told=told) for told in (table(DEAR), table({})))
    assert known.rate_of(200) > 1.03 * blind.rate_of(200)


def test_the_lag_of_a_long_text_is_its_own() -> None:
    """A drafter that has 8,000 tokens to read is worth less than one with the same number of short texts says."""
    planner = Planner(table(DEAR), Acceptance(DEPTH))
    short, long = (planner._offers._entry(RowView("a", "m", DEPTH, 99, count, length=count)) for count in (100, 8000))
    assert long / short > 80 * 3


@pytest.mark.parametrize("kind", ["dear", "cheap"])
def test_the_outlook_by_length_and_batch_is_the_best_of_all_depths(kind: str) -> None:
    costs = table(DEAR) if kind == "dear" else table(CHEAP, guess=1.2)
    run = Run(costs, [64, 9000])
    run.rate_of(100)
    cells = run.planner.outlook(8000, 8)
    assert [cell.context for cell in cells[::4]] == [256, 1024, 4096, 8000]
    assert [cell.concurrency for cell in cells[:4]] == [1, 2, 4, 8]
    expected = run.planner.acceptance.expected("m")
    kept, factors = expected[0], run.planner.corrections
    for cell in cells:
        plain = costs.verify(cell.concurrency, cell.concurrency, cell.context) * factors.plain
        speeds = [1.0]
        for depth in range(1, DEPTH + 1):
            rows = cell.concurrency * (1 + depth)
            seconds = costs.verify(cell.concurrency, rows, cell.context) * factors.guess
            seconds += costs.draft("m", cell.concurrency, depth, cell.context) * factors.draft["m"]
            speeds.append((1 + sum(kept[:depth])) * plain / seconds)
        assert cell.speedup == pytest.approx(max(speeds), rel=0.02), "nodes of one row in ten may be fewer"
    guesses = [cell.guesses for cell in cells if cell.concurrency == 1]
    assert (guesses[0] > 0, guesses[-1] > 0) == ((True, False) if kind == "dear" else (False, True))


def test_nothing_is_foretold_of_methods_without_a_guess_nor_where_costs_are_not_measured() -> None:
    fresh = Planner(table(DEAR), Acceptance(DEPTH))
    assert fresh.outlook(8000, 8) == []
    assert fresh.acceptance._slots == {}, "asking changes nothing"
    always = Planner(table(DEAR), Acceptance(DEPTH), mode="on")
    always.acceptance.observe("a", "m", 4, 4, 2)
    always.acceptance.curves(["a"], ["m"])
    assert always.acceptance.expected("m") is not None
    assert always.outlook(8000, 8) == []


def test_steps_after_long_texts_are_as_the_table_says() -> None:
    """Rows of different lengths that guess differently deep: no factor is learned where the table is right."""
    costs = table({PASS: TextCosts(1e-3, 1e-4), "m": TextCosts(1e-4, 2e-4)})
    planner = Planner(costs, Acceptance(DEPTH))
    lengths, caps = (5000, 64, 9064), (1, 4, 2)
    own = 4936 * (1e-4 + 1 * 2e-4) + 9000 * (1e-4 + 2 * 2e-4)
    passed = costs.verify(3, 3 + 7) + 4936 * (1e-3 + 2 * 1e-4) + 9000 * (1e-3 + 3 * 1e-4)
    rows = [
        RowStep(str(row), "m", cap, cap, 0, length=length)
        for row, (cap, length) in enumerate(zip(caps, lengths, strict=True))
    ]
    step = StepObservation(3, rows, 1.0, passed, 0.0, sum(lengths) / 3 + 0.0)
    assert planner._offers.pass_seconds(step) == pytest.approx(passed, rel=1e-3)
    drafted = planner._offers.draft_seconds("m", rows, 3)
    same = [RowStep(str(row), "m", cap, cap, 0) for row, cap in enumerate(caps)]
    assert drafted - planner._offers.draft_seconds("m", same, 3) == pytest.approx(own)
    plain = StepObservation(3, [], 0.0, 1.0, 0.0, 4000.0)
    assert planner._offers.pass_seconds(plain) == pytest.approx(costs.verify(3, 3, 4000))
