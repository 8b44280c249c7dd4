"""Whether acceptance falls against its own history, method by method. No learner is needed for it."""

import logging
import math
from dataclasses import dataclass, field

from foretell.engine.event import StepEvent
from foretell.engine.request.row import Row

logger = logging.getLogger(__name__)

PIECE = 64
"""Steps of a text that are one observation: a long text is not waited for."""


def ends_piece(row: Row) -> bool:
    """Whether a piece of the row's text ends with its last step."""
    count = len(row.steps)
    return bool(count) and (count % PIECE == 0 or row.finish_reason is not None)


def piece_of(row: Row) -> tuple[int, int] | None:
    """After a step of a row: steps that guessed and first guesses kept, of the piece of the text that ends with it; None
    where no piece does."""
    if not ends_piece(row):
        return None
    piece = row.steps[(len(row.steps) - 1) // PIECE * PIECE :]
    return sum(drafted > 0 for drafted, _ in piece), sum(drafted > 0 < accepted for drafted, accepted in piece)


@dataclass
class DriftWatch:
    """Two running means of the share of first guesses kept, a slow one and a fast one; a fall is reported once, and
    again only after half of it has been made up.

    Guesses of one text succeed and fail together (code beside noise), so what counts is how much *texts* differ: the
    variance of a piece's sum is estimated over the slow window, and a fall is reported where the fast mean lies at least
    ``fall`` and ``sigmas`` of its standard errors below the slow one. A mean that forgets with a memory of n guesses
    crosses z of its standard errors about once in n / (z phi(z)) guesses, phi the normal density: for the defaults once in
    fourteen million, were it normal. (Counting guesses as if they were independent told some thirty falls in half an hour
    of the same mixed traffic.)
    """

    fast: float = 1000.0  # guesses
    slow: float = 10_000.0
    fall: float = 0.1
    sigmas: float = 4.5
    warm: int = 2000
    _seen: int = 0
    _quick: float = 0.0
    _steady: float = 0.0
    _variance: float = 0.0  # of a piece's sum around its mean, per guess
    _told: bool = False
    num_drifts: int = field(default=0)

    @property
    def quick(self) -> float | None:
        """Share of first guesses kept, over the last guesses; None before any."""
        return self._quick if self._seen else None

    @property
    def steady(self) -> float | None:
        """The same over many more guesses."""
        return self._steady if self._seen else None

    @property
    def error(self) -> float:
        """Standard error of ``quick`` where acceptance is what it was."""
        return math.sqrt(self._variance / (2 * self.fast))

    def add(self, made: int, kept: int) -> bool:
        """A piece of a text: steps that guessed, and first guesses kept. True where a fall is to be reported now."""
        if not made:
            return False
        self._seen += made
        short, long = (1 - math.exp(-made / min(self._seen, window)) for window in (self.fast, self.slow))
        if self._seen == made:
            short = long = 1.0
        self._quick += (kept / made - self._quick) * short
        self._steady += (kept / made - self._steady) * long
        # Around the steady mean, but not more than it takes to see a fall: what fell must not excuse itself.
        self._variance += ((kept - self._steady * made) ** 2 / made - self._variance) * long
        gap = self._steady - self._quick
        if self._told:
            self._told = gap > self.fall / 2
            return False
        if self._seen < self.warm or gap < max(self.fall, self.sigmas * self.error):
            return False
        self._told = True
        self.num_drifts += 1
        return True


class Drifts:
    """An observer with a watch for each method, which tells the log of every fall."""

    def __init__(self) -> None:
        self._watches: dict[str, DriftWatch] = {}

    def __call__(self, event: StepEvent) -> None:
        """Take the pieces of texts that end with a step."""
        for row in event.rows:
            piece = None if row.error is not None else piece_of(row)
            if piece is None or not piece[0]:
                continue
            watch = self._watches.get(row.method)
            if watch is None:
                watch = self._watches[row.method] = DriftWatch()
            if watch.add(*piece):
                logger.warning(
                    "acceptance of %s fell: of the last first guesses %.2f were kept, and %.2f before; 'foretell doctor' "
                    "with prompts of now says what fits them",
                    row.method, watch.quick, watch.steady,
                )  # fmt: skip

    def num_drifts(self) -> dict[str, int]:
        """Falls so far, by method. From any thread."""
        return {name: watch.num_drifts for name, watch in list(self._watches.items())}

    def recent_acceptance(self) -> dict[str, float | None]:
        """Share of the last first guesses that were kept, by method. From any thread."""
        return {name: watch.quick for name, watch in list(self._watches.items())}
