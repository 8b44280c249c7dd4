"""Memory that was freed and that the C library keeps: given back to the system while nothing is being decoded.

glibc returns the end of a heap by itself, and nothing that lies before a block still in use. Passes over long prompts and
many connections leave hundreds of MiB so; ``malloc_trim`` returns the whole pages between blocks, in milliseconds.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from time import monotonic

IDLE_S = 1.0
"""So long without work, and the memory is given back: a pause between two requests is no end of work."""
BUSY_S = 60.0
"""Under work that does not end it is done so often."""


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's function; None with another C library."""
    try:
        function: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return function


def trim_heap() -> bool:
    """Give all free pages of the C library's heaps back; False where that is not possible."""
    function = _malloc_trim()
    return function is not None and bool(function(0))


class HeapKeeper:
    """Decides when. For one thread."""

    def __init__(self, trim: Callable[[], object] = trim_heap, clock: Callable[[], float] = monotonic) -> None:
        """clock tells seconds."""
        self._trim, self._clock = trim, clock
        self._since = clock()  # when work was last begun or memory last given back
        self._has_worked = False

    def worked(self) -> None:
        """Work was done."""
        now = self._clock()
        if not self._has_worked:
            self._has_worked, self._since = True, now
        elif now - self._since >= BUSY_S:
            self._since = now
            self._trim()

    def rested(self) -> None:
        """No work came for ``IDLE_S``."""
        if self._has_worked:
            self._has_worked = False
            self._trim()
