"""No plan in these tests depends on how long deciding takes on this machine."""

import pytest

from foretell.planner import decisions


@pytest.fixture(autouse=True)
def deciding_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deciding is charged by the thread's clock, which would make each run of a simulation another one."""
    monkeypatch.setattr(decisions, "thread_time", lambda: 0.0)
