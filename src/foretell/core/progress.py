"""How far loading has come, told to whoever listens: loaders tell, and need not know whether a person waits."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic

Listener = Callable[[str, float], None]
"""Called with what is loaded and the share of its weights that is in memory, 0 to 1."""
_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)
_EVERY_S = 1.0
"""Between two lines where the output is no terminal."""


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Within the block, loads of this thread call ``listener``; None: the one from before."""
    if listener is None:
        yield
        return
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell(what: str, share: float) -> None:
    """Say how far a load has come."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(what, share)


class Lines:
    """A listener that writes to standard error: one line in place on a terminal, else a line a second at most."""

    def __init__(self) -> None:
        self._begun = self._said = monotonic()

    def __call__(self, what: str, share: float) -> None:
        """See ``Listener``."""
        now = monotonic()
        whole = share >= 1
        if sys.stderr is None or not (sys.stderr.isatty() or whole or now - self._said >= _EVERY_S):
            return
        self._said, in_place = now, sys.stderr.isatty()
        line = f"loading {what}: {share:.0%}, {now - self._begun:.1f} s"
        ending = "" if in_place and not whole else "\n"
        print(f"\r{line}" if in_place else line, end=ending, file=sys.stderr, flush=True)
        if whole:
            self._begun = now
