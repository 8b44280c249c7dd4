"""Costs from the steps of a run, in units of plain steps: medians, so that a few slow steps change nothing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Protocol

import numpy as np

from foretell.costs.cost_model import speedup, step_cost
from foretell.costs.table import isotonic

LEAST_SECONDS = 1e-9  # replaces a reading of 0 by a coarse clock
LEAST_STEPS = 3  # of one number of guesses; fewer say nothing, unless no number has more


class StepTiming(Protocol):
    """Where the time of one step went (host clock), and how many guesses it made."""

    @property
    def seconds_draft(self) -> float:
        """Of proposing."""

    @property
    def seconds_target(self) -> float:
        """Of the target's pass."""

    @property
    def seconds_rest(self) -> float:
        """Of distributions, verification, commit and bookkeeping."""

    @property
    def num_draft_tokens(self) -> int:
        """Guesses."""


def _seconds(step: StepTiming) -> float:
    return step.seconds_draft + step.seconds_target + step.seconds_rest


def by_guesses(steps: Iterable[StepTiming]) -> dict[int, list[StepTiming]]:
    """Steps by how many guesses they made, ascending: each number has passes of its own width."""
    groups: dict[int, list[StepTiming]] = {}
    for step in steps:
        groups.setdefault(step.num_draft_tokens, []).append(step)
    return dict(sorted(groups.items()))


def _line(known: Mapping[int, float], count: float) -> float:
    xs = sorted(known)
    ys = list(accumulate((known[x] for x in xs), max))
    if count > xs[-1]:
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) if len(xs) > 1 else 0.0
        return ys[-1] + (count - xs[-1]) * slope
    return float(np.interp(count, xs, ys))


@dataclass(frozen=True)
class StepCosts:
    """Medians over steps. Keys are guesses a step; on an accelerator, where the host clock cannot separate the parts of
    a step, draft and verify are empty."""

    seconds_plain_pass: float
    seconds_plain_step: float
    draft: dict[int, float]  # c_total: drafting so many guesses, in plain passes
    verify: dict[int, float]  # v: the target's pass over them and the root, in plain passes
    step: dict[int, float]  # the whole step, distributions and bookkeeping too, in whole plain steps
    # The same without drafting, never falling and a plain step's 1 at least; empty where ``draft`` is.
    undrafted: dict[int, float] = field(default_factory=dict)

    def at(self, count: float) -> float:
        """A step with so many guesses, in whole plain steps: linear between the numbers that were timed, and beyond them
        with the slope of the last two."""
        return _line({0: 1.0, **self.step}, count)

    def pass_at(self, count: float) -> float:
        """The same without drafting."""
        return _line({**self.undrafted, 0: 1.0}, count)

    @property
    def per_guess(self) -> float | None:
        """c: one drafting step in plain passes, at the most guesses that were made."""
        most = max((count for count in self.draft if count), default=0)
        return self.draft[most] / most if most else None


def step_costs(plain: Sequence[StepTiming], steps: Sequence[StepTiming], *, split: bool) -> StepCosts:
    """Costs from steps of plain decoding and of a method. split: whether the clock can separate the parts of a step."""
    unit = max(LEAST_SECONDS, median(step.seconds_target for step in plain))
    whole = max(LEAST_SECONDS, median(map(_seconds, plain)))
    by_count = by_guesses(steps)
    enough = min(LEAST_STEPS, max(map(len, by_count.values())))
    groups = {count: group for count, group in by_count.items() if len(group) >= enough}
    draft = {count: [step.seconds_draft for step in group] for count, group in groups.items()}
    target = {count: [step.seconds_target for step in group] for count, group in groups.items()}
    total = {count: list(map(_seconds, group)) for count, group in groups.items()}
    rest = {count: [step.seconds_target + step.seconds_rest for step in group] for count, group in groups.items()}

    def medians(seconds: Mapping[int, Sequence[float]], plain_seconds: float) -> dict[int, float]:
        return {count: max(LEAST_SECONDS, median(found)) / plain_seconds for count, found in seconds.items()}

    return StepCosts(
        seconds_plain_pass=unit,
        seconds_plain_step=whole,
        draft=medians(draft, unit) if split else {},
        verify=medians(target, unit) if split else {},
        step=medians(total, whole),
        undrafted=_rising(medians(rest, whole), {count: len(group) for count, group in groups.items()})
        if split
        else {},
    )


def _rising(costs: Mapping[int, float], steps: Mapping[int, int]) -> dict[int, float]:
    """The nearest ones that never fall, each number of guesses counting by its steps: a running maximum would raise what
    many steps say by what a few slow ones do."""
    line = iter(isotonic([cost for count, cost in costs.items() for _ in range(steps[count])]))
    return {count: max(1.0, [next(line) for _ in range(steps[count])][-1]) for count in costs}


@dataclass(frozen=True)
class MeanCosts:
    """What a step of a run costs on average, in plain passes of the target."""

    draft: float  # c: one guess, the drafter's bookkeeping included
    verify: float  # v: the target's pass of a step, averaged over how many guesses the steps made
    overhead: float  # distributions, verification, commit and bookkeeping of a step
    plain_overhead: float  # the same of a plain step

    def speedup(self, tokens_per_step: float, guesses_per_step: float, *, overhead: bool = False) -> float:
        """As the cost model expects it; the overheads of both sides are counted on request."""
        if not overhead:
            return speedup(tokens_per_step, step_cost(self.verify, guesses_per_step, self.draft))
        cost = step_cost(self.verify, guesses_per_step, self.draft, self.overhead)
        return speedup(tokens_per_step, cost, step_cost(1.0, overhead=self.plain_overhead))


def mean_costs(plain: Sequence[StepTiming], steps: Sequence[StepTiming]) -> tuple[float | None, MeanCosts | None]:
    """(seconds of the median plain pass, costs in units of it), from all steps of plain decoding and of a method.

    None where there are no steps, or the clock is too coarse.
    """
    unit = median(step.seconds_target for step in plain) if plain else None
    if not unit or not steps:
        return unit, None
    guesses = [step.seconds_draft / step.num_draft_tokens for step in steps if step.num_draft_tokens]
    # Steps differ in how many guesses they make (a lookup may find none): each number has its own median pass.
    verify = sum(
        median(step.seconds_target for step in group) * len(group) / len(steps) for group in by_guesses(steps).values()
    )
    return unit, MeanCosts(
        draft=median(guesses) / unit if guesses else 0.0,
        verify=verify / unit,
        overhead=median(step.seconds_rest for step in steps) / unit,
        plain_overhead=median(step.seconds_rest for step in plain) / unit,
    )
