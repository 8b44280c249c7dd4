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


def check_stop(method: Method, shape: Shape) -> None:
    """Raise ConfigError where the shape stops by a head that the method was not loaded with.

    A method whose own head foresees acceptance (DSpark's does) says so by an attribute ``foresees``.
    """
    if isinstance(shape, SpecDec) and acceptance_of(method) is None and not getattr(method, "foresees", False):
        raise ConfigError(NO_FORESIGHT)
