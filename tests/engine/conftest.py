"""After every step of every test in this folder the invariants are checked: see ``harness.audit``."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import foretell.engine.batch as batch_module
from foretell.engine.event import StepEvent
from foretell.engine.step import step
from tests.engine import harness


class _Asserts(logging.Handler):
    """What tests assert within a drafter: an engine logs it, and goes on without guesses."""

    def __init__(self) -> None:
        super().__init__()
        self.raised: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, AssertionError):
            self.raised.append(error)


@pytest.fixture(autouse=True)
def asserted_in_drafters() -> Iterator[None]:
    """An assertion that a drafter of a test raises ends the test."""
    handler = _Asserts()
    logger = logging.getLogger("foretell.engine.failures")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    for error in handler.raised:
        raise error


@pytest.fixture(autouse=True)
def audited(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., None]]:
    """Wraps ``step``. Tests may append further auditors, called as auditor(state, target, drafter, report),
    with the drafter itself where all rows have one."""
    auditors: list[Callable[..., None]] = [harness.audit]

    def wrapped(state: Any, target: Any, drafter: Any, *rest: Any, **options: Any) -> StepEvent:
        report = step(state, target, drafter, *rest, **options)
        for auditor in auditors:
            auditor(state, target, harness.own(drafter), report)
        return report

    monkeypatch.setattr(batch_module, "step", wrapped)
    return auditors
