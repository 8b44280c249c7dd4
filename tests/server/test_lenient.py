"""What clients send that changes nothing is taken; what would change the text and is not supported is refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretell.server.unsupported import UNSUPPORTED
from tests.server.conftest import Serve
from tests.server.fake import ByteTokenizer, FakeService

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: Any = [{"role": "user", "content": "a"}]
FUNCTION: Any = {"name": "weather", "arguments": '{"city": "Rome"}'}
RESULT: Any = {"role": "tool", "tool_call_id": "call_1", "content": "31"}

CALLED: dict[str, Any] = {  # a reply with a tool call, as each client gives it back
    "litellm": {
        "content": None, "role": "assistant", "function_call": None, "provider_specific_fields": {"refusal": None},
        "tool_calls": [{"index": 0, "function": FUNCTION, "id": "call_1", "type": "function"}],
    },
    "litellm, of a model that thinks": {
        "content": None, "role": "assistant", "reasoning_content": "hm", "thinking_blocks": [{"type": "thinking"}],
        "tool_calls": [{"function": {**FUNCTION, "provider_specific_fields": {"a": 1}}, "id": "call_1",
                        "type": "function", "provider_specific_fields": {"thought_signature": "x"}}],
        "provider_specific_fields": {"reasoning": "hm"}, "annotations": [], "audio": None, "images": [],
    },
    "litellm, of a prompt to be cached": {
        "content": [{"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}], "role": "assistant",
        "tool_calls": [{"function": FUNCTION, "id": "call_1", "type": "function", "cache_control": {"type": "ephemeral"}}],
    },
    "openai-python, its stream helper": {
        "content": None, "refusal": None, "role": "assistant", "annotations": None, "audio": None, "function_call": None,
        "parsed": None,
        "tool_calls": [{"id": "call_1", "function": {**FUNCTION, "parsed_arguments": None}, "type": "function",
                        "index": 0}],
    },
    "openai-node, its stream helper": {
        "role": "assistant", "content": None, "refusal": None, "parsed": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {**FUNCTION, "parsed_arguments": None}}],
    },
    "langchain-openai": {
        "role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": "call_1", "function": FUNCTION}],
    },
    "AI SDK": {
        "role": "assistant", "content": "", "reasoning_content": "hm",
        "tool_calls": [{"id": "call_1", "type": "function", "function": FUNCTION,
                        "extra_content": {"google": {"thought_signature": "x"}}}],
    },
    "vLLM, its own reply": {
        "role": "assistant", "content": None, "refusal": None, "annotations": None, "audio": None, "function_call": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": FUNCTION}], "reasoning": None,
        "reasoning_content": None,
    },
    "OpenRouter, its own reply": {
        "role": "assistant", "content": None, "refusal": None, "reasoning": "hm", "reasoning_details": [{"text": "hm"}],
        "tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": FUNCTION}],
    },
    "a call without an id": {"role": "assistant", "content": None, "tool_calls": [{"function": FUNCTION}]},
}  # fmt: skip

TOLD: dict[str, Any] = {  # a reply of text
    "litellm": {
        "content": "It is.", "role": "assistant", "tool_calls": None, "function_call": None,
        "provider_specific_fields": {"refusal": None},
    },
    "openai-python": {
        "content": "It is.", "refusal": None, "role": "assistant", "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None, "id": "msg_1",
    },
    "langchain-openai, its content blocks": {
        "role": "assistant", "name": None,
        "content": [{"type": "text", "text": "It is.", "annotations": [], "index": 0, "id": "msg_1"}],
    },
}  # fmt: skip


class SeesAll(ByteTokenizer):
    """A tokenizer whose template shows the messages as JSON, and reads what was thought."""

    chat_template = "reads tools as <tool_call>, tool_calls and reasoning_content"

    def apply_chat_template(self, messages: Any, *, tools: Any = None, **options: Any) -> str:
        return json.dumps({"messages": messages, "tools": tools})


def rendered(service: FakeService) -> Any:
    """What the template of the last request was given."""
    return json.loads(bytes(service.submitted[-1].prompt_ids))


@pytest.fixture
def seen() -> FakeService:
    service = FakeService()
    service.engine.tokenizer = SeesAll()
    return service


@pytest.mark.parametrize("client", CALLED)
def test_a_reply_with_a_call_can_be_sent_back(serve: Serve, seen: FakeService, client: str) -> None:
    messages = [*USER, CALLED[client], RESULT]
    answer = serve(seen).post(CHAT, json={"model": "fake", "messages": messages})
    assert answer.status_code == 200, answer.text
    _, assistant, tool = rendered(seen)["messages"]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    named = {} if client == "a call without an id" else {"id": "call_1"}
    thought = CALLED[client].get("reasoning_content") or CALLED[client].get("reasoning")
    told = {"reasoning_content": thought} if thought else {}
    assert assistant == {"role": "assistant", "content": "", "tool_calls": [{**named, **call}], **told}
    assert tool == RESULT


@pytest.mark.parametrize("client", TOLD)
def test_a_reply_of_text_can_be_sent_back(serve: Serve, seen: FakeService, client: str) -> None:
    answer = serve(seen).post(CHAT, json={"model": "fake", "messages": [*USER, TOLD[client], *USER]})
    assert answer.status_code == 200, answer.text
    assert rendered(seen)["messages"] == [*USER, {"role": "assistant", "content": "It is."}, *USER]


def test_our_own_reply_can_be_sent_back(serve: Serve) -> None:
    client = serve()
    first = client.post(CHAT, json={"model": "fake", "messages": USER, "logprobs": True, "provenance": True}).json()
    again = client.post(CHAT, json={"model": "fake", "messages": [*USER, first["choices"][0]["message"], *USER]})
    assert again.status_code == 200, again.text


def test_a_template_that_does_not_read_thoughts_gets_none(serve: Serve) -> None:
    service = FakeService()
    said = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    assert serve(service).post(CHAT, json={"model": "fake", "messages": [*USER, said]}).status_code == 200
    assert bytes(service.submitted[0].prompt_ids) == b"<user>a<assistant>b<assistant>"


def test_marks_of_caches_are_left_out_of_the_prompt(serve: Serve, seen: FakeService) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": {"name": "weather", **mark}, **mark}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", **mark}], **mark},
        {"role": "user", "content": "a", "id": "1", **mark},
        {"role": "assistant", "tool_calls": [{"id": "call_1", "function": FUNCTION}]},
        {"role": "tool", "content": None, "tool_call_id": "call_1", **mark},
    ]
    answer = serve(seen).post(CHAT, json={"model": "fake", "messages": messages, "tools": [tool], "max_tokens": 1})
    assert answer.status_code == 400  # the fake's tokenizer has no grammar; the fields were taken
    assert "grammar" in answer.text or "tokenizer" in answer.text
    answer = serve(seen).post(CHAT, json={"model": "fake", "messages": messages})
    assert answer.status_code == 200, answer.text
    assert "cache_control" not in bytes(seen.submitted[-1].prompt_ids).decode()


@pytest.mark.parametrize(
    "more",
    [
        {"contnet": "a"},
        {"audio": {"id": "x"}},
        {"images": [{"type": "image_url"}]},
        {"tool_calls": [{"id": "1", "type": "function", "function": {**FUNCTION, "argumnets": "x"}}]},
    ],
)
def test_what_would_be_lost_from_a_message_is_refused(fake: httpx.Client, more: Any) -> None:
    said = {"role": "assistant", "content": "b", **more}
    answer = fake.post(CHAT, json={"model": "fake", "messages": [*USER, said, *USER]})
    assert (answer.status_code, answer.json()["error"]["param"].split(".")[:2]) == (400, ["messages", "1"])


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_unsupported_fields_may_have_the_value_that_changes_nothing(serve: Serve, path: str, name: str) -> None:
    service = FakeService()
    client = serve(service)
    body: Any = {"model": "fake", **({"messages": USER} if path == CHAT else {"prompt": "a"})}
    for value in (None, *UNSUPPORTED[name].no_op):
        if path == TEXT and name in ("best_of", "echo"):
            continue  # supported there
        answer = client.post(path, json={**body, name: value})
        assert answer.status_code == 200, (name, value, answer.text)
    assert all(sent.params == service.submitted[0].params.__class__(**{
        **vars(service.submitted[0].params), "seed": sent.params.seed}) for sent in service.submitted)  # fmt: skip


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"typical_p": 0.9}, "'typical_p' is not supported"),
        ({"mirostat": 2}, "'mirostat' is not supported"),
        ({"use_beam_search": True}, "'use_beam_search' is not supported"),
        ({"max_new_tokens": 9}, "use max_tokens"),
        ({"Temperature": 1}, "did you mean 'temperature'?"),
        ({"topP": 1}, "did you mean 'top_p'?"),
        ({"structural_tag": "a"}, "'structural_tag' is not supported"),
        ({"tempratur": 1, "echo": None}, "did you mean 'temperature'?"),
        ({"echo": None, "temperature": -1}, "greater than or equal to 0"),
        ({"early_stopping": 0}, "'early_stopping' is not supported"),  # a number is not false
        ({"best_of": True}, "'best_of' is not supported"),
    ],
)
def test_what_would_change_the_text_is_refused_by_name(fake: httpx.Client, more: Any, says: str) -> None:
    answer = fake.post(CHAT, json={"model": "fake", "messages": USER, **more})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("given", [{}, {"model": None}, {"model": ""}, {"model": "fake"}])
def test_the_one_model_need_not_be_named(serve: Serve, path: str, given: Any) -> None:
    body = {"messages": USER} if path == CHAT else {"prompt": "a"}
    answer = serve().post(path, json={**body, **given})
    assert (answer.status_code, answer.json()["model"]) == (200, "fake")


def test_the_first_curl_of_the_docs_is_answered(serve: Serve) -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    found = re.search(r"curl -s http://127\.0\.0\.1:8000(\S+) .*\n *-d '(.*)'", text)
    answer = serve().post(found[1], content=found[2], headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_routes_are_at_the_root_too(serve: Serve, path: str, stream: bool) -> None:
    client = serve()
    body: Any = {"model": "fake", **({"messages": USER} if "chat" in path else {"prompt": "a"})}
    here, there = (client.post(at, json={**body, "seed": 1, "stream": stream}) for at in (path, "/v1" + path))
    assert here.status_code == there.status_code == 200
    said = re.compile(r'"(?:content|text)":"([^"]*)"')  # a stream's pieces may be cut in other places
    assert "".join(said.findall(here.text)) == "".join(said.findall(there.text)) != ""
    assert (here.headers["content-type"], here.text[-9:]) == (there.headers["content-type"], there.text[-9:])


def test_models_version_and_ping_are_at_the_root(serve: Serve) -> None:
    from foretell import __version__

    client = serve()
    assert client.get("/models").json() == client.get("/v1/models").json()
    assert client.get("/models/fake").json() == client.get("/v1/models/fake").json()
    assert client.get("/models/other").status_code == 404
    assert client.get("/version").json() == {"version": __version__}
    assert client.get("/ping").json() == client.get("/health").json()


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, -(2**63)])
def test_seeds_of_64_bits(serve: Serve, seed: int) -> None:
    service = FakeService()
    answer = serve(service).post(TEXT, json={"model": "fake", "prompt": "a", "seed": seed})
    assert answer.status_code == 200, answer.text
    assert service.submitted[0].params.seed == answer.json()["choices"][0]["seed"] == seed


def test_a_drawn_seed_is_a_number_that_javascript_has(serve: Serve) -> None:
    client = serve()
    for given in ({}, {"seed": -5}, {"seed": 2**64 - 1}):
        asked = {"model": "fake", "prompt": ["a", "b"], "n": 4, **given}
        choices = client.post(TEXT, json=asked).json()["choices"] + client.post(TEXT, json=asked).json()["choices"]
        seeds = [choice["seed"] for choice in choices if choice["seed"] != given.get("seed")]
        assert all(0 <= seed < 2**53 for seed in seeds)
        assert len(set(seeds)) == (3 if given else 8)
