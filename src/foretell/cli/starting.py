"""What makes a command's start cheaper."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_command = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Let the collector rest while modules are imported and models read: they make some 100,000 objects that stay, and it
    would go through all of them again and again, a tenth of a start's processor time. In a process that is a command's
    alone it never looks at them again. For short calls, also as a decorator."""
    active = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _command:
            gc.freeze()
        if active:
            gc.enable()


@contextmanager
def command() -> Iterator[None]:
    """This process runs one command and ends after it: what then is left goes with it, and is not searched for cycles,
    unless Triton is there, which writes a page about its objects that nobody has collected."""
    global _command
    _command = True
    try:
        yield
    finally:
        _command = False
        if "triton" in sys.modules:
            gc.unfreeze()
        else:
            gc.freeze()


def let_idle_threads_sleep() -> None:
    """Before numpy is imported: the threads of its OpenBLAS, which nothing here uses at start, then wait for work asleep
    after 16 cycles, and not after 2**26 of them."""
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
