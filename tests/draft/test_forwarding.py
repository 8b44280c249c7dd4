"""The forwarders: every call and property of ``Drafter`` goes on to the inner drafter, and has an answer without one; a
method has the needs of its part."""

import inspect
from typing import Any

import pytest
import torch

from foretell.draft.base import Commit, Drafter, Method
from foretell.draft.forwarding import Forwarding, ForwardingMethod
from foretell.draft.suffix import Suffix
from tests.draft.test_join import CAPACITY, METHODS, Lane, context_of, row, target

NAMES = sorted(name for name in vars(Drafter) if not name.startswith("_"))


class Inner:
    """Says which of its names were used."""

    def __init__(self) -> None:
        self.used: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.used.append(name)
        return (lambda *given: name) if inspect.isfunction(vars(Drafter)[name]) else name


@pytest.mark.parametrize("name", NAMES)
def test_every_call_of_a_drafter_is_passed_on(name: str) -> None:
    """A call that is added to ``Drafter`` fails here until the forwarder has it."""
    assert name in vars(Forwarding), f"Forwarding does not pass {name!r} on"
    inner: Any = Inner()
    outer = Forwarding(inner)
    value = vars(Drafter)[name]
    if not inspect.isfunction(value):
        assert getattr(outer, name) == name
    else:
        count = len(inspect.signature(value).parameters) - 1
        given: list[Any] = [Forwarding(inner) if name == "join" else torch.zeros(1)] * count
        if name == "propose":
            with torch.inference_mode():
                lane = Lane(target(), METHODS["ngram"](), [row("a", 0)], CAPACITY)
            given[0] = lane.context
        if name == "num_unread":
            given = [context_of([row("a", 0)], 9)]
        said = getattr(outer, name)(*given)
        assert said in (name, None)
    assert inner.used == [name]


def test_without_a_drafter_there_are_no_guesses() -> None:
    outer, context = Forwarding(None), context_of([row("a", 0)], 9)
    given: Any = None
    assert outer.propose(context, given, given, given).num_nodes == 1
    assert (outer.can_join, outer.can_wait, outer.light_steps, outer.chance) == (
        False, False, None, None,
    )  # fmt: skip
    assert outer.num_unread(context) == [0]
    assert outer.catch_up(context, 0, 9) == 0
    commit: Any = Commit
    for call in (outer.observe, outer.read_prompt, outer.keep):
        call(commit)  # type: ignore[operator]


def test_a_method_has_the_needs_of_its_part() -> None:
    """A property that is added to ``Method`` is passed on, or named here as the method's own."""
    own = {"light", "trained", "learned_bytes"}
    names = {name for name, value in vars(Method).items() if isinstance(value, property)} - own
    assert names == {name for name, value in vars(ForwardingMethod).items() if isinstance(value, property)}
    suffix = Suffix()
    outer: Any = type("Outer", (ForwardingMethod,), {"open": None, "part": suffix})()
    assert {name: getattr(outer, name) for name in names} == {name: getattr(suffix, name) for name in names}
