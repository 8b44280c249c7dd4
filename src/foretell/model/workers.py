"""OpenMP's worker threads: idle pools of other threads slow a process down.

Under libgomp (PyTorch's wheels for Linux) every thread that computes has a pool of its own. Between two parallel regions
workers spin for the next one, but only while all pools of the process together have no more threads than there are
processors; beyond that they go to sleep at once, and waking them for each of the hundreds of regions of a pass takes longer
than the pass: on two processors a thread beside one that had computed *before* took twice as long, 15 ms instead of 7.
"""

from collections.abc import Callable
from functools import cache

from foretell.core.platform import own_function

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
    """
    _pause()()
