"""Tool calls: requests read, outputs held to the form, texts read back however they are cut."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken

from foretell import ConfigError, Engine
from foretell.engine.request.calls import knows_tools, messages_with_tools
from foretell.engine.structured.constraint import Constraints
from foretell.model.load import load_tokenizer
from foretell.server.texts.reading import whole
from foretell.server.texts.tools import (
    OPEN,
    CallDelta,
    ContentDelta,
    ToolCallStream,
    ToolUse,
    new_call_id,
)


def parse_tool_calls(text: str, new_id: Any = new_call_id, *, only_calls: bool = False, cut: bool = False) -> Any:
    stream = ToolCallStream(new_id, only_calls=only_calls)
    return whole([*stream.push(text), *stream.finish(cut=cut)])[1:]


CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {**CITY, "additionalProperties": False}}}
NOW = {"type": "function", "function": {"name": "now", "description": "the time"}}
TOOLS = [WEATHER, NOW]
NAMED = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "a}\\"<"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("bundled", speculative={"method": "draft_model", "num_speculative_tokens": 4})


def tokenizer_with(markers: str) -> Any:
    """The bundled tokenizer, whose vocabulary lacks the markers; or with them, as Qwen has them, or as special tokens."""
    tokenizer = load_tokenizer("bundled")
    if markers != "none":
        special = markers == "special"
        texts = ("<tool_call>", "</tool_call>", "<think>", "</think>")
        tokens = [AddedToken(text, special=special, normalized=False) for text in texts]
        tokenizer.add_tokens(tokens, special_tokens=special)
    return tokenizer


@pytest.fixture(scope="module", params=["none", "added", "special"])
def vocabulary(request: pytest.FixtureRequest) -> tuple[Any, Constraints, bool]:
    """(tokenizer, constraints, whether the markers are tokens that the text would lose)."""
    tokenizer = tokenizer_with(request.param)
    return tokenizer, Constraints(tokenizer, 8200, (2, 0)), request.param == "special"


# -- the form ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "parallel", "good", "bad"),
    [
        (
            "auto",
            True,
            ["", "Hi <tool_calls", "<think>\nhm</think>\nno call", CALL, "Let me see.\n" + CALL + "\n" + TIME],
            [
                "Hi" + OPEN + "nonsense",
                CALL + " more",
                OPEN,
                '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
            ],
        ),
        ("auto", False, [TIME, "x" + TIME, TIME + "\n"], [TIME + "\n" + TIME]),
        (
            "required",
            True,
            [CALL, CALL + "\n" + TIME, CALL + "\n", CALL + "\n\n" + TIME + " \n"],
            ["", "Hi", "Hi" + CALL],
        ),
        ("required", False, [CALL, TIME, TIME + "\n\n"], [CALL + "\n" + TIME, TIME + "\nHi"]),
        (NAMED, True, [TIME, TIME + "\n"], [CALL, "", TIME + "\n" + TIME]),
    ],
)
def test_what_each_choice_permits(
    vocabulary: tuple[Any, Constraints, bool], choice: Any, parallel: bool, good: list[str], bad: list[str]
) -> None:
    tokenizer, constraints, lost = vocabulary
    constraint = ToolUse.of(TOOLS, choice, parallel).constraint(constraints)
    assert constraint is not None

    def ids(text: str) -> list[int]:
        """Markers that decoding would skip are spelled."""
        if not lost:
            return list(tokenizer.encode(text))
        parts = text.replace("tool_call>", "tool_call\0>").split("\0")
        return [token for part in parts for token in tokenizer.encode(part)]

    for text in good:
        assert constraint.permits(ids(text)), text
        assert (
            tokenizer.decode(ids(text), skip_special_tokens=True).replace("think", "") == text.replace("think", "")
            or lost
        )
    for text in bad:
        assert not constraint.permits(ids(text)), text


def test_markers_are_their_own_tokens_where_the_text_keeps_them(vocabulary: tuple[Any, Constraints, bool]) -> None:
    tokenizer, constraints, lost = vocabulary
    known = OPEN in tokenizer.get_vocab()
    assert constraints.marker(OPEN) == (
        f"<[{tokenizer.get_vocab()[OPEN]}]>" if known and not lost else json.dumps(OPEN)
    )


def test_calls_of_a_model(engine: Engine) -> None:
    """Whatever a model without any notion of tools writes is a call, the same with and without speculation."""
    spec = engine.model.spec
    constraints = Constraints(engine.tokenizer, spec.vocab_size, spec.eos_token_ids)
    finished = 0
    for seed, choice in enumerate(["required", NAMED, "required", NAMED]):
        use = ToolUse.of(TOOLS, choice, False)
        constraint = use.constraint(constraints)
        prompt = engine.chat_prompt(messages_with_tools([{"role": "user", "content": "Weather?"}], use.rendered))
        options: dict[str, Any] = {"seed": seed, "max_new_tokens": 80}
        made = engine.generate(prompt, logits_processor=constraint.processor(len(prompt)), **options)
        plain = engine.with_method(None).generate(prompt, logits_processor=constraint.processor(len(prompt)), **options)
        assert made.token_ids == plain.token_ids
        content, (call,) = parse_tool_calls(made.text)
        assert content is None
        assert call.name in {tool.name for tool in use.tools}
        if made.finish_reason == "stop":
            finished += 1
            assert isinstance(json.loads(call.arguments), dict)
            assert call.arguments in made.text
    assert finished >= 2


# -- reading requests ----------------------------------------------------------------------------------------------------


def test_choices_by_default() -> None:
    assert ToolUse.of(None).mode == "none"
    assert ToolUse.of([], "auto").mode == "none"
    assert ToolUse.of(TOOLS).mode == "auto"
    assert ToolUse.of(TOOLS).rendered == (WEATHER, NOW)
    none = ToolUse.of(TOOLS, "none")
    assert (none.calls, none.rendered) == (False, ())
    named = ToolUse.of(TOOLS, NAMED)
    assert [tool.name for tool in named.tools] == ["now"]
    assert named.rendered == (WEATHER, NOW)


@pytest.mark.parametrize(
    ("tools", "choice", "reason"),
    [
        (None, "required", "needs tools"),
        (TOOLS, "sometimes", "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "gone"}}, "weather, now"),
        (TOOLS, {"type": "custom"}, "tool_choice"),
        ({"a": 1}, None, "list"),
        ([{"type": "retrieval"}], None, "function"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "name"),
        ([NOW, NOW], None, "differ"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}], None, "object"),
        ([{"type": "function", "function": {"name": "a", "parameters": "{}"}}], None, "object"),
    ],
)
def test_what_cannot_be_is_refused(tools: Any, choice: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ToolUse.of(tools, choice)


def test_a_schema_that_cannot_be_names_its_tool(vocabulary: tuple[Any, Constraints, bool]) -> None:
    broken = {"type": "object", "properties": {"x": {"type": "strin"}}}
    tools = [NOW, {"type": "function", "function": {"name": "bad", "parameters": broken}}]
    with pytest.raises(ConfigError, match=r"tool 'bad'.*strin"):
        ToolUse.of(tools, "required").constraint(vocabulary[1])
    loose = {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}
    for strict in (False, True):
        tools = [{"type": "function", "function": {"name": "odd", "parameters": loose, "strict": strict}}]
        use = ToolUse.of(tools)
        if strict:
            with pytest.raises(ConfigError, match=r"tool 'odd'.*not"):
                use.constraint(vocabulary[1])
        else:
            made = use.constraint(vocabulary[1])
            assert made.left_out == ("odd.properties/x/not",)


def test_a_schema_that_cannot_be_enforced_whole_refuses_no_list_of_tools(
    vocabulary: tuple[Any, Constraints, bool],
) -> None:
    mail = {"type": "object", "properties": {"to": {"type": "string", "pattern": "^(?!a)", "maxLength": 2}}}
    tool = {"type": "function", "function": {"name": "mail", "parameters": mail}}
    call = '<tool_call>\n{"name": "mail", "arguments": {"to": "ab"}}\n</tool_call>'
    tokenizer, constraints, lost = vocabulary
    answer = constraints.json_schema({"type": "integer"})
    assert answer.left_out == ()
    for text in (None, '%json {"type": "integer"}'):
        use = ToolUse.of([WEATHER, tool])
        constraint = use.constraint(constraints, text)
        assert constraint.left_out == ("mail.properties/to/pattern",)
        assert constraint is use.constraint(constraints, text), "it is made once"
        if not lost:
            assert constraint.permits(tokenizer.encode(call))
            assert constraint.permits(tokenizer.encode(CALL))
            assert not constraint.permits(tokenizer.encode(call.replace("ab", "abc")))
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"(?s)tool 'mail'.*look-ahead"):
        ToolUse.of([WEATHER, strict]).constraint(constraints)


CLIENTS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "Claude Code": (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "questions": {
                    "type": "array", "minItems": 1, "maxItems": 4, "uniqueItems": True,
                    "items": {
                        "type": "object",
                        "properties": {"header": {"type": "string"}, "multiSelect": {"type": "boolean", "default": False}},
                        "required": ["header", "multiSelect"], "additionalProperties": False,
                    },
                },
                "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": 9007199254740991},
                "answers": {
                    "type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"},
                },
            },
            "required": ["questions"], "additionalProperties": False,
        },
        {"questions": [{"header": "a", "multiSelect": True}], "timeout": 1},
        ("properties/answers/propertyNames", "properties/questions/uniqueItems"),
    ),
    "Codex": (
        {
            "type": "object",
            "properties": {
                "plan": {
                    "type": "array", "items": {
                        "type": "object", "additionalProperties": False, "required": ["step", "status"],
                        "properties": {"step": {"type": "string"}, "status": {"enum": ["pending", "done"]}},
                    },
                },
                "explanation": {"type": ["string", "null"]},
            },
            "required": ["plan"], "additionalProperties": False,
        },
        {"plan": [{"step": "a", "status": "done"}], "explanation": None},
        (),
    ),
    "zod, draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {
                "url": {"type": "string", "format": "uri"},
                "mail": {"type": "string", "pattern": "^(?!\\.)(?!.*\\.\\.)[a-z.]+@[a-z]+$", "format": "email"},
                "pair": {"type": "array", "items": [{"type": "string"}, {"type": "number"}], "additionalItems": False},
                "tree": {"$ref": "#/definitions/node"},
                "rest": {"not": {}},
            },
            "dependencies": {"mail": ["url"]}, "required": ["pair"], "additionalProperties": False,
            "definitions": {"node": {
                "type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/definitions/node"}}},
            }},
        },
        {"pair": ["a", 1.5], "tree": {"kids": [{"kids": []}]}},
        ("dependencies", "properties/mail/pattern", "properties/rest/not"),
    ),
    "pydantic": (
        {
            "type": "object",
            "$defs": {
                "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
                "Dog": {
                    "type": "object", "required": ["kind"],
                    "properties": {"kind": {"const": "dog"}, "at": {"type": "string", "format": "date-time"}},
                },
            },
            "properties": {
                "pet": {
                    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "discriminator": {"propertyName": "kind"},
                },
                "size": {
                    "type": "array", "prefixItems": [{"type": "integer"}, {"type": "integer"}],
                    "minItems": 2, "maxItems": 2,
                },
                "note": {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}], "default": None},
            },
            "required": ["pet"],
        },
        {"pet": {"kind": "dog"}, "size": [1, 2], "note": None},
        (),
    ),
    "schemars": (
        {
            "type": "object",
            "properties": {
                "limit": {"type": "integer", "format": "uint64", "minimum": 0, "maximum": 2**64 - 1},
                "path": {"type": "string", "if": {"const": "x"}, "then": {"minLength": 1}},
                "any": True, "env": {"patternProperties": {"^[A-Z]+$": {"type": "string"}}, "type": "object"},
            },
            "dependentRequired": {"limit": ["path"]}, "minProperties": 1, "unevaluatedProperties": False,
        },
        {"limit": 3, "path": "y", "any": [1], "env": {"A": "b"}},
        ("dependentRequired", "minProperties", "properties/limit/maximum", "properties/path/if", "properties/path/then",
         "unevaluatedProperties"),
    ),
}  # fmt: skip
"""(parameters of a tool, arguments that fit, what of them no grammar holds), as clients and their libraries send them."""


@pytest.mark.parametrize("client", CLIENTS)
def test_tools_as_clients_send_them(vocabulary: tuple[Any, Constraints, bool], client: str) -> None:
    parameters, arguments, left_out = CLIENTS[client]
    tokenizer, constraints, lost = vocabulary
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("a", "b")]
    for mode in ("auto", "required"):
        constraint = ToolUse.of(tools, mode).constraint(constraints)
        assert constraint.left_out == tuple(f"{name}.{place}" for name in ("a", "b") for place in left_out)
        call = f'<tool_call>\n{{"name": "b", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        assert lost or constraint.permits(tokenizer.encode(call))
        assert not constraint.permits(tokenizer.encode(call.replace('"arguments": {', '"arguments": [{')))
    tools[1]["function"]["strict"] = True  # type: ignore[index]
    if left_out:
        with pytest.raises(ConfigError, match=rf"tool 'b': .*#/{re.escape(left_out[0])}"):
            ToolUse.of(tools).constraint(constraints)
    else:
        assert ToolUse.of(tools).constraint(constraints) is not None


# -- prompts -------------------------------------------------------------------------------------------------------------


def test_a_conversation_with_tools_in_plain_messages() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    made = messages_with_tools(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call, call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        ],
        TOOLS,
    )
    assert [message["role"] for message in made] == ["system", "user", "assistant", "user"]
    assert made[0]["content"].startswith("Be brief.\n\n# Tools")
    assert json.dumps(WEATHER) in made[0]["content"]
    assert made[1]["content"] == "Weather?"
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    assert made[2] == {"role": "assistant", "content": f"{text}\n{text}", "reasoning_content": "hm"}
    assert made[3]["content"] == "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert [call.arguments for call in parse_tool_calls(made[2]["content"])[1]] == ['{"city": "Bonn"}'] * 2
    assert messages_with_tools([{"role": "user", "content": "a"}]) == [{"role": "user", "content": "a"}]
    assert messages_with_tools([{"role": "user", "content": "a"}], TOOLS)[0]["role"] == "system"


def test_which_templates_know_the_form() -> None:
    hermes = '{% if tools %}...<tool_call>\\n{"name"...</tool_call>{% endif %}'
    assert knows_tools(hermes)
    assert not knows_tools("{% if tools %}[AVAILABLE_TOOLS]{% endif %}")
    assert not knows_tools("{% if tools %}<tool_call><function=f>{% endif %}")
    assert not knows_tools(load_tokenizer("bundled").chat_template)
    assert not knows_tools("")


# -- what comes back -----------------------------------------------------------------------------------------------------


def joined(deltas: list[ContentDelta | CallDelta]) -> tuple[str, list[list[str]]]:
    """Content and [id, name, arguments] of each call; a call's first delta has id and name, and calls come in order."""
    content, calls = "", list[list[str]]()
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            assert delta.text
            content += delta.text
        elif delta.id is not None:
            assert delta.index == len(calls)
            assert delta.name
            assert delta.arguments == ""
            calls.append([delta.id, delta.name, ""])
        else:
            assert delta.index == len(calls) - 1
            calls[-1][2] += delta.arguments
    return content, calls


def counted() -> Any:
    numbers = iter(range(100))
    return lambda: f"call_{next(numbers)}"


HEADS = ['{"name": "x"', '{"name": "x", "arguments": {', '{"name": "</tool_call>", "arguments": {']
PARTS = st.sampled_from(
    [CALL, TIME, OPEN, "</tool_call>", "<", "<tool", " ", "\n", "text ☃", *HEADS, "}", '"', "\\"],
)


@given(parts=st.lists(PARTS, max_size=8), cuts=st.lists(st.integers(0, 300), max_size=12))
def test_any_text_cut_anywhere(parts: list[str], cuts: list[int]) -> None:
    """The pieces do not matter; and nothing is made up: all that comes out is in the text."""
    text = "".join(parts)
    stream, deltas = ToolCallStream(counted()), list[ContentDelta | CallDelta]()
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in pairwise(places):
        deltas += stream.push(text[start:end])
    deltas += stream.finish()
    content, calls = joined(deltas)
    expected, whole = parse_tool_calls(text, counted())
    assert (content or None) == (expected or None)
    assert calls == [[call.id, call.name, call.arguments] for call in whole]
    assert all(arguments in text for _, _, arguments in calls)
    assert stream.num_calls == len(calls)
    if OPEN not in text:
        assert content == text


def test_content_and_calls() -> None:
    content, calls = parse_tool_calls("See:\n\n" + CALL + "\n" + TIME + "\n")
    assert content == "See:"
    assert [(call.name, call.arguments) for call in calls] == [("weather", '{"city": "a}\\"<"}'), ("now", "{}")]
    assert calls[0].id != calls[1].id
    shape = calls[1].as_openai()
    assert shape == {"id": calls[1].id, "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert parse_tool_calls(CALL)[0] is None
    assert parse_tool_calls("") == ("", [])


def test_deltas_in_openais_shape() -> None:
    stream = ToolCallStream(counted())
    made = [delta.as_openai() for piece in CALL for delta in stream.push(piece) if isinstance(delta, CallDelta)]
    first = {"index": 0, "id": "call_0", "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert made[0] == first
    assert all(set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"} for delta in made[1:])
    assert "".join(delta["function"]["arguments"] for delta in made) == '{"city": "a}\\"<"}'
    assert stream.finish() == []


def test_content_is_not_held_back_longer_than_needed() -> None:
    stream = ToolCallStream()
    assert stream.push("Hello") == [ContentDelta("Hello")]
    assert stream.push(" <tool") == []
    assert stream.push("box>") == [ContentDelta(" <toolbox>")]


def test_a_call_cut_off_has_the_beginning_of_its_arguments() -> None:
    content, calls = parse_tool_calls(CALL[: CALL.index("a}") + 1])
    assert (content, calls[0].name, calls[0].arguments) == (None, "weather", '{"city": "a')


def test_a_call_cut_off_before_its_name_ends_is_neither_text_nor_a_call() -> None:
    name_ends = CALL.index("weather") + len('weather"')
    for before in ("", "See:\n", TIME + "\n"):
        calls_before = 1 if TIME in before else 0
        for cut in range(len(CALL)):
            for only_calls in (True, False) if before != "See:\n" else (False,):
                text = before + CALL[:cut]
                stream, deltas = ToolCallStream(counted(), only_calls=only_calls), list[ContentDelta | CallDelta]()
                for letter in text:
                    deltas += stream.push(letter)
                content, found = joined([*deltas, *stream.finish(cut=True)])
                whole, calls = parse_tool_calls(text, counted(), only_calls=only_calls, cut=True)
                assert (content or None, len(found)) == (whole or None, len(calls))
                if cut < len("<tool") and not only_calls and not calls_before:  # a text may begin so
                    assert content == text
                else:
                    assert content == ("See:" if "See" in before else "")
                assert len(calls) == calls_before + (cut >= name_ends)
    assert parse_tool_calls(CALL[:name_ends], counted())[1][0].arguments == ""


@pytest.mark.parametrize(
    "text", ["if a <", "a <tool", "a \n<tool_call", "see \n\n<tool_call> in the docs", "a <tool_call>\nb "]
)
def test_text_that_only_begins_like_a_call_is_kept_with_its_blanks(text: str) -> None:
    for size in (1, 2, 5, 100):
        stream, deltas = ToolCallStream(), list[ContentDelta | CallDelta]()
        for start in range(0, len(text), size):
            deltas += stream.push(text[start : start + size])
        assert joined([*deltas, *stream.finish()]) == (text, [])
    wrong = f" \n{OPEN}{{}}</tool_call>\n"
    assert parse_tool_calls(f"a{wrong}b \n") == (f"a{wrong}b \n", [])
    assert parse_tool_calls(f"a \n{TIME}\n{wrong}b ")[0] == f"a\n{wrong}b "


def test_ids() -> None:
    assert new_call_id().startswith("call_")
    assert len({new_call_id() for _ in range(100)}) == 100
