"""The rows of the science page: each can be asked for, and the one that keeps answers goes on where it was."""

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.papers import abstention
from benchmarks.papers.__main__ import ROWS, main
from benchmarks.papers.row import Line, Row

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"


@pytest.mark.parametrize("name", ROWS)
def test_every_row_has_options_and_a_command_on_the_page(name: str) -> None:
    module = importlib.import_module(f"benchmarks.papers.{name}")
    parser = argparse.ArgumentParser()
    module.options(parser)
    required = {"agreement": ["--answers", "file"]}
    assert vars(parser.parse_args(required.get(name, [])))
    assert callable(module.run)
    assert f"python -m benchmarks.papers {name}" in PAGE.read_text(encoding="utf-8")


def test_a_row_as_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("x", "Paper", "table 1", [Line("a", 2.0, 1.0, 0.5, 1.5), Line("b", None, 3.0)], "lost", "too small")
    row.show()
    said = capsys.readouterr().out
    assert "| a | 2 | 1 | [0.5, 1.5] | 0.50 |" in said
    assert "| b | - | 3 |  | - |" in said
    row.written(str(tmp_path / "x.json"))
    found = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert [line["ratio"] for line in found["lines"]] == [0.5, None]
    assert found["provenance"]["versions"]


def test_an_unknown_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["papers", "chat"])
    assert main() == 2
    assert "row 'chat' is not one of chart, stopping" in capsys.readouterr().err


def test_answers_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run answers nothing again, with the same figures; coupled answers are plain decoding's."""
    parser = argparse.ArgumentParser()
    abstention.options(parser)
    file = tmp_path / "answers.jsonl"
    args = parser.parse_args(["--limit", "9", "--tokens", "3", "--rules", "coupled,typical", "--answers", str(file)])
    first = abstention.run(args)
    assert len(file.read_text(encoding="utf-8").splitlines()) == 3 * 9
    assert first.why == "under coupled every answer is plain decoding's"

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded again")

    monkeypatch.setattr(abstention.Engine, "load", refuse)
    assert abstention.run(args).lines == first.lines
