"""A Ctrl-C that is never lost, and a SIGTERM (of ``timeout``, of a scheduler) that is handled in the same way."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is caught."""


@contextmanager
def interruptible(*, terminable: bool = False) -> Iterator[Callable[[], None]]:
    """Yields a function that a loop calls once per turn: it raises KeyboardInterrupt where Ctrl-C was pressed and got
    lost.

    Python raises it at any point, and in a finalizer it is only printed. terminable: SIGTERM raises
    Terminated the same way. Other threads than the main one get no signals.
    """
    if current_thread() is not main_thread():
        yield lambda: None
        return
    pressed: type[KeyboardInterrupt] | None = None

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        raise pressed

    def check() -> None:
        if pressed is not None:
            raise pressed

    caught = (signal.SIGINT, signal.SIGTERM) if terminable else (signal.SIGINT,)
    before = {number: signal.signal(number, press) for number in caught}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
