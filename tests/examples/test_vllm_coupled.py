"""``examples/vllm_coupled.py`` without vLLM: its questions, its verdict, and what it says where vLLM is missing."""

import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "examples" / "vllm_coupled.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_coupled", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_questions_differ(example: ModuleType) -> None:
    assert len(set(example.questions(50))) == 50
    assert example.questions(20) == example.questions(50)[:20]


@pytest.mark.parametrize("last", [2, 3])
def test_any_other_token_is_a_failure(example: ModuleType, capsys: pytest.CaptureFixture[str], last: int) -> None:
    counts = {"vllm:spec_decode_num_accepted_tokens": 5}
    found = {
        "plain": {"tokens": [[1, 2], [1, 2]], "counts": {}},
        "coupled": {"tokens": [[1, 2], [1, last]], "counts": counts},
    }
    assert example.report(found) == (last != 2)
    assert capsys.readouterr().out.splitlines()[1] == f"coupled: {2 - (last != 2)} of 2 texts equal; accepted_tokens 5"


def test_every_mode_is_a_process_that_knows_the_draft(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(command: list[str], check: bool) -> None:
        named = dict(pairwise(command))
        assert check
        assert named["MODEL"] == "DRAFT"
        ran.append(named["--mode"])
        Path(named["--file"]).write_text(json.dumps({"tokens": [[1]], "counts": {}}))

    monkeypatch.setattr(example, "find_spec", lambda _: object())
    monkeypatch.setattr(example.subprocess, "run", run)
    assert example.main(["MODEL", "DRAFT"]) == 0
    assert ran == ["plain", "coupled"]


def test_without_vllm_it_says_so(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "find_spec", lambda _: None)
    assert example.main(["model", "draft"]) == 2
    assert "pip install vllm" in capsys.readouterr().out
