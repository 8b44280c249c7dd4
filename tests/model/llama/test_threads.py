"""How many threads small passes get, by a clock of our own."""

from collections.abc import Callable, Mapping

import pytest

from foretell.model.llama.run.tuning import fewest_threads


class Machine:
    """Passes take the time that a table says for their threads, plus a disturbance in some rounds."""

    def __init__(self, seconds: dict[int, float], disturbed: Callable[[int], float] = lambda call: 0.0) -> None:
        self.seconds, self.disturbed = seconds, disturbed
        self.now, self.calls = 0.0, 0

    def run(self, threads: int) -> None:
        self.now += self.seconds[threads] + self.disturbed(self.calls)
        self.calls += 1

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({2: 1.0, 1: 1.9}, 2),
        ({2: 1.0, 1: 1.0}, 1),
        ({2: 0.97, 1: 1.0}, 1),  # not worth a processor
        ({2: 1.5, 1: 1.0}, 1),
        ({6: 0.99, 3: 1.0, 1: 2.8}, 3),
        ({16: 1.2, 8: 1.0, 4: 1.3, 2: 2.0, 1: 3.9}, 8),
        ({1: 1.0}, 1),
    ],
)
def test_the_fewest_that_are_about_as_fast_are_chosen(seconds: dict[int, float], chosen: int) -> None:
    machine = Machine({threads: time / 1000 for threads, time in seconds.items()})
    assert fewest_threads(machine.run, max(seconds), clock=machine.clock) == chosen


def test_one_slow_round_changes_nothing() -> None:
    machine = Machine({2: 0.001, 1: 0.0019}, lambda call: 0.05 if call in (4, 5, 6) else 0.0)
    assert fewest_threads(machine.run, 2, clock=machine.clock) == 2


def test_a_pass_that_is_not_tiny_takes_all_and_is_not_measured() -> None:
    slow, fast = Machine({2: 0.1, 1: 0.1}), Machine({2: 1e-4, 1: 2e-4})
    for machine in (slow, fast):
        assert fewest_threads(machine.run, 2, clock=machine.clock) == 2
    assert slow.calls == 2
    assert fast.now < 0.2


def test_what_an_earlier_start_measured_costs_two_passes() -> None:
    machine = Machine({2: 0.0007, 1: 0.001})

    def keep(
        candidates: tuple[int, ...], measure: object, check: Callable[[], Mapping[int, float]]
    ) -> dict[int, float]:
        assert (candidates, check()) == ((2, 1), {1: pytest.approx(0.001)})
        return {2: 1.0, 1: 1.0}

    assert fewest_threads(machine.run, 2, keep, clock=machine.clock) == 1
    assert machine.calls == 2
