"""The state machine of one adapter, with a student whose scores are given: what the gate compares, and when it rests."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from foretell.learn.options import LearnOptions
from foretell.learn.training import trainer as module
from foretell.learn.training.pool import TrainerPool
from foretell.learn.training.texts import Text
from foretell.learn.training.trainer import AdapterTrainer, Version
from tests.learn.test_texts import raw


class Counting:
    """Its weights are a number, which each optimiser step raises by one; score(number, is old) says what they are worth."""

    def __init__(self, score: Callable[[int, bool], float]) -> None:
        self.number, self.given, self.scored = 0, score, list[tuple[int, int]]()

    def weights(self) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor(self.number)}

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        self.number = int(weights["number"])

    def renew(self, texts: Sequence[Text]) -> int:
        return 0

    def learn(self, text: Text, share: float = 1.0) -> float:
        return 0.0

    def apply(self) -> bool:
        self.number += 1
        return True

    def score(self, text: Text) -> float:
        self.scored.append((id(text), self.number))
        return self.given(self.number, text.prompt[0] < 8) + 1e-4 * text.prompt[0]

    def checkpoint(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return weights

    def between(self, served: Any, learned: Any) -> Any:
        return learned


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 2)
    monkeypatch.setattr(module, "REST_TEXTS", 3)


def text(first: int) -> Text:
    return raw([first, *range(9)], 4).reduced(4)


def trainer_of(score: Callable[[int, bool], float]) -> tuple[AdapterTrainer, Counting]:
    """Eight old and eight recent held-out texts; each update is one step."""
    student: Any = Counting(score)
    options = LearnOptions(learn_every=4, replay=0, batch_texts=4)
    trainer = AdapterTrainer(student, options, max_bytes=1 << 20)
    trainer.held_out.old = [text(index) for index in range(8)]
    trainer.held_out.recent.extend(text(index) for index in range(8, 16))
    return trainer, student


def update(trainer: AdapterTrainer) -> Any:
    """What came of one more update: a version, or the event of a refusal."""
    trainer.fresh = [text(20 + index) for index in range(4)]
    found = [one for one in trainer.work() if isinstance(one, Version) or (one and one["event"] == "refused")]
    assert len(found) == 1
    return found[0]


def test_losses_on_old_texts_do_not_add_up_over_swaps() -> None:
    """Each update gains on recent texts and loses .015 on old ones, less than a swap may: the second would make it .03."""
    trainer, _ = trainer_of(lambda number, is_old: 0.5 + (-0.015 if is_old else 0.05) * number)
    assert isinstance(update(trainer), Version)
    refused = update(trainer)
    assert "old texts" in refused["reason"]
    assert trainer.number == 1


def test_a_version_is_what_was_judged_and_learning_goes_on_from_it() -> None:
    """It lies between what serves and what was learned."""
    trainer, student = trainer_of(lambda number, is_old: 0.1 * number)
    student.between = lambda served, learned: {"number": 50 + served["number"]}  # type: ignore[method-assign]
    version = update(trainer)
    assert int(version.weights["number"]) == int(trainer.served["number"]) == student.number == 50
    assert {number for _, number in student.scored} == {0, 50}


def test_what_a_new_kind_gains_hides_nothing_that_others_lose() -> None:
    """Half of the old texts are of the recent ones' kind and gain .1; the others lose .06: .02 in the mean is a gain."""
    trainer, _ = trainer_of(lambda number, is_old: 0.5 + (-0.06 if is_old else 0.1) * number)
    old, recent = [text(index) for index in range(4)], [text(100 + index) for index in range(8)]
    for one in (*old, *recent):
        trainer.kinds.add(one.sketch)
    trainer.kinds.of = lambda sketches: [kinds[id(one)] for one in sketches]  # type: ignore[method-assign]
    kinds = {id(one.sketch): number for number, texts in enumerate((old, recent)) for one in texts}
    trainer.held_out.old = [*old, *recent[:4]]
    trainer.held_out.recent = deque(recent[4:])
    assert "old texts: -0.03" in update(trainer)["reason"]


def test_old_texts_that_gain_again_may_be_swapped_in() -> None:
    trainer, _ = trainer_of(
        lambda number, is_old: 0.5 + ((0.0, -0.015, 0.0, -0.01)[number] if is_old else 0.05 * number)
    )
    assert [isinstance(update(trainer), Version) for _ in range(3)] == [True, True, True]


def test_the_served_weights_are_scored_once_on_each_text() -> None:
    trainer, student = trainer_of(lambda number, is_old: 0.5)
    update(trainer)
    first = len(student.scored)
    assert first == 2 * 16
    update(trainer)
    assert len(student.scored) - first == 16
    assert not any(number == 0 for _, number in student.scored[first:])


def test_refusals_in_a_row_are_dropped_and_it_rests_until_texts_have_come() -> None:
    trainer, student = trainer_of(lambda number, is_old: 0.5 - 0.01 * number)
    assert update(trainer)["rests"] is False
    assert student.number == 1
    assert update(trainer)["rests"] is True
    assert student.number == 0
    trainer.fresh = [text(40 + index) for index in range(4)]
    assert not trainer.is_due
    for index in range(3):
        trainer.add(text(50 + index))
    assert trainer.is_due
    assert trainer.resting == 0


def test_an_adapter_may_be_opened_while_another_learns() -> None:
    """A new client's first request opens one on its own thread, in the middle of the engine's look at all of them."""
    pool = TrainerPool(LearnOptions(where="inline"))

    class Arriving:
        num_bytes = 1

        @property
        def is_due(self) -> bool:
            pool.trainers[f"more{len(pool.trainers)}"] = Quiet()  # type: ignore[assignment]
            return False

    class Quiet:
        is_due, num_bytes = False, 1

    pool.trainers["a"] = Arriving()  # type: ignore[assignment]
    pool.trainers["b"] = Quiet()  # type: ignore[assignment]
    assert not pool.has_work
    assert not pool.piece()
    assert pool.num_bytes == len(pool.trainers) == 4


def test_work_of_a_closed_adapter_is_not_gone_on_with() -> None:
    pool = TrainerPool(LearnOptions(where="inline"))

    class Working:
        num_bytes, is_due = 1, True

        def work(self) -> Iterator[None]:
            while True:
                yield None

    pool.trainers["a"], pool.trainers["b"] = Working(), Working()  # type: ignore[assignment]
    assert pool.piece()
    pool.close("a")
    pool.trainers["b"].is_due = False  # type: ignore[misc]
    assert {name for name, _ in pool._turns} == {"b"}
    pool.close("b")
    assert not pool.has_work
    assert not pool.piece()
