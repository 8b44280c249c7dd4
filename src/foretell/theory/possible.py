"""How fast guesses could have been on the steps of a run, and what each part of a method costs of that.

Speeds are tokens a second over plain decoding's, from one record of steps: what they guessed and kept, what a pass over so
many guesses takes, and how fast they were. Each level makes one part more perfect than the one after it, on the same texts:

- *possible*: all guesses right, for nothing, in passes of the width that brings most;
- *candidates*: of what was proposed only the path that is kept, for nothing: the best choice among these proposals;
- *stopped*: the proposals as they were, each no deeper than it is kept, for the drafter's time of these guesses;
- *have*: as measured.

Losses are the differences between levels and add up to ``possible - have``. docs/planner.md has the formulas.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from foretell.theory.run_costs import StepTiming, step_costs

MOST_SCALE = 2.0
"""By which the steps' own prices may miss the time that was measured, either way: beyond it they explain nothing."""
NAN = math.nan
NO_PARTS = "the clock of this device cannot separate the parts of a step"


class RecordedStep(StepTiming, Protocol):
    """A step of a run, and what came of its guesses."""

    @property
    def num_accepted_tokens(self) -> int:
        """Guesses kept."""

    @property
    def num_beside_tokens(self) -> int:
        """Guesses beside the path that was kept, no deeper than it: 0 of a line."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """Steps that are alike."""

    nodes: float  # guesses of a step
    kept: float
    beside: float = 0.0  # see ``RecordedStep``
    draft: float = 0.0  # of proposing them, in plain steps
    count: float = 1.0  # such steps


@dataclass(frozen=True)
class Possible:
    """See the module's docstring. NaN: not known, and ``unknown`` says why."""

    have: float
    possible: float = NAN
    candidates: float = NAN
    stopped: float = NAN
    guesses: float = NAN  # what is lost by guesses that are wrong or were not made
    shape: float = NAN  # ... by guesses beside the path that is kept
    time: float = NAN  # ... by the drafter's time
    width: float = NAN  # ... by the target's passes over guesses deeper than what is kept
    unknown: str = ""

    @property
    def line(self) -> str:
        """For people."""
        have = "" if math.isnan(self.have) else f"you have {self.have:.2f}x"
        if self.unknown:
            return f"possible here: not known, {self.unknown}{have and f'; {have}'}"
        return (
            f"possible here {self.possible:.2f}x, {have}: the drafter's guesses cost {self.guesses:.2f}, its shape "
            f"{self.shape:.2f}, its time {self.time:.2f}, the width of passes {self.width:.2f}"
        )


def possible(
    steps: Iterable[Guesses],
    price: Callable[[float], float],
    have: float,
    *,
    tokens: float | None = None,
    widest: float | None = None,
) -> Possible:
    """Of steps that decoded at the speed ``have``. price: a step with so many guesses in plain steps, without proposing
    them; it never falls. tokens: that the steps wrote, where ends cut what was kept. widest: guesses up to which prices are
    known; None: those of the steps. Prices are scaled so that the steps take the time that was measured."""
    known, price = list(steps), cache(price)
    if not have > 0.0 or math.isinf(have):
        return Possible(NAN, unknown="the speed of plain decoding was not measured")
    if not widest and not any(step.nodes for step in known):
        return Possible(have, unknown="nothing was guessed")
    if not known or (widest is not None and widest < 1):
        return Possible(have, unknown="too few steps guessed to know what wider passes take")
    written = sum(step.count * (step.kept + 1) for step in known)
    written = written if tokens is None else min(tokens, written)
    drafting = sum(step.count * step.draft for step in known)

    def passes(guesses: Callable[[Guesses], float]) -> float:
        return sum(step.count * price(guesses(step)) for step in known)

    whole = passes(lambda step: step.nodes)
    scale = (written / have - drafting) / whole
    if not 1 / MOST_SCALE <= scale <= MOST_SCALE:
        return Possible(have, unknown="what its steps cost does not explain how long they took")
    right = sum(step.count * step.draft * (step.kept + step.beside) / step.nodes for step in known if step.nodes)
    level = scale * passes(lambda step: step.kept + step.beside)
    late, wide = drafting - right, scale * whole - level
    most = max(max(step.nodes for step in known) if widest is None else widest, max(step.kept for step in known))
    best = max(1.0, *((count + 1) / (scale * price(count)) for count in range(math.ceil(most) + 1)))
    candidates = written / (scale * passes(lambda step: step.kept))
    free, stopped = written / level, written / (level + right)
    lost = stopped - have
    share = late / (late + wide) if late + wide > 0.0 else 0.0
    late_time, late_width = max(0.0, lost) * share, max(0.0, lost) * (1.0 - share)
    wrong, shape = max(0.0, best - candidates), max(0.0, candidates - free)
    return Possible(have, best, candidates, stopped, wrong, shape, free - stopped + late_time, late_width)


def of_run(
    plain: Sequence[StepTiming], steps: Sequence[RecordedStep], have: float, *, tokens: int, seconds: float, split: bool
) -> Possible:
    """Of a run's steps, which wrote ``tokens`` in ``seconds``, and those of plain decoding. split: whether the clock can
    separate the parts of a step."""
    if not split:
        return Possible(have, unknown=NO_PARTS)
    if not plain or not steps or not tokens or not seconds * have > 0.0:
        return Possible(have, unknown="no steps were timed")
    costs, unit = step_costs(plain, steps, split=True), seconds * have / tokens  # of a plain step
    nodes = ((step.num_draft_tokens, step.num_accepted_tokens, step.num_beside_tokens) for step in steps)
    found = [Guesses(*one, step.seconds_draft / unit) for one, step in zip(nodes, steps, strict=True)]
    return possible(found, costs.pass_at, have, tokens=tokens, widest=max(costs.undrafted))
