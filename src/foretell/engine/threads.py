"""How many threads a loop's passes have: all that torch has, fewer while other processes have the cores.

The threads of a pass wait for each other a hundred times or more in it. Where another process has the core of one thread,
all wait: beside two processes on two cores, two threads are slower than one. Linux counts how long each thread was ready
and did not run (/proc/self/task/<thread>/schedstat); where there is no such file, the number of threads stays as it is.
"""

import logging
import threading
from collections.abc import Callable
from functools import cache
from time import perf_counter
from types import TracebackType

import torch

from foretell.core.platform import own_function, thread_times

logger = logging.getLogger(__name__)

WINDOW_S = 0.1
"""Between two readings."""
CROWDED = 0.4
"""Waiting of all threads together, as a part of the window, at which half of them are as fast."""
FREE = 0.1
"""The same at which more threads are tried."""
MOST_PAUSE_S = 5.0
"""Longest time between two such trials."""

Usage = dict[int, tuple[float, float]]
"""By thread: seconds that it ran, and seconds that it was ready and waited for a core."""


class ThreadLimit:
    """The context of each round of a loop: within it torch has as many threads as are worth it now. One loop at a time."""

    def __init__(
        self,
        *,
        read: Callable[[], Usage] = thread_times,
        clock: Callable[[], float] = perf_counter,
        own_thread: Callable[[], int] = threading.get_native_id,
    ) -> None:
        self._read, self._clock, self._own_thread = read, clock, own_thread
        self._count = self._most = 0  # threads now, of how many; 0: not known
        self._outside = 0  # torch's number outside this round, where it is another within
        self._usage: Usage = {}
        self._began = self._due = 0.0
        self._tries_more = False  # since the last window
        self._num_crowded = 0  # windows in a row
        self._pause_s, self._next_trial = WINDOW_S, 0.0

    def __enter__(self) -> None:
        now = self._clock()
        if now >= self._due:
            self._look(now)
        if self._count < self._most:
            self._outside = torch.get_num_threads()
            torch.set_num_threads(min(self._count, self._outside))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._outside:
            torch.set_num_threads(self._outside)
            self._outside = 0

    def _look(self, now: float) -> None:
        most = torch.get_num_threads()
        if most != self._most:  # the first round, or the user has set another number
            self._count = self._most = most
            self._usage = {}
        if most > 1:
            before, self._usage = self._usage, self._read()
            lost = self._lost(before, now - self._began)
            if lost is not None:
                self._choose(lost, now)
        self._began, self._due = now, now + WINDOW_S

    def _lost(self, before: Usage, seconds: float) -> float | None:
        """Waiting of the threads that share passes, because of other processes, as a part of the window; None where this
        loop did not work most of the time."""
        spent = {
            thread: (ran - before[thread][0], waited - before[thread][1])
            for thread, (ran, waited) in self._usage.items()
            if thread in before
        }
        own = spent.get(self._own_thread())
        if own is None or sum(own) < 0.5 * seconds:
            return None
        ranked = sorted(spent.values(), key=sum, reverse=True)
        waited = sum(waited for _, waited in ranked[: self._count])
        beside = sum(ran for ran, _ in ranked[self._count :])  # threads of this process: their time is no other's
        return (waited - beside) / seconds

    def _choose(self, lost: float, now: float) -> None:
        was, tried = self._count, self._tries_more
        self._tries_more = False
        self._num_crowded = self._num_crowded + 1 if lost > CROWDED else 0
        # One window alone is a process that came and went; long passes of prompts would go on with fewer threads.
        if self._count > 1 and (self._num_crowded > 1 or (tried and self._num_crowded)):
            self._num_crowded = 0
            self._count = (self._count + 1) // 2
            self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S) if tried else WINDOW_S
            self._next_trial = now + self._pause_s
            if not tried:
                logger.info(
                    "other processes have the cores: decoding goes on with %d of %d threads", self._count, self._most
                )
        elif tried:
            logger.info("decoding has %d of %d threads again", was, self._most)
        if lost < FREE and self._count < self._most and now >= self._next_trial:
            self._count, self._tries_more = min(2 * self._count, self._most), True


_OF_THREAD = threading.local()


def thread_limit() -> ThreadLimit:
    """The calling thread's, which outlives its loops."""
    if not hasattr(_OF_THREAD, "limit"):
        _OF_THREAD.limit = ThreadLimit()
    limit: ThreadLimit = _OF_THREAD.limit
    return limit


class Allowance:
    """A share of the serving time for work that is not decoding: earned as steps end, charged with what was measured.

    It may be overdrawn by one charge, after which nothing is covered until it is earned back. Not thread-safe.
    """

    def __init__(self, share: float, *, most: float = 0.25) -> None:
        """share: of the seconds of steps; most: seconds that it holds at most."""
        self.share, self.most = share, most
        self.credit = most / 10
        self.seconds = 0.0  # charged so far

    def earn(self, seconds: float) -> None:
        """A step took so long."""
        self.credit = min(self.most, self.credit + self.share * seconds)

    def covers(self, seconds: float) -> bool:
        """Whether work that takes this many seconds may begin; where ``most`` is less than that, whether it is full."""
        return self.credit >= min(seconds, self.most)

    def charge(self, seconds: float) -> None:
        """Work has taken so long."""
        self.credit -= seconds
        self.seconds += seconds


_SOFT = 1  # omp_pause_soft: everything but the threads themselves is kept


@cache
def _pause() -> Callable[[], object]:
    """libgomp's way to end the calling thread's pool; nothing where another runtime is loaded, or none."""
    if own_function("__kmpc_fork_call") is not None:  # LLVM's and Intel's: one pool for all threads
        return lambda: None
    pause, initial = own_function("omp_pause_resource"), own_function("omp_get_initial_device")
    if pause is None or initial is None:
        return lambda: None
    host = initial()
    return lambda: pause(_SOFT, host)


def release_workers() -> None:
    """End the calling thread's workers, until it computes again (which starts new ones, in a tenth of a millisecond).

    To be called by a thread that stops computing: after loading a model, or while it waits for work.

    Under libgomp (PyTorch's wheels for Linux) every thread that computes has a pool of its own. Between two parallel
    regions workers spin for the next one, but only while all pools of the process together have no more threads than
    there are processors; beyond that they go to sleep at once, and waking them for each of the hundreds of regions of
    a pass takes longer than the pass: on two processors a thread beside one that had computed *before* took twice as
    long, 15 ms instead of 7.
    """
    _pause()()
