"""Ollama's own client against its routes: chats and prompts, whole and in lines, tools, thoughts, what the model is."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from foretell import __version__
from foretell.server.protocol.ollama import GenerateRequest, OllamaChatRequest, as_chat, of_prompt
from foretell.server.replies.ollama import OllamaChatLine, OllamaModels, OllamaShown, OllamaTextLine
from tests.server.conftest import Serve
from tests.server.fake import FakeService
from tests.server.test_thoughts import Thinker, scripted, thinking

ollama = pytest.importorskip("ollama", reason="of the extra dev")

USER: Any = {"role": "user", "content": "a"}
TEXT = "<think>\nhm\n</think>\n\nHi"
NOW: Any = {
    "type": "function",
    "function": {"name": "now", "description": "the time", "parameters": {"type": "object"}},
}
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


OPENED: list[Any] = []


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop()._client.close()


def client_at(url: Any) -> Any:
    OPENED.append(ollama.Client(host=str(url), timeout=120))
    return OPENED[-1]


def client_of(serve: Serve, service: Any, **options: Any) -> Any:
    return client_at(serve(service, **options).base_url)


def prompt_of(service: FakeService) -> str:
    return bytes(service.submitted[-1].prompt_ids).decode()


def test_a_chat_whole_and_in_lines(serve: Serve) -> None:
    client = client_of(serve, thinking(TEXT))
    reply = client.chat("fake", [USER], options={"temperature": 0.5, "num_ctx": 4096, "num_predict": 50})
    assert (reply.message.thinking, reply.message.content, reply.done_reason) == ("hm", "Hi", "stop")
    assert (reply.eval_count, reply.prompt_eval_count > 0, reply.total_duration > 0) == (len(TEXT) + 1, True, True)
    lines = list(client.chat("fake:latest", [USER], stream=True))
    assert "".join(line.message.thinking or "" for line in lines) == "hm"
    assert "".join(line.message.content for line in lines) == "Hi"
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert (lines[-1].done_reason, lines[-1].eval_count) == ("stop", len(TEXT) + 1)


def test_lines_are_as_described(serve: Serve) -> None:
    client = serve(thinking(TEXT))
    for path, body, kind in (
        ("/api/chat", {"messages": [USER]}, OllamaChatLine), ("/api/generate", {"prompt": "a"}, OllamaTextLine),
    ):  # fmt: skip
        answer = client.post(path, json=body)
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        lines = [kind.model_validate_json(line) for line in answer.text.splitlines()]
        assert len(lines) > 2
        whole = client.post(path, json={**body, "stream": False})
        assert whole.headers["content-type"] == "application/json"
        assert kind.model_validate(whole.json()).done is True


def test_a_prompt_with_and_without_the_template(serve: Serve) -> None:
    service = thinking(TEXT)
    client = client_of(serve, service)
    reply = client.generate("fake", "a", system="Be kind.")
    assert (reply.response, reply.thinking) == ("Hi", "hm")
    assert prompt_of(service) == "<system>Be kind.<user>a<assistant>"
    assert "".join(line.response for line in client.generate("fake", "a", stream=True)) == "Hi"
    raw = client.generate("fake", "a", raw=True)
    assert (prompt_of(service), raw.response, raw.thinking) == ("a", TEXT, None)
    with pytest.raises(ollama.ResponseError, match="the prompt is the whole text"):
        client.generate("fake", "a", raw=True, system="b")


def test_whether_to_think(serve: Serve) -> None:
    service = thinking("Hi")
    client = client_of(serve, service)
    client.chat("fake", [USER], think=False)
    assert "<no thoughts>" in prompt_of(service)
    client.chat("fake", [USER], think="low")
    assert "<no thoughts>" not in prompt_of(service)


def test_options_are_those_of_sampling() -> None:
    given = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repeat_penalty": 1.2, "seed": 9,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "stop": ["x"], "num_gpu": 3, "mirostat": 0, "tfs_z": 1.0,
    }  # fmt: skip
    chat = as_chat(OllamaChatRequest.model_validate({"messages": [USER], "options": given, "format": "json"}))
    found = (chat.max_tokens, chat.temperature, chat.top_k, chat.top_p, chat.min_p, chat.repetition_penalty, chat.seed)
    assert found == (7, 0.5, 3, 0.5, 0.1, 1.2, 9)
    assert (chat.presence_penalty, chat.frequency_penalty, chat.stop, chat.stream) == (0.5, 0.25, ["x"], True)
    assert chat.response_format is not None
    assert chat.response_format.type == "json_object"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    made = of_prompt(GenerateRequest.model_validate({"prompt": "a", "format": schema, "options": {"num_predict": -1}}))
    assert made.max_tokens is None
    assert made.response_format is not None
    assert made.response_format.model_dump(by_alias=True, exclude_none=True)["json_schema"]["schema"] == schema


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_two_tools(serve: Serve, streams: bool) -> None:
    """Calls come whole; results stand in the order of the calls, as the client has no ids for them."""
    texts = [f"<think>t{turn}</think>Next. {call('now', n=turn)}\n{call('look', at='é')}" for turn in range(4)] + [
        "Done."
    ]
    service = scripted(*texts)
    client, history = client_of(serve, service), [USER]
    for turn in range(5):
        if streams:
            lines = list(client.chat("fake", history, tools=[NOW, LOOK], stream=True))
            calls = [one for line in lines for one in line.message.tool_calls or ()]
            text, thought = (
                "".join(getattr(line.message, name) or "" for line in lines) for name in ("content", "thinking")
            )
            message: Any = {"role": "assistant", "content": text, "thinking": thought or None, "tool_calls": calls}
        else:
            message = client.chat("fake", history, tools=[NOW, LOOK]).message
            calls, text = message.tool_calls or [], message.content
        if turn == 4:
            assert (text, list(calls)) == ("Done.", [])
            break
        assert text == "Next."
        made = [(one.function.name, dict(one.function.arguments)) for one in calls]
        assert made == [("now", {"n": turn}), ("look", {"at": "é"})]
        results = [{"role": "tool", "tool_name": name, "content": f"{name} {turn}"} for name in ("now", "look")]
        history += [message, *results]
    prompt = str(service.engine.tokenizer.decode(service.submitted[-1].prompt_ids))
    assert prompt.index("now 3") < prompt.index("look 3")
    assert prompt.count("<tool_response>") == 8


def test_what_is_served(serve: Serve) -> None:
    http = serve(thinking("Hi"))
    client = client_at(http.base_url)
    assert [model.model for model in client.list().models] == ["fake"]
    shown = client.show("fake")
    assert {"completion", "thinking"} <= set(shown.capabilities)
    assert shown.modelinfo["Fake.context_length"] == 4096
    assert http.get("/api/version").json() == {"version": __version__}
    OllamaModels.model_validate(http.get("/api/tags").json())
    OllamaShown.model_validate(http.post("/api/show", json={"name": "fake"}).json())
    plain = serve(FakeService()).post("/api/show", json={}).json()["capabilities"]
    assert "thinking" not in plain


def test_a_request_without_a_text_loads_nothing(serve: Serve) -> None:
    client = client_of(serve, FakeService())
    assert client.generate("fake", "").done_reason == "load"
    assert client.chat("fake", [], keep_alive=0).done_reason == "unload"


@pytest.mark.parametrize(
    ("path", "more", "status", "told"),
    [
        ("chat", {"messages": [{**USER, "images": ["aGk="]}]}, 400, "images"),
        ("generate", {"images": ["aGk="]}, 400, "images"),
        ("generate", {"suffix": "b"}, 400, "suffix"),
        ("generate", {"context": [1, 2]}, 400, "context"),
        ("generate", {"template": "b"}, 400, "template"),
        ("chat", {"options": {"mirostat": 2}}, 400, "mirostat"),
        ("chat", {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, 400, "repeat_last_n"),
        ("chat", {"logprobs": True}, 400, "logprobs"),
        ("chat", {"model": "llama3"}, 404, "this server has 'fake'"),
        ("show", {"model": "llama3", "messages": None, "prompt": None}, 404, "llama3"),
        ("embed", {}, 404, "/api/embed"),
    ],
)
def test_errors_have_ollamas_form(serve: Serve, path: str, more: Any, status: int, told: str) -> None:
    base: dict[str, Any] = {"chat": {"messages": [USER]}, "generate": {"prompt": "a"}}.get(path, {})
    answer = serve(FakeService()).post(f"/api/{path}", json={**base, **more})
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    assert told in answer.json()["error"]


def test_keys_are_asked_for(serve: Serve) -> None:
    client = serve(thinking("Hi", Thinker()), api_keys=("secret",))
    assert client.get("/api/tags").status_code == 401
    assert client.get("/api/tags", headers={"authorization": "Bearer secret"}).status_code == 200
    assert client.get("/api/version").status_code == 200


def test_the_bundled_pair_answers(url: str) -> None:
    client = client_at(url)
    given: Any = {"options": {"seed": 5, "num_predict": 12}}
    whole = client.chat("bundled", [USER], **given)
    lines = list(client.chat("bundled", [USER], stream=True, **given))
    assert "".join(line.message.content for line in lines) == whole.message.content
    assert (whole.eval_count, whole.done_reason) == (12, "length")
