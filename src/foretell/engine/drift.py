"""Whether acceptance falls against its own history, method by method. No learner is needed for it."""

import logging
from dataclasses import dataclass, field

from foretell.engine.event import StepEvent

logger = logging.getLogger(__name__)


@dataclass
class DriftWatch:
    """Whether acceptance falls against its own history, told without any learner: two running means of the share of first
    guesses that are kept, a slow one and a fast one.

    A fall is reported once, when the fast mean lies ``fall`` below the slow one after ``warm`` steps that guessed; then
    again only after it has recovered half of it. With a steady acceptance a the fast mean's standard deviation is about
    sqrt(a (1 - a) / (2 * fast)): 0.025 at most for 200 steps, so a fall of .1 is four of them.
    """

    fast: float = 200.0  # steps
    slow: float = 2000.0
    fall: float = 0.1
    warm: int = 400
    _seen: int = 0
    _quick: float = 0.0
    _steady: float = 0.0
    _told: bool = False
    num_drifts: int = field(default=0)

    @property
    def quick(self) -> float | None:
        """Share of first guesses kept, over the last steps; None before any."""
        return self._quick if self._seen else None

    @property
    def steady(self) -> float | None:
        """The same over many more steps."""
        return self._steady if self._seen else None

    def add(self, kept: bool) -> bool:
        """One row of one step that guessed: whether its first guess was kept. True where a fall is to be reported now."""
        self._seen += 1
        value = float(kept)
        self._quick += (value - self._quick) / min(self._seen, self.fast)
        self._steady += (value - self._steady) / min(self._seen, self.slow)
        gap = self._steady - self._quick
        if self._told:
            self._told = gap > self.fall / 2
            return False
        if self._seen < self.warm or gap < self.fall:
            return False
        self._told = True
        self.num_drifts += 1
        return True


class Drifts:
    """An observer with a watch for each method, which tells the log of every fall."""

    def __init__(self) -> None:
        self._watches: dict[str, DriftWatch] = {}

    def __call__(self, event: StepEvent) -> None:
        """Take the first guesses of a step's rows."""
        for row in event.rows:
            if row.error is not None or not row.steps or not row.steps[-1][0]:
                continue
            watch = self._watches.get(row.draft_name)
            if watch is None:
                watch = self._watches[row.draft_name] = DriftWatch()
            if watch.add(row.steps[-1][1] > 0):
                logger.warning(
                    "acceptance of %s fell: of the last first guesses %.2f were kept, and %.2f before",
                    row.draft_name, watch.quick, watch.steady,
                )  # fmt: skip

    def num_drifts(self) -> dict[str, int]:
        """Falls so far, by method. From any thread."""
        return {name: watch.num_drifts for name, watch in list(self._watches.items())}

    def recent_acceptance(self) -> dict[str, float | None]:
        """Share of the last first guesses that were kept, by method. From any thread."""
        return {name: watch.quick for name, watch in list(self._watches.items())}
