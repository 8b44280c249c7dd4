"""``foretell learn`` and ``serve --learn``: files in, figures and weights out; errors of one line."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from foretell import ConfigError, LearnOptions
from foretell.cli.commands.learn import summary
from foretell.learn.session import Session
from tests.cli.conftest import Invoke
from tests.learn.test_student import engine_of


def test_a_file_is_answered_and_learned_from(invoke: Invoke, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"def add_{n}(a, b):\n    return"}) + "\n" for n in range(10)))
    out = tmp_path / "out.json"
    done = invoke(
        "learn", "--target", "bundled", "--method", "draft_model", "--data", str(data), "--max-new-tokens", "8",
        "--json", "--output", str(out), "--learn-dir", str(tmp_path / "kept"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    state = json.loads(out.read_text())
    assert len(state["history"]) == 10
    assert state["figures"]["num_texts"] == 10
    assert (tmp_path / "kept" / "draft_model-0" / "export" / "config.json").is_file()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["learn", "--data", "nowhere.jsonl", "--method", "draft_model"], "nowhere.jsonl"),
        (["learn", "--data", "x", "--learn-lr", "7"], "learn_lr = 7.0 must be in (0, 1]"),
        (["serve", "bundled", "--learn-every", "4"], "--learn-every needs --learn"),
        (["learn", "--data", "x", "--learn-busy-share", "0.5"], "unknown option '--learn-busy-share'"),
        (["learn", "--data", "x", "--learn-memory-mib", "inf"], "learn_memory_mib = inf must be positive and finite"),
    ],
)
def test_mistakes_are_one_line(invoke: Invoke, options: list[str], said: str) -> None:
    done = invoke(*options)
    assert done.exit_code != 0
    assert said in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["serve", "bundled", "--method", "ngram", "--learn"], "ngram cannot learn while serving: choose one of"),
        (
            ["serve", "bundled", "--method", "kangaroo", "--also", "suffix", "--learn"],
            "methods kangaroo, suffix cannot",
        ),
        (["serve", "qwen2.5-coder-0.5b", "--learn", "--method", "suffix"], "methods suffix cannot learn"),
        (["serve", "bundled", "--speculation", "off", "--learn"], "nothing guesses here"),
        (["learn", "--target", "bundled", "--method", "suffix", "--data", "DATA"], "suffix cannot learn"),
    ],
)
def test_what_cannot_learn_is_refused_before_the_load(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str], said: str
) -> None:
    """It was said after loading, and after half a minute of measuring what passes cost."""
    (tmp_path / "a.txt").write_text("a\n")
    monkeypatch.setattr("foretell.Engine.load", lambda *args, **options: pytest.fail("it was loaded"))
    done = invoke(*(str(tmp_path / "a.txt") if word == "DATA" else word for word in command))
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"held_out": 1}, {"learn_share": 0.0}, {"where": "moon"}, {"learn_lr": -1.0}, {"replay": -1}, {"batch_texts": 0},
        {"learn_lr": math.inf}, {"learn_lr": 1e10}, {"learn_memory_mib": math.inf}, {"learn_dir": ""},
        {"seed": 2**70},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong)).replace("held_out", "held_out")):
        LearnOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learn_device": "banana"}, "device 'banana' cannot be used here"),
    ],
)
def test_options_that_would_be_ignored_or_fail_later_are_refused_at_the_start(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Session(engine_of("eagle1"), LearnOptions(where="inline", **options))


def test_prompts_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    """They were left out without a word."""
    from foretell import Engine, SamplingParams
    from foretell.learn.session import learn_from

    data = tmp_path / "prompts.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": text, "format": "text"}) + "\n" for text in ("a " * 6000, "def f(a):"))
    )
    said: list[str] = []
    engine = Engine.load("bundled", speculative="draft_model")
    state = learn_from(engine, data, LearnOptions(where="inline"), SamplingParams(max_new_tokens=2, temperature=0.0),
                       notice=said.append)  # fmt: skip
    assert len(state["history"]) == 1
    assert said == [f"1 of 2 prompts of {data} are left out: more than 2046 tokens"]


def test_the_summary_ends_its_last_line() -> None:
    names = ("num_updates", "num_swaps", "num_refused", "num_reverts", "seconds_learning")
    said = summary({"history": [], "figures": dict.fromkeys(names, 0), "events": [{"event": "saved", "folder": "x"}]})
    assert said.endswith("\nsaved: x\n")
