"""Falls of acceptance are told once each, of the method whose acceptance fell, and counted for the metrics."""

import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.service.drift import PIECE, Drifts, DriftWatch, piece_of


def text(
    drifts: Drifts, kept: bool, *, method: str = "ngram", guessed: int = 2, steps: int = 10, error: Any = None
) -> None:
    """A request of so many steps, which ends."""
    row = SimpleNamespace(error=error, steps=[], method=method, finish_reason=None)
    for number in range(steps):
        row.steps.append((guessed, int(kept)))
        row.finish_reason = "length" if number == steps - 1 else None
        event: Any = SimpleNamespace(rows=[row])
        drifts(event)


def test_a_fall_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    drifts = Drifts()
    with caplog.at_level(logging.WARNING):
        for number in range(500):
            text(drifts, kept=number < 300)
            text(drifts, kept=True, method="suffix")
    assert drifts.num_drifts() == {"ngram": 1, "suffix": 0}
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["acceptance of ngram fell"]
    recent = drifts.recent_acceptance()
    assert recent["suffix"] == pytest.approx(1.0)
    assert recent["ngram"] is not None
    assert recent["ngram"] < 0.3


def test_rows_that_did_not_guess_or_failed_say_nothing() -> None:
    drifts = Drifts()
    text(drifts, kept=False, guessed=0)
    text(drifts, kept=False, error=RuntimeError("lost"))
    event: Any = SimpleNamespace(rows=[SimpleNamespace(error=None, steps=[], method="ngram", finish_reason="stop")])
    drifts(event)
    assert drifts.recent_acceptance() == {}


def test_every_step_is_in_one_piece() -> None:
    """Long texts are counted while they are written, and nothing twice."""
    made = kept = 0
    row: Any = SimpleNamespace(steps=[], finish_reason=None)
    r = random.Random(0)
    steps = [(r.randrange(3), r.randrange(2)) for _ in range(2 * PIECE + 11)]
    steps = [(drafted, min(drafted, accepted)) for drafted, accepted in steps]
    for number, step in enumerate(steps):
        row.steps.append(step)
        row.finish_reason = "length" if number == len(steps) - 1 else None
        piece = piece_of(row)
        assert (piece is None) == (number + 1 not in (PIECE, 2 * PIECE, len(steps)))
        if piece is not None:
            made, kept = made + piece[0], kept + piece[1]
    assert made == sum(drafted > 0 for drafted, _ in steps)
    assert kept == sum(accepted > 0 for _, accepted in steps)


def told(watch: DriftWatch, r: random.Random, texts: int, rate: Callable[[random.Random], float]) -> int:
    """Falls told over texts of 2 to 60 guesses, each with an acceptance of its own."""
    before = watch.num_drifts
    for _ in range(texts):
        own, made = rate(r), r.randrange(2, 60)
        watch.add(made, sum(r.random() < own for _ in range(made)))
    return watch.num_drifts - before


def mixed(r: random.Random) -> float:
    return 0.75 if r.random() < 0.7 else 0.15


def test_texts_that_differ_are_no_fall_and_a_fall_is_found() -> None:
    """100,000 guesses of code and noise, seven texts to three. With independent guesses in the place of texts (the
    control), some fifty falls would be told."""
    watch, control = DriftWatch(), DriftWatch(fast=200.0, slow=2000.0, sigmas=0.0, warm=400)
    assert told(watch, random.Random(1), 3400, mixed) == 0
    assert told(DriftWatch(fast=200.0, slow=2000.0), random.Random(1), 3400, mixed) == 0  # by its errors, not by luck
    assert told(control, random.Random(1), 3400, mixed) > 10
    assert told(watch, random.Random(2), 100, lambda r: max(0.0, mixed(r) - 0.25)) == 1


def test_single_guesses_fall_once_too() -> None:
    r, falling = random.Random(3), DriftWatch()
    reported = [falling.add(1, r.random() < (0.6 if step < 4000 else 0.35)) for step in range(7000)]
    assert sum(reported) == 1
    assert 4000 < reported.index(True) < 5000
    assert falling.num_drifts == 1
