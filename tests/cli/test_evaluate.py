"""``foretell evaluate`` on tiny models: the tables, the JSON report, the mistakes."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Invoke
from tests.cli.test_bench import suite  # noqa: F401 (a fixture)
from tests.cli.test_errors import one_line


@pytest.fixture
def evaluate(invoke: Invoke, models: dict[str, Path], suite: Path) -> Invoke:  # noqa: F811
    """The command on the tiny target."""

    def run(*args: object, **options: object) -> object:
        target = ["--target", models["target"], "--implementation", "lean", "--prompts", suite]
        return invoke("evaluate", *target, "--max-new-tokens", 12, "--timed", 1, *args)

    return run


def test_report(evaluate: Invoke, models: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = evaluate("--draft", models["draft"], "--num-speculative-tokens", 3, "--json", "--output", file)
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert json.loads(file.read_text()) == found
    assert (found["config"]["method"], found["num_speculative_tokens"]) == ("draft_model", 3)
    greedy, sampled = found["temperatures"]
    assert (greedy["measured_with"], sampled["measured_with"]) == ("exact, draws fixed", "rejection, draws iid")
    for at in (greedy, sampled):
        assert at["num_texts"] == 3
        assert 1 <= at["mean_acceptance_length"] <= 4
        assert at["costs"]["per_guess"] > 0
        assert [length["num_speculative_tokens"] for length in at["lengths"]] == [1, 2, 3]
        assert all(length["predicted_speedup"] > 0 for length in at["lengths"])
    assert set(sampled["slots"][0]["by_rule"]) == {"rejection", "coupled", "exact"}
    assert len(found["conclusions"]) == 2


def test_a_perfect_drafter(evaluate: Invoke, models: dict[str, Path]) -> None:
    result = evaluate("--draft", models["target"], "--temperature", "1", "--json", "--verify", "rejection")
    (at,) = json.loads(result.stdout)["temperatures"]
    assert at["rule"] == "rejection"
    assert at["slots"][0]["acceptance"]["value"] == 1.0
    assert at["slots"][0]["by_rule"]["rejection"]["value"] == pytest.approx(1.0, abs=1e-5)
    assert at["expected_length"] == pytest.approx(6.0, abs=1e-3)


def test_tables(evaluate: Invoke, models: dict[str, Path]) -> None:
    result = evaluate("--draft", models["draft"], "--limit", 1, "--num-speculative-tokens", 2)
    assert (result.exit_code, result.stderr) == (0, "")
    for part in ("temperature 0", "1-TV", "predicted", "calibration error", "a plain pass takes"):
        assert part in result.stdout
    last = result.stdout.strip().splitlines()[-2:]
    assert [line.split(":")[0] for line in last] == ["temperature 0", "temperature 1"]
    assert all("draft_model is predicted" in line for line in last)


def test_methods_without_a_law(evaluate: Invoke) -> None:
    result = evaluate("--method", "prediction", "--temperature", "0")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "of 2 texts" in result.stdout, "one prompt has no prediction"
    result = evaluate("--method", "ngram", "--temperature", "0", "--timed", 0)
    assert "no prediction: no guess was made, or nothing was timed" in result.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "name a drafter by --draft NAME_OR_DIR or --method NAME"),
        (["--method", "none"], "name a drafter"),
        (["--method", "ngrm"], "did you mean 'ngram'?"),
        (["--method", "draft_model"], "needs --draft NAME_OR_DIR"),
        (["--method", "prediction", "--categories", "code"], "needs prompts with a 'prediction'"),
        (["--method", "ngram", "--categories", "cpoy"], "did you mean 'copy'?"),
        (["--method", "ngram", "--temperature", "x"], "--temperature 'x' must be numbers"),
        (["--method", "ngram", "--temperature", "-1"], "temperature = -1.0 must be at least 0"),
        (["--method", "ngram", "--num-speculative-tokens", "0"], "num_speculative_tokens = 0"),
        (["--method", "ngram", "--prompts", "/nonexistent"], "cannot be read"),
        (["--method", "ngram", "--output", "/nonexistent/x"], "cannot be written"),
        (["--method", "ngram", "--threads", "0"], "--threads 0 must be at least 1"),
        (["--method", "ngram", "--verify", "couple"], "did you mean 'coupled'?"),
        (["--method", "ngram", "--speculative-config", "{"], "is not JSON"),
        (["--method", "ngram", "--width", "2"], "width = 2"),
    ],
)
def test_mistakes(evaluate: Invoke, args: list[str], said: str) -> None:
    result = evaluate(*args)
    assert said in one_line(result.stderr)
    assert (result.exit_code, result.stdout) == (2, "")
