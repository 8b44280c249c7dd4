"""What guesses of several rows would bring."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from foretell.planner.acceptance import Array, Curves
from foretell.planner.allocation import Allocation, Problem, price, search
from foretell.planner.budget import Trial
from foretell.planner.plan import Option

MANY = 16  # rows of which four are tried together, too


class Offer(Protocol):
    """What the guesses of some rows, by one ``Option``, would bring and cost."""

    @property
    def is_blind(self) -> bool:
        """A long text would be read for guesses of which nothing is known: no more than a trial, whatever is expected."""

    def best(self) -> Allocation | None:
        """The depths of most tokens a second; None where no row may guess."""

    def hoped(self, doubt: float) -> Allocation | None:
        """The same by what is still possible. doubt: standard deviation of the log of what guessing passes take."""

    def trials(self, hope: Allocation, rate: float, goes_on: Callable[[Sequence[str]], bool]) -> Iterator[Trial]:
        """Guesses of one row or a few, where none guesses; rate: tokens a second without. goes_on: see ``Budget``."""

    def goes_on(self, goes_on: Callable[[Sequence[str]], bool]) -> bool:
        """Whether a row's text was read for a trial before."""

    def idle(self, expected: Allocation) -> Trial | None:
        """A guess by the most hopeful row that has none where others do, if it may pay."""


@dataclass(frozen=True)
class Several:
    """One allocation to make, and the estimates it rests on, row by row."""

    problem: Problem
    curves: Curves
    request_ids: Sequence[str]
    steps: Array  # [B] over which reading what a drafter lags behind is written off
    is_blind: bool
    option: Option = Option.WHOLE

    def best(self) -> Allocation | None:
        """See ``Offer``."""
        return search(self.problem)

    def _optimistic(self) -> Array:
        kept = self.problem.kept
        hopes: Array = np.where(kept > 0.0, np.maximum(self.curves.optimistic[:, : kept.shape[1]], kept), 0.0)
        return hopes

    def hoped(self, doubt: float) -> Allocation | None:
        """See ``Offer``."""
        factor = self.problem.guess_factor * math.exp(-doubt)
        return search(replace(self.problem, kept=self._optimistic(), guess_factor=factor))

    def goes_on(self, goes_on: Callable[[Sequence[str]], bool]) -> bool:
        """See ``Offer``."""
        entry = self.problem.entry * self.steps <= self.problem.plain
        return any(near and goes_on((name,)) for near, name in zip(entry.tolist(), self.request_ids, strict=True))

    def trials(self, hope: Allocation, rate: float, goes_on: Callable[[Sequence[str]], bool]) -> Iterator[Trial]:
        """See ``Offer``."""
        problem = replace(self.problem, entry=self.problem.entry * self.steps)  # a failed trial has read it all in vain
        order = np.argsort(-self._optimistic()[:, 0], kind="stable")
        read = np.array([goes_on((name,)) for name in self.request_ids])
        if (read & (problem.entry <= problem.plain)).any():
            order = order[np.argsort(~read[order], kind="stable")]  # those that a trial has read first
        allowed = (problem.kept > 0.0).sum(axis=1)
        for count in (1, 4) if problem.batch >= MANY else (1,):
            tried = order[:count]
            for cap in sorted({1, 2, max(hope.caps)}):
                caps = np.zeros(problem.batch, dtype=np.int64)
                caps[tried] = np.minimum(cap, allowed[tried])
                choice = price(problem, caps.tolist())
                loss = choice.seconds - choice.tokens / rate
                learned = sum(1.0 + problem.kept[row, : caps[row] - 1].sum() for row in tried if caps[row])
                reading = float(problem.entry[caps > 0].sum())
                trying = tuple(self.request_ids[row] for row in tried if caps[row])
                value = float(learned) / max(loss, 0.02 * problem.plain)
                yield Trial(self.option, choice, loss, reading if reading > problem.plain else 0.0, trying, value)

    def idle(self, expected: Allocation) -> Trial | None:
        """See ``Offer``."""
        problem, caps = self.problem, np.array(expected.caps)
        idle = (caps == 0) & (problem.kept[:, 0] > 0.0)
        optimistic = np.where(idle, self.curves.optimistic[:, 0], 0.0)
        row = int(optimistic.argmax())
        if optimistic[row] <= 0.0:
            return None
        caps[row] = 1
        caps = np.array(problem.deepened(caps.tolist()))
        drafting = problem.draft[problem.method[row], 0, min(int((caps > 0).sum()), len(caps))]
        if optimistic[row] / expected.rate <= drafting:
            return None  # its drafting alone costs more than the token is worth
        choice = price(problem, caps.tolist())
        gain = choice.tokens - problem.kept[row, 0] + optimistic[row]
        if gain / choice.seconds <= expected.rate:
            return None
        return Trial(self.option, choice, choice.seconds - choice.tokens / expected.rate)
