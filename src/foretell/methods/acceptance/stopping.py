"""Check, before decoding, that a method has the acceptance head that a shape needs."""

from foretell.core.errors import ConfigError
from foretell.draft.base import Method
from foretell.draft.growing.frontier import NO_FORESIGHT
from foretell.draft.shapes import Shape


def can_stop(method: Method, shape: Shape) -> bool:
    """Whether the method, as it was loaded, has the head that the shape stops by, if it stops by one."""
    return not shape.asks_acceptance or method.foresees


def check_stop(method: Method, shape: Shape) -> None:
    """Raise ConfigError where ``can_stop`` says no."""
    if not can_stop(method, shape):
        raise ConfigError(NO_FORESIGHT)
