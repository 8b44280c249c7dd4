"""Drafters that read a request's text before their first guess: short runs try them too, and lose little by a poor one."""

import random

import pytest

from foretell.costs.table import CostTable
from foretell.planner.acceptance import Acceptance
from foretell.planner.budget import PROMISE
from foretell.planner.observations import RowStep, RowView, StepObservation
from foretell.planner.plan import Option
from foretell.planner.planner import Planner

DEPTH, LENGTH, PROMPT = 6, 64, 80
GUESS, NODE, READ, LOOKUP = 0.15, 0.06, 0.05, 0.005  # in plain steps: reading a prompt takes four
SURE = (0.95, 0.2)  # of steps, half each: the chance that a guess of a line is kept; unsure lines stop after two


def table() -> CostTable:
    depths = (1, 2, 4, DEPTH)
    verify = {(1, 1 + depth): 1.0 + NODE * depth for depth in (0, *depths)}
    draft = {"whole": {(1, d): GUESS * d for d in depths}, "light": {(1, d): LOOKUP for d in depths}}
    return CostTable(verify, draft, {"whole": READ, "light": 0.0})


class Requests:
    """Requests of 64 tokens by a method of which a lookup finds a guess in ``found`` of the steps, whose tokens are kept
    with a chance of 0.6; in the others a draft model makes a line of guesses, kept with the chances ``sure``."""

    def __init__(self, sure: tuple[float, float], *, found: float, seed: int = 0) -> None:
        self.planner = Planner(table(), Acceptance(DEPTH, weighed=("whole", "light")), {"whole": "light"})
        self.sure, self.found, self.rng = sure, found, random.Random(seed)
        self.kinds: list[str] = []  # of each request's last step
        self.seconds: list[float] = []  # of each request
        self.least = 1.0  # tokens a second since the start, at the end of any request

    def serve(self, count: int) -> "Requests":
        for number in range(count):
            done = unread = 0
            seconds, kind = 0.0, ""
            while done < LENGTH:
                (plan,) = [
                    self.planner.plan([RowView(str(number), "whole", DEPTH, LENGTH - done, PROMPT + done - unread)])
                ]
                took, kept, kind, read = self.step(str(number), plan, LENGTH - done, PROMPT + done - unread)
                unread = PROMPT + done if read else unread
                done, seconds = done + 1 + kept, seconds + took
            self.planner.forget(str(number))
            self.kinds.append(kind)
            self.seconds.append(seconds)
            self.least = min(self.least, LENGTH * len(self.seconds) / sum(self.seconds))
        return self

    def line(self, limit: int) -> tuple[int, int]:
        """(made, kept) guesses of the draft model."""
        rate = self.sure[self.rng.random() < 0.5]
        made = min(limit, DEPTH if rate == self.sure[0] else 2)
        return made, next((at for at in range(made) if self.rng.random() >= rate), made)

    def step(self, name: str, plan, room: int, unread: int) -> tuple[float, int, str, bool]:  # type: ignore[no-untyped-def]
        (cap,), (paid,) = plan.caps, plan.paid or plan.caps
        finds = self.rng.random() < self.found
        looked = min(cap, 3, room - 1) if finds else 0
        right = next((at for at in range(looked) if self.rng.random() >= 0.6), looked)
        own = not looked and min(paid, room - 1) > 0
        made, kept = self.line(min(paid, room - 1)) if own else (looked, right)
        drafting = GUESS * made + READ * (unread - 1) if own else LOOKUP * (cap > 0)
        known = (cap, looked, right) if cap else None
        row = RowStep(name, "whole", cap, made, kept, light=known, by_light=finds if cap else None)
        step = StepObservation(1, [row] if cap else [], drafting, 1.0 + NODE * made, 0.0)
        self.planner.observe(plan, step)
        return step.seconds, kept, "own" if own else "light" if cap else "plain", own

    def speed(self, first: int = 0) -> float:
        return LENGTH * len(self.seconds[first:]) / sum(self.seconds[first:])


def by_lookups_alone(sure: tuple[float, float], *, found: float, seed: int = 0) -> Requests:
    """The same requests where the draft model is never asked."""
    run = Requests(sure, found=found, seed=seed)
    real = run.planner._offers_of
    run.planner._offers_of = lambda *given: {  # type: ignore[method-assign]
        option: offer for option, offer in real(*given).items() if option != Option.WHOLE
    }
    return run.serve(30)


@pytest.mark.parametrize(("found", "gain"), [(0.4, 1.12), (0.0, 1.4)])
def test_a_draft_that_pays_is_found_within_a_few_short_requests(found: float, gain: float) -> None:
    """A trial costs a tenth of a request: the share of time that trials have would pay it after a hundred."""
    for seed in range(3):
        run = Requests(SURE, found=found, seed=seed).serve(30)
        assert run.kinds[:8].count("own") > 0
        assert run.speed(8) > gain * by_lookups_alone(SURE, found=found, seed=seed).speed(8)
        assert run.least > 1.0 - PROMISE


@pytest.mark.parametrize("found", [0.4, 0.0])
@pytest.mark.parametrize("sure", [(0.0, 0.0), (0.4, 0.1)])
def test_a_poor_draft_is_left_alone_again(sure: tuple[float, float], found: float) -> None:
    """With lookups that pay, and where nothing does."""
    run = Requests(sure, found=found).serve(30)
    assert run.planner.acceptance.knows("whole"), "it was tried"
    assert run.speed() > 0.98 * by_lookups_alone(sure, found=found).speed()
    assert run.least > 1.0 - 1.5 * PROMISE


def test_a_trial_in_which_a_lookup_stood_in_costs_nothing() -> None:
    """Nothing was read, so that the next one can be paid."""
    planner = Requests(SURE, found=0.0).planner
    charged = before = 0.0
    for _ in range(2000):
        before, plan = planner._budget.seconds, planner.plan([RowView("row", "whole", DEPTH, LENGTH, PROMPT)])
        (cap,) = plan.caps
        charged = 0.0 if plan.option != Option.WHOLE else plan.charged or 0.0
        found = 2 if charged else 0
        row = RowStep("row", "whole", cap, found, found, light=(cap, found, found), by_light=found > 0)
        planner.observe(plan, StepObservation(1, [row] if cap else [], LOOKUP, 1.0 + NODE * found, 0.0))
        if charged:
            break
    assert charged > 1.0
    assert planner._budget.seconds < before + 0.1
