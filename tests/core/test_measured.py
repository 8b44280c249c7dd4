"""Timed passes that later starts use: what is kept, when it is believed, and that no disk stops a start."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretell.core import measured
from foretell.core.measured import MAX_AGE_S, MAX_PREEMPTIONS, TOO_SLOW, of_passes

SUBJECT = {"of": "test", "model": {"name": "m"}}


class Passes:
    """Passes of a made-up machine, and how often it was asked for them."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.now = {int(name[1:]): value for name, value in seconds.items()}, seconds["n1"]
        self.timed = self.checked = 0
        self.factors: Callable[[int], float] = lambda call: 1.0

    def measure(self) -> dict[int, float]:
        self.timed += 1
        return {nodes: self.factors(self.timed) * each for nodes, each in self.seconds.items()}

    def check(self) -> dict[int, float]:
        self.checked += 1
        return {1: self.now}

    def start(self, subject: Any = SUBJECT) -> dict[int, float]:
        return of_passes(subject, tuple(self.seconds), self.measure, self.check)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    monkeypatch.setattr(measured, "preemptions", lambda: 0)
    return tmp_path


def kept(directory: Path) -> list[Path]:
    return list((directory / "costs").glob("*"))


def test_the_second_start_times_nothing(quiet: Path) -> None:
    first, second = Passes(n1=1.0, n4=1.5), Passes(n1=9.0, n4=0.1)
    second.now = 1.0
    assert first.start() == second.start() == {1: 1.0, 4: 1.5}
    assert (first.timed, first.checked, second.timed, second.checked) == (2, 0, 0, 1)
    assert [path.suffix for path in kept(quiet)] == [".json"]


@pytest.mark.parametrize(("factor", "stands"), [(0.95 / TOO_SLOW, False), (1.05 / TOO_SLOW, True), (9.0, True)])
def test_what_a_busy_machine_left_is_measured_anew(factor: float, stands: bool) -> None:
    """A pass that is slower now says nothing: it is now that the machine is busy."""
    Passes(n1=1.0, n4=1.5).start()
    again, third = Passes(n1=factor, n4=0.2), Passes(n1=factor, n4=0.3)
    assert again.start()[4] == third.start()[4] == (1.5 if stands else 0.2)
    assert again.timed == (0 if stands else 2)


@pytest.mark.parametrize(("factor", "is_kept"), [(1.1, True), (1.2, False)])
def test_two_measurements_must_agree(factor: float, is_kept: bool, quiet: Path) -> None:
    passes = Passes(n1=1.0, n4=1.5)
    passes.factors = lambda call: factor if call == 1 else 1.0
    assert passes.start() == {1: 1.0, 4: 1.5}, "the least of both counts"
    assert len(kept(quiet)) == is_kept


@pytest.mark.parametrize(("rate", "is_kept"), [(0.5, True), (2.0, False)])
def test_nothing_is_kept_of_processors_that_others_took(
    rate: float, is_kept: bool, quiet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that all are slowed alike agree with each other."""
    clock, counts = iter((100.0, 102.0)), iter((7, 7 + round(2 * rate * MAX_PREEMPTIONS)))
    monkeypatch.setattr(measured, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(measured, "preemptions", lambda: next(counts))
    assert Passes(n1=1.0, n4=1.5).start() == {1: 1.0, 4: 1.5}
    assert len(kept(quiet)) == is_kept


@pytest.mark.parametrize("what", ["subject", "version", "machine", "candidates"])
def test_it_holds_for_what_was_timed_alone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Passes(n1=1.0, n4=1.5).start()
    other, subject = Passes(n1=1.0, n4=0.7), SUBJECT
    if what == "subject":
        subject = {**SUBJECT, "model": {"name": "other"}}
    elif what == "version":
        monkeypatch.setattr(measured, "package_version", lambda name: "0.0")
    elif what == "machine":
        monkeypatch.setattr(measured, "machine", lambda: {"threads": 99})
    else:
        other = Passes(n1=1.0, n4=0.7, n5=0.8)
    assert other.start(subject)[4] == 0.7


@pytest.mark.parametrize(
    "change",
    [
        lambda given: "",
        lambda given: "[1, 2",
        lambda given: "null",
        lambda given: json.dumps({**given, "key": {}}),
        lambda given: json.dumps({**given, "seconds": [1.0]}),
        lambda given: json.dumps({**given, "seconds": [1.0, 0.0]}),
        lambda given: json.dumps({**given, "seconds": [1.0, "x"]}),
        lambda given: json.dumps({**given, "seconds": None}),
        lambda given: json.dumps({**given, "time": time.time() - MAX_AGE_S - 60}),
        lambda given: json.dumps({**given, "time": time.time() + 1000}),
    ],
    ids=range(10),
)
def test_damaged_foreign_and_old_files_are_ignored(
    change: Callable[[dict[str, Any]], str], quiet: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Passes(n1=1.0, n4=1.5).start()
    (path,) = kept(quiet)
    path.write_text(change(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")
    again = Passes(n1=1.0, n4=0.7)
    with caplog.at_level("DEBUG", "foretell"):
        assert again.start()[4] == 0.7
    assert (again.timed, [record.levelno for record in caplog.records]) == (2, [logging.DEBUG])
    assert Passes(n1=1.0, n4=9.0).start()[4] == 0.7, "and replaced"


def test_a_disk_that_refuses_costs_the_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "file"))
    with caplog.at_level("DEBUG", "foretell"):
        for _ in range(2):
            passes = Passes(n1=1.0, n4=1.5)
            assert passes.start() == {1: 1.0, 4: 1.5}
            assert passes.timed == 2
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


def test_a_full_disk_leaves_no_scrap(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measured.json, "dump", full)
    assert Passes(n1=1.0, n4=1.5).start() == {1: 1.0, 4: 1.5}
    assert kept(quiet) == []
