"""Return memory that was freed but is kept by the C library to the system, while nothing is being decoded.

glibc returns only the end of a heap by itself, never pages before a block in use. Long prompts and many connections
leave hundreds of MiB there. ``malloc_trim`` returns whole free pages between blocks, in milliseconds.
"""

import gc
from collections.abc import Callable
from time import monotonic

import torch

from foretell.core.platform import own_function

IDLE_S = 1.0
"""Seconds without work after which memory is returned."""
BUSY_S = 60.0
"""Seconds between two calls while work goes on without a pause."""


def trim_heap() -> bool:
    """Return all free pages of the C library's heaps to the system. False where ``malloc_trim`` does not exist."""
    function = own_function("malloc_trim")
    return function is not None and bool(function(0))


def collect() -> None:
    """Give back what a model that was closed has left, circles of objects too, also of those that were frozen: a command
    freezes what its start has made."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
    torch.cuda.empty_cache()  # where a device is in use
    trim_heap()


class HeapKeeper:
    """Decides when to trim. Not thread-safe."""

    def __init__(self, trim: Callable[[], object] = trim_heap, clock: Callable[[], float] = monotonic) -> None:
        """clock returns seconds."""
        self._trim, self._clock = trim, clock
        self._since = clock()  # when work was last begun or memory last given back
        self._has_worked = False

    def worked(self) -> None:
        """To be called after work was done."""
        now = self._clock()
        if not self._has_worked:
            self._has_worked, self._since = True, now
        elif now - self._since >= BUSY_S:
            self._since = now
            self._trim()

    def rested(self) -> None:
        """To be called when no work came for ``IDLE_S`` seconds."""
        if self._has_worked:
            self._has_worked = False
            self._trim()
