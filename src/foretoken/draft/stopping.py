"""Whether a drafter can stop as a shape asks, known before anything is decoded."""

from foretoken.draft.base import Method
from foretoken.draft.frontier import NO_FORESIGHT
from foretoken.draft.shape import Shape, SpecDec
from foretoken.errors import ConfigError
from foretoken.heads.acceptance import AcceptanceHead


def acceptance_of(method: Method) -> AcceptanceHead | None:
    """The acceptance head that a method was loaded with: its attribute ``acceptance``, where it has one."""
    head: AcceptanceHead | None = getattr(method, "acceptance", None)
    return head


def can_stop(method: Method, shape: Shape) -> bool:
    """Whether the method, as it was loaded, has the head that the shape stops by, if it stops by one.

    A method whose own head foresees acceptance (DSpark's does) says so by an attribute ``foresees``.
    """
    return not isinstance(shape, SpecDec) or acceptance_of(method) is not None or getattr(method, "foresees", False)


def check_stop(method: Method, shape: Shape) -> None:
    """Raise ConfigError where ``can_stop`` says no."""
    if not can_stop(method, shape):
        raise ConfigError(NO_FORESIGHT)
