"""The script of real checkpoints, on table models: cells, resuming, what it prints."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import real

from foretell.bench import run
from foretell.core.provenance import provenance
from foretell.engine.engine import Engine
from tests.bench.test_run import Letters
from tests.model.table import TableLM


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the script on a suite of four questions; returns what it printed and what it said."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    suite = tmp_path / "suite.jsonl"
    lines = [{"question_id": i, "category": "ab"[i % 2], "turns": ["good", "again"][: 1 + i // 2]} for i in range(4)]
    suite.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(real, "dram_read_bandwidth", lambda: 1e9)
    monkeypatch.setattr(real, "load", lambda *_: Engine(TableLM(16, seed=3, max_positions=64), Letters()))

    def run(*args: object) -> tuple[str, str]:
        command = ["real", "--results", tmp_path / "real.jsonl", "--suite", suite, "--sample", 0, "--tokens", 6, *args]
        monkeypatch.setattr(sys, "argv", [str(part) for part in command])
        real.main()
        return capsys.readouterr()

    return run


def cells(tmp_path: Path) -> list[tuple[str, float]]:
    lines = (tmp_path / "real.jsonl").read_text().splitlines()
    return [(cell["method"], cell["temperature"]) for cell in map(json.loads, lines)]


def test_cells_are_measured_once(call: Any, tmp_path: Path) -> None:
    out, _ = call("--model", "tiny=x", "--methods", "ngram:2,draft_model:2", "--temperatures", "0,1")
    assert cells(tmp_path) == [("none", 0.0), ("ngram:2", 0.0), ("none", 1.0), ("ngram:2", 1.0)]  # there is no draft
    assert "## tiny, bf16, temperature 0" in out
    assert "| `ngram:2` |" in out
    assert "| a | b |" in out
    assert "6/6 |" in out  # four questions, two of them with a second message; all tokens identical
    assert "memory reads 1.0 GB/s" in out
    _, said = call("--model", "tiny=x", "--methods", "ngram:2,suffix", "--temperatures", "0")
    assert "tiny, bf16, temperature 0: none, suffix" in said
    assert cells(tmp_path)[4:] == [("none", 0.0), ("suffix", 0.0)]
    _, said = call("--model", "tiny=x", "--methods", "ngram:2,suffix", "--temperatures", "0")
    assert said == ""
    assert call("--show")[0].count("## tiny") == 2
    assert list(tmp_path.glob("*.runs.jsonl")) == []


def test_other_questions_are_other_cells(call: Any, tmp_path: Path) -> None:
    call("--model", "tiny=x", "--methods", "ngram:2", "--temperatures", "0")
    call("--model", "tiny=x", "--methods", "ngram:2", "--temperatures", "0", "--limit", 1)
    assert len(cells(tmp_path)) == 4


def test_it_stops_in_time_and_goes_on(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1e6])
    monkeypatch.setattr(real, "monotonic", lambda: next(clock, 1e6))
    _, said = call("--model", "tiny=x", "--methods", "ngram:2", "--temperatures", "0", "--minutes", 1)
    assert "stopped: the same command goes on" in said
    assert cells(tmp_path) == []
    (runs,) = tmp_path.glob("*.runs.jsonl")
    assert len(runs.read_text().splitlines()) > 1
    monkeypatch.undo()


def test_weights_are_cells_of_their_own(call: Any, tmp_path: Path) -> None:
    """One target in two kinds of weights, and a draft in a third."""
    given = ["--model", "tiny=x", "--methods", "ngram", "--temperatures", "0"]
    out, _ = call(*given, "--weights", "bf16,int8")
    assert (out.count("## tiny, bf16, "), out.count("## tiny, int8, ")) == (1, 1)
    call(*given, "--weights", "int8", "--draft-weights", "int4")
    assert len(cells(tmp_path)) == 6
    method = real.Model("T", draft="D").method("auto:draft_model:3", "int8")
    assert (method.speculation, method.config.resolved()["draft_weights"]) == ("auto", "int8")


def test_auto_and_its_bars() -> None:
    def cell(method: str, ratio: float, low: float) -> dict[str, Any]:
        parts = [
            {"category": name, "speedup": {"value": value}} for name, value in (("a", low), ("b", 2 * ratio - low))
        ]
        return {"method": method, "report": {"overall": {"speedup": {"value": ratio}}, "categories": parts}}

    (said,) = real.bars([cell("none", 1.0, 1.0), cell("ngram", 1.6, 0.9), cell("auto:ngram", 1.52, 0.99)])
    assert said == (
        "auto:ngram: at least 0.99 of plain in every task (lowest: a; bar 0.98); 0.95 of the best fixed choice, "
        "ngram (bar 0.95)"
    )
    (said,) = real.bars([cell("ngram", 0.8, 0.7), cell("auto:ngram", 1.0, 0.99)])
    assert "1.00 of the best fixed choice, plain decoding" in said


def test_models(tmp_path: Path) -> None:
    found = real.chosen_models(["qwen", "mine=T,draft=D", "smollm2,eagle3=E"], tmp_path)
    assert found["qwen"].target == str(tmp_path / "qwen2.5-coder-1.5b-hf")
    assert found["qwen"].methods()[:5] == [f"draft_model:{count}" for count in range(1, 6)]
    assert found["qwen"].methods()[-1] == "auto:draft_model:5"
    assert (found["mine"].target, found["mine"].draft) == ("T", "D")
    assert found["smollm2"].methods() == ["eagle3:5", "hybrid:15", "suffix", "ngram", "auto:hybrid:15"]
    assert found["smollm2"].method("draft_model:3", "bf16") is None
    with pytest.raises(SystemExit, match="give --model x=TARGET"):
        real.chosen_models(["x"], None)
    with pytest.raises(SystemExit, match="expected NAME=TARGET"):
        real.chosen_models(["x=T,drft=D"], None)


def test_a_commit_between_two_parts_starts_nothing_again(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(revision: str) -> None:
        for module in (real, run):
            monkeypatch.setattr(module, "provenance", lambda: {**provenance(), "git_revision": revision})

    given = ["--model", "tiny=x", "--methods", "ngram:2", "--temperatures", "0"]
    clock = iter([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    with monkeypatch.context() as patch:
        patch.setattr(real, "monotonic", lambda: next(clock, 1e6))
        at("a" * 40)
        call(*given, "--minutes", 1)
    (runs,) = tmp_path.glob("*.runs.jsonl")
    before = len(runs.read_text().splitlines()) - 1
    assert 0 < before < 12
    made: list[int] = []
    with monkeypatch.context() as patch:
        once = run.measure
        patch.setattr(run, "measure", lambda *args: made.append(args[2].max_new_tokens) or once(*args))
        at("b" * 40 + "+changes")
        out, _ = call(*given)
    assert made.count(6) == 12 - before
    rows = [json.loads(line) for line in (tmp_path / "real.jsonl").read_text().splitlines()]
    assert sum(count for row in rows for count in row["revisions"].values()) == 12
    assert all(list(row["revisions"]) == ["a" * 40, "b" * 40 + "+changes"] for row in rows)
    assert f"Not all from one revision: none: aaaaaaaaaa ({rows[0]['revisions']['a' * 40]} runs), bbbbbbbbbb" in out
    at("c" * 40)
    call(*given)
    assert len(cells(tmp_path)) == 2  # finished cells are not measured again either
    out, _ = call(*given[:2], "--methods", "suffix", "--temperatures", "0")
    assert "suffix: cccccccccc" in out
    assert len(cells(tmp_path)) == 4


def test_changed_files_and_options_are_other_cells(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "weights"
    target.mkdir()
    (target / "model.bin").write_text("one")
    call("--model", f"tiny={target}", "--methods", "ngram:2", "--temperatures", "0")
    target.rename(tmp_path / "moved")
    target = tmp_path / "moved"
    call("--model", f"tiny={target}", "--methods", "ngram:2", "--temperatures", "0")
    assert len(cells(tmp_path)) == 2
    (target / "model.bin").write_text("more")
    call("--model", f"tiny={target}", "--methods", "ngram:2", "--temperatures", "0")
    assert len(cells(tmp_path)) == 4
    found = provenance()
    monkeypatch.setattr(real, "provenance", lambda: {**found, "versions": {**found["versions"], "foretell": "9"}})
    call("--model", f"tiny={target}", "--methods", "ngram:2", "--temperatures", "0")
    assert len(cells(tmp_path)) == 6


def test_tables_of_one_revision_say_nothing_of_it() -> None:
    old = {"method": "none", "provenance": {"git_revision": "a" * 40}}  # a row of before revisions were counted
    assert list(real.origins([old, {**old, "method": "ngram", "revisions": {"a" * 40: 3}}])) == []
    assert list(real.origins([old, {**old, "method": "ngram", "revisions": {"b" * 40: 3}}])) == [
        "Not all from one revision: none: aaaaaaaaaa; ngram: bbbbbbbbbb"
    ]
