"""Files of prompts: one loader for every command."""

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.core.errors import ConfigError
from foretell.core.prompts import Conversation, conversation, entries, is_plain, read_text

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


def read(text: str, suffix: str = "") -> list[tuple[tuple[str, ...], str, int]]:
    found = [conversation(entry) for entry in entries(text, "f", suffix=suffix)]
    return [(one.texts, one.format, len(one.messages)) for one in found]


@pytest.mark.parametrize("suffix", ["", ".txt", ".jsonl", ".json"])
def test_json_lines_of_every_form(suffix: str) -> None:
    lines: list[Any] = [
        {"prompt": "a"},
        "b",
        {"turns": ["c", "d"]},
        {"turns": ["e"], "format": "text"},
        {"messages": TALK},
    ]
    text = "\n".join(map(json.dumps, lines)) + "\n\n"
    wanted = [
        (("a",), "text", 0), (("b",), "text", 0), (("c", "d"), "chat", 0), (("e",), "text", 0),
        (("Hi\n\nHello\n\nBye",), "chat", 3),
    ]  # fmt: skip
    assert read(text, suffix) == wanted
    assert read(json.dumps(lines), suffix) == wanted, "a JSON list"
    if suffix != ".txt":
        assert read(json.dumps(lines, indent=2), suffix) == wanted


def test_a_json_file_may_be_one_object() -> None:
    assert read(json.dumps({"prompt": "a"}, indent=1), ".json") == [(("a",), "text", 0)]


def test_plain_text_is_a_prompt_a_line() -> None:
    assert read("one\n\n two \r\n[three]\n") == [
        (("one",), "text", 0),
        ((" two ",), "text", 0),
        (("[three]",), "text", 0),
    ]
    assert read("[note] one\ntwo", ".txt") == [(("[note] one",), "text", 0), (("two",), "text", 0)]
    assert read('"Hello", she said.\ntwo', ".txt")[0][0] == ('"Hello", she said.',)
    assert not is_plain('{"prompt": "a"}', ".txt")


def test_the_targets_own_last_message_is_left_out() -> None:
    (entry,) = entries(json.dumps({"messages": TALK[:2]}), "f")
    assert conversation(entry) == Conversation(("Hi",), "chat", tuple(TALK[:1]))


@pytest.mark.parametrize(
    ("text", "suffix", "words"),
    [
        (" \n", "", "f is empty"),
        ('{"prompt": "a"}\n{', "", "f, line 2: not JSON"),
        ('{"prompt": "a"}\nb', ".jsonl", "f, line 2: not JSON"),
        ("[1, ", ".json", "f, line 1: not JSON"),
        ("[1]", "", "f, entry 1: expected a text, or an object with"),
        ('{"text": "a"}', "", "f, line 1: expected a text, or an object with"),
        ('{"prompt": ""}', "", "f, line 1: expected"),
        ('{"prompt": ["a"]}', "", "f, line 1: expected"),
        ('{"turns": "a"}', "", "f, line 1: expected"),
        ('{"prompt": "a", "format": "x"}', "", "format = 'x' must be 'text' or 'chat'"),
        ('{"messages": []}', "", "'messages' must be a list of objects"),
        ('{"messages": ["a"]}', "", "message 1 must be an object with 'role'"),
        ('{"messages": [{"role": "user"}]}', "", "expected 'content', a text"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "", "nothing to answer"),
    ],
)
def test_what_is_refused(text: str, suffix: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, suffix)
    assert words in str(caught.value)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_bytes(b"\xef\xbb\xbfone")
    assert read_text(file, "f") == "one", "the mark of byte order is none of it"
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="f cannot be read: not UTF-8"):
        read_text(file, "f")
    with pytest.raises(ConfigError, match="f cannot be read: No such file"):
        read_text(tmp_path / "absent", "f")
