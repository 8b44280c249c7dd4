"""Streams: tint on and off, control characters, closed pipes; and the pages made from the commands."""

import importlib.util
import io
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import typer.main

from foretell.cli.app import app
from foretell.cli.output import RESET, TINT, PieceWriter, as_json, has_color
from tests.cli.conftest import Invoke

DOCS = Path(__file__).parents[2] / "docs"
HELP = DOCS / "help.md"


def _helpdoc() -> ModuleType:
    spec = importlib.util.spec_from_file_location("helpdoc", DOCS / "site" / "helpdoc.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


helpdoc = _helpdoc()


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class ClosedPipe(io.StringIO):
    """A pipe whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_runs_of_accepted_pieces_are_tinted_once() -> None:
    stream = Terminal()
    writer = PieceWriter(stream, tint=True)
    for text, accepted in [("a", False), ("b", True), ("", False), ("c", True), ("d", False), ("e", True)]:
        writer.write(text, accepted=accepted)
    writer.close()
    assert stream.getvalue() == f"a{TINT}bc{RESET}d{TINT}e{RESET}\n"


def test_a_pipe_gets_the_text_alone_and_one_newline_at_the_end() -> None:
    for pieces, wanted in [(["a", "b"], "ab\n"), (["a\n"], "a\n"), ([], ""), (["\x1b[2J"], "\x1b[2J\n")]:
        stream = io.StringIO()
        writer = PieceWriter(stream, tint=False)
        for piece in pieces:
            writer.write(piece, accepted=True)
        writer.close()
        assert stream.getvalue() == wanted


def test_a_terminal_is_not_sent_what_it_would_obey() -> None:
    stream = Terminal()
    PieceWriter(stream, tint=False).write("a\x1b[2J\r\x07\x9b\tb\n", accepted=False)
    assert stream.getvalue() == "a␛[2J␍␇�\tb\n"


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_color(Terminal(), False)
    assert not has_color(Terminal(), True)
    assert not has_color(io.StringIO(), False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_color(Terminal(), False)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not has_color(Terminal(), False)


def test_closed_pipe_in_mid_stream(generate: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(self: PieceWriter, text: str, *, accepted: bool) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(PieceWriter, "write", closed)
    result = generate("hi", "--max-new-tokens", 3)
    assert (result.exit_code, result.stderr) == (1, "")


def test_json_has_no_number_that_json_does_not_have() -> None:
    assert json.loads(as_json({"a": float("nan"), 3: [float("inf"), 1.5], "b": "é"})) == {
        "a": None,
        "3": [None, 1.5],
        "b": "é",
    }


def test_methods_lists_everything_and_every_pair(invoke: Invoke) -> None:
    from foretell import METHODS, VERIFIERS

    found = json.loads(invoke("methods", "--json").stdout)
    assert found["methods"].keys() == METHODS.keys()
    assert found["verifiers"].keys() == VERIFIERS.keys()
    assert found["pairs"].keys() == METHODS.keys() - {"none"}
    rejection = found["pairs"]["draft_model"]["rejection"]
    assert (rejection["draws"], rejection["exact"], rejection["refused"]) == ("without_replacement", True, {})
    assert found["pairs"]["ngram"]["rejection"]["draws"] == "fixed"
    assert "cannot grow" in found["pairs"]["ngram"]["rejection"]["refused"]["sequoia"]
    for options in ((), ("--all",)):
        shown = invoke("methods", *options).stdout
        assert all(name in shown for name in [*METHODS, *VERIFIERS])


def sections(page: str) -> dict[str, str]:
    """The help page's sections by their titles."""
    _, *parts = re.split(r"^## `?([^`\n]+)`?\n", page, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def named(shared: str, last: str) -> set[str]:
    """The options of a line "Shared: ...": of a topic all, or all but those named. last: the page's last section."""
    _, *parts = re.split(r"^### (.+)\n", last, flags=re.MULTILINE)
    topics = {
        panel: set(re.findall(r"^- `([\w-]+)", text, re.MULTILINE))
        for panel, text in zip(parts[::2], parts[1::2], strict=True)
    }
    found: set[str] = set()
    for part in shared.strip().removesuffix(".").split("; "):
        topic = re.fullmatch(r"\*([^*]+)\*(?: but ([^(]+?))?(?: \(.*\))?", part)
        words = set(re.findall(r"`(-[\w-]+)`", topic[2] or "" if topic else part))
        found |= topics[topic[1]] - words if topic else words
    return found


def missing(page: str) -> list[str]:
    """Commands and options that the page does not tell, and options that it tells of commands which have none such. An
    option has a line of its own in its command's section, or is shared and has exactly one line in the last section."""
    root = typer.main.get_command(app)
    found, gone = sections(page), []
    last = found["Shared options"]
    for name, command in helpdoc.walk("foretell", root):
        own, _, shared = found.get(name, "").partition("\nShared: ")
        gone += [name] if name not in found else []
        has = {helpdoc.names_of(option)[0] for option in command.params if option.param_type_name == "option"}
        gone += [f"{name} has no {word}" for word in sorted(named(shared, last) - has)]
        for option in command.params:
            word = helpdoc.names_of(option)[0] if option.param_type_name == "option" else option.name
            line = rf"^- `{re.escape(word)}(?![\w-])"
            here = len(re.findall(line, own, re.MULTILINE))
            there = len(re.findall(line, last, re.MULTILINE))
            if word.startswith("--") and not (here == 1 or (word in named(shared, last) and there == 1)):
                gone.append(f"{name} {word}")
    return gone


def test_help_page_has_every_command_and_option() -> None:
    """``chat``, ``pull``, ``list`` and ``rm`` once were not in it."""
    page = HELP.read_text(encoding="utf-8")
    assert missing(page) == []
    assert len(sections(page)) > 15
    lines = page.splitlines(keepends=True)
    without = [line for line in lines if not line.startswith(("- `--top-p ", "- `--drain-timeout "))]
    assert set(missing("".join(without))) >= {"foretell serve --drain-timeout", "foretell chat --top-p"}


def test_help_page_is_fresh() -> None:
    assert HELP.read_text(encoding="utf-8") == helpdoc.page(), "stale: python docs/site/helpdoc.py > docs/help.md"


def test_commands_are_listed_in_four_groups(invoke: Invoke) -> None:
    """Each command once, under what it is for; a command without a group would stand under typer's "Commands"."""
    lines = invoke("--help").stdout.splitlines()
    titles = [line.strip("\u256d\u256e\u2500 ") for line in lines if line.startswith("\u256d")]
    assert titles == ["Options", "Use", "Measure", "Train", "Check"]
    named = [match[1] for line in lines if (match := re.match(r"\u2502 ([a-z][a-z-]*) ", line))]
    assert sorted(named) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_version_and_no_arguments(invoke: Invoke) -> None:
    from foretell import __version__

    assert invoke("--version").stdout == f"foretell {__version__}\n"
    result = invoke()
    assert result.exit_code == 0
    assert "generate" in result.stdout
