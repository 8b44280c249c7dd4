"""``foretell certify`` on tiny models: the table, the JSON certificate, the exit status, the mistakes."""

import json
from pathlib import Path

import pytest

from foretell.cli.commands.certify_url import read_prompts
from foretell.core.errors import ConfigError
from tests.cli.conftest import Invoke
from tests.cli.test_errors import one_line


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two lines of text."""
    file = tmp_path / "prompts.txt"
    file.write_text("def total(values):\n\nimport the class\n")
    return file


@pytest.fixture
def certify(invoke: Invoke, models: dict[str, Path], prompts: Path) -> Invoke:
    """The command on the tiny pair, small."""

    def run(*args: object, **options: object) -> object:
        pair = ["--target", models["target"], "--draft", models["draft"], "--implementation", "lean"]
        small = ["--prompts", prompts, "--max-new-tokens", 8, "--temperature", 1, "--shape", "chain"]
        return invoke("certify", *pair, *small, *args)

    return run


def test_table(certify: Invoke) -> None:
    result = certify("--verify", "coupled", "--verify", "rejection")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.strip().splitlines()
    assert lines[-1] == "certified"
    for part in ("window", "draws", "law", "joint", "tokens", "looked at", "tolerance", "pass", "lean", "2 prompts"):
        assert part in result.stdout
    assert "DEFECT" not in result.stdout


def test_json(certify: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "certificate.json"
    result = certify("--verify", "rejection", "--json", "--output", file, "--seed", 3, "--temperature", 0)
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    written = json.loads(file.read_text())
    assert written == found
    assert found["passed"] is True
    assert found["settings"]["temperatures"] == [1.0, 0.0]
    assert found["settings"]["seed"] == 3
    assert {check["name"] for check in found["checks"]} == {"window", "draws", "law", "joint", "tokens"}


def test_a_defect_is_status_1(certify: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretell.core import deferred

    right = deferred.logits_to_probs
    monkeypatch.setattr(deferred, "logits_to_probs", lambda logits, *args: right(logits * 1.05, *args))
    result = certify("--verify", "rejection")
    assert result.exit_code == 1
    assert result.stdout.strip().splitlines()[-1] == "DEFECT"
    assert "DEFECT: window, rejection, chain: prompt of" in result.stdout


def test_what_does_not_compose_is_left_out(certify: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import dataclass

    from foretell.verify import VERIFIERS
    from foretell.verify.rejection import Rejection

    @dataclass(frozen=True)
    class Linear(Rejection):
        name = "linear"
        chains_only = True

    monkeypatch.setitem(VERIFIERS, "linear", Linear())
    result = certify("--verify", "linear", "--shape", "static/branching=2x1")
    assert result.exit_code == 0
    assert "left out: linear, static/branching=2x1: verifier 'linear' is defined on chains" in result.stdout


def test_suffixes_where_there_is_no_draft(invoke: Invoke, models: dict[str, Path], prompts: Path) -> None:
    result = invoke(
        "certify", "--target", models["plain"], "--implementation", "lean", "--prompts", prompts, "--json",
        "--max-new-tokens", 16, "--verify", "coupled", "--shape", "chain", "--temperature", 0,
    )  # fmt: skip
    assert result.exit_code == 0
    assert json.loads(result.stdout)["settings"]["speculative"]["method"] == "suffix"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--verify", "rejecton"], "did you mean 'rejection'?"),
        (["--shape", "chian"], "did you mean 'chain'?"),
        (["--limit", "0"], "--limit 0 must be at least 1"),
        (["--threads", "0"], "--threads 0 must be at least 1"),
        (["--temperature", "-1"], "temperature = -1.0 must be at least 0"),
        (["--max-new-tokens", "1"], "max_new_tokens = 1 must be at least 2"),
        (["--prompts", "/nonexistent"], "suite '/nonexistent' cannot be read"),
        (["--output", "/nonexistent/x"], "cannot be written"),
        (["--method", "ngram"], "is read by methods with weights"),
        (["--method", "none"], "drop one"),
        (["--num-speculative-tokens", "0"], "must be between 1 and 64"),
    ],
)
def test_mistakes(certify: Invoke, args: list[str], said: str) -> None:
    result = certify(*args)
    assert said in one_line(result.stderr)
    assert (result.exit_code, result.stdout) == (2, "")


def test_prompts(tmp_path: Path) -> None:
    assert len(read_prompts("bundled", 7)) == 7
    assert len({item.category for item in read_prompts("bundled", 5)}) == 5, "categories in turn"
    file = tmp_path / "x"

    def read(text: str) -> list[tuple[str, str]]:
        file.write_text(text)
        return [(item.prompt, item.format) for item in read_prompts(str(file), 9)]

    assert read("one\n\n two \n") == [("one", "text"), (" two ", "text")]
    lines = ['{"prompt": "a"}', '"b"', '{"turns": ["c", "d"]}', '{"turns": ["e"], "format": "text"}']
    assert read("\n".join(lines)) == [("a", "text"), ("b", "text"), ("c", "chat"), ("e", "text")]
    for text, said in [
        ("", "is empty"),
        ('{"prompt": 1}', "line 1: expected a text"),
        ('"a"\n[1]', "line 2: expected a text"),
        ('"a"\nb', "line 2: not JSON"),
        ('{"prompt": "a", "format": "x"}', "format = 'x'"),
    ]:
        with pytest.raises(ConfigError, match=said):
            read(text)
