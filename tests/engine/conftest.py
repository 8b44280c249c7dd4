"""After every step of every test in this folder the invariants are checked: see ``harness.audit``."""

from collections.abc import Callable
from typing import Any

import pytest

import foretell.engine.batch as batch_module
from foretell.engine.event import StepEvent
from foretell.engine.step import step
from tests.engine import harness


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
