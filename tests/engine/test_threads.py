"""The number of threads beside other processes, on a made-up machine whose clock and scheduler are a table."""

import logging
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

import foretell
from foretell.core.platform import thread_times
from foretell.engine.loop import Limits, Loop
from foretell.engine.threads import MOST_PAUSE_S, WINDOW_S, ThreadLimit

LOOP, WORKER, SERVER = 1, 2, 3


class Machine:
    """Two threads of a loop, and one of a server, beside ``busy`` processes on two cores. Rounds take 10 ms."""

    def __init__(self, *, served: float = 0.0) -> None:
        self.now, self.busy, self.served, self.works = 0.0, 0, served, True
        self.usage = {LOOP: (0.0, 0.0), WORKER: (0.0, 0.0), SERVER: (0.0, 0.0)}
        self.counts: list[int] = []
        self.limit = ThreadLimit(read=self.read, clock=lambda: self.now, own_thread=lambda: LOOP)

    def read(self) -> dict[int, tuple[float, float]]:
        return dict(self.usage)

    def spend(self, thread: int, ran: float, waited: float) -> None:
        before = self.usage[thread]
        self.usage[thread] = (before[0] + ran, before[1] + waited)

    def rounds(self, seconds: float) -> list[int]:
        """The threads of each round."""
        counts = []
        for _ in range(round(seconds / 0.01)):
            with self.limit:
                counts.append(torch.get_num_threads())
            threads = counts[-1] if self.works else 0
            ready = threads + self.busy + self.served
            part = min(1.0, 2 / ready) if ready else 1.0  # of its time that each runs
            for thread in (LOOP, WORKER)[:threads]:
                self.spend(thread, 0.01 * part, 0.01 * (1 - part))
            self.spend(SERVER, 0.01 * self.served * part, 0.01 * self.served * (1 - part))
            self.now += 0.01
        return counts


@pytest.fixture(autouse=True)
def two_threads():
    torch.set_num_threads(2)


def test_an_idle_machine_keeps_all_threads():
    machine = Machine()
    assert machine.rounds(5) == [2] * 500


@pytest.mark.parametrize("busy", [1, 2, 8])
def test_beside_busy_processes_one_thread_is_left_within_three_windows(busy):
    machine = Machine()
    machine.rounds(1)
    machine.busy = busy
    counts = machine.rounds(5)
    assert counts[: round(3.1 * WINDOW_S / 0.01)][-1] == 1
    assert counts.count(2) <= len(counts) // (4 if busy == 1 else 10), "trials of more threads take too much"
    assert torch.get_num_threads() == 2, "outside its rounds torch has what it had"


def test_a_process_that_comes_and_goes_changes_nothing():
    machine = Machine()
    counts = []
    for busy in (0, 8, 0, 0, 8, 0):
        machine.busy = busy
        counts += machine.rounds(WINDOW_S)
    assert set(counts) == {2}


def test_trials_become_rare_where_they_fail():
    machine = Machine()
    machine.busy = 1  # one thread has a core of its own, so that more must be tried
    machine.rounds(20)
    counts = machine.rounds(4 * MOST_PAUSE_S)
    trials = sum(now > before for before, now in pairwise(counts))
    assert 1 <= trials <= 5


def test_threads_come_back_when_the_others_have_ended():
    machine = Machine()
    machine.busy = 8
    machine.rounds(3)
    machine.busy = 0
    counts = machine.rounds(MOST_PAUSE_S + 1)
    assert counts[-1] == 2
    machine.busy = 8  # and the pause begins short again
    machine.rounds(1)
    machine.busy = 0
    assert machine.rounds(1)[-1] == 2


def test_a_server_of_this_process_is_no_other():
    machine = Machine(served=0.6)
    assert set(machine.rounds(3)) == {2}


def test_a_loop_without_work_tells_nothing():
    machine = Machine()
    machine.rounds(1)
    machine.works, machine.busy = False, 8
    machine.rounds(1)
    assert machine.limit._count == 2
    machine.works = True
    machine.rounds(1)
    assert machine.limit._count == 1


def test_another_number_of_the_user_counts_at_once():
    machine = Machine()
    machine.busy = 2
    machine.rounds(1)
    torch.set_num_threads(1)
    assert set(machine.rounds(1)) == {1}
    assert torch.get_num_threads() == 1, "not what it was before"


def test_it_is_said_once(caplog):
    caplog.set_level(logging.INFO, logger="foretell.engine.threads")
    machine = Machine()
    machine.busy = 1
    machine.rounds(10)
    assert [record.getMessage() for record in caplog.records] == [
        "other processes have the cores: decoding goes on with 1 of 2 threads"
    ]
    machine.busy = 0
    machine.rounds(MOST_PAUSE_S + 1)
    assert caplog.records[-1].getMessage() == "decoding has 2 of 2 threads again"


def test_an_error_within_leaves_torch_as_it_was():
    machine = Machine()
    machine.busy = 8
    machine.rounds(1)
    with pytest.raises(ZeroDivisionError), machine.limit:
        1 / (torch.get_num_threads() - 1)
    assert torch.get_num_threads() == 2


def test_a_kernel_that_does_not_count_changes_nothing():
    limit = ThreadLimit(read=dict)
    for _ in range(3):
        with limit:
            assert torch.get_num_threads() == 2


def test_this_kernels_figures_are_of_all_threads():
    import threading

    usage = thread_times()
    if not usage:
        pytest.skip("this kernel does not count")
    assert threading.get_native_id() in usage
    assert usage[threading.get_native_id()][0] > 0


@pytest.mark.parametrize(("implementation", "limited"), [("lean", True), ("transformers", False)])
def test_modules_whose_rounding_depends_on_threads_keep_theirs(implementation, limited):
    engine = foretell.Engine.load("bundled", dtype="float32", implementation=implementation, speculative="none")
    loop = Loop(engine.model, Limits(1, 1, 64, 64, None), None)
    assert (loop._threads is not nullcontext) == limited
