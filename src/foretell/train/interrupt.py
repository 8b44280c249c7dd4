"""Ctrl-C while a head is trained: a step is finished first."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patient(tell: Callable[[], None]) -> Iterator[threading.Event]:
    """While inside, the first Ctrl-C sets an event (the step is finished first) and calls tell; the second interrupts."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def on_interrupt(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        tell()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
