"""When the trainer process may compute: always while nothing is decoded, for a small share of the time while all cores are.

The scheduler's idle priority does not do. A core that decodes is idle for moments, between two passes and in the parts of a
step that take one core; a process that takes them has the caches and the memory bus when the next pass begins, and costs
those who are served about as much as it computes: with all of such moments a tenth (docs/learn.md).
"""

from collections.abc import Callable
from time import monotonic

from foretell.core.platform import num_cores
from foretell.engine.allowance import Allowance

POLL_S = 0.05
"""How long a process that may not compute waits before it asks again."""
MOST_S = 0.1
"""Seconds of work that may be saved up."""


class Pace:
    """Credit of processor time, earned while the service decodes. Not thread-safe."""

    def __init__(self, share: float, is_busy: Callable[[], bool], *, clock: Callable[[], float] = monotonic) -> None:
        """share: processor seconds in a second of decoding, of one core; 1 or more: no limit. is_busy: whether the service
        decodes, on every core that there is."""
        self._is_busy, self._clock = is_busy, clock
        self._allowance = None if share >= 1 else Allowance(share, most=MOST_S)
        self._asked = clock()

    def may_compute(self) -> bool:
        """Whether a piece of work may begin now."""
        if self._allowance is None:
            return True
        now = self._clock()
        passed, self._asked = now - self._asked, now
        if not self._is_busy():
            return True
        self._allowance.earn(passed)
        return self._allowance.covers(0.0)

    def computed(self, seconds: float) -> None:
        """A piece took so much of the processor: to be paid where the service decodes."""
        if self._allowance is not None and self._is_busy():
            self._allowance.charge(seconds)


def spare_cores(threads: int) -> int:
    """Cores of this process that ``threads`` threads leave free."""
    return num_cores() - threads
