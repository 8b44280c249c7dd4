"""Whatever fails, every request ends with plain decoding's text or one error of its own; each guard is needed for it."""

from collections.abc import Callable
from typing import Any

import pytest

from foretell.engine.batch import Batch
from foretell.engine.drafters.guarded import GuardedDrafter
from foretell.engine.failures import Failures, GuardedPlanner
from tests.stress import faults, size


@pytest.mark.parametrize(
    ("seed", "ticks"), [(0, 40), pytest.param(1, size(400, 5000), marks=pytest.mark.slow),
                        pytest.param(2, size(400, 5000), marks=pytest.mark.slow)]
)  # fmt: skip
def test_errors_in_every_call_of_a_turn(seed: int, ticks: int) -> None:
    with faults.faulty(seed) as made:
        made.run(ticks)
        ends = made.check()
        assert ends["length"] + ends["stop"] > ticks / 20
        assert made.count.total() > ticks / 10
        if ticks >= 400:
            places = made.service._failures.by_place()
            assert min(places[one] for one in ("planner", "step", "recorder", "observer", "sink", "learner")) > 0


def raised(self: Failures, place: str, instead: Any, call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


def asked(self: GuardedPlanner, instead: Any, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return call(*args, **options)


def read(self: GuardedDrafter, call: Callable[..., Any], instead: Any) -> Any:
    return call(self.inner)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "without"),
    [
        (Failures, "run", raised),
        (GuardedPlanner, "_ask", asked),
        (GuardedDrafter, "_read", read),
        (Batch, "begin_anew", lambda self: None),
    ],
)
def test_control_without_a_guard_it_is_seen(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, without: Callable[..., Any]
) -> None:
    """A run is not the same twice, as plans follow the clock: one of several must show it."""
    monkeypatch.setattr(kind, name, without)
    with pytest.raises((AssertionError, RuntimeError, faults.InjectedError)):  # noqa: PT012
        for seed in range(1, 5):
            with faults.faulty(seed) as made:
                made.run(400)
                made.check()
