"""What is said while models load: to a function, on standard error, in the log, in a command's line."""

import io
import logging
import sys

import pytest

from foretell import Engine
from foretell.cli.output import waiting
from foretell.core import progress
from foretell.core.progress import Lines, listening, tell


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("implementation", ["native", "lean", "transformers"])
def test_the_share_of_each_model_grows(implementation: str, caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[str, float]] = []
    with caplog.at_level(logging.INFO, logger="foretell"):
        Engine.load(
            "bundled",
            speculative="draft_model",
            implementation=implementation,
            progress=lambda *each: told.append(each),
        )
    for name in ("bundled", "bundled/draft"):
        shares = [share for what, share in told if what == name]
        assert shares[0] == 0.0
        assert shares[-1] == 1.0
        assert shares == sorted(shares)
        assert any(0.2 < share < 0.8 for share in shares) or implementation == "transformers"
    lines = [record.getMessage() for record in caplog.records if record.name == "foretell.model.load"]
    assert any(line.startswith(f"bundled: loaded as {implementation} in ") for line in lines)


def test_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    Engine.load("bundled", progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("loading bundled: 100%, ")
    assert len(lines) <= 3
    Engine.load("bundled")
    assert capsys.readouterr().err == ""


def test_a_line_a_second_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    lines = Lines()
    for step in range(11):
        now[0] = step * 0.3
        lines("x", step / 10)
    assert capsys.readouterr().err.splitlines() == [
        "loading x: 40%, 1.2 s",
        "loading x: 80%, 2.4 s",
        "loading x: 100%, 3.0 s",
    ]


def test_in_place_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    lines = Lines()
    for share in (0.0, 0.5, 1.0):
        lines("x", share)
    assert screen.getvalue().replace("0.0 s", "T") == "\rloading x: 0%, T\rloading x: 50%, T\rloading x: 100%, T\n"


def test_listeners_end_with_their_block() -> None:
    told: list[str] = []
    with listening(lambda what, _: told.append(what)):
        tell("a", 0.5)
        with listening(None):  # the one from before
            tell("b", 0.5)
    tell("c", 0.5)
    assert told == ["a", "b"]


def test_a_command_shows_share_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with waiting("loading it", no_color=True):
        tell("bundled", 0.25)
    assert "loading bundled, 25%" in screen.getvalue()
    assert "0:00:00" in screen.getvalue()
