"""A Ctrl-C that cannot get lost."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Yields what a loop calls once a turn: it raises KeyboardInterrupt where Ctrl-C was pressed and did not get through.

    Python raises it wherever it happens to be, and in a finalizer it is printed and forgotten. For the main thread.
    """
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
