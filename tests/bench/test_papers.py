"""The rows of the science page: each can be asked for, and the one that keeps answers goes on where it was."""

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.papers import abstention, judge
from benchmarks.papers.__main__ import ROWS, main
from benchmarks.papers.answers import Answers
from benchmarks.papers.row import Line, Row

from foretell.bench import Item
from foretell.bench.answers import number_check

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
    args.rules = "typical"
    assert abstention.run(args).why == "coupled was not asked for"
    args.rules = "coupled,typical"

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded again")

    monkeypatch.setattr(abstention.Engine, "load", refuse)
    assert abstention.run(args).lines == first.lines


def _suite(tmp_path: Path, count: int = 5) -> Path:
    """Word problems in a file of the public suites' form."""
    lines = [
        {"question_id": at, "category": "gsm8k", "turns": [f"What is {at} and {at}?"], "reference": [f"#### {2 * at}"]}
        for at in range(count)
    ]
    file = tmp_path / "suite.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def _judge(tmp_path: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    judge.options(parser)
    return parser.parse_args([
        "--suite", str(_suite(tmp_path)), "--limit", "5", "--tokens", "6", "--gamma", "3", "--rules", "coupled,top_n",
        "--answers", str(tmp_path / "answers.jsonl"), *more,
    ])  # fmt: skip


def test_a_judge_run_that_was_killed_goes_on_and_the_batch_changes_nothing(tmp_path: Path) -> None:
    """Cut in the middle of a line, the file is completed to the same figures, alone or five at a time."""
    file = tmp_path / "answers.jsonl"
    first = judge.run(_judge(tmp_path, "--batch-size", "5"))
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) == 2 * 5
    file.write_text("".join(lines[:6]) + lines[6][:20] + "\n", encoding="utf-8")
    second = judge.run(_judge(tmp_path, "--batch-size", "1"))
    assert second.details == first.details
    assert len(file.read_text(encoding="utf-8").splitlines()) == 6 + 1 + 4
    assert first.details["coupled"]["same"] == first.details["coupled"]["kept"] == 5
    assert first.details["coupled"]["cut"] > 0
    assert first.verdict == "lost"
    assert first.why.endswith(f"{4 / first.details['coupled']['length']:.2f} times as long as the exact one")


def _record(rule: str, at: int, text: str, steps: int, accepted: int) -> dict[str, Any]:
    return {
        "setting": ["s"], "rule": rule, "question_id": str(at), "seed": at, "category": "c", "level": "", "text": text,
        "ids": list(text.encode()), "steps": steps, "accepted": accepted, "finish": "stop",
    }  # fmt: skip


def test_a_lossy_rule_beside_the_exact_one(tmp_path: Path) -> None:
    """Worked by hand: four questions, of which the exact rule has three right and the lossy one two."""
    said = {"coupled": ["1", "2", "3", "no"], "typical": ["1", "It is 2", "9", "no"]}
    file = tmp_path / "answers.jsonl"
    records = [_record("coupled", at, text, 4, 4) for at, text in enumerate(said["coupled"])]
    records += [_record("typical", at, text, 2, 4) for at, text in enumerate(said["typical"])]
    file.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    items = [Item(at, "c", "?", check=number_check(f"#### {at + 1}")) for at in range(4)]
    found = judge.compared("typical", "coupled", Answers(file, ["s"], spread=True), items)
    assert (found["num_right"], found["count"], found["exact_alone"], found["rule_alone"]) == (2, 4, 1, 0)
    assert (found["kept"], found["same"], found["cut"]) == (3, 2, 0)
    assert found["length"] == 3
    assert found["gain"].value == 3 / 2
    assert found["gain"].low == pytest.approx(3 / 2), "every question has the same lengths"
    assert found["difference"].value == pytest.approx(-1 / 4)
    assert found["difference"].low < -1 / 4 < found["difference"].high
    other = Answers(file, ["another setting"], spread=True)
    assert not other.known
