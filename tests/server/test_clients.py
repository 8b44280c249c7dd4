"""What clients send of themselves is taken and named, by every route; beside it what would change the text is refused.

The bodies have the structure of those that Codex, the ``anthropic`` library's tool runner, Ollama's own examples,
litellm and langchain send; the texts are this file's.
"""

import json
import re
from typing import Any

import anthropic
import httpx
import openai
import pytest

from foretell.server.protocol.responses import ResponsesRequest, flat_tools
from foretell.server.routes.responses import ResponseOutput
from foretell.server.texts.tools import ToolUse
from foretell.server.unsupported import OF_THE_CLIENT, RETURNED, UNSUPPORTED, near
from tests.server.conftest import Serve
from tests.server.fake import FakeService, ended
from tests.server.test_thoughts import scripted

USER: Any = {"role": "user", "content": "a"}
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BASES: dict[str, Any] = {
    CHAT: {"messages": [USER]}, TEXT: {"prompt": "a"}, RESPONSES: {"input": "a"},
    MESSAGES: {"messages": [USER], "max_tokens": 9}, "/v1/messages/count_tokens": {"messages": [USER]},
    "/api/chat": {"messages": [USER], "stream": False}, "/api/generate": {"prompt": "a", "stream": False},
    "/api/show": {}, "/tokenize": {"prompt": "a"},
}  # fmt: skip
HEADER = "x-foretell-without-effect"
PARAMETERS: Any = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
READ: Any = {"type": "function", "name": "read", "description": "Reads.", "strict": False, "parameters": PARAMETERS}
SPACE: Any = {"type": "namespace", "name": "mcp__disk__", "description": "The disk.", "tools": [READ]}
PATCH: Any = {
    "type": "custom", "name": "patch", "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}  # fmt: skip
CODEX: Any = {
    "model": "fake", "instructions": "Be brief.", "store": False, "stream": True, "parallel_tool_calls": False,
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}],
    "tools": [
        {**READ, "name": "shell"}, SPACE, PATCH, {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"}, {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto", "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "medium"},
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "service_tier": "auto",
    "client_metadata": {"x-installation": "1"},
}  # fmt: skip


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def header_of(answer: httpx.Response) -> list[str]:
    return [part for part in answer.headers.get(HEADER, "").split(", ") if part]


# -- fields that tell of the client, and those that nobody knows ---------------------------------------------------------


@pytest.mark.parametrize("path", BASES)
def test_one_table_is_for_all_routes(serve: Serve, path: str) -> None:
    service = FakeService()
    client = serve(service)
    own = client.post(path, json=BASES[path])
    assert (own.status_code, header_of(own)) == (200, []), own.text
    for name in ("client_metadata", "thread", "safety_identifier", "trace_id", "x_tags", "enable_caching"):
        for value in ({"a": 1}, ["b"], "c", 3):
            answer = client.post(path, json={**BASES[path], name: value})
            assert (answer.status_code, header_of(answer)) == (200, [name]), answer.text
    assert header_of(client.post(path, json={**BASES[path], "trace_id": None})) == []
    prompts = {tuple(one.prompt_ids) for one in service.submitted}
    assert len(prompts) <= 1


@pytest.mark.parametrize("path", BASES)
def test_what_would_change_the_text_is_refused_beside_them(serve: Serve, path: str) -> None:
    client = serve()
    names = {"max_new_tokens": 3, "previous_response_id": "r", "top_n_sigma": 1.0, "chat_template": "a"}
    for name, value in {**names, **({"temprature": 1} if path.startswith("/v1") else {})}.items():
        answer = client.post(path, json={**BASES[path], "client_metadata": {}, name: value})
        assert (answer.status_code, name in answer.text) == (400, True)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_fields_within_are_read_as_those_without(serve: Serve, path: str) -> None:
    client, key = serve(), "messages" if path == CHAT else "input"
    answer = client.post(path, json={key: [{**USER, "sender": "me"}, {**USER, "sender": "you"}]})
    assert (answer.status_code, header_of(answer)) == (200, [f"{key}.sender"])
    for wrong in ("contents", "Content", "cotnent", "documents", "temperature"):
        answer = client.post(path, json={key: [{**USER, wrong: "b"}]})
        assert answer.status_code == 400, wrong
        assert wrong in answer.json()["error"]["message"]


def test_nobody_is_refused_for_many_and_none_for_long(serve: Serve) -> None:
    client = serve()
    many = client.post(CHAT, json={"messages": [{**USER, "sender": "me"}] * 300})
    assert (many.status_code, header_of(many)) == (200, ["messages.sender"])
    assert client.post(CHAT, json={"messages": [USER], "x" * 65: 1}).status_code == 400
    assert client.post(CHAT, json={"messages": [USER], **{f"field {at}": 1 for at in range(2000)}}).status_code == 400
    odd = client.post(CHAT, json={"messages": [USER], "größe\r\nset-cookie: a": 1})
    assert (odd.status_code, "set-cookie" in odd.headers) == (200, False)


def test_strict_fields_are_those_that_are_known(serve: Serve) -> None:
    client = serve(strict_fields=True)
    for path, base in BASES.items():
        assert client.post(path, json={**base, "x_tags": 1}).status_code == 400
        assert client.post(path, json={**base, "thread": {"id": "1"}}).status_code == 200
    assert "did you mean 'temperature'?" in client.post(CHAT, json={"messages": [USER], "temprature": 1}).text


def test_the_log_names_them(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    from foretell.server.logs import configure_logs

    configure_logs(json=True)
    client = serve()
    client.post(CHAT, json={"messages": [USER], "x_tags": 1})
    client.post(CHAT, json={"messages": [USER]})
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if '"event": "request"' in line]
    assert [line.get("without_effect") for line in lines] == ["x_tags", None]


@pytest.mark.parametrize("stream", [False, True])
def test_they_stand_beside_what_the_template_does_not_read(serve: Serve, stream: bool) -> None:
    answer = serve().post(CHAT, json={"messages": [USER], "verbosity": "low", "user": "ann", "stream": stream})
    assert header_of(answer) == ["user", "verbosity"]


def test_the_tables_do_not_overlap() -> None:
    assert not OF_THE_CLIENT & RETURNED
    assert not (OF_THE_CLIENT | RETURNED) & UNSUPPORTED.keys()
    known = frozenset({"temperature", "seed", "stop", "top_p", "max_tokens"})
    for given, meant in (
        ("temprature", "temperature"), ("tempreature", "temperature"), ("temperatrue", "temperature"), ("sede", "seed"),
        ("sead", "seed"), ("stopp", "stop"), ("topP", "top_p"), ("max-tokens", "max_tokens"), ("maxTokns", "max_tokens"),
        ("mirostta", "mirostat"),
    ):  # fmt: skip
        assert near(given, known) == meant, given
    assert [near(given, known) for given in ("thread", "tags", "trace_id", "x", "max")] == [None] * 5


# -- tools ---------------------------------------------------------------------------------------------------------------


def items_of(answer: httpx.Response) -> list[dict[str, Any]]:
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    return list(events[-1]["response"]["output"])


def test_codex_is_answered(serve: Serve) -> None:
    """A call of a namespace and one of a text, and both come back in the next request."""
    patch = '*** Begin\n+"a"\n*** End'
    service = scripted(called("mcp__disk__read", q="b") + "\n" + called("patch", input=patch), "Done.")
    client = serve(service)
    first = client.post(RESPONSES, json={**CODEX, "parallel_tool_calls": True})
    assert first.status_code == 200, first.text
    assert {"client_metadata", "prompt_cache_key", "service_tier", "reasoning.summary", "tools.web_search",
            "tools.local_shell", "tools.image_generation", "tools.patch.format"} <= {*header_of(first)}  # fmt: skip
    prompt = str(service.engine.tokenizer.decode(service.submitted[0].prompt_ids))
    assert re.findall(r'"name": "(\w+)"', prompt)[:3] == ["shell", "mcp__disk__read", "patch"]
    assert ("The disk." in prompt, "start: /.+/" in prompt, "web_search" in prompt) == (True, True, False)
    read, patched = items_of(first)
    assert (read["type"], read["namespace"], read["name"]) == ("function_call", "mcp__disk__", "read")
    assert json.loads(read["arguments"]) == {"q": "b"}
    assert (patched["type"], patched["name"], patched["input"]) == ("custom_tool_call", "patch", patch)
    assert "response.custom_tool_call_input.done" in first.text
    results = [
        {"type": "function_call_output", "call_id": read["call_id"], "output": "found"},
        {"type": "custom_tool_call_output", "call_id": patched["call_id"], "output": "patched"},
    ]
    again = client.post(RESPONSES, json={**CODEX, "input": [*CODEX["input"], read, patched, *results]})
    assert again.status_code == 200, again.text
    assert items_of(again)[0]["content"][0]["text"] == "Done."
    prompt = str(service.engine.tokenizer.decode(service.submitted[1].prompt_ids))
    assert '{"name": "mcp__disk__read", "arguments": {"q": "b"}}' in prompt
    assert prompt.index("found") < prompt.index("patched")
    for more in ({"tool_choice": {"type": "web_search"}}, {"tools": [{"type": "computer"}]}, {"tempratur": 1}):
        assert client.post(RESPONSES, json={**CODEX, **more}).status_code == 400, more


def test_names_of_namespaces_are_unique() -> None:
    tools = [
        {**READ, "name": "a__read"}, {"type": "namespace", "name": "a", "tools": [READ]},
        {"type": "namespace", "name": "a__", "tools": [READ]}, {"type": "namespace", "name": "ä b", "tools": [READ]},
        {"type": "namespace", "name": "n" * 128, "tools": [{**READ, "name": "r" * 128}, {**READ, "name": "s" + "r" * 127}]},
    ]  # fmt: skip
    found = flat_tools(ResponsesRequest.model_validate({"input": "a", "tools": tools}))
    names = [name for name, _, _ in found]
    assert names[:4] == ["a__read", "a__read_", "a__read__", "__b__read"]
    assert len(set(names)) == 6
    assert all(re.fullmatch(r"[\w-]{1,128}", name, re.ASCII) for name in names)


def test_a_text_that_a_limit_cut_is_given_as_far_as_it_came(serve: Serve) -> None:
    body = ResponsesRequest.model_validate({"input": "a", "tools": [PATCH]})
    text = called("patch", input='*** Begin "and" more')
    use = ToolUse.of([{"type": "function", "function": {"name": "patch"}}])
    for size in range(text.index("arguments") + 12, len(text) + 1):
        output = ResponseOutput(None, use, flat_tools(body))
        output.push([], text[:size], (), ended("stop" if size == len(text) else "length"))
        (item,) = output.items
        assert item["type"] == "custom_tool_call"
        assert '*** Begin "and" more'.startswith(item["input"])
    assert (item["input"], item["status"]) == ('*** Begin "and" more', "completed")


HOSTED: dict[str, Any] = {
    RESPONSES: [{"type": "web_search_preview_2025_03_11"}, {"type": "mcp", "server_label": "x"}, {"type": "file_search"}],
    MESSAGES: [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
               {"type": "code_execution_20250522", "name": "code_execution"}],
    CHAT: [{"type": "web_search"}, {"type": "code_interpreter", "container": {"type": "auto"}}],
}  # fmt: skip
FORCED: dict[str, Any] = {
    RESPONSES: ["required", {"type": "file_search"}], CHAT: ["required", {"type": "web_search"}],
    MESSAGES: [{"type": "any"}, {"type": "tool", "name": "web_search"}],
}  # fmt: skip


@pytest.mark.parametrize("path", HOSTED)
def test_tools_of_a_providers_server_are_left_out(serve: Serve, path: str) -> None:
    service = FakeService()
    client = serve(service)
    answer = client.post(path, json={**BASES[path], "tools": HOSTED[path]})
    assert (answer.status_code, header_of(answer)) == (200, [f"tools.{one['type']}" for one in HOSTED[path]]), (
        answer.text
    )
    client.post(path, json=BASES[path])
    assert len({tuple(one.prompt_ids) for one in service.submitted}) == 1
    for choice in FORCED[path]:
        refused = client.post(path, json={**BASES[path], "tools": HOSTED[path], "tool_choice": choice})
        assert refused.status_code == 400, choice
        assert re.search("runs no tools|tool_choice", refused.text)
    for unknown in ({"type": "bash_20250124", "name": "bash"}, {"type": "telepathy"}):
        assert client.post(path, json={**BASES[path], "tools": [unknown]}).status_code == 400


# -- the older form of tools ---------------------------------------------------------------------------------------------

LOOK: Any = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}


@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_answered_in_their_own_form(serve: Serve, stream: bool) -> None:
    service = scripted(called("look", q="é"), "Done.")
    client = openai.OpenAI(base_url=f"{serve(service).base_url}/v1", api_key="x")
    given: Any = {"model": "fake", "functions": [LOOK], "messages": [USER], "function_call": "auto"}
    made: Any = client.chat.completions.create(**given, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in made]
        parts = [one.delta.function_call for one in chunks if one.delta.function_call]
        name, arguments = "".join(one.name or "" for one in parts), "".join(one.arguments or "" for one in parts)
        assert all(one.delta.tool_calls is None for one in chunks)
        reason = chunks[-1].finish_reason
    else:
        call, reason = made.choices[0].message.function_call, made.choices[0].finish_reason
        name, arguments = call.name, call.arguments
        assert made.choices[0].message.tool_calls is None
    assert (reason, name, json.loads(arguments)) == ("function_call", "look", {"q": "é"})
    said = {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": arguments}}
    history = [USER, said, {"role": "function", "name": "look", "content": "found"}]
    last = client.chat.completions.create(**{**given, "messages": history})
    assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("Done.", "stop")
    prompt = str(service.engine.tokenizer.decode(service.submitted[-1].prompt_ids))
    assert prompt.index('"arguments": {"q"') < prompt.index("found")
    client.close()


@pytest.mark.parametrize(
    "more",
    [
        {"functions": [LOOK], "tools": []}, {"function_call": {"name": "look"}},
        {"functions": [LOOK], "tool_choice": "auto"},
        {"functions": [LOOK], "function_call": {"name": "other"}}, {"functions": [{"name": "a b"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}],
                       "function_call": {"name": "look", "arguments": "{}"}},
                      {"role": "function", "name": "look", "content": "found"}]},
    ],
)  # fmt: skip
def test_what_would_be_lost_of_functions_is_refused(serve: Serve, more: Any) -> None:
    client = serve(scripted("Done."))
    assert client.post(CHAT, json={"messages": [USER], **more}).status_code == 400


# -- one model by several names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [("one", "two"), "one,two", "one, two,one"])
def test_several_names(serve: Serve, given: Any) -> None:
    client = serve(served_model_name=given)
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["one", "two"]
    assert [one["name"] for one in client.get("/api/tags").json()["models"]] == ["one", "two"]
    assert client.get("/v1/models/two").json()["parent"] is None
    for path in (CHAT, TEXT, RESPONSES, MESSAGES, "/api/chat"):
        for name in ("two", "one", ""):
            answer = client.post(path, json={**BASES[path], "model": name})
            assert (answer.status_code, answer.json()["model"]) == (200, name or "one"), answer.text
        assert client.post(path, json={**BASES[path], "model": "three"}).status_code == 404


def test_any_name(serve: Serve) -> None:
    service = FakeService()
    service.engine.model.loras = ("lora",)
    client = serve(service, served_model_name=("one", "*"))
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["one", "lora"]
    for path in (CHAT, RESPONSES, MESSAGES, "/api/generate"):
        for name, lora in (("gpt-4o", None), ("claude-sonnet-4-5", None), ("one", None), ("lora", "lora")):
            answer = client.post(path, json={**BASES[path], "model": name})
            assert (answer.status_code, answer.json()["model"]) == (200, name), answer.text
            assert service.submitted[-1].lora == lora
    assert client.get("/v1/models/gpt-4o").json()["id"] == "gpt-4o"
    assert (
        "enum" not in client.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    )
    assert [one["id"] for one in serve(served_model_name="*").get("/v1/models").json()["data"]] == ["fake"]


# -- clients' own libraries -----------------------------------------------------------------------------------------------


def test_anthropics_library_sends_what_it_likes(serve: Serve) -> None:
    text = called("look", q="b")
    client = anthropic.Anthropic(base_url=str(serve(scripted(text, "Done.")).base_url), api_key="x")
    tools: Any = [{"name": "look", "input_schema": PARAMETERS, "cache_control": {"type": "ephemeral"}},
                  {"type": "web_search_20250305", "name": "web_search"}]  # fmt: skip
    made: Any = client.messages.with_raw_response.create(
        model="fake", max_tokens=90, messages=[USER], tools=tools, metadata={"user_id": "u"},
        extra_body={"thread": {"id": "1"}},
    )  # fmt: skip
    assert made.headers[HEADER] == "metadata, thread, tools.web_search_20250305, tools.cache_control"
    assert [one.name for one in made.parse().content if one.type == "tool_use"] == ["look"]
    with pytest.raises(anthropic.BadRequestError, match="top_n_sigma"):
        client.messages.create(
            model="fake", max_tokens=9, messages=[USER], extra_body={"thread": {}, "top_n_sigma": 1.0}
        )
    client.close()


def test_openais_library_sends_what_it_likes(serve: Serve) -> None:
    client = openai.OpenAI(base_url=f"{serve(served_model_name='*').base_url}/v1", api_key="x")
    made: Any = client.responses.with_raw_response.create(
        model="gpt-4o", input="a", background=False, truncation="auto", service_tier="flex", safety_identifier="s",
        prompt_cache_key="k", max_tool_calls=3, reasoning={"summary": "auto"}, tools=[{"type": "web_search"}],
        include=["web_search_call.action.sources"],
    )  # fmt: skip
    assert {*made.headers[HEADER].split(", ")} == {
        "service_tier", "safety_identifier", "prompt_cache_key", "max_tool_calls", "reasoning.summary", "tools.web_search",
    }  # fmt: skip
    assert (made.parse().model, made.parse().truncation) == ("gpt-4o", "disabled")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.create(model="gpt-4o", input="a", background=True)
    client.close()


def test_a_field_with_any_name_is_named_in_a_header_that_can_be_sent(fake: httpx.Client) -> None:
    names = ["", " ", "a b", "\u0007", "ü" * 40, '"']
    answer = fake.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, **dict.fromkeys(names, 3)})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER].split(", ")[:3] == ['""', "%20", "a%20b"]
