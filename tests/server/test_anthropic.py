"""Anthropic's own client against ``/v1/messages``: whole and streamed, tools, thoughts, errors, an agent of ten turns."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foretell.engine.structured.thoughts import Thinking, Thoughts, family_named
from foretell.server.protocol.anthropic import MessagesRequest, as_chat
from foretell.server.replies.anthropic import MessageReply
from foretell.server.routes.anthropic import Blocks
from foretell.server.texts.reading import TextReading
from foretell.server.texts.tools import ToolUse
from tests.server.calls import SCHEMA, is_dog
from tests.server.conftest import OPENED, Serve
from tests.server.fake import EOS, ByteTokenizer, FakeService, ended
from tests.server.test_thoughts import NOW, Thinker, scripted

anthropic = pytest.importorskip("anthropic", reason="of the extra dev")

PATH = "/v1/messages"
USER: Any = {"role": "user", "content": "a"}
SUM: Any = {
    "name": "add", "description": "Adds.", "input_schema": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"],
    },
}  # fmt: skip
LOOK: Any = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
TEXT = "<think>\nhm\n</think>\n\nHi"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def saying(*texts: str, tokenizer: Any = None) -> FakeService:
    """A service whose n-th answer is the n-th text."""
    service = FakeService()
    service.script = lambda _: [*texts[len(service.submitted) - 1].encode(), EOS]
    service.engine.tokenizer = tokenizer or Thinker()
    return service


def client_at(url: Any, key: str = "none") -> Any:
    OPENED.append(anthropic.Anthropic(base_url=str(url), api_key=key, max_retries=0, timeout=120))
    return OPENED[-1]


def client_of(serve: Serve, service: Any, **options: Any) -> Any:
    return client_at(serve(service, **options).base_url)


def ask(client: Any, *messages: Any, **more: Any) -> Any:
    return client.messages.create(model="fake", max_tokens=100, messages=[*(messages or (USER,))], **more)


def shown(reply: Any) -> list[tuple[str, str]]:
    return [(block.type, getattr(block, block.type)) for block in reply.content]


def prompt_of(service: FakeService) -> str:
    return bytes(service.submitted[-1].prompt_ids).decode()


def test_a_message_whole_and_streamed(serve: Serve) -> None:
    client = client_of(serve, saying(TEXT, TEXT))
    reply = ask(client, extra_body={"temperature": 0.5, "top_k": 3}, metadata={"user_id": "me"})
    MessageReply.model_validate(reply.model_dump(exclude_unset=True))
    assert shown(reply) == [("thinking", "hm"), ("text", "Hi")]
    assert (reply.role, reply.type, reply.stop_reason, reply.stop_sequence) == (
        "assistant",
        "message",
        "end_turn",
        None,
    )
    assert reply.usage.output_tokens == len(TEXT) + 1
    assert reply.usage.output_tokens_details.thinking_tokens == len("\nhm\n")
    with client.messages.stream(model="fake", max_tokens=100, messages=[USER]) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "thinking")]
        last = stream.get_final_message()
    assert shown(last) == shown(reply)
    assert (last.stop_reason, last.usage.output_tokens) == ("end_turn", len(TEXT) + 1)
    started = kinds.index("content_block_start", 2)
    assert [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert kinds[started - 1] == "content_block_stop"


def test_the_events_have_names_and_come_in_their_order(serve: Serve) -> None:
    answer = serve(saying("Hi")).post(PATH, json={"messages": [USER], "max_tokens": 9, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n") if line and not line.startswith(":")]
    named = [line.removeprefix("event: ") for line in lines[::2]]
    data = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert named == [one["type"] for one in data]
    assert [one["type"] for one in data if one["type"] != "content_block_delta"] == [
        "message_start", "ping", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert (data[0]["message"]["content"], data[0]["message"]["stop_reason"]) == ([], None)
    assert data[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", ["", "Hi", TEXT, TEXT + call("now"), call("now") + call("now", a=[1])])
def test_the_events_add_up_to_the_blocks_however_the_text_is_cut(text: str, size: int) -> None:
    thinking = Thinking(Thoughts(family_named("think"), ByteTokenizer()), "before")
    blocks = Blocks(TextReading(thinking, ToolUse.of([NOW]), iter("abc").__next__))
    events = [event for at in range(0, len(text), size) for event in blocks.push((), text[at : at + size])]
    events += blocks.push((), "", ended("stop"))
    built: list[Any] = []
    for event in events:
        assert event["index"] == len(built) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            built.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            kind, value = list(event["delta"].items())[1]
            built[-1]["json" if kind == "partial_json" else kind] += value
    for block in built:
        arguments = block.pop("json")
        block |= {"input": json.loads(arguments)} if arguments else {}
    assert built == blocks.content


def test_why_it_ended(serve: Serve) -> None:
    client = client_of(serve, saying("one STOP two", "one two", "no end to it"))
    stopped = ask(client, stop_sequences=["nothing", "STOP"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "STOP", "one ")
    cut = client.messages.create(model="fake", max_tokens=3, messages=[USER])
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "one")
    assert ask(client_of(serve, scripted(call("look"))), tools=[LOOK]).stop_reason == "tool_use"
    assert ask(client, stop_sequences=["never"]).stop_reason == "end_turn"


def test_a_full_context_is_said(serve: Serve) -> None:
    service = saying("no end to it")
    service.engine.model.spec.__dict__["max_positions"] = 24
    reply = ask(client_of(serve, service))
    assert reply.stop_reason == "model_context_window_exceeded"


def test_tools_and_what_may_be_called(serve: Serve) -> None:
    client = client_of(serve, scripted(call("add", a=1, b=2) + "\n" + call("look"), call("add", a=1)[:-20]))
    reply = ask(client, tools=[SUM, LOOK])
    assert [(block.name, block.input) for block in reply.content] == [("add", {"a": 1, "b": 2}), ("look", {})]
    assert all(block.id.startswith("toolu_") for block in reply.content)
    cut = client.messages.create(model="fake", max_tokens=15, messages=[USER], tools=[SUM])
    assert (cut.content[0].name, cut.content[0].input) == ("add", {})
    chat = as_chat(MessagesRequest.model_validate({
        "messages": [USER], "tools": [SUM, {**LOOK, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }))  # fmt: skip
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    assert [tool.function.name for tool in chat.tools or ()] == ["add", "look"]
    for kind, choice in (("auto", "auto"), ("none", "none")):
        given = {"messages": [USER], "tools": [SUM], "tool_choice": {"type": kind}}
        assert as_chat(MessagesRequest.model_validate(given)).tool_choice == choice


def test_turns_are_those_of_a_conversation() -> None:
    given = {
        "system": [
            {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "kind."},
        ],
        "messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "b"}, {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é"}},
                {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "c"}]},
                {"type": "tool_result", "tool_use_id": "t1", "content": "d", "is_error": True},
                {"type": "text", "text": "e"}, {"type": "text", "text": "f"},
            ]},
        ],
        "thinking": {"type": "enabled", "budget_tokens": 5}, "output_config": {"effort": "max"}, "seed": 3, "top_k": 4,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    chat = as_chat(MessagesRequest.model_validate(given))
    said = [message.model_dump(exclude_none=True) for message in chat.messages]
    assert [one["role"] for one in said] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert [one["content"] for one in said] == ["Be\nkind.", "a", "b", "c", "Error: d", "e\nf"]
    assert said[2]["reasoning_content"] == "hm"
    assert [json.loads(one["function"]["arguments"]) for one in said[2]["tool_calls"]] == [{"at": "é"}, {}]
    assert [one.get("tool_call_id") for one in said[3:5]] == ["t2", "t1"]
    assert (chat.thinking_budget, chat.enable_thinking, chat.reasoning_effort) == (5, True, "xhigh")
    assert (chat.seed, chat.top_k, chat.continue_final_message) == (3, 4, None)


def test_a_turn_of_the_assistants_at_the_end_is_gone_on_with(serve: Serve) -> None:
    service = saying(" world")
    reply = ask(client_of(serve, service), USER, {"role": "assistant", "content": "Hello"})
    assert (prompt_of(service), reply.content[0].text) == ("<user>a<assistant>Hello", " world")


def test_thoughts_can_be_turned_off_and_hidden(serve: Serve) -> None:
    service = saying("Hi", TEXT)
    client = client_of(serve, service)
    ask(client, thinking={"type": "disabled"})
    assert "<no thoughts>" in prompt_of(service)
    hidden = ask(client, thinking={"type": "adaptive", "display": "omitted"})
    assert shown(hidden) == [("thinking", ""), ("text", "Hi")]


def test_an_answer_of_a_schema(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = {"messages": [USER], "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    made = as_chat(MessagesRequest.model_validate(given)).response_format
    assert made.model_dump(by_alias=True, exclude_none=True)["json_schema"]["schema"] == schema


def test_tokens_are_counted_as_a_message_has_them(serve: Serve) -> None:
    client = client_of(serve, scripted("Hi"))
    given: Any = {"model": "fake", "messages": [USER], "system": "Be kind.", "tools": [SUM]}
    counted = client.messages.count_tokens(**given).input_tokens
    assert counted == client.messages.create(**given, max_tokens=5).usage.input_tokens > 20
    long = {"role": "user", "content": "x y " * 3000}  # beyond the context
    assert client.messages.count_tokens(model="fake", messages=[long]).input_tokens > 4096


@pytest.mark.parametrize(
    ("more", "status", "kind", "told"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "image"),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [
                {"type": "image"}]}]}]}, 400, "invalid_request_error", "'image'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, 400,
         "invalid_request_error", "a tool_use is no block of the user"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, 400,
         "invalid_request_error", "'x' answers no call"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "bash_20250124"),
        ({"tool_choice": {"type": "tool"}, "tools": [SUM]}, 400, "invalid_request_error", "names it"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, 400, "invalid_request_error",
         "context_management.edits.0.type"),
        ({"documents": ["c"]}, 400, "invalid_request_error", "'documents' is not supported"),
        ({"temprature": 1}, 400, "invalid_request_error", "temperature"),
        ({"model": "claude"}, 404, "not_found_error", "this server has 'fake'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [PATH, PATH + "/count_tokens"])
def test_errors_have_anthropics_form(serve: Serve, more: Any, status: int, kind: str, told: str, path: str) -> None:
    answer = serve(saying("Hi")).post(path, json={"messages": [USER], "max_tokens": 9, **more})
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert (set(body), body["type"], body["error"]["type"]) == ({"type", "error"}, "error", kind)
    assert told in body["error"]["message"]


def test_a_key_may_come_as_anthropics_clients_send_it(serve: Serve) -> None:
    client = serve(saying("Hi", "Hi"), api_keys=("secret",))
    body = {"messages": [USER], "max_tokens": 9}
    assert client.post(PATH, json=body, headers={"x-api-key": "secret"}).status_code == 200
    refused = client.post(PATH, json=body, headers={"x-api-key": "other"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    mixed = client.post(PATH, json=body, headers={"x-api-key": "secret", "authorization": "Bearer other"})
    assert mixed.status_code == 401
    with pytest.raises(anthropic.AuthenticationError):
        ask(client_at(client.base_url, "wrong"))


def test_the_model_is_listed_as_anthropics_clients_read_it(serve: Serve) -> None:
    client = client_of(serve, saying("Hi"))
    assert [(model.id, model.type, model.display_name) for model in client.models.list()] == [("fake", "model", "fake")]
    assert client.models.retrieve("fake").created_at.year > 2000


def test_a_stream_that_fails_ends_with_an_error(serve: Serve) -> None:
    from foretell.core.errors import ModelError

    client = serve(FakeService(failure=ModelError("broken")))
    last = client.post(PATH, json={"messages": [USER], "stream": True}).text.strip().splitlines()[-2:]
    assert last[0] == "event: error"
    assert json.loads(last[1].removeprefix("data: "))["error"]["type"] == "api_error"


def agent() -> Iterator[tuple[str, Any]]:
    """Ten turns of a model with two tools: (what it writes, the results that it gets)."""
    for turn in range(9):
        thought = f"<think>\nturn {turn}\n</think>\n\n"
        if turn % 3 == 2:
            yield (
                thought + call("add", a=turn, b=1) + "\n" + call("look", at=f"x{turn}"),
                [str(turn + 1), f"seen x{turn}"],
            )
        else:
            name, result = (("add", str(turn + 2)), ("look", f"seen {turn}"))[turn % 3]
            made = {"a": turn, "b": 2} if name == "add" else {"at": str(turn)}
            yield thought + "Next.\n" + call(name, **made), [result]
    yield "<think>done</think>All done.", []


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_two_tools_over_ten_turns(serve: Serve, streams: bool) -> None:
    """Messages go back as they came; every result stands where its call was; a prompt begins like the one before."""
    texts = [text for text, _ in agent()]
    service = scripted(*texts)
    client, history, before = client_of(serve, service), [USER], ""
    for turn in range(10):
        given: Any = {
            "model": "fake",
            "max_tokens": 200,
            "messages": history,
            "tools": [SUM, LOOK],
            "system": "Use tools.",
        }
        if streams:
            with client.messages.stream(**given) as stream:
                reply = stream.get_final_message()
        else:
            reply = client.messages.create(**given)
        assert reply.stop_reason == ("tool_use" if turn < 9 else "end_turn")
        history.append({"role": "assistant", "content": reply.content})
        results = []
        for block in reply.content:
            if block.type == "tool_use":
                done = str(block.input["a"] + block.input["b"]) if block.name == "add" else f"seen {block.input['at']}"
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": done})
        if results:
            history.append({"role": "user", "content": results[::-1]})
        prompt = str(service.engine.tokenizer.decode(service.submitted[-1].prompt_ids))
        assert prompt.startswith(before)
        before = prompt
    assert reply.content[-1].text == "All done."
    for _, results in list(agent())[:9]:
        assert all(result in before for result in results)
    assert before.index("<tool_response>\n9\n</tool_response>") < before.index("seen x8")
    assert len(service.submitted) == 10


def test_the_bundled_pair_answers(url: str) -> None:
    client = client_at(url)
    given: Any = {"model": "bundled", "max_tokens": 12, "messages": [USER], "extra_body": {"seed": 5}}
    whole = client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        last = stream.get_final_message()
    assert [block.text for block in whole.content] == [block.text for block in last.content]
    assert whole.stop_reason == last.stop_reason
    speculated = client.messages.create(**{**given, "extra_body": {"seed": 5, "speculative": False}})
    assert [block.text for block in speculated.content] == [block.text for block in whole.content]
    with httpx.Client(base_url=url) as raw:
        openai = raw.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 12, "seed": 5}).json()
    assert openai["choices"][0]["message"]["content"] == whole.content[0].text


def test_the_bundled_pair_calls_tools(url: str) -> None:
    client = client_at(url)
    feed = {"name": "feed", "input_schema": SCHEMA, "strict": True}
    given: Any = {"model": "bundled", "max_tokens": 64, "messages": [USER], "tools": [feed], "extra_body": {"seed": 1}}
    choice = {"type": "tool", "name": "feed"}
    reply = client.messages.create(**given, tool_choice=choice)
    (block,) = reply.content
    assert (block.name, reply.stop_reason, is_dog(json.dumps(block.input))) == ("feed", "tool_use", True)
    with client.messages.stream(**given, tool_choice=choice) as stream:
        assert stream.get_final_message().content[0].input == block.input
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "fed"}
    history = [USER, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    again = client.messages.create(**{**given, "messages": history}, tool_choice={"type": "none"})
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens > 0
    assert again.content[0].type == "text"
