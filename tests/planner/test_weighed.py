"""Methods that weigh their guesses themselves: how deep they go is not planned, and a node's price is told them."""

import numpy as np
import pytest

from foretell.costs.table import PASS, CostTable, TextCosts
from foretell.planner.acceptance import Acceptance
from foretell.planner.corrections import Corrections
from foretell.planner.observations import RowStep, RowView, StepObservation
from foretell.planner.offers import Offers, steps_ahead
from foretell.planner.planner import Planner
from foretell.planner.shares import LightShares

DEPTH = 12
NODE, LOOKUP = 0.1, 0.01


def table(batch: int = 1) -> CostTable:
    """A plain step of 1 s a row, 0.1 s for each node; a lookup costs 0.01 s however deep."""
    verify = {(rows, rows * (1 + depth)): rows * (1.0 + NODE * depth) for rows in (1, batch) for depth in (0, DEPTH)}
    draft = {"whole": {(1, d): 2.0 * d for d in (1, DEPTH)}, "light": {(1, d): LOOKUP for d in (1, DEPTH)}}
    return CostTable(verify, draft, {"whole": 0.0, "light": 0.0})


class Runs:
    """Rows of 60 steps. Where they copy, a step in ten finds a run of twelve guesses, nearly all right; all other guesses
    are single ones, right with a chance of 0.15."""

    def __init__(self, planner: Planner, seed: int, *, gates: bool = True) -> None:
        self.planner, self.gates = planner, gates
        self.rng = np.random.default_rng(seed)
        self.tokens = self.seconds = 0.0
        self.caps: list[int] = []

    def rows(self, count: int, runs: float) -> "Runs":
        """Figures are of these rows alone. runs: share of their steps that find one."""
        self.tokens, self.seconds, self.caps = 0.0, 0.0, []
        for number in range(count):
            name = str(number)
            method = "whole" if self.planner.parts else "light"
            for _ in range(60):
                self.step(name, method, runs)
            self.planner.forget(name)
        return self

    def step(self, name: str, method: str, runs: float) -> None:
        plan = self.planner.plan([RowView(name, method, DEPTH, 99)])
        (cap,) = plan.caps
        is_run, kept = self.rng.random() < runs, self.rng.random()
        found, chance, right = (DEPTH, 0.9, DEPTH - 1) if is_run else (1, 0.15, int(kept < 0.15))
        depth = min(cap, found) if not self.gates or chance >= plan.least else 0
        accepted = min(depth, right)
        seconds = 1.0 + NODE * depth + LOOKUP * (cap > 0)
        row = RowStep(name, method, cap, depth, accepted, light=(cap, depth, accepted) if cap else None, by_light=True)
        self.planner.observe(plan, StepObservation(1, [row], LOOKUP * (cap > 0), 1.0 + NODE * depth, 0.0))
        self.tokens, self.seconds = self.tokens + 1 + accepted, self.seconds + seconds
        self.caps += [cap] if cap else []

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def layered(weighed: tuple[str, ...]) -> Planner:
    return Planner(table(), Acceptance(DEPTH, weighed=weighed), {"whole": "light"})


def best(share: float) -> float:
    """Tokens a second of lookups in every step, of which this share finds a run and follows it."""
    return (1 + share * (DEPTH - 1)) / (1 + LOOKUP + share * NODE * DEPTH)


@pytest.mark.parametrize("seed", range(2))
def test_rare_runs_are_followed_to_their_ends(seed: int) -> None:
    """Most guesses miss, and a planner of depths that takes them for the rule allows one, and never sees what a run is."""
    for weighed in (("light",), ()):
        text = Runs(layered(weighed), seed).rows(10, 0.02).rows(40, 0.1)
        assert text.rate > 0.95 * best(0.1) > 1.6
        assert (set(text.caps) == {DEPTH}) == bool(weighed)


@pytest.mark.parametrize("gates", [True, False])
def test_where_nothing_is_ever_found_nothing_is_lost(*, gates: bool) -> None:
    """By a method that sees which guesses do not pay, nor by one that makes all."""
    assert Runs(layered(("light",)), 0, gates=gates).rows(50, 0.0).rate > 0.98


def test_a_planner_of_one_such_method_does_the_same() -> None:
    text = Runs(Planner(table(), Acceptance(DEPTH, weighed=("light",))), 0).rows(40, 0.1)
    assert text.rate > 0.95 * best(0.1)
    assert set(text.caps) == {DEPTH}


def test_a_new_text_is_planned_again_soon_and_then_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the method is well known: its first steps show what lookups find in it."""
    planner, steps = layered(("light",)), []
    run, decisions = Runs(planner, 0).rows(20, 0.3), planner._decisions
    decide = decisions.decide
    monkeypatch.setattr(
        decisions, "decide", lambda *given, **more: steps.append(len(run.caps)) or decide(*given, **more)
    )
    run.caps = []
    for _ in range(60):
        run.step("new", "whole", 0.3)
    assert len(run.caps) == 60, "it guesses in every step"
    assert steps[:5] == [0, 4, 8, 16, 32]


@pytest.mark.parametrize(("batch", "length"), [(1, 0), (1, 2000), (4, 0), (4, 2000)])
def test_a_guess_pays_its_node_exactly_from_the_least_chance_on(batch: int, length: int) -> None:
    costs = table(batch)
    costs = CostTable(costs.verify_cells, costs.draft_cells, {}, {PASS: TextCosts(1e-4, 3e-5)}, 100.0)
    corrections = Corrections(costs.methods)
    for _ in range(50):
        corrections.observe_guess(1.3, 1.0)
    offers = Offers(costs, Acceptance(DEPTH, weighed=("light",)), corrections, LightShares())
    rows = [RowView(str(row), "light", DEPTH, 99, length=length) for row in range(batch)]
    plain, least = offers.plain_of(rows), offers.least_chance(rows)
    more = (costs.verify(batch, batch + 1, length) - costs.verify(batch, batch, length)) * corrections.guess
    assert 0.0 < least < 1.0
    for chance in (0.95 * least, 1.05 * least):
        assert ((batch + chance) / (plain + more) > batch / plain) == (chance > least)


def test_a_line_that_stops_is_priced_as_far_as_it_goes() -> None:
    """Of a method that weighs its guesses: its lines stop before the passes of those that it does not make."""
    costs = CostTable(table().verify_cells, {"whole": {(1, d): 0.1 * d for d in (1, DEPTH)}})
    acceptance = Acceptance(DEPTH, weighed=("whole",))
    for _ in range(100):
        acceptance.observe("row", "whole", DEPTH, 3, 2)
    offers = Offers(costs, acceptance, Corrections(costs.methods), LightShares())
    single = offers.single(RowView("row", "whole", DEPTH, 99), 1.0)
    assert sum(single.draft[:DEPTH]) == pytest.approx(costs.draft("whole", 1, 3), rel=0.05)
    stopped = RowStep("row", "whole", DEPTH, 3, 2)
    assert offers.draft_seconds("whole", [stopped], 1) == pytest.approx(costs.draft("whole", 1, 3))


def test_reading_a_text_is_written_off_over_the_steps_that_remain() -> None:
    row = RowView("a", "m", 4, 60)
    assert [steps_ahead(row, kept) for kept in (0.0, 2.0, 1000.0)] == [32.0, 20.0, 1.0]


def test_a_trial_that_finds_nothing_is_charged_what_it_took() -> None:
    charged = []
    for seconds in (1.0, 1.5):
        planner = Planner(table(), Acceptance(DEPTH, weighed=("light",)))
        for number in range(400):
            plan = planner.plan([RowView("row", "light", DEPTH, 99)])
            before, found = planner._budget.seconds, [RowStep("row", "light", plan.caps[0], 0, 0)]
            if plan.charged is not None and number > 50:
                break
            planner.observe(plan, StepObservation(1, found, LOOKUP, 1.0, 0.0))
        assert plan.trial
        planner.observe(plan, StepObservation(1, found, LOOKUP, seconds, 0.0))
        charged.append(planner._budget.seconds - before)
    assert charged[1] - charged[0] == pytest.approx(0.5, abs=0.1)
