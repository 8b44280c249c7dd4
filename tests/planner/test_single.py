"""One row's allocation and decisions in plain Python, against those of ``allocation.py``, which serve several rows."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from foretell.costs.table import PASS, CostTable, TextCosts
from foretell.planner.acceptance import Acceptance
from foretell.planner.allocation import price, search
from foretell.planner.corrections import Corrections
from foretell.planner.decisions import Decision
from foretell.planner.observations import RowStep, RowView, StepObservation
from foretell.planner.offers import Offers
from foretell.planner.plan import Option, StepPlan
from foretell.planner.planner import Planner
from foretell.planner.shares import LightShares


def costs(rng: np.random.Generator) -> CostTable:
    passes = np.sort(rng.uniform(1.0, 1.6, 4)).tolist()
    guesses = np.cumsum(rng.uniform(0.01, 0.3, 3)).tolist()
    return CostTable(
        {(1, nodes): seconds for nodes, seconds in zip((1, 2, 4, 7), passes, strict=True)},
        {"m": {(1, depth): seconds for depth, seconds in zip((1, 3, 5), guesses, strict=True)}},
        {"m": float(rng.uniform(0.0, 0.02))},
        {PASS: TextCosts(*rng.uniform(0.0, 1e-3, 2)), "m": TextCosts(*rng.uniform(0.0, 1e-4, 3))},
        64.0,
    )


def learned(rng: np.random.Generator, acceptance: Acceptance, corrections: Corrections, shares: LightShares) -> None:
    for _ in range(int(rng.integers(0, 30))):
        cap = int(rng.integers(1, 6))
        drafted = int(rng.integers(0, cap + 1))
        kept = int(rng.integers(0, drafted + 1))
        acceptance.tick()
        acceptance.observe(str(rng.choice(["a", "b"])), "m", cap, drafted, kept, drafted + int(rng.integers(0, 3)), 1)
        shares.observe("a", "m", 1, int(rng.integers(0, 4)), int(rng.integers(0, 2)))
        is_plain, factor = rng.choice(["plain", "guess"]) == "plain", float(rng.uniform(0.8, 1.3))
        (corrections.observe_plain(factor, 1.0, 1) if is_plain else corrections.observe_guess(factor, 1.0))
        corrections.observe_draft("m", float(rng.uniform(0.5, 2.0)), 1.0)


@pytest.mark.parametrize("with_shares", [False, True])
def test_one_row_is_reckoned_as_a_batch_of_one(*, with_shares: bool) -> None:
    found = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        weighed = ("m",) if seed % 3 == 0 else ()
        table, acceptance, shares = costs(rng), Acceptance(5, weighed=weighed), LightShares()
        corrections = Corrections(["m"])
        learned(rng, acceptance, corrections, shares)
        offers = Offers(table, acceptance, corrections, shares if with_shares else LightShares())
        asked, length = map(int, rng.integers(0, 9, 2)), int(rng.integers(1, 2000)) if seed % 2 else 0
        row = RowView("a", "m", *asked, int(rng.integers(0, 40)), heat=1, length=length)
        plain = offers.plain_of([row])
        single, question = offers.single(row, plain), offers.several([row], plain)
        assert (single is None) == (question is None)
        if single is None or question is None:
            continue
        found += 1
        problem, depth = question.problem, len(single.kept)
        for mine, theirs in (
            (single.kept, problem.kept), (single.drafted, problem.drafted), (single.nodes, problem.nodes),
            (single.optimistic, question.curves.optimistic[:, :depth]),
        ):  # fmt: skip
            assert mine == pytest.approx(theirs[0].tolist(), rel=1e-12)
        prices = single.prices(single.kept, entry=single.entry)
        for cap, (tokens, seconds) in enumerate(prices, 1):
            choice = price(problem, [cap])
            assert (tokens, seconds) == pytest.approx((choice.tokens, choice.seconds), rel=1e-12)
        best, other = single.best(single.kept), search(problem)
        assert best.rate >= other.rate * (1 - 1e-12), "a search of all depths, the other may leave some out"
        hopes = np.array([single.optimistic])
        hoped = search(replace(problem, kept=hopes, guess_factor=problem.guess_factor * 0.8))
        mine = single.best(single.optimistic, doubt=0.8)
        assert mine.rate >= hoped.rate * (1 - 1e-12)
    assert found > 90


def test_a_depth_that_is_not_allowed_ends_the_search() -> None:
    offers = Offers(costs(np.random.default_rng(1)), Acceptance(5), Corrections(["m"]), LightShares())
    single = offers.single(RowView("a", "m", 5, 9), 1.0)
    assert single.best([0.0] * 5) is None
    first = single.best([0.9, 0.0, 0.9, 0.9, 0.9])
    assert first.caps == [1]


def decided(planner: Planner, row: RowView, way: str) -> Decision:
    plain = planner._offers.plain_of([row])
    offer = planner._offers.single(row, plain) if way == "single" else planner._offers.several([row], plain)
    offers = {Option.WHOLE: offer} if offer is not None else {}
    return planner._decisions.decide(1, plain, offers, planner.standing, unsettled=planner._unsettled)


def test_one_row_is_decided_as_a_batch_of_one() -> None:
    """Guesses, trials of them, trials of plain steps, and nothing: what is chosen, and what the account is charged."""
    kinds: dict[tuple[bool, bool, bool], int] = {}
    for seed in range(60):
        rng = np.random.default_rng(seed)
        made = Planner(costs(rng), Acceptance(5))
        rate = float(rng.uniform(0.0, 0.9))
        for _ in range(60):
            row = RowView("a", "m", 5, int(rng.integers(1, 30)), int(rng.integers(0, 9)))
            twin = copy.deepcopy(made)
            mine, theirs = decided(made, row, "single"), decided(twin, row, "several")
            # (A proposal that is made in 999 of 1,000 steps counts there as made in all.)
            assert (mine.caps, mine.trial, mine.num_steps) == (theirs.caps, theirs.trial, theirs.num_steps)
            assert mine.charged == (
                None if theirs.charged is None else pytest.approx(theirs.charged, rel=1e-3, abs=1e-3)
            )
            assert made._budget._credit == pytest.approx(twin._budget._credit, rel=1e-3, abs=1e-3)
            assert made._budget._asked.keys() == twin._budget._asked.keys()
            for option, asked in made._budget._asked.items():
                assert asked == pytest.approx(twin._budget._asked[option], rel=1e-3, abs=1e-3)
            assert (mine.stands, mine.option) == (theirs.stands, theirs.option)
            assert mine.without == theirs.without
            if mine.expected is not None and theirs.expected is not None:
                assert mine.expected.rate == pytest.approx(theirs.expected.rate, rel=1e-3)
            kind = mine.stands == Option.WHOLE, mine.trial, bool(mine.caps[0])
            kinds[kind] = kinds.get(kind, 0) + 1
            made.standing, cap = mine, mine.caps[0]
            kept = int(np.argmin([*(rng.random(cap) < rate), False]))
            noise = float(rng.uniform(0.9, 1.15))
            step = StepObservation(
                1, [RowStep("a", "m", cap, cap, kept)], noise * made.costs.draft("m", 1, cap),
                noise * made.costs.verify(1, 1 + cap), 0.0,
            )  # fmt: skip
            made._budget.earn(step.seconds)
            made._learn(StepPlan(mine.caps, option=mine.option, trial=mine.trial, charged=mine.charged), step)
    assert {(True, False, True), (False, False, False), (False, True, True), (True, True, False)} <= set(kinds)
    assert min(kinds.values()) >= 5


@pytest.mark.parametrize("dear", [3.0, 8.0, 12.0])
def test_what_weighs_its_guesses_is_tried_a_little_where_deep_guesses_are_dear(dear: float) -> None:
    """As by a table that was measured on a busy machine: a first request of 200 tokens of a repeating text had no
    guess, since the one trial that there was, of all guesses at once, was beyond the budget."""
    passes = {(1, 1 + more): 0.01 * (1 + (dear - 1) * more / 15) for more in (0, 1, 3, 7, 15)}
    made = Planner(CostTable(passes, {"suffix": {(1, 1): 1e-5, (1, 15): 1e-5}}), Acceptance(16, None, {"suffix"}))
    guessed = 0
    for at in range(200):
        plan = made.plan([RowView("a", "suffix", 15, 200, length=at)])
        (cap,) = plan.caps
        guessed += cap > 0
        rows = [RowStep("a", "suffix", cap, cap, cap, length=at)] if cap else []
        made.observe(plan, StepObservation(1, rows, 1e-5 if cap else 0.0, 0.01 * (1 + (dear - 1) * cap / 15), 0.0, at))
    assert guessed > 100
