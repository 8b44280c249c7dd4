"""``foretell chat`` in a terminal, as a person has it: lines, keys and commands; and its parts alone."""

import io
import json
import stat
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.cli.conversation import COMMANDS, Talk
from foretell.cli.figures import cut
from foretell.cli.prose import Prose
from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams
from tests.cli import checkpoint
from tests.cli.terminal import Screen, Terminal

PASTE = "\x1b[200~{}\x1b[201~"
UP, CTRL_C, CTRL_D, ALT_ENTER, TAB = "\x1b[A", "\x03", "\x04", "\x1b\r", "\t"
OPTIONS = (
    "--target",
    "bundled",
    "--implementation",
    "lean",
    "--method",
    "none",
    "--temperature",
    "0",
    "--max-new-tokens",
    "60",
)


def answered(count: int) -> Callable[[list[str]], bool]:
    """Whether so many answers are there, and the next message may be typed."""
    return lambda lines: sum("tokens/s" in line for line in lines) == count and lines[-1] == ">"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four five six", ["one two three four", "five six"]),
        ("one two three fourr\u2019s", ["one two three", "fourr\u2019s"]),
        ("  - one two three four", ["  - one two three", "four"]),
        ("a-word-longer-than-the-whole-line x", ["a-word-longer-than-t", "he-whole-line x"]),
        ("```py\na = 'longer than the whole line'\n```\none two three four five", [
            "```py", "a = 'longer than the", " whole line'", "```", "one two three four", "five",
        ]),
        ("\u4f60\u597d" * 8 + " x", ["\u4f60\u597d" * 5, "\u4f60\u597d" * 3 + " x"]),
        ("twenty letters long.\nx", ["twenty letters long.", "x"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 100])
def test_words_stay_whole_however_the_text_comes(
    monkeypatch: pytest.MonkeyPatch, text: str, lines: list[str], size: int
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = io.StringIO()
    writer = Prose(stream, tint=False)
    for at in range(0, len(text), size):
        writer.write(text[at : at + size], accepted=at % 2 == 0)
    writer.close()
    screen = Screen(20)
    screen.write(stream.getvalue().replace("\n", "\r\n"))
    assert screen.lines == [line.rstrip() for line in lines]
    assert "".join(stream.getvalue().split()) == "".join(text.split())


@pytest.mark.parametrize("folds", [True, False])
def test_a_thought_is_a_line_or_all_of_it(folds: bool) -> None:
    stream = io.StringIO()
    writer = Prose(stream, tint=False)
    for parts in ([("thought", "Let me")], [("thought", " see.")], [("answer", "It is ")], [("answer", "4.")]):
        writer.show(parts, accepted=False, folds=folds)
    writer.close()
    screen = Screen(80)
    screen.write(stream.getvalue().replace("\n", "\r\n"))
    folded = ["a thought of 2 tokens (/set thoughts on)", "It is 4."]
    assert screen.lines == (folded if folds else ["<think>", "Let me see.", "</think>", "", "It is 4."])


@pytest.mark.parametrize(
    ("prompt", "output", "wanted"),
    [
        ("<assistant><think>\n", "Hm.\n</think>\n\nYes.", [("thought", "Hm."), ("answer", "Yes.")]),
        ("<assistant>", "<think>\nHm.\n</think>\nYes.", [("thought", "Hm."), ("answer", "Yes.")]),
        ("<assistant>", "Yes.", [("answer", "Yes.")]),
        ("<think>\n\n</think>\n\n", "Yes.", [("answer", "Yes.")]),
    ],
)
def test_thoughts_are_told_apart_by_the_models_template(
    prompt: str, output: str, wanted: list[tuple[str, str]]
) -> None:
    speaks = checkpoint.tokenizer()
    spec = SimpleNamespace(vocab_size=len(speaks))
    engine: Any = SimpleNamespace(tokenizer=speaks, model=SimpleNamespace(spec=spec))
    talk = Talk(engine, SamplingParams())
    assert talk.parts(speaks.encode(prompt)) is None, "its template has no thoughts"
    speaks.chat_template = checkpoint.TEMPLATE + "<think>"
    cutter = talk.parts(speaks.encode(prompt))
    assert cutter is not None
    parts = [*cutter.push([], output), *cutter.finish()]
    assert [(phase, "".join(text for _, text in run)) for phase, run in groupby(parts, itemgetter(0))] == wanted


@pytest.fixture
def talk() -> Talk:
    """Two turns."""
    turns = [("user", "/a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    made: Any = Talk(SimpleNamespace(), SamplingParams(seed=3), "Be brief.")  # type: ignore[arg-type]
    made.turns += [{"role": role, "content": text} for role, text in turns]
    made.number = 2
    return made  # type: ignore[no-any-return]


def test_commands_change_the_conversation(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk.command("/retry") == "c"
    assert talk.command("/retry") == "/a"
    with pytest.raises(ConfigError, match="no answer yet"):
        talk.command("/retry")
    talk.command("/set top-k 5")
    talk.command("/set stop END")
    talk.command('/set logit_bias {"4": 2}')
    talk.command("/set seed 9")
    talk.command("/set thoughts on")
    assert talk.params == SamplingParams(seed=9, top_k=5, stop=("END",), logit_bias={4: 2.0})
    assert (talk.number, talk.thoughts) == (0, True), "the next answer has the seed that was given"
    talk.command("/set")
    told = capsys.readouterr().err
    assert "top_k = 5\n" in told
    assert "thoughts = True" in told
    talk.command("/system\nTwo\nlines")
    assert talk.messages == [{"role": "system", "content": "Two\nlines"}]
    talk.command("/system")
    assert talk.messages == []
    with pytest.raises(EOFError):
        talk.command("/exit")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/bye", "unknown command '/bye'; known: /help, /new, "),
        ("/usr/bin/env is what?", "// sends a message that begins with /"),
        ("/set heat 3", "unknown setting 'heat'; known: "),
        ("/set temperatur 3", "did you mean 'temperature'?"),
        ("/set temperature warm", "temperature = 'warm' must be a number"),
        ("/set temperature -1", "temperature = -1.0 must be at least 0"),
        ("/set json_schema {}", "unknown setting 'json_schema'"),
        ("/set thoughts maybe", "thoughts = 'maybe' must be true or false"),
        ("/save", "/save FILE: FILE is missing"),
        ("/save /no/such/folder/x", "/no/such/folder/x cannot be written: No such file"),
    ],
)
def test_a_wrong_command_is_an_error_and_changes_nothing(talk: Talk, line: str, said: str) -> None:
    before = replace(talk, turns=list(talk.turns))
    with pytest.raises(ConfigError) as caught:
        talk.command(line)
    assert said in str(caught.value)
    assert talk == before


def test_a_conversation_is_saved_and_no_other_file_is_overwritten(talk: Talk, tmp_path: Path) -> None:
    plain, as_json, theirs = (tmp_path / name for name in ("talk.md", "talk.json", "letter.txt"))
    theirs.write_text("dear")
    for file in (plain, as_json):
        talk.command(f"/save {file}")
    assert plain.read_text().startswith("## system\n\nBe brief.\n\n## user\n\n/a\n\n## assistant\n\nb\n")
    assert json.loads(as_json.read_text())["messages"] == talk.messages
    with pytest.raises(ConfigError, match="exists: give another file"):
        talk.command(f"/save {theirs}")
    assert theirs.read_text() == "dear"


def test_every_command_is_in_the_help(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    talk.command("/help")
    told = capsys.readouterr().err
    assert all(f"{name} " in told for name in COMMANDS)
    assert "Alt-Enter" in told


@pytest.mark.parametrize(
    ("reason", "count", "said"),
    [
        ("stop", 5, ""),
        ("length", 9, "cut: max_new_tokens = 9"),
        ("length", 5, "the model's context of 8 tokens is full"),
    ],
)
def test_it_is_said_why_an_answer_ends(reason: str, count: int, said: str) -> None:
    done: Any = SimpleNamespace(num_tokens=count, num_prompt_tokens=3, finish_reason=reason)
    assert cut(done, SamplingParams(max_new_tokens=9)) == said


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A state folder of its own, with the kernels that are built."""
    from foretell.core.cachedir import cache_directory

    for file in cache_directory().glob("*.so"):
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 120])
def test_a_conversation_in_a_terminal(cache: Path, columns: int) -> None:
    with Terminal("chat", *OPTIONS, columns=columns, env={"FORETELL_CACHE": str(cache)}) as terminal:
        terminal.type("typed early")
        lines = terminal.until(lambda lines: lines[-1] == "> typed early")
        assert sum("typed early" in line for line in lines) == 1, "not shown while the model was loaded"
        assert not any("loading" in line for line in lines), "a line that goes"
        terminal.type(CTRL_C + PASTE.format("one\ntwo\nthree"))
        terminal.until(lambda lines: lines[-3:] == ["> one", "  two", "  three"])
        terminal.type("\r")
        terminal.until(answered(1))
        terminal.type("a\\\rb" + ALT_ENTER + "c")
        terminal.until(lambda lines: lines[-3:] == ["> a", "  b", "  c"])
        terminal.type("\r")
        terminal.until(answered(2))
        terminal.type(UP)
        terminal.until(lambda lines: lines[-3:] == ["> a", "  b", "  c"])
        terminal.type(CTRL_C + "/help\r")
        terminal.until("/retry")
        terminal.type("/set max_n" + TAB + " 8\r")
        terminal.until("max_new_tokens = 8")
        terminal.type("Write a function that sorts a list.\r")
        lines = terminal.until(answered(3))
        assert "8 tokens" in lines[-2]
        assert "cut: max_new_tokens = 8" in lines[-2]
        terminal.type("/speed\r")
        terminal.until(lambda lines: "decoding · 8 steps" in " ".join(" ".join(lines).split()))
        terminal.type("/hepl\r")
        terminal.until("unknown command '/hepl'; known: /help")
        terminal.type("//exit\r")
        terminal.until(answered(5))  # with the line of /speed
        assert all(len(line) <= columns for line in terminal.screen.lines)
        terminal.type(CTRL_C)
        terminal.until("Ctrl-D or /exit leaves")
        terminal.type(CTRL_D)
        assert terminal.status() == 0
    history = cache / "history" / "chat"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+two" in history.read_text()


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_what_came_is_kept(cache: Path) -> None:
    with Terminal("chat", *OPTIONS[:-2], "--ignore-eos", env={"FORETELL_CACHE": str(cache)}) as terminal:
        terminal.until(lambda lines: lines[-1] == ">")
        terminal.type("Count.\r")
        terminal.until(lambda lines: len(lines) > 8)
        terminal.type("not shown" + CTRL_C)
        lines = terminal.until(lambda lines: lines[-1] == ">" and "tokens/s" in lines[-2])
        assert lines[-2].endswith("· stopped")
        assert not any("not shown" in line for line in lines)
        terminal.type(f"/save {cache}/talk.json\r")
        terminal.until("2 messages in")
        terminal.type("/exit\r")
        assert terminal.status() == 0


@pytest.mark.slow
def test_ctrl_c_while_it_loads_is_one_line(cache: Path) -> None:
    with Terminal("chat", *OPTIONS, env={"FORETELL_CACHE": str(cache)}) as terminal:
        terminal.until("loading bundled")
        terminal.type(CTRL_C)
        assert terminal.status() == 130
        assert [line for line in terminal.screen.lines if line] == ["foretell: stopped: bundled was being loaded"]
