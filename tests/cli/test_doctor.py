"""``foretell doctor`` on tiny models and bundled heads: the report, the recommendation, the diagnosis, the mistakes."""

import json
from pathlib import Path
from time import sleep

import pytest

from foretell.cli import layout
from foretell.cli.commands.doctor import flags_of
from foretell.cli.options import Models
from foretell.core.errors import ConfigError
from foretell.costs.table import CostTable, TextCosts
from foretell.doctor import head
from foretell.engine.calibrate import Calibration
from tests.cli.conftest import Invoke
from tests.cli.test_bench import suite  # noqa: F401 (a fixture)
from tests.cli.test_errors import one_line
from tests.doctor import plants

SMALL = ("--limit", 2, "--timed", 1, "--max-new-tokens", 12, "--no-bandwidth")


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is said because a machine is slow."""
    monkeypatch.setattr(layout, "LINE_S", 1e6)


@pytest.fixture
def doctor(invoke: Invoke, models: dict[str, Path], suite: Path) -> Invoke:  # noqa: F811
    """The command on the tiny target."""

    def run(*args: object, **options: object) -> object:
        target = ["--target", models["target"], "--implementation", "lean", "--prompts", suite]
        return invoke("doctor", *target, *SMALL, *args)

    return run


def test_report(doctor: Invoke, models: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = doctor("--draft", models["draft"], "--methods", "draft_model,ngram", "--json", "--output", file)
    assert result.exit_code == 0
    said = result.stderr.splitlines()
    assert all(line.startswith("foretell: ") for line in said)
    assert "% , at most".replace(" ", "") in said[0].replace(" ", "")
    assert "(what is used where no method is named): about" in said[1], "a first figure, before all is measured"
    found = json.loads(result.stdout)
    assert json.loads(file.read_text()) == found
    assert {one["method"] for one in found["methods"]} == {"draft_model", "ngram"}
    draft = next(one for one in found["methods"] if one["method"] == "draft_model")
    assert draft["drafter"] == str(models["draft"])
    assert [one["num_speculative_tokens"] for one in draft["predictions"]] == list(
        range(1, len(draft["predictions"]) + 1)
    )
    for one in draft["predictions"]:
        assert one["speedup"]["low"] <= one["speedup"]["high"]
        assert one["cost"] > 0
    assert found["command"].startswith(f"foretell generate --target {models['target']} --implementation lean --method ")
    assert found["machine"]["implementation"] == "lean"
    assert found["num_prompts"] == 2
    assert found["outlook"] == [], "only where it is asked for"
    for one in found["methods"]:
        told = one["possible"]
        levels = [told[level] for level in ("possible", "candidates", "stopped", "have")]
        assert told["unknown"] or levels == sorted(levels, reverse=True), one["method"]
    assert not draft["possible"]["unknown"]


def test_something_new_is_said_while_one_thing_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """38 seconds passed without a line."""
    monkeypatch.setattr(layout, "LINE_S", 0.05)
    said: list[str] = []
    monkeypatch.setattr(layout, "say", said.append)

    def until(words: str) -> None:
        for _ in range(2000):
            if any(line.startswith(words) for line in said):
                return
            sleep(0.01)
        raise AssertionError(said)

    with layout.ProgressLines("loading a model") as lines:
        until("loading a model: for ")
        lines("a prompt")
        until("a prompt: for ")
    assert "a prompt" in said, "what is new is said at once"


def test_tables(doctor: Invoke, models: dict[str, Path]) -> None:
    result = doctor("--draft", models["draft"], "--methods", "draft_model")
    assert result.exit_code == 0
    for part in ("machine:", "target:", "what guessing would bring", "slot 1", "foretell generate --target"):
        assert part in result.stdout
    assert "auto:draft_model" in result.stdout, "what draft_model is with --speculation auto"
    assert "! 2 prompts" in result.stdout
    assert "not native" in result.stdout  # the implementation was forced: said, and why


def test_longer_texts_and_more_requests_are_foreseen(
    doctor: Invoke, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a table of costs that says when guesses pay: never with long texts."""
    verify = {(batch, batch * (1 + depth)): 1.0 for batch in (1, 2, 4) for depth in (0, 1, 8)}
    draft = {"draft_model": {(batch, depth): 1e-6 * depth for batch in (1, 2, 4) for depth in (1, 8)}}
    costs = CostTable(verify, draft, {}, {"draft_model": TextCosts(1.0)}, 64.0)
    asked: list[int] = []
    monkeypatch.setattr(Calibration, "table", lambda self: (asked.append(self.max_batch), costs)[1])
    args = ("--draft", models["draft"], "--methods", "draft_model", "--context", 100, "--concurrency", 4)
    found = json.loads(doctor(*args, "--json").stdout)
    assert asked[-1] == 4
    cells = [(cell["context"], cell["concurrency"], cell["guesses"]) for cell in found["outlook"]]
    assert cells == [(100, 1, 0), (100, 2, 0), (100, 4, 0)], "attention costs more than guesses bring"
    costs = CostTable(verify, draft)
    shown = doctor(*args[:-2]).stdout
    assert "draft_model, foreseen by tokens of text and requests at once" in shown
    assert "100 tokens and 1 at once: " in shown
    assert "times plain decoding, if as many are kept as here." in shown
    assert "is longer than the target's context" in one_line(doctor("--context", 10**6).stderr)


def test_a_draft_as_large_as_its_target_is_warned_of(doctor: Invoke, models: dict[str, Path]) -> None:
    """It accepts everything, and each of its guesses costs a pass: no speedup, whatever it accepts."""
    found = json.loads(doctor("--draft", models["target"], "--methods", "draft_model", "--json").stdout)
    one = next(one for one in found["methods"] if one["speculation"] == "on")
    assert one["slots"][0] == pytest.approx(1.0)
    assert [one["method"] for one in found["methods"]] == ["draft_model"] * 2
    assert not [one for one in found["warnings"] if one["about"] == "sampling"], "it is greedy"
    assert one["best_case"] is not None


def test_a_head_with_a_fault_has_exit_status_3_and_a_remedy(invoke: Invoke, tmp_path: Path) -> None:
    broken = plants.too_large_for_half(tmp_path)
    result = invoke("doctor", broken, "--target", "bundled", "--limit", 2)
    assert result.exit_code == 3
    assert "dtype: its numbers do not fit the dtype it runs in" in result.stdout
    assert "remedy:" in result.stdout


def test_the_length_of_answers_reaches_the_diagnosis(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def diagnose(*args: object, max_new_tokens: int, **more: object) -> None:
        seen.append(max_new_tokens)
        raise ConfigError("seen")

    monkeypatch.setattr(head, "diagnose", diagnose)
    for args in ((), ("--max-new-tokens", 20)):
        assert "seen" in invoke("doctor", "bundled/kangaroo", "--target", "bundled", "--limit", 1, *args).stderr
    assert seen == [48, 20]


def test_the_recommended_command_runs_the_same_target() -> None:
    """An option that is not repeated there would recommend what was not measured."""
    assert flags_of(Models("a/b", draft="c", draft_weights="int8", dtype="auto")) == []
    chosen = Models(
        "a/b", "v1", True, None, "cuda", "bfloat16", '{"": 0}', "lean", "int8", None, "int8", cuda_graphs="off", width=4
    )  # fmt: skip
    assert flags_of(chosen) == [
        "--revision", "v1", "--trust-remote-code", "--device", "cuda", "--dtype", "bfloat16", "--device-map", '{"": 0}',
        "--implementation", "lean", "--weights", "int8", "--kv", "int8", "--cuda-graphs", "off", "--width", "4",
    ]  # fmt: skip


def test_a_clean_head(invoke: Invoke) -> None:
    result = invoke("doctor", "bundled/kangaroo", "--target", "bundled", "--limit", 3)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "No fault was found" in result.stdout
    assert "accepted" in result.stdout


def test_mistakes(doctor: Invoke, invoke: Invoke, models: dict[str, Path]) -> None:
    assert "did you mean 'ngram'" in one_line(doctor("--methods", "ngrm").stderr)
    assert "no method 'none' to try; known: dflash" in one_line(doctor("--methods", "none").stderr), "not itself"
    assert "--methods names none" in one_line(doctor("--methods", "").stderr)
    assert "drop --methods" in one_line(doctor("bundled/eagle1", "--methods", "ngram").stderr)
    for option in (["--temperature", 1], ["--timed", 2], ["--no-bandwidth"]):
        said = one_line(invoke("doctor", "bundled/eagle1", "--target", "bundled", *option).stderr)
        assert "is not for HEAD" in said
        assert said.startswith(f"{option[0].replace('no-', '')}")
    assert "it needs a trained head" in one_line(doctor("--methods", "medusa").stderr)
    assert "--draft NAME" in one_line(invoke("doctor", models["draft"], "--target", "bundled").stderr)
