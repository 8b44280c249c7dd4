"""What further clients send: formats under every server's name, tools beside them, and turns that go on."""

import json
import re
from typing import Any

import httpx
import openai
import pytest

from foretell.core.errors import ConfigError
from foretell.engine.structured.constraint import Constraints
from foretell.model.load import load_tokenizer
from foretell.server.protocol.requests import ChatRequest
from foretell.server.texts.formats import term_of, wanted_format
from foretell.server.texts.tools import ToolUse
from tests.server.conftest import Serve
from tests.server.fake import ByteTokenizer, FakeService
from tests.server.test_tools import NOW, TOOLS, WEATHER

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: Any = [{"role": "user", "content": "a"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
EBNF = 'root ::= "yes" | "no" digit\ndigit ::= [0-9]\n'
LARK = 'start: "yes" | "no" /[0-9]/\n'


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    tokenizer = load_tokenizer("bundled")
    return Constraints(tokenizer, len(tokenizer), [tokenizer.eos_token_id])  # type: ignore[arg-type, attr-defined]


def admits(constraints: Constraints, body: dict[str, Any], text: str) -> bool:
    format = wanted_format(ChatRequest.model_validate({"messages": USER, **body}))
    made = format.constraint(constraints)
    return made.permits(load_tokenizer("bundled").encode(text, add_special_tokens=False))


SAME: list[tuple[dict[str, Any], str, str]] = [
    *(
        ({field: value}, '{"a": 1}', '{"a": "x"}')
        for field, value in (
            ("json_schema", SCHEMA), ("json_schema", json.dumps(SCHEMA)), ("guided_json", SCHEMA),
            ("structured_outputs", {"json": SCHEMA}),
            ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
        )
    ),
    *(({field: value}, "ab12", "ab")
      for field, value in (("regex", "[a-z]+[0-9]+"), ("guided_regex", "[a-z]+[0-9]+"),
                           ("structured_outputs", {"regex": "[a-z]+[0-9]+"}))),
    *(({field: value}, "no7", "no")
      for field, value in (("ebnf", EBNF), ("grammar", EBNF), ("guided_grammar", EBNF), ("guided_grammar", LARK),
                           ("structured_outputs", {"grammar": LARK}))),
    *(({field: value}, "red", "rod")
      for field, value in (("guided_choice", ["red", "blue"]), ("structured_outputs", {"choice": ["red", "blue"]}))),
    *(({field: value}, '{"a": 1}', "[1]")
      for field, value in (("response_format", {"type": "json_object"}), ("structured_outputs", {"json_object": True}))),
]  # fmt: skip


@pytest.mark.parametrize(("body", "good", "bad"), SAME)
def test_every_name_of_a_format_means_the_same(
    constraints: Constraints, body: dict[str, Any], good: str, bad: str
) -> None:
    assert admits(constraints, body, good)
    assert not admits(constraints, body, bad)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        ({"regex": "(red|blue)[0-9]{2}"}, r"(red|blue)[0-9]{2}"),
        ({"ebnf": EBNF}, r"yes|no[0-9]"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
    ],
)
def test_texts_keep_to_their_format(url: str, path: str, more: dict[str, Any], pattern: str) -> None:
    body = {"messages": USER} if path == CHAT else {"prompt": "a"}
    with httpx.Client(base_url=url, timeout=120) as client:
        answer = client.post(path, json={**body, "seed": 1, "max_tokens": 16, **more})
    (choice,) = answer.json()["choices"]
    text = choice["text"] if path == TEXT else choice["message"]["content"]
    assert (re.fullmatch(pattern, text) is not None, choice["finish_reason"]) == (True, "stop"), text


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"regex": "a", "ebnf": EBNF}, "regex and ebnf both say"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format and regex both say"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "both say"),
        ({"json_schema": "{"}, "json_schema: the text is not JSON"),
        ({"json_schema": "3"}, "a JSON schema is an object"),
        ({"regex": "("}, "regex"),
        ({"ebnf": "root ::= missing"}, "grammar"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"guided_choice": []}, "guided_choice"),
    ],
)
def test_formats_that_cannot_be_kept_are_refused(url: str, more: dict[str, Any], says: str) -> None:
    with httpx.Client(base_url=url, timeout=120) as client:
        answer = client.post(TEXT, json={"prompt": "a", "max_tokens": 4, **more})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_an_answer_is_of_the_format_or_calls(constraints: Constraints) -> None:
    encode = load_tokenizer("bundled").encode
    body = ChatRequest.model_validate({"messages": USER, "json_schema": SCHEMA})
    format = wanted_format(body)
    assert format is not None
    made = ToolUse.of(TOOLS).constraint(constraints, term_of(format))
    assert made is not None
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for text, good in (('{"a": 1}', True), (call, True), ("words", False), ('{"a": 1}' + call, False)):
        assert made.permits(encode(text, add_special_tokens=False)) is good, text
    for more in ({"guided_choice": ["x"]}, {"structured_outputs": {"choice": ["x"]}}):
        chosen = wanted_format(ChatRequest.model_validate({"messages": USER, **more}))
        assert chosen is not None
        either = ToolUse.of(TOOLS).constraint(constraints, term_of(chosen))
        assert either.permits(encode("x", add_special_tokens=False))
    pattern = wanted_format(ChatRequest.model_validate({"messages": USER, "regex": "x"}))
    assert pattern is not None
    with pytest.raises(ConfigError, match="regex and tools exclude each other"):
        term_of(pattern)


def test_a_format_and_tools_over_http(url: str) -> None:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 7}}}
        given: Any = {"model": "bundled", "messages": USER, "tools": [NOW], "response_format": wanted, "seed": 1}
        free = client.chat.completions.create(**given, max_tokens=48).choices[0]
        assert free.message.content == "7" or free.message.tool_calls
        must = client.chat.completions.create(**given, tool_choice="required", max_tokens=48).choices[0]
        assert must.message.tool_calls
        assert must.message.content is None


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(constraints: Constraints, mode: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [
        {"type": "function", "function": {"name": "now"}}]}}  # fmt: skip
    use = ToolUse.of(TOOLS, choice)
    assert (use.mode, [tool.name for tool in use.tools], list(use.rendered)) == (mode, ["now"], TOOLS)
    ChatRequest.model_validate({"messages": USER, "tools": TOOLS, "tool_choice": choice})
    with pytest.raises(ConfigError, match="allowed_tools names 'weather'"):
        ToolUse.of([NOW], {**choice, "allowed_tools": {"mode": mode, "tools": [WEATHER]}})
    with pytest.raises(ConfigError, match='"auto" or "required"'):
        ToolUse.of(TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [WEATHER]}})


def prompt_of(serve: Serve, **more: Any) -> str:
    service = FakeService()
    answer = serve(service).post(CHAT, json={"messages": USER, **more})
    assert answer.status_code == 200, answer.text
    return bytes(service.submitted[0].prompt_ids).decode()


def test_an_assistants_message_is_continued(serve: Serve) -> None:
    begun = [
        *USER,
        {"role": "assistant", "content": [{"type": "text", "text": "Once "}, {"type": "text", "text": "upon"}]},
    ]
    assert prompt_of(serve, messages=begun, continue_final_message=True) == "<user>a<assistant>Once upon"
    assert prompt_of(serve, messages=begun, continue_final_message=True, add_generation_prompt=False)
    assert prompt_of(serve, messages=begun) == "<user>a<assistant>Once upon<assistant>"


@pytest.mark.parametrize(
    "more",
    [
        {"messages": USER},
        {"messages": [*USER, {"role": "assistant", "content": ""}]},
        {"messages": [*USER, {"role": "assistant", "content": "b"}], "add_generation_prompt": True},
    ],
)
def test_what_cannot_be_continued_is_refused(fake: httpx.Client, more: dict[str, Any]) -> None:
    answer = fake.post(CHAT, json={**more, "continue_final_message": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")


def test_refusals_of_the_past_are_text(serve: Serve) -> None:
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert prompt_of(serve, messages=[*USER, said, *USER]) == "<user>a<assistant>No.<user>a<assistant>"


@pytest.mark.parametrize("stream", [False, True])
def test_effort_reaches_the_template_or_is_said_to_have_no_effect(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    client = serve()
    body = {"messages": USER, "stream": stream}
    told = client.post(CHAT, json={**body, "reasoning_effort": "low"}).headers
    assert told["x-foretell-without-effect"] == "reasoning_effort"
    values = {"shout": True, "enable_thinking": False}  # the template's text names neither: it is a program here
    both = client.post(CHAT, json={**body, "reasoning_effort": "high", "chat_template_kwargs": values}).headers
    assert both["x-foretell-without-effect"] == (
        "reasoning_effort, chat_template_kwargs.shout, chat_template_kwargs.enable_thinking"
    )
    assert "x-foretell-without-effect" not in client.post(CHAT, json={**body, "reasoning_effort": "none"}).headers
    monkeypatch.setattr(ByteTokenizer, "chat_template", "reads enable_thinking")
    assert prompt_of(serve, reasoning_effort="none") == "<user>a<no thoughts><assistant>"
    assert prompt_of(serve, reasoning_effort="high") == "<user>a<assistant>"
    own = {"enable_thinking": True}
    assert prompt_of(serve, reasoning_effort="none", chat_template_kwargs=own) == "<user>a<assistant>"


def test_a_server_and_an_engine_hold_texts_by_the_same_code(bundled: Any, serve: Serve) -> None:
    engine = bundled.engine
    asked = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "not": {"type": "string"}}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": asked}}
    body = {
        "model": "bundled",
        "prompt": "A number: ",
        "seed": 5,
        "max_tokens": 40,
        "response_format": format,
        "logprobs": 1,
    }
    found = serve(bundled).post(TEXT, json=body)
    own = engine.generate(
        "A number: ", json_schema=asked, lenient_schema=True, seed=5, max_new_tokens=40, temperature=1.0, logprobs=1
    )
    told = found.json()["choices"][0]
    assert told["text"] == own.text
    assert found.headers["x-foretell-without-effect"] == "response_format.not"
    assert own.left_out == ("not",)
    scores = [piece.logprob for piece in own.pieces][: len(told["logprobs"]["token_logprobs"])]
    assert told["logprobs"]["token_logprobs"] == pytest.approx(scores, abs=1e-3)
