"""The allocation of one row, in plain Python: what ``Offers.of`` and ``allocation.search`` say of a batch of one.

After a pass of a small model each call of numpy takes as long as all of this, and a plan of a row that has just come is
never written off over many steps.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Single:
    """One allocation to make: see ``Problem`` and ``Curves``. Lists are by depth - 1."""

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

    def best(self, kept: Sequence[float], *, doubt: float = 1.0) -> tuple[int, float, float] | None:
        """(depth, tokens, seconds) of most tokens a second, or of the deepest where ``is_weighed``; None where no depth may
        be kept."""
        depth, most = 0, (0.0, 1.0)
        for level, (price, one) in enumerate(
            zip(self.prices(kept, entry=self.entry, doubt=doubt), kept, strict=True), 1
        ):
            if one <= 0.0:
                break
            if self.is_weighed or not depth or price[0] * most[1] > most[0] * price[1]:
                depth, most = level, price
        return (depth, *most) if depth else None
