"""Whole methods and their light parts: each step is the cheapest of three, and teaches of those who guessed in it."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foretell.costs.table import CostTable
from foretell.planner import planner as planner_module
from foretell.planner.acceptance import Acceptance
from foretell.planner.allocation import Allocation
from foretell.planner.budget import BUDGET, Budget
from foretell.planner.decisions import Decision, Decisions
from foretell.planner.observations import RowStep, RowView, StepObservation
from foretell.planner.plan import Option, StepPlan
from foretell.planner.planner import Planner
from tests.planner.test_planner import Quick
from tests.stress import size

DEPTHS = (1, 2, 4)


def table(guess: float, node: float = 0.02) -> CostTable:
    """A pass of 1 s and ``node`` for each node; "whole" drafts for ``guess`` seconds a token, "light" for nothing."""
    verify = {(1, 1 + depth): 1.0 + node * (1 + depth) for depth in (0, *DEPTHS)}
    draft = {"whole": {(1, d): guess * d for d in DEPTHS}, "light": {(1, d): 0.001 for d in DEPTHS}}
    return CostTable(verify, draft, {"whole": 0.0, "light": 0.0})


class Text:
    """A row: in a share of the steps the light part finds a guess, whose tokens are kept at a rate; else the second one."""

    tells_by_light = False  # whether steps say which part's guess they make

    def __init__(
        self, guess: float, *, found: float, light: float, second: float, seed: int = 0, tells: bool = False,
        node: float = 0.02,
    ) -> None:  # fmt: skip
        """tells: whole steps say what the light part would have done, as a drafter's ``light_steps``."""
        costs, self.tells = table(guess, node), tells
        self.planner = Planner(costs, Acceptance(4), {"whole": "light"})
        self.costs, self.found, self.light, self.second = costs, found, light, second
        self.rng = np.random.default_rng(seed)
        self.kinds: list[str] = []
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    def step(self, num_unread: int = 0) -> None:
        self.plan = plan = self.planner.plan([RowView("row", "whole", 4, 99, num_unread)])
        (cap,) = plan.caps
        paid = cap if plan.paid is None else plan.paid[0]
        finds = self.rng.random() < self.found
        depth = cap if finds else paid
        drafts = not finds and depth > 0
        kept = int(np.argmin([*(self.rng.random(depth) < (self.light if finds else self.second)), False]))
        seconds = self.costs.draft("whole", 1, depth) if drafts else 0.0
        verify = self.costs.verify(1, 1 + depth) * self.slowness(drafts=drafts)
        known = (cap, depth if finds else 0, kept if finds else 0) if self.tells and cap else None
        by_light = finds if self.tells_by_light and cap else None
        row = RowStep("row", "whole", cap, depth, kept, light=known, by_light=by_light)
        self.planner.observe(plan, StepObservation(1, [row], seconds, verify * 0.9, verify * 0.1))
        self.kinds.append("plain" if not cap else "whole" if paid else "light")
        self.seconds.append(seconds + verify)
        self.tokens.append(1 + kept)

    def slowness(self, *, drafts: bool) -> float:
        """How much longer the step's pass takes than by the table."""
        return 1.0

    def steps(self, count: int) -> "Text":
        for _ in range(count):
            self.step()
        return self

    def share(self, kind: str, last: int = 1000) -> float:
        return self.kinds[-last:].count(kind) / last

    def speedup(self, last: int = 1000) -> float:
        return sum(self.tokens[-last:]) * self.costs.verify(1, 1) / sum(self.seconds[-last:])


@pytest.mark.parametrize("seed", range(3))
def test_a_dear_second_method_leaves_the_light_part_at_work(seed: int) -> None:
    text = Text(0.6, found=0.4, light=0.8, second=0.6, seed=seed).steps(2000)
    assert text.share("light") > 0.9
    assert text.speedup() > 1.2, "the whole method alone gives way to plain decoding here"


@pytest.mark.parametrize("seed", range(3))
def test_a_cheap_second_method_is_used_where_the_light_part_has_nothing(seed: int) -> None:
    text = Text(0.05, found=0.3, light=0.7, second=0.8, seed=seed).steps(2000)
    assert text.share("whole") > 0.85
    only = Text(9.0, found=0.3, light=0.7, second=0.8, seed=seed).steps(2000)
    assert text.speedup() > only.speedup() > 1.0


@pytest.mark.parametrize("seed", range(3))
def test_where_neither_pays_both_try_within_their_budgets(seed: int) -> None:
    text = Text(0.5, found=0.5, light=0.0, second=0.1, seed=seed).steps(4000)
    assert text.share("whole") < 0.02
    assert text.share("plain") > 0.5, "a guess for nothing may be tried often"
    assert text.speedup(3000) > 1.0 - 4 * BUDGET


def test_each_step_teaches_of_those_who_guessed_in_it() -> None:
    text = Text(0.25, found=0.4, light=0.8, second=0.6)
    for _ in range(1500):
        text.planner._flush()
        whole, light = text.planner.acceptance.seen("whole"), text.planner.acceptance.seen("light")
        text.step()
        if text.kinds[-1] == "whole":
            assert text.planner.acceptance.seen("light") <= light
        else:
            assert text.planner.acceptance.seen("whole") <= whole
    assert {"whole", "light"} <= set(text.kinds)
    assert min(text.planner.acceptance.seen(one) for one in ("whole", "light")) > 0.0


def test_rows_that_ask_to_guess_always_guess_with_all_they_have() -> None:
    text = Text(9.0, found=0.4, light=0.8, second=0.6).steps(300)
    assert text.share("whole", 200) == 0.0
    plan = text.planner.plan([RowView("row", "whole", 4, 99, always=True)])
    assert (plan.caps, plan.paid) == ([4], None)


def test_a_method_without_a_light_part_is_planned_as_ever() -> None:
    costs = CostTable(
        {(1, 1): 1.0, (1, 5): 1.0}, {"m": {(1, 4): 0.4}, "light": {(1, 4): 0.0}}, {"m": 0.0, "light": 0.0}
    )
    planner = Planner(costs, Acceptance(4), {"whole": "light"})
    caps = []
    for _ in range(200):
        plan = planner.plan([RowView("row", "m", 4, 99)])
        (cap,) = plan.caps
        caps.append(cap)
        assert cap == 0 or plan.paid is None
        planner.observe(plan, StepObservation(1, [RowStep("row", "m", cap, cap, cap)], 0.1 * cap, 0.9, 0.1))
    assert caps[-50:] == [4] * 50


def test_the_speedup_counts_the_steps_of_both() -> None:
    text = Text(0.6, found=0.4, light=0.8, second=0.6).steps(2000)
    assert text.planner.speedup == pytest.approx(text.speedup(), rel=0.15)
    assert text.planner.state["guessing"] is True
    text.planner.use(table(0.6))
    assert text.planner._offers.costs is text.planner.costs
    assert text.planner._offers.corrections is text.planner._decisions._corrections is text.planner.corrections


def asked(planner: Planner, seed: int, steps: int) -> Iterator[tuple[StepPlan, list[RowView]]]:
    """Each step's plan and rows, of members that join, leave and arrive at random; asked as the loop asks: again while the
    members are the same."""
    draw = random.Random(seed)
    number, views = 0, list[RowView]()
    for _ in range(steps):
        arriving = draw.choice((1, 2)) if draw.random() < 0.05 else 0
        changes = draw.random() < 0.1 or not views
        if changes:
            leaves, always = draw.choice((0.3, 1.0)), draw.random() < 0.3
            gone = [one for one in views if draw.random() < leaves]
            views = [one for one in views if one not in gone]
            for one in gone:
                planner.forget(one.request_id)
            while not views or draw.random() < 0.4:
                views = [*views, RowView(str(number), "whole", 4, 99, always=always)]
                number += 1
        plan = None if changes or arriving else planner.again(99, lagging=False)
        yield planner.plan(views, arriving) if plan is None else plan, views


def wrong(plan: StepPlan, views: list[RowView]) -> bool:
    return plan.members != tuple(one.request_id for one in views) or len(plan.caps) != len(views)


def test_every_plan_is_of_the_members_that_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever joins, leaves, arrives or asks to guess always, and whatever is decided."""
    draw = random.Random(0)

    def decide(self: Decisions, batch: int, *_: Any, **__: Any) -> Decision:
        """Anything that a decision can be."""
        caps = [draw.choice((0, 0, 2, 4)) for _ in range(batch)]
        option = draw.choice((Option.LIGHT, Option.WHOLE))
        guessing, trial = any(caps) and draw.random() < 0.7, draw.random() < 0.3
        caps = caps if guessing or trial else [0] * batch
        expected = Allocation(caps, 1.0, 1.0) if guessing else None
        return Decision(
            caps, option if any(caps) else Option.PLAIN, option if guessing else Option.PLAIN, expected, trial=trial
        )

    monkeypatch.setattr(Decisions, "decide", decide)
    monkeypatch.setattr(Budget, "rests", 4)
    monkeypatch.setattr(Planner, "_period", lambda *_, **__: 12)
    planners = [Planner(table(0.2), Acceptance(4), {"whole": "light"}) for _ in range(60)]
    seen = [
        (seed, step)
        for seed, planner in enumerate(planners)
        for step, one in enumerate(asked(planner, seed, size(60, 1500)))
        if wrong(*one)
    ]
    assert not seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_so_it_is_with_what_is_learned(seed: int) -> None:
    planner = Planner(table((0.02, 0.2, 0.6)[seed % 3]), Acceptance(4), {"whole": "light"})
    draw = random.Random(seed)
    for plan, views in asked(planner, seed, size(300, 1500)):
        assert not wrong(plan, views)
        rows = [
            RowStep(one.request_id, "whole", cap, cap, draw.randint(0, cap), by_light=draw.random() < 0.5)
            for one, cap in zip(views, plan.caps, strict=True)
        ]
        verify = planner.costs.verify(len(rows), sum(1 + row.drafted for row in rows))
        planner.observe(plan, StepObservation(len(rows), rows, 0.1 * any(plan.paid or plan.caps), verify, 0.01))


def test_a_method_with_a_better_light_part_is_left_alone() -> None:
    """The whole method would beat plain decoding here, and less than its light part does."""
    text = Text(0.35, found=0.5, light=0.9, second=0.55).steps(3000)
    assert text.share("light") > 0.9
    only = Text(0.35, found=0.0, light=0.0, second=0.55).steps(3000)
    assert only.speedup() > 1.0


@pytest.mark.parametrize("seed", range(3))
def test_whole_steps_teach_what_the_light_part_would_do(seed: int) -> None:
    """A cheap second method guesses in nearly every step, and the light part is known as well as if it had."""
    told = Text(0.02, found=0.5, light=0.7, second=0.8, seed=seed, tells=True).steps(600)
    assert told.share("whole", 600) > 0.9
    kept, _, hope = told.planner.acceptance.curve("light", "row", 2)
    assert kept == pytest.approx([0.5 * 0.7, 0.5 * 0.7 * 0.7], abs=0.08)
    assert hope[0] < 0.55, "nothing is left to be found out by trials"
    silent = Text(0.02, found=0.5, light=0.7, second=0.8, seed=seed).steps(600)
    assert silent.planner.acceptance.seen("light") < told.planner.acceptance.seen("light") / 3


@pytest.mark.parametrize("tells", [False, True])
def test_where_the_second_method_becomes_useless_the_light_part_takes_over(tells: bool) -> None:
    """Whole at first; then the second method's guesses are wrong. Told, the step down is made at once."""
    shares = []
    for seed in range(4):
        text = Text(0.3, found=0.5, light=0.8, second=0.9, seed=seed, tells=tells).steps(600)
        text.second = 0.0
        shares.append(text.steps(200).share("light", 200))
        assert text.steps(800).share("light") > 0.7
    if tells:
        assert float(np.mean(shares)) > 0.6


@pytest.mark.parametrize("seed", range(4))
def test_a_light_part_worth_little_does_not_hold_up_a_whole_method_that_pays(seed: int) -> None:
    """Its trials cost nothing beside plain decoding and much beside whole steps, whose place they would take."""
    text = Text(0.05, found=0.1, light=0.3, second=0.85, seed=seed, tells=True).steps(800)
    assert text.share("whole", 700) > 0.97


def test_another_table_forgets_what_the_whole_method_brought() -> None:
    text = Text(0.05, found=0.1, light=0.3, second=0.85, tells=True).steps(100)
    assert text.planner.standing.stands == Option.WHOLE
    text.planner.use(table(9.0))
    assert text.planner.standing.stands == Option.PLAIN
    assert text.steps(600).share("whole", 300) < 0.05


@pytest.mark.parametrize("found", [0.0, 0.3])
@pytest.mark.parametrize(("guess", "node"), [(0.05, 0.02), (2.0, 0.02), (0.05, 0.3), (0.3, 0.3)])
def test_steps_that_are_not_planned_are_those_that_would_have_been(found: float, guess: float, node: float) -> None:
    given = {"found": found, "light": 0.1, "second": 0.2, "node": node}
    planned, resting = Text(guess, **given).steps(800), Text(guess, **given)  # type: ignore[arg-type]
    quick = Quick(resting.planner)
    resting.steps(800)
    for text in (planned, resting):
        text.planner._flush()
    assert resting.kinds == planned.kinds
    assert resting.planner.state == planned.planner.state
    assert resting.planner.speedup == planned.planner.speedup
    assert quick.asked[0] > 0.9 * planned.kinds.count("plain") - 60


@pytest.mark.parametrize("found", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("second", [0.3, 0.55, 0.8])
def test_a_plan_that_goes_on_is_what_would_have_been_planned(found: float, second: float) -> None:
    given: dict[str, Any] = {"found": found, "light": 0.7, "second": second, "tells": True}
    planned, going = Text(0.05, **given), Text(0.05, **given)
    quick = Quick(going.planner)
    room = np.random.default_rng(5)
    for step in range(800):
        unread = int(room.integers(0, 5))
        for text in (planned, going):
            text.second = second if step < 500 else 0.05
            text.step(unread)
        assert going.plan.paid == planned.plan.paid
    assert going.kinds == planned.kinds
    for text in (planned, going):
        text.planner._flush()
    assert going.planner.state == planned.planner.state
    assert going.planner.acceptance.curve("whole", "row", 4) == planned.planner.acceptance.curve("whole", "row", 4)
    if planned.kinds.count("whole") > 400:
        assert quick.asked[0] > 0.5 * planned.kinds.count("whole")


def test_the_light_part_is_asked_as_deep_as_there_is_room_and_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the whole method guesses as planned, its light part is preferred in the same step: the plan is of guesses that
    cost time. Allowed in the counts is what was planned, or what the light part made of its room."""
    planner = Text(0.05, found=0.3, light=0.7, second=0.8).steps(300).planner
    planner._flush()
    monkeypatch.setattr(planner._decisions, "decide", lambda *_, **__: Decision([2], Option.WHOLE, Option.WHOLE))
    planner.replan()
    plan = planner.plan([RowView("row", "whole", 4, 99)])
    assert (plan.caps, plan.paid) == ([4], [2])
    assert planner.plan([RowView("row", "whole", 4, 3)]).caps == [3], "no deeper than there is room"
    counted: list[tuple[int, int]] = []
    monkeypatch.setattr(
        planner.acceptance, "observe", lambda row, method, cap, drafted, *given: counted.append((cap, drafted))
    )
    for drafted in (1, 2, 4):
        plan = planner.plan([RowView("row", "whole", 4, 99)])
        planner.observe(plan, StepObservation(1, [RowStep("row", "whole", 4, drafted, 1)], 0.1, 0.9, 0.1))
    planner._flush()
    assert counted == [(2, 1), (2, 2), (4, 4)]


@pytest.mark.parametrize("second", [0.3, 0.6, 0.85])
@pytest.mark.parametrize("guess", [0.05, 0.3])
def test_learning_from_a_few_steps_together_changes_no_plan(
    guess: float, second: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, waited = Text(guess, found=0.3, light=0.7, second=second, tells=True), 0
    for _ in range(1200):
        together.step()
        waited += len(together.planner._waiting) > 0
    together.planner._flush()
    monkeypatch.setattr(planner_module, "TOGETHER", 1)
    each = Text(guess, found=0.3, light=0.7, second=second, tells=True)
    longest = 0
    for _ in range(1200):
        each.step()
        longest = max(longest, len(each.planner._waiting))
    assert longest == 0
    assert waited > 200
    assert together.kinds == each.kinds
    assert together.tokens == each.tokens
    assert together.planner.state == each.planner.state
    assert together.planner.speedup == each.planner.speedup


def test_a_request_that_ended_is_forgotten_with_the_steps_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(0.05, found=0.1, light=0.3, second=0.85, tells=True).steps(300)
    while not text.planner._waiting:
        text.step()
    text.planner.forget("row")
    assert not text.planner._waiting
    assert "row" not in text.planner.acceptance._slots


class Cold(Text):
    """Text whose whole method reads weights that take the target's place in a cache: its passes take a third longer, and
    the two behind them."""

    tells_by_light, behind = True, 99

    def slowness(self, *, drafts: bool) -> float:
        self.behind = 0 if drafts else self.behind + 1
        return 1.35 if self.behind < 3 else 1.0


def test_passes_that_a_drafter_slows_down_are_its_own_cost() -> None:
    """A text in which the light part is worth most: it alone is known to have the faster passes. Where they count as passes
    of everybody (the control), the whole method stays in more steps, and the text takes longer."""

    def attained(*, apart: bool) -> tuple[float, float]:
        found = []
        for seed in range(8):
            text = Cold(0.1, found=0.5, light=0.9, second=0.6, seed=seed, tells=True)
            if not apart:
                real = text.planner._learn_rows
                text.planner._learn_rows = lambda plan, *given, real=real, **more: real(  # type: ignore[method-assign]
                    replace(plan, option=Option.PLAIN), *given, **more
                )
            text.steps(1500)
            found.append((text.share("whole", 1000), sum(text.tokens[-1000:]) / sum(text.seconds[-1000:])))
        return tuple(np.mean(found, axis=0))

    (share, rate), (more, slower) = attained(apart=True), attained(apart=False)
    assert share < more - 0.15
    assert rate > 1.04 * slower


def test_a_light_parts_steps_bring_the_targets_weights_back_as_plain_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes after a drafter's are slow, whoever guesses in them: the ones after those say what passes take."""
    planner = Planner(table(0.5), Acceptance(4), {"whole": "light"})
    told: list[float] = []
    monkeypatch.setattr(planner.corrections, "observe_guess", lambda seconds, predicted: told.append(seconds))
    whole, light = StepPlan([4], [2]), StepPlan([4], [0], Option.LIGHT)
    planner._learn(whole, StepObservation(1, [RowStep("row", "whole", 4, 2, 1)], 1.0, 1.3, 0.0))
    for seconds in (1.5, 1.4, 1.3, 1.2, 1.1):
        planner._learn(light, StepObservation(1, [RowStep("row", "whole", 4, 4, 2)], 0.0, seconds, 0.0))
    assert told == [1.3, 1.2, 1.1]
