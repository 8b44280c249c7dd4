"""Check, before decoding, that a method has the acceptance head that a shape needs."""

from foretoken.draft.base import Method
from foretoken.draft.frontier import NO_FORESIGHT
from foretoken.draft.shape import Shape
from foretoken.errors import ConfigError


def can_stop(method: Method, shape: Shape) -> bool:
    """Whether the method, as it was loaded, has the head that the shape stops by, if it stops by one."""
    return not shape.asks_acceptance or method.foresees


def check_stop(method: Method, shape: Shape) -> None:
    """Raise ConfigError where ``can_stop`` says no."""
    if not can_stop(method, shape):
        raise ConfigError(NO_FORESIGHT)
