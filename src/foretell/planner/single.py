"""What guesses of one row would bring, in plain Python: what ``several.py`` says of a batch of one.

After a pass of a small model each call of numpy takes as long as all of this, and a plan of a row that has just come is
never written off over many steps.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from foretell.planner.allocation import Allocation
from foretell.planner.budget import Trial
from foretell.planner.plan import Option


@dataclass(slots=True)
class Single:
    """One allocation to make: see ``Problem`` and ``Curves``. Lists are by depth - 1."""

    request_id: str
    kept: list[float]
    drafted: list[float]
    optimistic: list[float]
    nodes: list[float]
    draft: list[float]  # seconds that each depth adds ...
    draft_factor: float  # ... times this
    entry: float
    first: float  # seconds that its text adds to a proposal ...
    level: float  # ... and to each depth of it
    node: float  # ... and to the pass for each of its nodes
    points: tuple[list[float], list[float]]  # (nodes beyond the root, seconds) of the pass
    plain: float
    guess_factor: float
    is_weighed: bool = False  # its guesses cost the same however deep: it goes as deep as it may
    steps: float = 1.0  # over which ``entry`` is written off
    is_blind: bool = False  # see ``Offer``
    option: Option = Option.WHOLE

    def prices(self, kept: Sequence[float], *, entry: float, doubt: float = 1.0) -> list[tuple[float, float]]:
        """(tokens, seconds) of each depth, where so much is kept; doubt: a factor of guessing passes."""
        xs, ys = self.points
        last, plain, factor = len(xs) - 1, self.plain, self.guess_factor * doubt
        tokens, nodes, seconds = 1.0, 0.0, entry + self.first
        some = min(max(self.drafted[0], 1e-9), 1.0)  # P(anything is drafted)
        found = []
        for one, more, cost in zip(kept, self.nodes, self.draft, strict=False):
            tokens += one
            nodes += more
            seconds += cost * self.draft_factor + self.level
            width = nodes / some
            after = min(max(bisect_left(xs, width), 1), last)
            low = xs[after - 1]
            passed = ys[after - 1] + (width - low) / (xs[after] - low) * (ys[after] - ys[after - 1])
            found.append((tokens, seconds + (1.0 - some) * plain + some * (passed + width * self.node) * factor))
        return found

    def best(self, kept: Sequence[float] | None = None, *, doubt: float = 1.0) -> Allocation | None:
        """See ``Offer``; where so much is kept. The deepest where it ``is_weighed``."""
        kept = self.kept if kept is None else kept
        depth, most = 0, (0.0, 1.0)
        for level, (price, one) in enumerate(
            zip(self.prices(kept, entry=self.entry, doubt=doubt), kept, strict=True), 1
        ):
            if one <= 0.0:
                break
            if self.is_weighed or not depth or price[0] * most[1] > most[0] * price[1]:
                depth, most = level, price
        return Allocation([depth], *most) if depth else None

    def hoped(self, doubt: float) -> Allocation | None:
        """See ``Offer``."""
        hopes = [max(hope, one) if one > 0.0 else 0.0 for hope, one in zip(self.optimistic, self.kept, strict=True)]
        return self.best(hopes, doubt=math.exp(-doubt))

    def trials(self, hope: Allocation, rate: float, _: Callable[[Sequence[str]], bool]) -> Iterator[Trial]:
        """See ``Offer``."""
        kept, entry = self.kept, self.entry * self.steps  # a failed trial has read the whole text in vain
        prices = self.prices(kept, entry=entry)
        reading, allowed = entry if entry > self.plain else 0.0, sum(one > 0.0 for one in kept)
        for cap in sorted({1, 2, *hope.caps}):
            if depth := min(cap, allowed):
                tokens, seconds = prices[depth - 1]
                loss = seconds - tokens / rate
                value = (1.0 + sum(kept[: depth - 1])) / max(loss, 0.02 * self.plain)
                yield Trial(self.option, Allocation([depth], tokens, seconds), loss, reading, (self.request_id,), value)

    def goes_on(self, goes_on: Callable[[Sequence[str]], bool]) -> bool:
        """See ``Offer``."""
        return self.entry * self.steps <= self.plain and goes_on((self.request_id,))

    def idle(self, expected: Allocation) -> Trial | None:
        """See ``Offer``: the row guesses."""
        return None
