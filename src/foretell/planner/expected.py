"""Guesses of what logits processors expect (``RowView.expected``): of nearly certain tokens, which methods follow for
nothing. They are weighed by themselves, step by step, where nobody else would guess."""

from collections.abc import Sequence
from dataclasses import replace
from math import log

from foretell.planner.observations import RowStep, RowView, StepObservation
from foretell.planner.offers import Offers
from foretell.planner.plan import Option, StepPlan

FIRST_RATE, MEMORY = 0.9, 0.01
"""Share of such guesses that are kept, before any was seen; and what each counts in its mean."""
LEAST_GAIN = 1.05
LIKELY, MOST_UNPLANNED = 0.3, 4
"""While costs are not known: the chance to be kept of the deepest guess; the rows of a batch that guesses."""
LOOKED_UP, LEAST_CHANCE = 15, 0.5
"""... how deep a text that is held to a grammar may guess what is looked up, as long as that is so likely to be kept: calls
repeat values of earlier ones."""
SOME = 8
"""Tokens that a grammar often leaves no choice about, one after the other: a key and the marks around it."""


def guessing(plan: StepPlan, rows: Sequence[RowView], most: int, looked_up: int = 0) -> StepPlan:
    """A plan in which nobody guesses, but that rows guess what is expected of them, at most so deep, and go on with what is
    looked up where all of that was taken, to a depth of looked_up."""
    counts = tuple(min(row.expected or 0, most) for row in rows)
    pairs = list(zip(rows, counts, strict=True))
    depths = [max(count, looked_up) if row.expected == count else count for row, count in pairs]
    caps = [max(0, min(row.max_depth, row.depth_limit, depth)) for row, depth in zip(rows, depths, strict=True)]
    least = LEAST_CHANCE if looked_up else plan.least
    made = replace(plan, caps=caps, paid=[0] * len(rows), option=Option.LIGHT, least=least, expected=counts)
    return made if any(caps) else plan


class Expected:
    """How many of them are kept, and the plans in which they pay."""

    def __init__(self) -> None:
        self.rate = FIRST_RATE

    def can_pay(self, batch: int, length: float, offers: Offers | None) -> bool:
        """Whether it is worth while to ask what grammars expect: whether a row's line of some tokens would pay. length: of
        the rows' texts, mean; offers: None: costs are not known."""
        if offers is None:
            return batch <= MOST_UNPLANNED
        steps = [RowStep("", "", SOME, SOME, 0, length=int(length))]
        seconds = offers.pass_seconds(StepObservation(batch, steps, 0.0, 0.0, 0.0, length)) * offers.corrections.guess
        return (batch + self._kept(SOME)) / batch * offers.plain(batch, length) > LEAST_GAIN * seconds

    def _kept(self, count: int) -> float:
        return self.rate * (1 - self.rate**count) / (1 - self.rate)

    def plan(self, plan: StepPlan, rows: Sequence[RowView], offers: Offers) -> StepPlan:
        """The plan, in which nobody guesses; or one in which rows guess what is expected, as deep as it pays most."""
        batch, length = len(rows), sum(row.length for row in rows) / len(rows)
        plain, most = offers.plain(batch, length), max(row.expected or 0 for row in rows)
        best, highest = plan, LEAST_GAIN
        while most:
            made = guessing(plan, rows, most)
            caps = list(zip(rows, made.caps, strict=True))
            steps = [RowStep(row.request_id, row.method, cap, cap, 0, length=row.length) for row, cap in caps]
            kept = sum(map(self._kept, made.caps))
            seconds = offers.pass_seconds(StepObservation(batch, steps, 0.0, 0.0, 0.0, length))
            gain = (batch + kept) / batch * plain / (seconds * offers.corrections.guess)
            if gain > highest:
                best, highest = made, gain
            most //= 2
        return best

    def unplanned(self, plan: StepPlan, rows: Sequence[RowView]) -> StepPlan:
        """The same while costs are not known: as deep as guesses are likely to be kept, which seldom costs more than it
        brings."""
        return guessing(plan, rows, int(log(LIKELY) / log(self.rate)), LOOKED_UP)

    def learn(self, counts: Sequence[int], rows: Sequence[RowStep]) -> int:
        """Of a step of such a plan, ``StepPlan.expected`` of which are counts; returns how many guesses were kept."""
        for count, row in zip(counts, rows, strict=False):  # no rows: nobody guessed
            for level in range(min(row.drafted, row.accepted + 1, count)):
                self.rate += MEMORY * ((level < row.accepted) - self.rate)
        self.rate = min(max(self.rate, MEMORY), 1.0 - MEMORY)
        return sum(row.accepted for row in rows)
