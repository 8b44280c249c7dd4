"""``foretell bench`` on tiny models: the table, the JSON report, the mistakes."""

import json
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Invoke
from tests.cli.test_errors import one_line
from tests.cli.test_process import PROGRAM, environment


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Three prompts of two categories, one with a prediction."""
    file = tmp_path / "suite.jsonl"
    records = [
        {"question_id": 1, "category": "code", "format": "text", "turns": ["def total(values):"]},
        {"question_id": 2, "category": "copy", "turns": ["Repeat: the class"], "prediction": "the class"},
        {"question_id": 3, "category": "copy", "turns": ["Repeat: return"], "prediction": "return"},
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture
def bench(invoke: Invoke, models: dict[str, Path], suite: Path) -> Invoke:
    """The command on the tiny target."""

    def run(*args: object, **options: object) -> object:
        target = ["--target", models["target"], "--implementation", "lean", "--suite", suite, "--no-bandwidth"]
        return invoke("bench", *target, "--max-new-tokens", 12, *args)

    return run


def test_report(bench: Invoke, models: dict[str, Path], tmp_path: Path) -> None:
    methods = "none,draft_model:3,draft_model:3:rejection,ngram,prediction"
    file = tmp_path / "report.json"
    result = bench(
        "--draft",
        models["draft"],
        "--methods",
        methods,
        "--temperature",
        0,
        "--temperature",
        1,
        "--json",
        "--output",
        file,
    )
    assert result.exit_code == 0
    lines = result.stderr.splitlines()  # a line a prompt, as it is done
    assert len(lines) == 2 * 3
    assert lines[0].startswith("bench 4/28 runs · temperature 0 · ")
    assert all(part in lines[0] for part in (" · none ", "draft_model:3:rejection ", " tok/s ("))
    found = json.loads(result.stdout)
    assert json.loads(file.read_text())["prompts"] == found["prompts"]
    assert found["settings"]["implementation"] == "lean"
    greedy, sampled = found["temperatures"]
    for at in (greedy, sampled):
        assert [method["label"] for method in at["methods"]] == methods.split(",")
        for method in at["methods"]:
            overall = method["overall"]
            wanted = 2 if method["label"] == "prediction" else 3
            assert overall["num_prompts"] == sum(part["num_prompts"] for part in method["categories"]) == wanted
            assert overall["num_tokens"] == sum(part["num_tokens"] for part in method["categories"]) == 12 * wanted
            assert overall["speedup"]["low"] <= overall["speedup"]["value"] <= overall["speedup"]["high"]
            if method["identical_expected"]:
                assert overall["num_identical"] == wanted
    rejection = [at["methods"][2]["identical_expected"] for at in (greedy, sampled)]
    assert rejection == [True, False]


def test_table(bench: Invoke) -> None:
    result = bench("--methods", "ngram:4", "--limit", 1)
    assert result.exit_code == 0
    for part in ("temperature 0", "none", "ngram:4", "code", "copy", "speedup", "2/2", "lean", "peak memory"):
        assert part in result.stdout
    assert "prediction" not in result.stdout


def test_default_methods(bench: Invoke, models: dict[str, Path]) -> None:
    found = json.loads(bench("--draft", models["target"], "--json").stdout)
    labels = [method["label"] for method in found["temperatures"][0]["methods"]]
    assert labels == ["none", "draft_model", "ngram", "prediction"]
    draft = found["temperatures"][0]["methods"][1]["overall"]
    assert draft["acceptance_rate"] == 1.0
    assert set(draft["conditional_acceptance_per_pos"]) == {1.0}
    labels = [
        method["label"]
        for method in json.loads(bench("--json", "--categories", "code").stdout)["temperatures"][0]["methods"]
    ]
    assert labels == ["none", "suffix", "ngram"]


def test_messages_samples_and_right_answers(bench: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "several.jsonl"
    lines = [
        {"question_id": 1, "category": "writing", "turns": ["def total(values):", "class Point:"]},
        {"question_id": 2, "category": "math_reasoning", "turns": ["return"], "reference": ["1\n#### 12345"]},
        {"question_id": 3, "category": "math_reasoning", "turns": ["import"], "reference": ["#### 54321"]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["--suite", file, "--methods", "ngram:2", "--quality"]
    result = bench(*given, "--json")
    assert result.exit_code == 0
    assert " writing 1 turn 2 · " in result.stderr
    method = json.loads(result.stdout)["temperatures"][0]["methods"][1]
    (judged,) = method["quality"]
    assert (judged["category"], judged["num_judged"], judged["num_right"]) == ("math_reasoning", 2, 0)
    assert method["macro"]["num_tasks"] == 2
    table = bench(*given).stdout
    for part in ("mean of 2", "right answers, temperature 0", "0.0% to 65.8%", "4 prompts of 3 questions"):
        assert part in table
    assert json.loads(bench(*given, "--sample", 2, "--json").stdout)["settings"]["num_questions"] == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--methods", "ngrm"], "did you mean 'ngram'?"),
        (["--methods", ","], "--methods ',' names none"),
        (["--methods", "draft_model"], "needs --draft NAME_OR_DIR"),
        (["--draft", "x", "--methods", "ngram"], "add it to --methods or drop --draft"),
        (["--categories", "code,cpoy"], "unknown category 'cpoy'; did you mean 'copy'?"),
        (["--categories", "code", "--methods", "prediction"], "needs prompts with a 'prediction'"),
        (["--limit", "0"], "limit = 0 must be at least 1"),
        (["--rounds", "0"], "rounds = 0"),
        (["--threads", "0"], "--threads 0 must be at least 1"),
        (["--temperature", "-1"], "temperature = -1.0 must be at least 0"),
        (["--suite", "/nonexistent"], "suite '/nonexistent' cannot be read"),
        (["--output", "/nonexistent/x"], "cannot be written"),
        (["--resume"], "--resume needs --output FILE"),
        (["--verify", "couple"], "did you mean 'coupled'?"),
        (["--sample", "1"], "--sample 1 must be at least 2, one of each task"),
        (["--quality"], "--quality needs questions whose answers can be judged"),
        (["--methods", "auto:ngrm"], "did you mean 'ngram'?"),
        (["--methods", "auto"], "name what auto guesses with, e.g. 'auto:draft_model:5'"),
        (["--methods", "auto:none"], "name what auto guesses with"),
    ],
)
def test_mistakes(bench: Invoke, args: list[str], said: str) -> None:
    result = bench(*args)
    assert said in one_line(result.stderr)
    assert (result.exit_code, result.stdout) == (2, "")


def test_a_narrow_terminal_gets_a_narrow_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from foretell.bench import Interval, Item, run_bench
    from foretell.cli import tables
    from foretell.cli.layout import console_of
    from foretell.engine.engine import Engine
    from tests.bench.test_run import Letters
    from tests.model.table import TableLM

    engine = Engine(TableLM(16, seed=3, max_positions=64), Letters())
    measured = run_bench(
        engine,
        [Item(0, "reasoning", "abc", "text", "abc"), Item(1, "b", "abc", "text")],
        ["prediction:16:rejection", "ngram:8:rejection"],
    )
    # Two prompts of microseconds: what was timed may be of any length, so figures of known lengths stand in for it.
    usual = {"speedup": Interval(1.1, 0.9, 1.3), "tokens_per_second": 1234.5}
    for interval, fits in [(Interval(1.17, 0.98, 1.41), True), (Interval(1234.56, 0.01, 98765.43), False)]:
        methods = [
            replace(
                method,
                overall=replace(
                    method.overall, **(usual if method.label == "none" else {**usual, "speedup": interval})
                ),
                macro=replace(method.macro, **usual),
                categories=[replace(figures, **usual) for figures in method.categories],
            )
            for method in measured.temperatures[0].methods
        ]
        report = replace(measured, temperatures=[replace(measured.temperatures[0], methods=methods)])
        for width, shown in [(80, False), (tables.WIDE, True)]:
            monkeypatch.setattr(tables, "console_of", lambda no_color, _, width=width: console_of(no_color, width))
            tables.show(report, no_color=True)
            text = capsys.readouterr().out
            lines = text.splitlines()
            assert max(map(len, lines[:10])) <= width
            header = tables.COLUMNS if shown else [name for name in tables.COLUMNS if name not in tables.NOT_IF_NARROW]
            whole = " ".join(text.split())
            assert all(f"{name}: " in whole for name in header if name not in ("method", "prompts")), (
                "each is explained"
            )
            assert ("more figures" in whole) == (not shown)
            assert ("of limit: " in whole) == shown
            if fits or shown:
                assert ("outside" in lines[2], "speedup" in lines[2]) == (shown, True)
            else:
                assert lines[1] == "none", "too wide for a table: a block of lines for each row"
                assert "  speedup: 1234.56 [0.01, 98765.43]" in lines
            assert "…" not in text


@pytest.mark.parametrize(
    ("speedups", "said"),
    [
        ({"a": (2.0, 1.8, 2.2), "b": (1.2, 1.1, 1.3)}, "At temperature 0 a is the fastest: 2.00 times plain decoding's "
         "tokens per second [1.72, 2.29, as the best of 2]. All texts are plain decoding's."),
        ({"a": (2.0, 1.8, 2.2), "b": (1.9, 1.7, 2.1)}, "[1.72, 2.29, as the best of 2]; not certainly faster than b."),
        ({"a": (2.0, 1.8, 2.2)}, "tokens per second [1.80, 2.20]. All texts"),
        ({"a": (1.2, 1.05, 1.4), "b": (1.0, 0.9, 1.1), "c": (0.9, 0.8, 1.1)}, "no method is certainly faster"),
        ({"a": (1.1, 0.9, 1.3)}, "no method is certainly faster than plain decoding: the best, a, has 1.10 times"),
        ({"a": (0.9, 0.8, 0.95), "b": (0.7, 0.6, 0.8)}, "guessing costs time here: the best, a, has 0.90 times"),
        ({"a": (1.3, 1.3, 1.3)}, "1.30 times plain decoding's tokens per second; one prompt decides nothing: give more."),
        ({}, "only plain decoding was measured"),
    ],
)  # fmt: skip
def test_the_report_ends_with_a_conclusion(speedups: dict[str, tuple[float, float, float]], said: str) -> None:
    from types import SimpleNamespace

    from foretell.bench import Interval
    from foretell.cli.tables import conclusion

    def method(label: str, speedup: tuple[float, float, float], **more: Any) -> Any:
        overall = SimpleNamespace(speedup=Interval(*speedup), num_identical=3, num_prompts=3, num_independent=3)
        return SimpleNamespace(
            label=label, config={"method": label}, exact=True, identical_expected=True, overall=overall
        )

    at: Any = SimpleNamespace(temperature=0.0, methods=[method("none", (1.0, 1.0, 1.0))])
    at.methods += [method(label, speedup) for label, speedup in speedups.items()]
    assert said in conclusion(at)


def test_messages_of_one_conversation_decide_as_one_text() -> None:
    """Forty messages of five conversations are five texts: what the best of two is known to is wider by that."""
    from types import SimpleNamespace

    from foretell.bench import Interval, stats
    from foretell.cli.tables import conclusion

    def told(num_independent: int) -> str:
        overall = SimpleNamespace(
            speedup=Interval(1.5, 1.2, 1.9), num_identical=40, num_prompts=40, num_independent=num_independent
        )
        methods = [
            SimpleNamespace(label=label, config={"method": label}, exact=True, identical_expected=True, overall=overall)
            for label in ("a", "b")
        ]
        at: Any = SimpleNamespace(temperature=0.0, methods=methods)
        return conclusion(at)

    five, forty = (stats.best_of(Interval(1.5, 1.2, 1.9), 2, count) for count in (5, 40))
    assert f"[{five.low:.2f}, {five.high:.2f}" in told(5)
    assert f"[{forty.low:.2f}, {forty.high:.2f}" in told(40)
    assert five.low < forty.low


def test_what_a_conclusion_says_of_texts() -> None:
    from types import SimpleNamespace

    from foretell.cli.tables import _same_text

    def told(exact: bool, identical_expected: bool, num_identical: int) -> str:
        overall = SimpleNamespace(num_identical=num_identical, num_prompts=3)
        method: Any = SimpleNamespace(exact=exact, identical_expected=identical_expected, overall=overall)
        return _same_text(method)

    assert "lossy" in told(False, False, 0)
    assert "another one of the same distribution" in told(True, False, 0)
    assert told(True, True, 2) == " 1 of 3 texts differ from plain decoding's."


def stopped(monkeypatch: pytest.MonkeyPatch, at: int, number: signal.Signals) -> None:
    """A signal in the run with this number."""
    from foretell.bench import run

    sound, runs = run.measure, []

    def measure(engine: Any, prompt: Any, params: Any, *rest: Any) -> Any:
        runs.extend([prompt] if not params.ignore_eos else [])
        if len(runs) == at:
            signal.raise_signal(number)
        return sound(engine, prompt, params, *rest)

    monkeypatch.setattr(run, "measure", measure)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(
    bench: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    file, before = tmp_path / "report.json", signal.getsignal(number)
    runs = tmp_path / "report.json.runs.jsonl"
    given = ["--methods", "ngram", "--json", "--output", file]
    with monkeypatch.context() as during:
        stopped(during, 4, number)
        result = bench(*given)
    assert signal.getsignal(number) is before
    assert result.exit_code == status
    assert f"interrupted after 2 of 6 runs: the report is partial; runs are kept in {runs}" in result.stderr
    found = json.loads(result.stdout)
    assert found["partial"]
    assert json.loads(file.read_text())["partial"]
    assert found["temperatures"][0]["methods"][1]["overall"]["num_prompts"] == 1
    refused = bench(*given)
    assert refused.exit_code == 2
    assert "holds 3 runs of an interrupted bench: give --resume" in one_line(refused.stderr)
    refused = bench(*given, "--resume", "--rounds", 2)
    assert refused.exit_code == 2
    assert "3 results that were made with" in one_line(refused.stderr)
    again = bench(*given, "--resume")
    assert again.exit_code == 0
    assert len(again.stderr.splitlines()) == 2
    found = json.loads(again.stdout)
    assert not found["partial"]
    assert found["temperatures"][0]["methods"][1]["overall"]["num_prompts"] == 3
    # Of a finished bench nothing is left: with --resume nothing is measured, without it everything, anew.
    same = bench(*given, "--resume")
    assert json.loads(same.stdout)["prompts"] == found["prompts"]
    assert same.stderr == ""
    fresh = bench(*given)
    assert len(fresh.stderr.splitlines()) == 3
    assert json.loads(fresh.stdout)["prompts"] != found["prompts"]


def test_interrupted_table_and_nothing_measured(bench: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as during:
        stopped(during, 3, signal.SIGINT)
        result = bench("--methods", "ngram")
    assert result.exit_code == 130
    assert "PARTIAL: interrupted after 2 of 6 runs" in result.stdout
    assert "with --output FILE runs would be kept" in result.stderr
    stopped(monkeypatch, 1, signal.SIGINT)
    result = bench("--methods", "ngram")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "nothing to report" in one_line(result.stderr)


def test_a_killed_bench_goes_on(bench: Invoke, models: dict[str, Path], suite: Path, tmp_path: Path) -> None:
    """A real process says a line as it is done with a prompt, and is killed: what it had measured is not measured again."""
    file = tmp_path / "report.json"
    given = ["--methods", "ngram,ngram:2", "--rounds", "3", "--json", "--output", file, "--threads", "1", "--resume"]
    command = [*PROGRAM, "bench", "--target", models["target"], "--implementation", "lean", "--suite", suite]
    command += ["--no-bandwidth", "--max-new-tokens", "12", *given]
    process = subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    process.kill()
    out, rest = process.communicate(timeout=120)
    assert first.startswith("bench 3/27 runs · "), first + rest
    assert (process.returncode, out) == (-signal.SIGKILL, "")
    threads = torch.get_num_threads()
    again = bench(*given)
    torch.set_num_threads(threads)
    assert again.exit_code == 0, again.stderr
    lines = again.stderr.splitlines()
    assert 0 < len(lines) < 9
    assert lines[-1].startswith("bench 27/27 runs")
    assert json.loads(again.stdout)["settings"]["num_runs"] == 27


def test_a_report_that_is_no_file_has_no_file_of_runs(bench: Invoke) -> None:
    result = bench("--methods", "ngram", "--limit", 1, "--output", "/dev/null")
    assert result.exit_code == 0
    assert not Path("/dev/null.runs.jsonl").exists()


def test_lossy_rules_are_named_so(bench: Invoke) -> None:
    result = bench("--methods", "ngram:4:typical,ngram:3:rejection", "--limit", 1, "--temperature", 1)
    assert result.exit_code == 0
    assert "ngram:4:typical: LOSSY" in result.stdout
    assert "ngram:3:rejection: another text of the same distribution" in result.stdout
    found = json.loads(bench("--methods", "ngram:4:typical", "--limit", 1, "--json").stdout)
    assert [method["exact"] for method in found["temperatures"][0]["methods"]] == [True, False]


def test_half_a_surrogate_pair_is_one_line(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "a\\ud83d"}\n')
    for command in (("bench", "--methods", "ngram", "--suite"), ("doctor", "--methods", "ngram", "--prompts")):
        result = invoke(*command, str(file), "--max-new-tokens", "8", "--no-bandwidth")
        assert result.exit_code == 1
        assert "question 2 of the suite: the prompt is no text: its character 1 is half a surrogate" in result.stderr
        assert "internal error" not in result.stderr


def test_more_threads_than_any_machine_has_are_refused(invoke: Invoke) -> None:
    result = invoke("bench", "--threads", "999999999", "--methods", "ngram")
    assert result.exit_code == 2
    assert "--threads 999999999 must be at most 1024" in result.stderr


def test_a_negative_seed_is_a_seed(invoke: Invoke) -> None:
    result = invoke(
        "bench", "--methods", "ngram", "--limit", "1", "--max-new-tokens", "2", "--seed", "-5", "--no-bandwidth"
    )
    assert result.exit_code == 0, result.stderr
