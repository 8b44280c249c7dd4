"""What a service's callers leave for the engine's thread."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """A command for the engine's thread, and its form as a message to the other processes that share the model."""

    run: Callable[[], None]
    wire: tuple[Any, ...]

    def __call__(self) -> None:
        """Do it."""
        self.run()
