"""Falls of acceptance are told once each, of the method whose acceptance fell, and counted for the metrics."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.engine.drift import Drifts


def step(drifts: Drifts, kept: bool, *, method: str = "ngram", guessed: int = 2, error: Any = None) -> None:
    row = SimpleNamespace(error=error, steps=[(guessed, int(kept))], draft_name=method)
    event: Any = SimpleNamespace(rows=[row])
    drifts(event)


def test_a_fall_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    drifts = Drifts()
    with caplog.at_level(logging.WARNING):
        for number in range(1200):
            step(drifts, number < 800)
            step(drifts, kept=True, method="suffix")
    assert drifts.num_drifts() == {"ngram": 1, "suffix": 0}
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["acceptance of ngram fell"]
    recent = drifts.recent_acceptance()
    assert recent["suffix"] == pytest.approx(1.0)
    assert recent["ngram"] is not None
    assert recent["ngram"] < 0.3


def test_rows_that_did_not_guess_or_failed_say_nothing() -> None:
    drifts = Drifts()
    step(drifts, kept=False, guessed=0)
    step(drifts, kept=False, error=RuntimeError("lost"))
    event: Any = SimpleNamespace(rows=[SimpleNamespace(error=None, steps=[], draft_name="ngram")])
    drifts(event)
    assert drifts.recent_acceptance() == {}
