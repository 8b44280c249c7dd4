"""How often a looked-up guess is kept, by how much of the text before it was found: what says whether it pays a node."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

FIRST = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Before anything is seen: of greedy answers to questions behind documents (docs/LOG.md)."""
ENDS = (1, 2, 3, 4, 6, 9, 15)
"""Lengths of matches, in tokens: those above one of these, up to the next, count as alike."""
PRIOR, MEMORY = 6.0, 256.0
"""Observations that a first value counts as, and after which older ones fade."""


@dataclass
class Mean:
    """A mean that begins at a guess and forgets."""

    value: float
    weight: float = PRIOR

    def add(self, value: float) -> None:
        """One observation."""
        self.value += (value - self.value) / (self.weight + 1.0)
        self.weight = min(self.weight + 1.0, MEMORY)


class Chances:
    """Means by length of match. A guess behind kept ones has a longer match before it: a token more for each."""

    def __init__(self) -> None:
        self.means = [Mean(rate) for rate in FIRST]

    def _of(self, match: int) -> Mean:
        return self.means[bisect_left(ENDS, match)]

    def depth(self, match: int, most: int, least: float) -> int:
        """How many guesses in a line, at most ``most``, are kept with a chance of at least ``least``. match: tokens of the
        text before them that were found."""
        chance = 1.0
        for level in range(most):
            chance *= self._of(match + level).value
            if chance < least:
                return level
        return most

    def observe(self, match: int, line: Sequence[int], emitted: Sequence[int]) -> None:
        """A line of guesses behind such a match, and the tokens that came instead: it is known of each guess behind right
        ones, as far as tokens came."""
        for level, (guess, token) in enumerate(zip(line, emitted, strict=False)):
            self._of(match + level).add(float(guess == token))
            if guess != token:
                return
