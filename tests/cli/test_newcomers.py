"""What a first user of the command line meets: variables, files of prompts, narrow terminals, chat, completion."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console
from rich.table import Table

from foretell import Engine, Request, SamplingParams
from foretell.cli import settings
from foretell.cli.layout import console_of, print_table
from tests.cli.conftest import Invoke


@pytest.fixture(scope="module")
def instruct() -> Engine:
    """Its template ends the assistant's turn with an end token."""
    return Engine.load("bundled", speculative="draft_model")


def shown(width: int, *rows: tuple[str, ...]) -> str:
    table = Table("name", "long words", "empty", title="A title")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    print_table(Console(file=out, width=width), table)
    return out.getvalue()


def test_a_table_that_does_not_fit_is_printed_as_blocks() -> None:
    """Words were cut to three letters and a dot."""
    row = ("ngram", "whatfollowedthelasttokens earlier", "")
    assert "─" in shown(60, row)
    narrow = shown(30, row, ("x", "-", "b"))
    assert narrow.splitlines()[:4] == ["A title", "ngram", "  long words: ", "whatfollowedthelasttokens "]
    assert "  empty: b" in narrow
    assert "…" not in narrow


def test_names_between_colons_are_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    """A package's method ``ledger`` was an open book in what ``bench`` printed of ``auto:ledger:4``."""
    table = Table("method", "share of all")
    table.add_row("auto:ledger:4", "1")
    for width in (60, 8):
        print_table(console_of(True, width), table)
    console_of(True, 60).print("auto:ledger:4")
    assert capsys.readouterr().out.count("auto:ledger:4") == 3


def test_methods_on_a_narrow_terminal_keep_their_words(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = invoke("methods", "--all").stdout
    monkeypatch.setattr("foretell.cli.commands.methods.WIDE", 40)
    narrow = invoke("methods", "--all").stdout
    assert "draft_model" in narrow
    assert "…" not in narrow
    assert {"without_replacement", "distribution"} <= set(wide.split()) & set(narrow.split())


def test_a_draft_of_the_environment_breaks_no_other_method(generate: Invoke, models: dict[str, Path]) -> None:
    """FORETELL_DRAFT with --method ngram was refused."""
    env = {"FORETELL_DRAFT": str(models["draft"])}
    options = ("def f(", "--seed", "1", "--max-new-tokens", "6", "--json")
    for more, method in [
        (("--method", "ngram"), "ngram"),
        (("--speculative-config", '{"method": "ngram"}'), "ngram"),
        (("--prediction", "return"), "prediction"),
        ((), "draft_model"),
    ]:
        result = generate(*options, *more, env=env)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["config"]["speculative"]["method"] == method
    refused = generate(*options, "--method", "ngram", "--draft", models["draft"], env=env)
    assert refused.exit_code == 2
    assert "is read by methods with weights" in refused.stderr


def test_a_draft_of_the_environment_and_the_methods_of_a_bench(
    invoke: Invoke, models: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("def f(\nclass A\n")
    options = ("--target", models["target"], "--implementation", "lean", "--max-new-tokens", "4", "--no-bandwidth")
    env = {"FORETELL_DRAFT": str(models["draft"])}
    result = invoke("bench", *options, "--prompts", file, "--methods", "ngram:2", "--json", env=env)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["settings"]["num_prompts"] == 2
    certified = invoke("certify", *options[:4], "--prompts", file, "--method", "ngram", "--verify", "coupled", "--shape",
                       "chain", "--limit", "1", "--max-new-tokens", "3", env=env)  # fmt: skip
    assert certified.exit_code == 1, certified.output
    assert "not certified: nothing to check" in certified.output, "three tokens leave nothing to guess"


def test_one_file_of_conversations_serves_every_command(
    invoke: Invoke, models: dict[str, Path], tmp_path: Path
) -> None:
    from foretell import Engine
    from foretell.bench import encode_item, load_suite
    from foretell.train.responses import read_prompts

    file = tmp_path / "talks.json"
    talks = [
        [{"role": "user", "content": "the"}, {"role": "assistant", "content": "def"}, {"role": "user", "content": "a"}]
    ]
    file.write_text(json.dumps([{"messages": talk} for talk in talks]))
    engine = Engine.load(models["target"], implementation="lean")
    wanted = [engine.chat_prompt(talk) for talk in talks]
    assert [encode_item(engine, item) for item in load_suite(file)] == wanted
    assert read_prompts(file, engine) == wanted


@pytest.mark.parametrize(
    ("command", "measures", "place"),
    [
        ("bench --methods ngram --no-bandwidth", "foretell.bench.run_bench", 1),
        ("certify --method ngram", "foretell.certify.certify", 1),
        ("doctor --methods ngram", "foretell.doctor.checkup.check_up", 1),
        ("doctor HEAD", "foretell.doctor.head.diagnose", 2),
    ],
)
def test_an_instruct_model_gets_texts_of_a_file_as_messages(
    invoke: Invoke, instruct: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, measures: str,
    place: int,
) -> None:  # fmt: skip
    """All but ``train`` and ``learn`` gave it bare texts, whose answers end at once. measures: what gets the prompts,
    as its argument number ``place``."""
    from foretell.bench import Item, encode_item

    file, asked = tmp_path / "prompts.json", list[list[list[int]]]()
    file.write_text(json.dumps(["a b", {"prompt": "def f(", "format": "text"}, {"turns": ["Hi"]}, {"prompt": "c"}]))
    chat = {text: instruct.chat_prompt([{"role": "user", "content": text}]) for text in ("a b", "Hi", "c")}
    bare = {text: instruct.make_row(0, Request(text)).prompt_ids for text in ("a b", "def f(", "c")}

    def ids_of(prompt: Any) -> list[int]:
        if isinstance(prompt, Item):
            return encode_item(instruct, prompt)
        return list(prompt.ids[: prompt.num_prompt] if hasattr(prompt, "num_prompt") else prompt)

    def seen(*args: Any, **_: Any) -> None:
        given = args[place]["given"] if isinstance(args[place], dict) else args[place]
        asked.append([ids_of(prompt) for prompt in given])
        raise settings.ConfigError("seen")

    monkeypatch.setattr("foretell.cli.settings.load_engine", lambda *_, **__: instruct)
    monkeypatch.setattr("benchmarks.theory.trees.pass_seconds", lambda *_: {1: 1.0})
    monkeypatch.setattr(measures, seen)
    options = [*command.split(), "--target", "bundled", "--prompts", str(file), "--max-new-tokens", "8"]
    options += ["--temperature", "0", "--limit", "4"] if "HEAD" not in command else []
    said = "2 of 4 prompts go into the chat template of 'bundled', an instruct model; --raw"
    assert said in invoke(*options).stderr
    assert "chat template" not in invoke(*options, "--raw").stderr
    assert asked == [
        [chat["a b"], bare["def f("], chat["Hi"], chat["c"]],
        [bare["a b"], bare["def f("], chat["Hi"], bare["c"]],
    ]


def test_an_instruct_model_gets_the_prompt_of_explain_as_a_message(
    invoke: Invoke, instruct: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foretell.cli.commands.explain import PROMPT

    asked: list[Any] = []

    def seen(engine: Any, prompt: Any, **_: Any) -> None:
        asked.append(prompt)
        raise settings.ConfigError("seen")

    monkeypatch.setattr("foretell.cli.settings.load_engine", lambda *_, **__: instruct)
    monkeypatch.setattr("foretell.analysis.explain.explain", seen)
    told = [invoke("explain", "--target", "bundled", *more).stderr for more in ([], ["a b"], ["a b", "--raw"])]
    assert asked == [PROMPT, instruct.chat_prompt([{"role": "user", "content": "a b"}]), "a b"]
    assert ["the prompt goes into the chat template of" in text for text in told] == [False, True, False]


def test_temperature_is_spelled_alike_and_checked_before_anything_is_loaded(invoke: Invoke) -> None:
    assert settings.temperatures(["0,0.5", "1"], ()) == [0.0, 0.5, 1.0]
    assert settings.temperatures(None, (0.0, 1.0)) == [0.0, 1.0]
    absent = ("--target", "/nonexistent/model")
    for command in (
        ("bench",),
        ("certify",),
    ):
        for value, said in [
            ("x", "--temperature 'x' must be numbers"),
            ("-1", "temperature = -1.0 must be at least 0"),
        ]:
            result = invoke(*command, *absent, "--draft", "/nonexistent/draft", "--temperature", value)
            assert result.exit_code == 2
            assert said in result.stderr, command


def test_revision_and_trust(invoke: Invoke, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def load(target: str, **options: Any) -> None:
        asked.append({"target": target, **options})
        raise settings.ConfigError("seen")

    monkeypatch.setattr("foretell.Engine.load", load)
    invoke("generate", "a", "--target", "owner/name", "--revision", "v1", "--trust-remote-code")
    invoke("generate", "a", "--target", "owner/name")
    assert [(one["target"], one["trust_remote_code"]) for one in asked] == [
        ("owner/name@v1", True),
        ("owner/name", False),
    ]
    for target in ("bundled", str(models["target"]), "owner/name@v2"):
        result = invoke("generate", "a", "--target", target, "--revision", "v1")
        assert "--revision v1 is of a Hugging Face id" in result.stderr
    assert len(asked) == 2


def test_chat_keeps_the_conversation(invoke: Invoke, models: dict[str, Path]) -> None:
    from foretell import Engine

    options = ("--target", models["target"], "--implementation", "lean", "--max-new-tokens", "5", "--seed", "7")
    said = invoke("chat", *options, "--system", "Be brief.", input="the\n\na\n/new\nthe\n/exit\nnever\n")
    assert said.exit_code == 0, said.output
    engine = Engine.load(models["target"], implementation="lean")
    system = {"role": "system", "content": "Be brief."}
    first = engine.generate(engine.chat_prompt([system, {"role": "user", "content": "the"}]), seed=7, max_new_tokens=5)
    talk = [system, {"role": "user", "content": "the"}, {"role": "assistant", "content": first.text}]
    second = engine.generate(engine.chat_prompt([*talk, {"role": "user", "content": "a"}]), seed=8, max_new_tokens=5)
    third = engine.generate(engine.chat_prompt([system, {"role": "user", "content": "the"}]), seed=9, max_new_tokens=5)
    wanted = "".join(text if text.endswith("\n") else text + "\n" for text in (first.text, second.text, third.text))
    assert said.stdout == wanted
    assert said.stderr.count("tokens/s") == 3
    assert "tokens/s" not in invoke("chat", *options, "--quiet", input="the\n").stderr


def test_chat_guesses_as_deep_as_pays_unless_told(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Loaded:
        def measure(self) -> None:
            asked.append("measured")
            raise settings.ConfigError("seen")

        def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
            raise settings.ConfigError("seen")

    def load(target: str, *, speculation: str, **options: Any) -> Loaded:
        asked.append(speculation)
        return Loaded()

    monkeypatch.setattr("foretell.Engine.load", load)
    invoke("chat", "--target", "owner/name", input="a\n")
    invoke("chat", "--target", "owner/name", "--speculation", "on", input="a\n")
    invoke("generate", "a", "--chat", "--target", "owner/name")
    invoke("generate", "a", "--chat", "--target", "owner/name", "--speculation", "auto")
    assert asked == ["auto", "measured", "on", "on", "auto", "measured"]
    monkeypatch.undo()
    wrong = invoke("generate", "a", "--target", "bundled", "--speculation", "sometimes")
    assert wrong.exit_code == 2
    assert "must be 'on' or 'auto'" in wrong.stderr


@pytest.mark.parametrize(
    ("typed", "status", "told"),
    [
        (["^C", "/exit"], 0, 1),
        (["^C", "^C"], 130, 1),
        (["^C", "", "^C", "^D"], 0, 2),  # not in a row
    ],
)
def test_ctrl_c_at_the_prompt_says_how_to_leave(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: list[str], status: int, told: int
) -> None:
    """It ended the chat without a word; from a pipe it still does."""
    from foretell.cli.commands import chat
    from foretell.cli.conversation import Talk

    left, talk = list(typed), Talk(None, SamplingParams())  # type: ignore[arg-type]

    def read() -> str:
        line = left.pop(0)
        if line in ("^C", "^D"):
            raise KeyboardInterrupt if line == "^C" else EOFError
        return line

    if status:
        with pytest.raises(typer.Exit) as caught:
            chat._talk(talk, quiet=True, no_color=True, read=read)
        assert caught.value.exit_code == status
    else:
        chat._talk(talk, quiet=True, no_color=True, read=read)
    assert left == []
    assert capsys.readouterr().err.count("Ctrl-D or /exit leaves the chat, and so does Ctrl-C") == told
    left[:] = ["^C"]
    monkeypatch.setattr("sys.stdin", SimpleNamespace(readline=read))
    with pytest.raises(typer.Exit):
        chat._read_lines(talk, quiet=True, no_color=True)
    assert "Ctrl" not in capsys.readouterr().err


def test_chat_refuses_what_it_cannot_do(invoke: Invoke, models: dict[str, Path]) -> None:
    refused = invoke("chat", "--target", models["plain"], "--implementation", "lean", input="a\n")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "has no chat template" in refused.stderr
    full = invoke("chat", "--target", models["short"], "--implementation", "lean", input="the " * 40 + "\n")
    assert full.exit_code == 1
    assert "/new starts again" in full.stderr


def test_chat_refuses_bytes_that_are_no_text(invoke: Invoke, models: dict[str, Path]) -> None:
    """An internal error: UnicodeDecodeError."""
    options = ("--target", models["target"], "--implementation", "lean", "--max-new-tokens", "4")
    refused = invoke("chat", *options, input=b"the\ncaf\xe9\nthe\n")
    assert refused.exit_code == 1
    assert "the message is not UTF-8 text: 'caf\\udce9'" in refused.stderr
    assert refused.stderr.count("tokens/s") == 1


@pytest.mark.slow
def test_python_m_and_completion() -> None:
    env = {**os.environ, "_FORETELL_COMPLETE": "complete_bash", "COMP_WORDS": "foretell ge", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "foretell"], capture_output=True, text=True, env=env, timeout=120, check=False
    )
    assert done.stdout.split() == ["generate"]
    del env["_FORETELL_COMPLETE"]
    done = subprocess.run([sys.executable, "-m", "foretell", "--version"], capture_output=True, text=True, env=env,
                          timeout=120, check=True)  # fmt: skip
    assert done.stdout.startswith("foretell ")
