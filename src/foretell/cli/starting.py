"""What makes a command's start cheaper, and is nobody's business after it."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Let the collector rest while modules are imported and models read: they make some 100,000 objects that stay, and it
    would go through all of them again and again, a tenth of a start's processor time. For short calls, also as a
    decorator."""
    active = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if active:
            gc.enable()


def let_idle_threads_sleep() -> None:
    """Before numpy is imported: the threads of its OpenBLAS, which nothing here uses at start, then wait for work asleep
    after 16 cycles, and not after 2**26 of them."""
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
