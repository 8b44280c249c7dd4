"""What SGLang's own tests of its OpenAI-compatible server ask for, asked of ours: the bundled pair, and OpenAI's client.

Written from their expectations (``test/registered/openai_server``: basic, features, function_call, validation; and the
kit of matched stops), with a smaller model's limits; what a far larger model would say is left out. Where the two servers
differ on purpose, ``DIFFERS`` says how ours answers.
"""

import itertools
import json
import re
from collections import Counter
from typing import Any

import httpx
import openai
import pytest

from tests.server.calls import FEED, USER, WALK, Calls, called, chat, is_dog, said

CALLS, DIFFERS = Calls(), Calls()
PROMPT = "def fibonacci("


def text(client: Any, **more: Any) -> Any:
    return client.completions.create(
        **{"model": "bundled", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **more}
    )


def post(client: Any, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{client.base_url}{path}", json={"model": "bundled", **body}, timeout=120)


# -- test_openai_server: 16 forms of a completion, whole and in a stream ----------------------------------------------

FORMS = list(itertools.product((False, True), (None, 5), (False, True), (1, 2), (False, True)))


def form(client: Any, tokens: list[int], echo: bool, logprobs: int | None, several: bool, n: int, as_ids: bool) -> Any:
    one: Any = tokens if as_ids else PROMPT
    return {"prompt": [one, one] if several else one, "echo": echo, "logprobs": logprobs, "n": n}


def completion(client: Any, tokens: list[int], *given: Any) -> None:
    echo, logprobs, several, n, _ = given
    reply = text(client, **form(client, tokens, *given))
    assert len(reply.choices) == (1 + several) * n
    assert reply.choices[0].text.startswith(PROMPT) is echo
    if logprobs:
        found = reply.choices[0].logprobs
        assert isinstance(found.tokens[0], str)
        assert isinstance(found.top_logprobs[1], dict)
        assert 0 < len(found.top_logprobs[1]) <= 5 + 1  # the token itself beside the likeliest, as OpenAI says
        assert (found.token_logprobs[0] is None) is echo
    assert reply.usage.prompt_tokens == len(tokens) * (1 + several)
    assert 0 < reply.usage.completion_tokens < reply.usage.total_tokens


def completion_stream(client: Any, tokens: list[int], *given: Any) -> None:
    echo, logprobs, several, n, _ = given
    begun: set[int] = set()
    usage = None
    for chunk in text(client, stream=True, stream_options={"include_usage": True}, **form(client, tokens, *given)):
        assert chunk.id
        if chunk.usage is not None:
            usage = chunk.usage
            continue
        (choice,) = chunk.choices
        first = choice.index not in begun
        if logprobs:
            assert isinstance(choice.logprobs.tokens[0], str)
            assert (first and echo) or 0 < len(choice.logprobs.top_logprobs[0]) <= 5 + 1
        assert not (first and echo) or choice.text.startswith(PROMPT)
        begun.add(choice.index)
    assert begun == set(range((1 + several) * n))
    assert min(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) > 0


@pytest.fixture(scope="module")
def tokens(bundled: Any) -> list[int]:
    found: list[int] = bundled.engine.tokenizer.encode(PROMPT)
    return found


@pytest.mark.parametrize("given", FORMS, ids=str)
def test_completion(client: openai.OpenAI, tokens: list[int], given: Any) -> None:
    completion(client, tokens, *given)


@pytest.mark.parametrize("given", FORMS, ids=str)
def test_completion_stream(client: openai.OpenAI, tokens: list[int], given: Any) -> None:
    completion_stream(client, tokens, *given)


# -- test_openai_server: conversations, but for what test_chat.py and test_openai_calls.py have -------------------------


@CALLS("regex")
def _(client: Any) -> None:
    regex = r"""\{\n   "name": "[\w]{1,8}",\n   "population": [\d]{1,9}\n\}"""
    made = json.loads(said(chat(client, temperature=0, max_tokens=128, extra_body={"regex": regex})))
    assert isinstance(made["name"], str)
    assert isinstance(made["population"], int)


# -- responses ----------------------------------------------------------------------------------------------------------

RESPOND: Any = {
    "model": "bundled", "input": "The capital of France is", "temperature": 0.0, "top_p": 1.0, "store": True,
    "parallel_tool_calls": True, "tool_choice": "auto", "truncation": "disabled",
}  # fmt: skip
WEATHER: Any = {
    "type": "function", "name": "get_weather",
    "parameters": {"type": "object", "properties": {"location": {"type": "string", "maxLength": 8}},
                   "required": ["location"], "additionalProperties": False},
}  # fmt: skip


@CALLS("responses: an unknown previous response is an error")
def _(client: Any) -> None:
    answer = post(client, "responses", input="Hi", previous_response_id="bad")
    assert answer.status_code == 400
    assert {"message", "type", "code"} <= set(answer.json()["error"])


@CALLS("responses: a tool of an unknown type is an error")
def _(client: Any) -> None:
    answer = post(client, "responses", input="Hi", tools=[{"type": "some_invalid_tool_type"}])
    assert answer.status_code == 400
    assert {"message", "type", "code"} <= set(answer.json()["error"])


@CALLS("responses: a tool in the request")
def _(client: Any) -> None:
    for tools in ([WEATHER], [WEATHER, {**WEATHER, "name": "get_time"}], [{**WEATHER, "strict": True}], []):
        reply = client.responses.create(**RESPOND, max_output_tokens=8, tools=tools)
        assert reply.status in ("completed", "incomplete")
        assert reply.output


@CALLS("responses: a tool in a stream")
def _(client: Any) -> None:
    given = {**RESPOND, "tool_choice": "required", "parallel_tool_calls": False}
    events = list(client.responses.create(**given, max_output_tokens=64, tools=[WEATHER], stream=True))
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert set(json.loads(done.arguments)) == {"location"}
    assert events[-1].type == "response.completed"


# -- features -----------------------------------------------------------------------------------------------------------


@CALLS("json mode, a stream")
def _(client: Any) -> None:
    given: Any = {"temperature": 0, "max_tokens": 64, "response_format": {"type": "json_object"}}
    chunks = chat(client, stream=True, **given)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said(chat(client, **given))


@CALLS("ebnf")
def _(client: Any) -> None:
    grammar = '\n        root ::= "Hello" | "Hi" | "Hey"\n        '
    assert said(chat(client, temperature=0, extra_body={"ebnf": grammar})) in ("Hello", "Hi", "Hey")


@CALLS("ebnf of JSON")
def _(client: Any) -> None:
    grammar = r"""
        root    ::= "{" pair "}"
        pair    ::= "\"name\"" ":" string
        string  ::= "\"" [A-Za-z] [A-Za-z] [A-Za-z] "\""
        """
    made = said(chat(client, temperature=0, max_tokens=64, extra_body={"ebnf": grammar}))
    assert re.fullmatch(r'\{"name":"[A-Za-z]+"\}', made)


@CALLS("structural tag: a constant")
def _(client: Any) -> None:
    wanted = "The capital of France is Berlin."
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": wanted}}
    assert said(chat(client, temperature=0, max_tokens=64, response_format=tag)) == wanted


@CALLS("reasoning switched off, and not separated")
def _(client: Any) -> None:
    more = {"separate_reasoning": False, "stream_reasoning": False, "chat_template_kwargs": {"enable_thinking": False}}
    assert getattr(chat(client, extra_body=more).choices[0].message, "reasoning_content", None) is None


# -- function calls -----------------------------------------------------------------------------------------------------


@CALLS("a function that is named, whole and in a stream")
def _(client: Any) -> None:
    given: Any = {"tools": [FEED, WALK], "tool_choice": {"type": "function", "function": {"name": "walk"}}}
    assert [one.function.name for one in chat(client, max_tokens=64, **given).choices[0].message.tool_calls] == ["walk"]
    assert [name for name, _ in called(chat(client, max_tokens=64, stream=True, **given)).values()] == ["walk"]


@CALLS("two choices of a stream with tools end once each")
def _(client: Any) -> None:
    ended: Counter[int] = Counter()
    for chunk in chat(
        client, tools=[FEED], tool_choice="required", parallel_tool_calls=False, max_tokens=64, n=2, stream=True
    ):
        for choice in chunk.choices:
            ended[choice.index] += choice.finish_reason == "tool_calls"
    assert ended == {0: 1, 1: 1}


@CALLS("no call where none may come, in a stream")
def _(client: Any) -> None:
    chunks = list(chat(client, tools=[FEED], tool_choice="none", stream=True))
    assert called(chunks) == {}
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


@CALLS("nested parameters")
def _(client: Any) -> None:
    inner = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    outer = {
        "type": "object",
        "properties": {"data": inner, "many": {"type": "array", "items": inner, "maxItems": 2}},
        "required": ["data"], "additionalProperties": False,
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "analyse", "parameters": outer, "strict": True}}
    reply = chat(client, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=120)
    made = json.loads(reply.choices[0].message.tool_calls[0].function.arguments)
    assert isinstance(made["data"]["on"], bool)


def refused(client: Any, match: str, **more: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=match):
        chat(client, **more)


@CALLS("a function that is not among the tools")
def _(client: Any) -> None:
    refused(client, "nonexistent", tools=[FEED], tool_choice={"type": "function", "function": {"name": "nonexistent"}})


@CALLS("a tool without a name")
def _(client: Any) -> None:
    refused(client, "name", tools=[{"type": "function", "function": {"description": "a"}}], tool_choice="required")


@CALLS("a tool with a schema that is none")
def _(client: Any) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "unknown_type"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "test_function", "parameters": bad}}
    refused(client, "test_function", tools=[tool], tool_choice="required")


# -- validation ---------------------------------------------------------------------------------------------------------


@CALLS("a prompt beyond the context, whole and in a stream")
def _(client: Any) -> None:
    long: Any = [{"role": "user", "content": "hello " * 5000}]
    for stream in (False, True):
        refused(client, "context", messages=long, stream=stream)


@CALLS("completions: response_format")
def _(client: Any) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "dog", "schema": FEED["function"]["parameters"]}}
    assert is_dog(text(client, max_tokens=64, extra_body={"response_format": shape}).choices[0].text)
    assert text(client, extra_body={"response_format": {"type": "json_object"}}).choices[0].text.startswith("{")


@CALLS("completions: logprobs false")
def _(client: Any) -> None:
    answer = post(client, "completions", prompt="Hello", max_tokens=2, logprobs=False)
    assert answer.json()["choices"][0]["logprobs"] is None


@CALLS("completions: fields of SGLang's")
def _(client: Any) -> None:
    schema = json.dumps(FEED["function"]["parameters"])
    more: Any = {"top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1, "json_schema": schema, "lora_path": None}
    assert is_dog(text(client, max_tokens=64, extra_body=more).choices[0].text)


@CALLS("requests without what they need, and with what cannot be")
def _(client: Any) -> None:
    for body in ({}, {"prompt": "a", "max_tokens": -1}, {"prompt": "a", "n": 0}):
        assert post(client, "completions", **body).status_code == 400
    for more in ({"tool_choice": 123}, {"messages": []}):
        assert post(client, "chat/completions", **{"messages": USER, **more}).status_code == 400


@CALLS("a body beyond the limit")
def _(client: Any) -> None:
    assert post(client, "completions", prompt="hello " * 10**6).status_code == 413


# -- where ours differs -------------------------------------------------------------------------------------------------


@DIFFERS("a text that its limit cut is incomplete, as OpenAI says; SGLang calls it completed")
def _(client: Any) -> None:
    reply = client.responses.create(**RESPOND, max_output_tokens=2, extra_body={"ignore_eos": True})
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@DIFFERS("another model's name is 404, as OpenAI says; SGLang's strict mode says 400")
def _(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="wrong_model_name"):
        client.completions.create(model="wrong_model_name", prompt="hi")


@DIFFERS("max_tokens beyond the context is cut, and the answer says so; SGLang refuses it")
def _(client: Any) -> None:
    answer = post(client, "completions", prompt=[5] * 4090, max_tokens=5000, ignore_eos=True)
    (choice,) = answer.json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "context")


@DIFFERS("two tools may define types of one name; SGLang refuses them")
def _(client: Any) -> None:
    tools = []
    for name, kind in (("one", "boolean"), ("two", "null")):
        inner = {
            "type": "object",
            "properties": {"a": {"type": kind}},
            "required": ["a"],
            "additionalProperties": False,
        }
        shape = {"type": "object", "properties": {"d": {"$ref": "#/$defs/D"}}, "required": ["d"], "$defs": {"D": inner}}
        tools.append(
            {"type": "function", "function": {"name": name, "parameters": {**shape, "additionalProperties": False}}}
        )
    for name, kind in (("one", bool), ("two", type(None))):
        choice = {"type": "function", "function": {"name": name}}
        (call,) = chat(client, tools=tools, tool_choice=choice, max_tokens=100).choices[0].message.tool_calls
        assert isinstance(json.loads(call.function.arguments)["d"]["a"], kind)


NOT_OURS = {
    "thoughts left out": ({"include_reasoning": False}, "include_reasoning"),
    "a hidden state": ({"return_hidden_states": True}, "return_hidden_states"),
    "an adapter": ({"lora_path": "a"}, "lora_path"),
    "a stop by regular expression": ({"stop_regex": "a+"}, "stop_regex"),
    "tokens of the prompt": ({"return_prompt_token_ids": True}, "return_prompt_token_ids"),
    "triggers": (
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<a>"]}}, "response_format"
    ),
    "a schema outside json_schema": ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format"),
    "an object of reasoning": ({"reasoning": {"enabled": True}}, "reasoning"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_OURS)
def test_what_is_sglangs_own_is_refused_by_name(client: openai.OpenAI, name: str) -> None:
    more, field = NOT_OURS[name]
    answer = post(client, "chat/completions", messages=USER, max_tokens=2, **more)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].split(".")[0] == field
    assert "did you mean" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", CALLS)
def test_call(client: openai.OpenAI, name: str) -> None:
    CALLS[name](client)


@pytest.mark.parametrize("name", DIFFERS)
def test_differs(client: openai.OpenAI, name: str) -> None:
    DIFFERS[name](client)
