"""Freed memory goes back to the system: when, and how much of it."""

import gc
import sys
import threading
import weakref

import pytest

from foretell import Submission
from foretell.core.platform import own_function
from foretell.service.memory import BUSY_S, HeapKeeper, collect, trim_heap
from tests.service.test_memory import resident
from tests.service.test_service import ENDLESS, Mailbox, service

GLIBC = sys.platform == "linux" and own_function("malloc_trim") is not None


@pytest.mark.skipif(not GLIBC, reason="another C library than glibc")
def test_what_lies_before_a_block_in_use_is_given_back() -> None:
    trim_heap()
    before = resident()
    blocks = [bytes([1]) * 60_000 for _ in range(2000)]  # too small for pages of their own
    last = blocks[-1]
    blocks.clear()
    kept = resident() - before
    trim_heap()
    left = resident() - before
    assert len(last) == 60_000
    assert kept > 60 << 20, "control: without it the C library keeps them"
    assert left < 10 << 20


def test_it_is_done_once_after_work_and_at_times_under_work() -> None:
    now, calls = [0.0], [0]

    def trim() -> None:
        calls[0] += 1

    keeper = HeapKeeper(trim, lambda: now[0])
    keeper.rested()
    assert calls[0] == 0, "nothing was done"
    keeper.worked()
    keeper.rested()
    keeper.rested()
    assert calls[0] == 1
    for second in range(1, int(3 * BUSY_S) + 2):
        now[0] = 1000.0 + second
        keeper.worked()
    assert calls[0] == 4
    keeper.rested()
    assert calls[0] == 5


def test_an_idle_service_gives_memory_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = threading.Semaphore(0)
    monkeypatch.setattr("foretell.service.service.IDLE_S", 0.02)
    made, box = service(), Mailbox()
    try:
        monkeypatch.setattr(made._heap, "_trim", trimmed.release)
        assert not trimmed.acquire(timeout=0.2), "it has done nothing yet"
        for name in ("a", "b"):
            made.submit(Submission(name, [1, 2, 3], ENDLESS), box.hear)
        for name in ("a", "b"):
            assert box.last(name).completion is not None
        assert trimmed.acquire(timeout=10)
        assert not trimmed.acquire(timeout=0.2)
    finally:
        made.close()


def test_a_service_that_rests_is_woken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.service.service.IDLE_S", 1000.0)
    made, box = service(), Mailbox()
    made.submit(Submission("a", [1, 2, 3], ENDLESS), box.hear)
    assert box.last("a").completion is not None
    made.submit(Submission("b", [1, 2, 3], ENDLESS), box.hear)
    assert box.last("b").completion is not None
    made.close()
    assert not made.healthy


@pytest.mark.parametrize("frozen", [True, False])
def test_circles_are_given_back_that_were_frozen(frozen: bool) -> None:
    """As a command freezes the first model of a server with those of its start."""

    class Node:
        me: object = None

    node = Node()
    node.me = node
    known = weakref.ref(node)
    before = gc.get_freeze_count()
    try:
        if frozen:
            gc.freeze()
        del node
        collect()
        assert known() is None
        assert bool(gc.get_freeze_count()) == (frozen or bool(before))
    finally:
        if not before:
            gc.unfreeze()


def test_the_collector_is_not_asked_where_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops all threads of the process while it looks."""

    class Node:
        me: object = None

    asked = list[int]()
    monkeypatch.setattr("foretell.service.memory.gc.collect", lambda: asked.append(1))
    node = Node()
    known = weakref.ref(node)
    collect(known)
    assert len(asked) == 1, "control"
    del node
    collect(known)
    assert len(asked) == 1
