"""Answers that are calls but for their marks, whole and streamed alike; and answers that only look like that."""

import json
import random
from typing import Any

import pytest

from foretell.server.texts.bare_calls import call_of, takes_nothing
from foretell.server.texts.tools import CallableTool, ContentDelta, ToolCallStream, ToolUse

READ = {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": ["integer", "null"]}},
        "required": ["path"]}  # fmt: skip
NONE: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = {"read": READ, "list_all": NONE, "read_more": {"type": "object"}}
READ_CALL = '{"name": "read", "arguments": {"path": "a {b}.py"}}'
CALLS = {
    READ_CALL: ("read", {"path": "a {b}.py"}),
    f"\n  {READ_CALL}\n": ("read", {"path": "a {b}.py"}),
    f"```json\n{READ_CALL}\n```": ("read", {"path": "a {b}.py"}),
    f"```\n{READ_CALL}```\n": ("read", {"path": "a {b}.py"}),
    '{ "name" : "read",\n"parameters": {"path": "x", "limit": null}}': ("read", {"path": "x", "limit": None}),
    '{"name": "list_all"}': ("list_all", {}),
    '{"name": "list_all", "arguments": {"type": "object", "properties": {}}}': ("list_all", {}),
    '{"name": "read_more", "arguments": {"any": [1, {"b": "\\"}"}]}}': ("read_more", {"any": [1, {"b": '"}'}]}),
}
TEXTS = (
    "", "  \n", "A sentence.", "{", '{"name"', '{"name": "re', "```json\n", "```python\nprint(1)\n```", "`read`",
    '{"name": "write", "arguments": {"path": "x"}}',  # no tool
    '{"name": "read", "arguments": {}}',  # path is required
    '{"name": "read", "arguments": {"path": 3}}',
    '{"name": "read", "arguments": {"path": "x", "limit": true}}',
    '{"name": "read", "arguments": {"path": "x", "depth": 3}}',
    '{"name": "read", "arguments": ["x"]}',
    '{"name": "read", "arguments": {"path": "x"}, "more": 1}',
    '{"name": "read", "path": "x"}',
    READ_CALL + " is what I would call.",
    READ_CALL + "\n" + READ_CALL,
    "I call it:\n" + READ_CALL,
    READ_CALL[:-1],
    f"```json\n{READ_CALL}\n",
    f"```json\n{READ_CALL}\n```\nDone.",
    '{"answer": 42}', "[1, 2]", '"read"', "42",
)  # fmt: skip


def read_out(text: str, cuts: list[int], *, cut: bool = False, bare: Any = TOOLS) -> tuple[str, list[tuple[str, str]]]:
    stream = ToolCallStream(lambda: "id", bare=bare)
    deltas = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        deltas += stream.push(text[begin:end])
    deltas += stream.finish(cut=cut)
    content = "".join(one.text for one in deltas if isinstance(one, ContentDelta))
    calls: list[list[str]] = []
    for one in deltas:
        if isinstance(one, ContentDelta):
            continue
        if one.name is not None:
            calls.append([one.name, ""])
        calls[one.index][1] += one.arguments
    assert stream.num_calls == len(calls)
    return content, [(name, arguments) for name, arguments in calls]


def cuts_of(text: str) -> list[list[int]]:
    rng = random.Random(text)
    return [[], list(range(1, len(text))), *[sorted(rng.choices(range(len(text) + 1), k=3)) for _ in range(8)]]


@pytest.mark.parametrize("text", CALLS)
def test_an_answer_that_is_a_call_is_one_however_it_is_cut(text: str) -> None:
    name, arguments = CALLS[text]
    for cuts in cuts_of(text):
        content, calls = read_out(text, cuts)
        assert content == ""
        assert [(one, json.loads(given)) for one, given in calls] == [(name, arguments)]
    assert read_out(text, [], bare=None) == (text, []), "off"


@pytest.mark.parametrize("text", TEXTS)
def test_any_other_answer_is_the_text_that_it_was(text: str) -> None:
    for cuts in cuts_of(text):
        assert read_out(text, cuts) == (text, [])


def test_a_call_names_a_tool() -> None:
    assert call_of(READ_CALL, TOOLS) is not None
    assert call_of(READ_CALL.replace("read", "write"), TOOLS) is None
    assert call_of(READ_CALL.replace('"read"', "3"), TOOLS) is None


def test_a_call_that_a_limit_may_have_cut_is_a_text() -> None:
    assert read_out(READ_CALL, [3], cut=True) == (READ_CALL, [])


def test_calls_with_marks_are_read_as_ever() -> None:
    text = f"First.<tool_call>\n{READ_CALL}\n</tool_call>"
    for cuts in cuts_of(text):
        content, calls = read_out(text, cuts)
        assert (content, calls) == ("First.", [("read", '{"path": "a {b}.py"}')])
    content, calls = read_out(text[len("First.") :], [5])
    assert (content, len(calls)) == ("", 1)


def test_text_is_held_back_only_while_it_may_be_a_call() -> None:
    for text in ("A", '{"answer', '{"name": "write"', "```py", "[", '{"name": "reax'):
        stream = ToolCallStream(bare=TOOLS)
        assert "".join(one.text for one in stream.push(text) if isinstance(one, ContentDelta)) == text
    stream = ToolCallStream(bare=TOOLS)
    assert not stream.push('{"name": "read')


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (None, True), ({}, True), (NONE, True), ({"type": "object"}, False),
        ({"type": "object", "properties": {}, "additionalProperties": True}, False), (READ, False),
        ({"type": "object", "patternProperties": {"a": {}}}, False), ({"type": "object", "$ref": "#/x"}, False),
    ],
)  # fmt: skip
def test_a_tool_without_parameters_takes_nothing(schema: Any, closed: bool) -> None:
    tool = CallableTool.of({"type": "function", "function": {"name": "f", "parameters": schema}})
    assert takes_nothing(schema or {}) == closed
    assert (tool.parameters.get("additionalProperties") is False) == closed


def test_only_where_the_model_may_choose() -> None:
    tools = [{"type": "function", "function": {"name": "read", "parameters": READ}}]
    for choice, found in (("auto", True), ("required", False), ("none", False)):
        use = ToolUse.of(tools, choice)
        assert use.bare_tools is None
        assert (ToolUse(use.tools, use.mode, True, (), bare=True).bare_tools is not None) == found
