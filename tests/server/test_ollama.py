"""Ollama's own client against its routes: chats and prompts, whole and in lines, tools, thoughts, what the model is."""

import json
from typing import Any

import httpx
import pytest

from foretell import __version__
from foretell.server.protocol.ollama import GenerateRequest, OllamaChatRequest, as_chat, of_prompt
from foretell.server.replies.ollama import OllamaChatLine, OllamaModels, OllamaShown, OllamaTextLine
from tests.server.conftest import OPENED, Serve
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


def client_at(url: Any) -> Any:
    made = ollama.Client(host=str(url), timeout=120)
    OPENED.append(made._client)
    return made


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
    with pytest.raises(ollama.ResponseError, match="no template is used"):
        client.generate("fake", "a", raw=True, system="b")


def test_whether_to_think(serve: Serve) -> None:
    service = thinking("Hi")
    client = client_of(serve, service)
    client.chat("fake", [USER], think=False)
    assert "<no thoughts>" in prompt_of(service)
    client.chat("fake", [USER], think="low")
    assert "<no thoughts>" not in prompt_of(service)


def test_options_without_effect_are_taken_and_formats_are_those_of_conversations() -> None:
    given = {"num_gpu": 3, "mirostat": 0, "tfs_z": 1.0}
    chat = as_chat(OllamaChatRequest.model_validate({"messages": [USER], "options": given, "format": "json"}))
    assert (chat.stream, chat.response_format.type) == (True, "json_object")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    made = of_prompt(GenerateRequest.model_validate({"prompt": "a", "format": schema, "options": {"num_predict": -1}}))
    assert made.max_tokens is None
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
    assert not {"thinking", "insert"} & set(plain)


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
        ("chat", {"top_logprobs": 2}, 400, "logprobs"),
        ("chat", {"options": {"temprature": 1}}, 400, "did you mean 'temperature'?"),
        ("chat", {"options": {"sede": 1}}, 400, "did you mean 'seed'?"),
        ("chat", {"options": {"max_tokens": 1}}, 400, "max_tokens"),
        ("chat", {"model": "llama3"}, 404, "this server has 'fake'"),
        ("show", {"model": "llama3", "messages": None, "prompt": None}, 404, "llama3"),
        ("pull", {"model": "llama3"}, 404, "this server has 'fake'"),
        ("pull", {"name": "llama3", "stream": False}, 404, "llama3"),
        ("embed", {"model": "llama3", "input": "a"}, 404, "llama3"),
        ("embed", {}, 400, "input"),
        ("embed", {"input": []}, 400, "input"),
        ("embeddings", {"model": "llama3", "prompt": "a"}, 404, "llama3"),
        ("embeddings", {"prompt": ""}, 400, "prompt"),
        ("copy", {}, 404, "/api/copy"),
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


BARE: Any = {"content": json.dumps({"messages": [USER], "stream": False}).encode()}
FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize("kind", [{}, FORM, {"content-type": "text/plain"}])
def test_a_body_needs_no_type_but_from_a_browser(serve: Serve, kind: dict[str, str]) -> None:
    """As curl -d and litellm send it. A page is known by what its browser adds."""
    client = serve(thinking(TEXT), allowed_origins=("https://app.example",))
    assert client.post("/api/chat", headers=kind, **BARE).json()["message"]["content"] == "Hi"
    assert client.post("/api/show", headers=kind, content=b"{}").status_code == 200
    for mark in (
        {"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"},
        {"Sec-Fetch-Site": "none"}, {"origin": ""},
    ):  # fmt: skip
        for path in ("/api/chat", "/api/show", "/api/pull", "/api/embed"):
            assert client.post(path, headers={**kind, **mark}, **BARE).status_code == 415, (path, mark)
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
        assert client.post(path, headers=kind, **BARE).status_code == 415, path
    json_type = {"content-type": "application/json", "origin": "https://app.example"}
    assert client.post("/api/chat", headers=json_type, **BARE).status_code == 200


def test_options_of_the_sampler_that_is_off_change_nothing(serve: Serve) -> None:
    client = serve(thinking(TEXT))
    options: Any = {"num_ctx": 8192, "repeat_last_n": 64, "repeat_penalty": 1.0, "num_thread": 2, "my_own": 1}
    answer = client.post("/api/chat", json={"messages": [USER], "stream": False, "options": options})
    named = answer.headers["x-foretell-without-effect"]
    assert (answer.status_code, named) == (200, "options.num_ctx, options.num_thread, options.my_own")
    refused = client.post("/api/chat", json={"messages": [USER], "options": {**options, "repeat_penalty": 1.1}})
    assert (refused.status_code, "repeat_last_n" in refused.text) == (400, True)


@pytest.mark.parametrize("raw", [False, True])
def test_log_probabilities(serve: Serve, raw: bool) -> None:
    client = client_of(serve, thinking(TEXT))
    more: Any = {"logprobs": True, "top_logprobs": 2}
    whole = client.generate("fake", "a", raw=raw, **more)
    lines = list(client.generate("fake", "a", raw=raw, stream=True, **more))
    found = [one for line in lines for one in line.logprobs or ()]
    assert found == list(whole.logprobs)
    assert "".join(one.token for one in found) == ("Hi" if not raw else TEXT)
    assert {one.logprob for one in found} == {-0.5}
    chat = client.chat("fake", [USER], **more)
    assert [one.token for one in chat.logprobs] == ["H", "i"]
    assert client.chat("fake", [USER]).logprobs is None


def test_what_is_there_need_not_be_pulled(serve: Serve) -> None:
    http = serve(FakeService(), served_model_name="qwen")
    client = client_at(http.base_url)
    assert client.pull("qwen").status == "success"
    assert [one.status for one in client.pull("qwen:latest", stream=True)] == ["pulling manifest", "success"]
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.pull("llama3")
    (one,) = client.ps().models
    assert (one.model, one.context_length, one.size_vram, one.expires_at.year > 2100) == ("qwen", 4096, 0, True)
    OllamaModels.model_validate(http.get("/api/ps").json())


def test_texts_become_vectors(url: str) -> None:
    client, http = client_at(url), httpx.Client(base_url=url, timeout=60)
    made = client.embed("bundled", ["a text", "another"], options={"num_ctx": 512}, keep_alive="5m")
    one = client.embed("bundled", "a text")
    old = client.embeddings("bundled", "a text")
    assert (len(made.embeddings), made.prompt_eval_count > 2) == (2, True)
    assert list(made.embeddings[0]) == list(one.embeddings[0]) == list(old.embedding)
    assert sum(each**2 for each in old.embedding) == pytest.approx(1, abs=1e-4)
    theirs = http.post("/v1/embeddings", json={"input": "a text"}).json()["data"][0]["embedding"]
    assert list(old.embedding) == theirs
    with pytest.raises(ollama.ResponseError, match="dimensions"):
        client.embed("bundled", "a text", dimensions=3)
    with pytest.raises(ollama.ResponseError, match="shorten"):
        client.embed("bundled", "a text " * 9000, truncate=True)
    http.close()


def test_the_bundled_pair_answers(url: str) -> None:
    client = client_at(url)
    given: Any = {"options": {"seed": 5, "num_predict": 12}}
    whole = client.chat("bundled", [USER], **given)
    lines = list(client.chat("bundled", [USER], stream=True, **given))
    assert "".join(line.message.content for line in lines) == whole.message.content
    assert (whole.eval_count, whole.done_reason) == (12, "length")
