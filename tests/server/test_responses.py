"""``/v1/responses`` by OpenAI's own client: texts, tools, formats, streams whose events add up, and whole histories."""

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from foretell.core.errors import ModelError
from foretell.engine.structured.thoughts import Thinking, Thoughts, family_named
from foretell.server.protocol.responses import ResponsesRequest, as_chat
from foretell.server.replies.responses import ResponseReply
from foretell.server.routes.responses import ResponseOutput
from foretell.server.texts.tools import ToolUse
from tests.server.conftest import Serve
from tests.server.fake import EOS, ByteTokenizer, FakeService, ended

PATH = "/v1/responses"
CLOCK = {"type": "function", "function": {"name": "now"}}
THOUGHT = "<think>\nhm </think>\n\nSo"
CALL = '<tool_call>\n{"name": "now", "arguments": {"a": "}"}}\n</tool_call>'
NOW: Any = {
    "type": "function",
    "name": "now",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}


def respond(client: httpx.Client, **more: Any) -> ResponseReply:
    answer = client.post(PATH, json={"input": "a", **more})
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    return ResponseReply.model_validate(answer.json(), strict=True)


def test_a_text(serve: Serve) -> None:
    service = FakeService(lambda _: [*"Grüße".encode(), EOS])
    reply = respond(serve(service), instructions="be kind", temperature=0.5, metadata={"k": "v"}, max_output_tokens=50)
    assert bytes(service.submitted[0].prompt_ids).decode() == "<system>be kind<user>a<assistant>"
    (item,) = reply.output
    assert (reply.status, item.type, item.status) == ("completed", "message", "completed")
    assert item.content[0].text == "Grüße"  # type: ignore[union-attr]
    assert (reply.temperature, reply.metadata, reply.max_output_tokens) == (0.5, {"k": "v"}, 50)
    assert reply.usage.output_tokens == len("Grüße".encode()) + 1
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens


@pytest.mark.parametrize("limit", [0, 3])
def test_what_a_limit_cuts_is_incomplete(serve: Serve, limit: int) -> None:
    reply = respond(serve(FakeService(lambda _: [97] * 9)), max_output_tokens=limit)
    assert (reply.status, reply.incomplete_details) == ("incomplete", {"reason": "max_output_tokens"})
    assert [part.text for item in reply.output for part in item.content] == ["a" * limit]  # type: ignore[union-attr]
    assert reply.output[-1].status == "incomplete"


def test_log_probabilities_where_they_are_included(serve: Serve) -> None:
    client = serve(FakeService(lambda _: [*b"ab", EOS]))
    reply = respond(client, include=["message.output_text.logprobs"], top_logprobs=1)
    scores = reply.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert [(one.token, one.logprob, len(one.top_logprobs)) for one in scores] == [("a", -0.5, 1), ("b", -0.5, 1)]
    assert respond(client).output[0].content[0].logprobs == []  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("text", ["Hello", CALL, "So: " + CALL + "\n" + CALL, "", "<tool_call> no", THOUGHT])
def test_the_events_add_up_to_the_items_however_the_text_is_cut(text: str, size: int) -> None:
    thinking = Thinking(Thoughts(family_named("think"), ByteTokenizer()), "before")
    whole = ResponseOutput(thinking, calls=ToolUse.of([CLOCK]))
    whole.push((), text, (), ended("stop"))
    made, events = ResponseOutput(thinking, calls=ToolUse.of([CLOCK])), []
    for start in range(0, len(text), size):
        events += made.push((), text[start : start + size])
    events += made.push((), "", (), ended("stop"))
    assert [strip(item) for item in made.items] == [strip(item) for item in whole.items]
    built: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(built)
            built.append(event["item"])
        elif kind == "content_part.added":
            built[-1]["content"].append(event["part"])
        elif kind == "output_text.delta":
            assert event["item_id"] == built[-1]["id"]
            built[-1]["content"][0]["text"] += event["delta"]
        elif kind == "reasoning_text.delta":
            built[-1]["content"] = built[-1]["content"] or [{"type": "reasoning_text", "text": ""}]
            built[-1]["content"][0]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            built[-1]["arguments"] += event["delta"]
        elif kind == "output_item.done":
            built[-1]["status"] = "completed"
            assert event["item"] == built[-1]
    assert built == made.items != []


def strip(item: dict[str, Any]) -> dict[str, Any]:
    """Without what is drawn."""
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def test_streams_of_openais_client_end_with_what_the_plain_answer_says(url: str) -> None:
    given: Any = {"model": "bundled", "input": "hi", "max_output_tokens": 24, "extra_body": {"seed": 5}}
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        whole = client.responses.create(**given)
        with client.responses.stream(**given) as stream:
            kinds = [event.type for event in stream]
            last = stream.get_final_response()
        raw = list(client.responses.create(**given, stream=True))
    assert last.output_text == whole.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    deltas = "".join(event.delta for event in raw if event.type == "response.output_text.delta")
    assert deltas == whole.output_text


def test_a_call_and_its_result(url: str) -> None:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        given: Any = {"model": "bundled", "tools": [NOW], "extra_body": {"seed": 1}, "max_output_tokens": 64}
        strict = {**NOW, "parameters": {**NOW["parameters"], "required": ["a"], "additionalProperties": False,
                                        "properties": {"a": {"type": "string", "maxLength": 4}}}}  # fmt: skip
        first = client.responses.create(**{**given, "tools": [strict]}, input="hi", tool_choice="required")
        calls = [item for item in first.output if item.type == "function_call"]
        assert calls
        assert calls[0].name == "now"
        assert set(json.loads(calls[0].arguments)) == {"a"} or first.status == "incomplete"
        history: Any = [{"role": "user", "content": "hi"}, *first.output]
        history += [{"type": "function_call_output", "call_id": call.call_id, "output": "noon"} for call in calls]
        second = client.responses.create(**given, input=history, tool_choice="none")
        assert second.output[0].type == "message"


def test_items_become_turns() -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "f", "call_id": "c1", "name": "now", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "x"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "y"}]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]  # fmt: skip
    chat = as_chat(ResponsesRequest.model_validate({"input": items, "instructions": "s"}))
    turns = [(one.role, one.content, len(getattr(one, "tool_calls", None) or ())) for one in chat.messages]
    assert turns == [("system", "s", 0), ("user", "ab", 0), ("assistant", "c", 2), ("tool", "x", 0), ("tool", "y", 0),
                     ("assistant", "d", 0), ("assistant", "e", 0)]  # fmt: skip
    assert chat.messages[2].reasoning == "hm"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"previous_response_id": "resp_1"}, "nothing is stored"),
        ({"conversation": "c"}, "nothing is stored"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "an item is a message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "computer"}]}, "tools.0"),
        ({"truncation": "middle"}, "truncation"),
        ({"n": 2}, "n:"),
        ({"max_tokens": 3, "max_output_tokens": 4}, "max_tokens and max_output_tokens are one setting"),
        ({"top_logprobs": 2}, "only where include has 'message.output_text.logprobs'"),
        ({"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, "only false"),
        ({"temperatur": 1}, "did you mean 'temperature'?"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "later"}}, "'later'"),
    ],
)
def test_what_it_cannot_do_is_refused(fake: httpx.Client, more: dict[str, Any], says: str) -> None:
    answer = fake.post(PATH, json={"input": "a", **more})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_nulls_and_what_changes_nothing_are_taken(serve: Serve) -> None:
    nulls = dict.fromkeys(("previous_response_id", "conversation", "max_tool_calls"))
    plain: Any = {"background": False, "truncation": "disabled", "store": True, "reasoning": {"effort": None}}
    assert respond(serve(), **nulls, **plain, text={"format": {"type": "text"}, "verbosity": "medium"})


@pytest.mark.parametrize(("count", "status"), [(4095, 200), (4096, 400)])
def test_the_longest_conversation(serve: Serve, count: int, status: int) -> None:
    """The instructions are a message of their own, and one more than a conversation may have was an internal error."""
    items = [{"role": "user", "content": ""}] * (count - 1) + [{"role": "user", "content": "a"}]
    client = serve(FakeService(max_model_len=10**6))
    answer = client.post(PATH, json={"input": items, "instructions": "s", "max_output_tokens": 1})
    assert answer.status_code == status, answer.text[:300]


def test_one_limit_under_both_names(serve: Serve) -> None:
    assert respond(serve(), max_tokens=3, max_output_tokens=3).max_output_tokens == 3


def test_an_error_ends_the_stream_as_an_event(serve: Serve) -> None:
    client = serve(FakeService(failure=ModelError("broken")))
    text = client.post(PATH, json={"input": "a", "stream": True}).text
    kind, data = text.strip().split("\n\n")[-1].split("\n")
    assert kind == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["sequence_number"]) == ("error", 2)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_refused(fake: httpx.Client, number: str) -> None:
    """Tools are given back with the answer, which was an internal error, or a stream that broke off."""
    tool = {"type": "function", "name": "f", "parameters": {"properties": {"a": [{"maximum": 12345}]}}}
    body = json.dumps({"input": "a", "tool_choice": "none", "tools": [tool]}).replace("12345", number)
    refused = fake.post(PATH, content=body, headers={"content-type": "application/json"})
    assert refused.status_code == 400
    assert "is no number of JSON" in refused.json()["error"]["message"]
