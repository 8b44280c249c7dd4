"""How much of the processor the trainer takes of a service that decodes."""

import os
import pickle
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from foretell.core.platform import num_cores
from foretell.learn.options import LearnOptions
from foretell.learn.training import process as trainer_process
from foretell.learn.training.process import MOST_S, MOST_WAITING, Pace, TrainerProcess, share_of, spare_cores
from foretell.learn.training.texts import RawText


class World:
    """A clock, and a service that decodes or does not."""

    def __init__(self, share: float) -> None:
        self.now, self.busy, self.worked = 0.0, True, 0.0
        self.pace = Pace(share, lambda: self.busy, clock=lambda: self.now)

    def live(self, seconds: float, piece: float) -> float:
        """A trainer that always has work; returns the seconds that it computed for."""
        end, before = self.now + seconds, self.worked
        while self.now < end:
            if self.pace.may_compute():
                self.worked += piece
                self.now += piece
                self.pace.computed(piece)
            else:
                self.now += 0.05
        return self.worked - before


@pytest.mark.parametrize("piece", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("share", [0.01, 0.1])
def test_a_busy_service_gives_the_share_and_no_more(share: float, piece: float) -> None:
    world = World(share)
    taken = world.live(600.0, piece)
    assert taken <= share * 600.0 + MOST_S / 10 + piece
    assert taken >= share * 600.0 - piece - 0.1


def test_an_idle_service_gives_all() -> None:
    world = World(0.01)
    world.busy = False
    assert world.live(60.0, 0.02) == pytest.approx(60.0, abs=0.05)


def test_idle_time_is_neither_owed_nor_saved() -> None:
    """What was computed between requests is free, and waiting between them earns nothing for when they come."""
    world = World(0.01)
    world.live(20.0, 0.02)
    world.busy = False
    world.live(300.0, 0.02)
    world.now += 300.0
    world.pace.may_compute()
    world.busy = True
    assert 0.9 <= world.live(100.0, 0.02) <= 1.0 + MOST_S + 0.04


def test_what_is_saved_is_bounded() -> None:
    world = World(0.1)
    for _ in range(1000):
        world.now += 1.0
        world.pace.may_compute()  # nothing to do meanwhile
    assert world.live(10.0, 0.02) <= MOST_S + 1.0 + 0.04


def test_no_limit() -> None:
    assert World(1.0).live(10.0, 0.02) == pytest.approx(10.0, abs=0.05)


def test_cores_left_free() -> None:
    usable = num_cores()
    assert spare_cores(usable) == 0
    assert spare_cores(1) == usable - 1


@pytest.mark.parametrize(("device", "has_core", "share"), [(None, False, 0.25), (None, True, 1.0), ("cpu", False, 1.0)])
def test_its_share(device: str | None, has_core: bool, share: float) -> None:
    """No limit where a core is free, or another device learns."""
    assert share_of(LearnOptions(learn_busy_share=0.25, learn_device=device), has_core=has_core) == share


def text(number: int, places: int = 4) -> RawText:
    return RawText([1, 2, number], 2, 1.0, [torch.zeros(places, 1000, dtype=torch.float16)])


@pytest.fixture(scope="module")
def started() -> Iterator[TrainerProcess]:
    """With a child that never asks for anything; starting one takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_process, "run", _idle)
        made = TrainerProcess(LearnOptions(learn_memory_mib=1.0), print)
    yield made
    made.stop()


@pytest.fixture
def trainer(started: TrainerProcess) -> TrainerProcess:
    started._texts.clear()
    started._texts_bytes, started._is_asked = 0, False
    return started


def test_it_is_told_whether_the_service_decodes(trainer: TrainerProcess) -> None:
    for busy in (True, False):
        trainer.serves(busy=busy)
        assert trainer._busy.value == busy


def test_texts_wait_until_they_are_asked_for(trainer: TrainerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many and no more; commands do not wait behind them, and none is handed out twice."""
    sent = list[tuple[object, ...]]()
    monkeypatch.setattr(trainer._outbox, "put", sent.append)
    assert [trainer.add("/a", text(number)) for number in range(MOST_WAITING + 2)] == [True] * MOST_WAITING + [
        False
    ] * 2
    assert not trainer.has_room
    trainer.act("/a", "revert")
    assert sent == [("act", "/a", "revert", 0, "")]
    for _ in range(2):
        trainer._hand(asked=True)
    assert [(kind, given[-1].tokens[-1]) for kind, *given in sent[1:]] == [("add", 0), ("add", 1)]
    assert trainer.add("/a", text(99))


def test_one_who_asks_first_is_served_when_there_is_one(
    trainer: TrainerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[tuple[object, ...]]()
    monkeypatch.setattr(trainer._outbox, "put", sent.append)
    trainer._hand(asked=True)
    trainer._hand(asked=True)  # it does not ask twice before it has one
    assert not sent
    for number in range(2):
        trainer.add("/a", text(number))
    assert [given[-1].tokens[-1] for _, *given in sent] == [0]


def test_large_texts_wait_in_a_quarter_of_the_memory(trainer: TrainerProcess) -> None:
    large = [trainer.add("/a", text(number, 100)) for number in range(4)]  # 200,000 bytes each of 262,144
    assert large == [True, True, False, False]
    trainer.close("/a")
    assert trainer.has_room
    assert trainer._texts_bytes == 0


@pytest.mark.slow
def test_it_is_up_before_anybody_is_served() -> None:
    """Imports and all, and at the lowest priority from then on."""
    made = TrainerProcess(LearnOptions(), print)
    try:
        assert made._is_up.is_set()
        assert not made.failure
        if hasattr(os, "sched_getscheduler"):
            assert made.pid is not None
            assert os.sched_getscheduler(made.pid) == os.SCHED_IDLE
    finally:
        made.stop()


@pytest.mark.slow
def test_a_child_that_dies_at_once_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_process, "run", _die)
    failures = list[object]()
    made = TrainerProcess(LearnOptions(), failures.append)
    made.stop()
    assert len(failures) == 1
    assert "has ended" in str(failures[0])


def _idle(pipe: Connection, *_: object) -> None:
    pipe.send_bytes(pickle.dumps(("up",)))
    pipe.recv_bytes()


def _die(*_: object) -> None:
    """As a child that cannot import."""
