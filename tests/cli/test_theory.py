"""``foretell theory``: numbers without models, and figures of the bundled pair."""

import csv
import json
from pathlib import Path

import pytest

from foretell.draft.shapes import parse_shape
from tests.cli.conftest import Invoke

SMALL = ("--limit", "1", "--contexts", "1", "--max-new-tokens", "4", "--threads", "1")


def test_length(invoke: Invoke) -> None:
    found = json.loads(invoke("theory", "length", "--acceptance", "0.8", "--cost", "0.05", "--json").stdout)
    assert found["best_num_speculative_tokens"] == 8
    assert found["lengths"][2]["expected_tokens"] == pytest.approx((1 - 0.8**3) / 0.2)
    assert found["lengths"][2]["speedup"] == pytest.approx((1 - 0.8**3) / 0.2 / 1.1)
    shown = invoke("theory", "length", "--acceptance", "0.9,0.5", "--cost", "2").stdout
    assert "no guesses" in shown


def test_alone_it_shows_its_help(invoke: Invoke) -> None:
    result = invoke("theory")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "optimum" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("length", "--acceptance", "x"), "--acceptance 'x' must be numbers"),
        (("length", "--acceptance", "1.5"), "probability in [0, 1]"),
        (("length", "--cost", "-1"), "cost"),
        (("lenght",), "did you mean 'length'"),
        (("optimum", "--drafts", "1.5"), "whole numbers"),
        (("optimum", "--plot", "x.txt"), "must end in .png"),
        (("optimum", "--plot", "no/such/x.svg"), "--plot 'no/such/x.svg' cannot be written"),
        (("optimum", "--csv", "no/such/x.csv"), "--csv 'no/such/x.csv' cannot be written"),
        (("optimum", "--csv", "/nowhere/x.csv"), "cannot be written"),
        (("shape", "--verify", "rejectoin"), "did you mean 'rejection'"),
        (("shape", "--draws", "idd"), "did you mean 'iid'"),
        (("optimum", "--target", "some/model"), "needs --draft"),
        (("length", "--max-length", "100000"), "less than or equal to 1000"),
        (("length", "--acceptance", ",".join(["1"] * 1001)), "expected 1000 at most"),
        (("optimum", "--drafts", "2,17", "--target", "no/model", "--draft", "bundled"), "from 1 to 16"),
        (
            ("optimum", "--prompts", "no.jsonl", "--target", "no/model", "--draft", "bundled"),
            "'no.jsonl' cannot be read",
        ),
        (("shape", "--categories", "cod", "--target", "no/model", "--draft", "bundled"), "did you mean 'code'"),
    ],
)
def test_mistakes(invoke: Invoke, arguments: tuple[str, ...], said: str) -> None:
    result = invoke("theory", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_contexts_that_no_machine_holds(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.analysis.pairs.memory_bytes", lambda: 2**22)
    result = invoke("theory", "optimum", "--limit", "1", "--contexts", "9999999999")
    assert result.exit_code == 2
    assert "contexts of 8192 tokens take" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_optimum_as_json_csv_and_plot(invoke: Invoke, tmp_path: Path) -> None:
    files = {name: tmp_path / f"table.{name}" for name in ("csv", "png")}
    result = invoke(
        "theory", "optimum", *SMALL, "--temperature", "0,1", "--drafts", "1,2", "--json",
        "--csv", str(files["csv"]), "--plot", str(files["png"]),
    )  # fmt: skip
    found = json.loads(result.stdout)
    assert found["target"] == "bundled"
    with files["csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["cells"]) > 10
    assert all(float(row["acceptance"]) <= 1 for row in rows)
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_shape(invoke: Invoke) -> None:
    shown = invoke("theory", "shape", *SMALL, "--temperature", "0,1", "--max-size", "4").stdout
    answers = [line for line in shown.splitlines() if line.startswith("temperature ")]
    assert [line.partition(":")[0] for line in answers] == ["temperature 0", "temperature 1"]
    for line in answers:  # whole, on a line of its own
        spec = line.partition("--shape ")[2]
        assert "plain decoding is fastest" in line or parse_shape(spec, 5).name == "sequoia"
    result = invoke("theory", "shape", *SMALL, "--temperature", "1", "--max-size", "4", "--json")
    (choice,) = json.loads(result.stdout)
    assert choice["verifier"] == "coupled"
    assert len(choice["acceptance"]) == 8
    assert choice["num_guesses"] <= 4
    assert (choice["spec"] == "") == (choice["num_guesses"] == 0)
    assert choice["cost_target"]["1"] == 1.0


@pytest.mark.parametrize("command", ["optimum", "shape"])
def test_a_draft_of_another_vocabulary_is_refused(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Its token ids mean other tokens: the figures would be of nothing."""
    from foretell import Engine
    from foretell.methods.draft_model.vocabulary.translated import TranslatedDraft

    engine = Engine.load("bundled", speculative="draft_model")
    other = object.__new__(TranslatedDraft)
    other.model = engine.method.model  # type: ignore[attr-defined]
    engine.method = other
    monkeypatch.setattr("foretell.cli.settings.load_engine", lambda *_, **__: engine)
    result = invoke("theory", command, *SMALL)
    assert result.exit_code == 2
    assert "has another vocabulary than target" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
