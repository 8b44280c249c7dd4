"""Every way to be refused: the status, the field, and OpenAI's typed exceptions; nothing of the inside in any of them."""

import json
import time
from typing import Any

import httpx
import openai
import pytest

from foretell.core.errors import ConfigError, EngineError, ModelError, PromptError, QueueFullError, ServiceClosedError
from foretell.engine.request.result import Update
from foretell.server.errors import ApiError, parse
from foretell.server.protocol.requests import ChatRequest, CompletionRequest
from foretell.server.replies.common import ErrorReply
from tests.server.conftest import Serve
from tests.server.fake import FakeService

USER: Any = [{"role": "user", "content": "a"}]
TOOL: Any = {"type": "function", "function": {"name": "now"}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def error(response: httpx.Response) -> Any:
    """The error of a response, its shape checked."""
    detail = ErrorReply.model_validate(response.json(), strict=True).error
    assert response.headers["x-request-id"]
    assert "Traceback" not in detail.message
    assert ".py" not in detail.message
    return detail


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"tempratur": 1}, "tempratur", "did you mean 'temperature'?"),
        ({"functions": [{"name": "a"}], "tools": []}, "functions", "are one setting"),
        ({"echo": True}, "echo", "/v1/completions"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'medium'"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "one setting"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "more than max_tokens, 3"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 33}, "n", "at most 32"),
        ({"seed": 2**64}, "seed", "less than or equal to"),
        ({"stop": ["a", ""]}, "stop.1", "at least 1 character"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "pattern"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "9999 is not one of 0 to 257"),
        ({"stop_token_ids": [300]}, "stop_token_ids", "300 is not one of 0 to 257"),
        ({"top_logprobs": 2}, "top_logprobs", "only where logprobs is true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0", "'system'"),
        ({"messages": [{"content": "a"}]}, "messages.0", "'role'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "valid string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None, "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]},
         "messages.0.content.1", "'input_audio' is not read: this server reads text only"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_schema'"),
        ({"tool_choice": "required"}, "tools", "needs tools"),
        ({"speculative": {"method": "eagle3"}}, "speculative", "not loaded"),
        ({"speculative": {"method": "ngrma"}}, "speculative", "did you mean 'ngram'?"),
        ({"speculative": {"model": "/etc/passwd"}}, "speculative", "chosen where the server is started"),
        ({"speculative": {"num_speculative_tokens": 2}, "num_draft_tokens": 3}, "speculative", "one setting"),
        ({"speculative": 0}, "speculative", "boolean"),
        ({"speculative": {"method": "suffix", "suffix_decoding_min_token_prob": 1e308}},
         "speculative.suffix_decoding_min_token_prob", "less than or equal to"),
        ({"speculative": {"x": []}}, "speculative.x", "valid"),
        ({"speculative": False, "num_draft_tokens": 3}, "speculative", "num_draft_tokens is 3"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex",
         "structured_outputs.json and structured_outputs.regex both say"),
        ({"regex": "a", "tools": [TOOL]}, "regex", "regex and tools exclude each other"),
        ({"structural_tag": "x"}, "structural_tag", "response_format of type 'structural_tag'"),
        ({"num_draft_tokens": 65}, "num_draft_tokens", "less than or equal to 64"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "may not give"),
        ({"chat_template_kwargs": {"no_such": 1}}, "messages", "template refuses"),
    ],
)  # fmt: skip
def test_chat_requests_that_cannot_be(fake: httpx.Client, more: Any, param: str | None, says: str) -> None:
    response = fake.post(CHAT, json={"model": "fake", "messages": USER, **more})
    assert response.status_code == 400
    detail = error(response)
    assert says in detail.message
    assert detail.type == "invalid_request_error"
    assert param is None or detail.param == param


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_required_parameter"),
        ({"temperature": "hot", "messages": [{"role": "user"}]}, "messages.0.content", "missing_required_parameter"),
        ({"messages": [{"role": "user"}], "tools": [{"type": "function", "function": {"name": 3}}]},
         "tools.0.function.name", "invalid_value"),
    ],
)  # fmt: skip
def test_the_code_is_of_the_fault_that_is_named(fake: httpx.Client, more: Any, param: str, code: str) -> None:
    """Of several the deepest is named."""
    detail = error(fake.post(CHAT, json={"messages": USER, **more}))
    assert (detail.param, detail.code) == (param, code)


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[]]}, "prompt.0", "at least 1 item"),
        ({"prompt": [97, -1]}, "prompt.1", "greater than or equal to 0"),
        ({"prompt": ["a", 5]}, "prompt.1", "valid string"),
        ({"prompt": [[97], [98, "c"]]}, "prompt.1.1", "valid integer"),
        ({"prompt": [97, 258]}, "prompt", "258 is not one of 0 to 257"),
        ({"prompt": 5}, "prompt", "valid string"),
        ({"prompt": "a" * 4096}, "prompt", "shorten"),
        ({"suffix": "b"}, "suffix", "not taught to fill gaps"),
        ({"echo": 2}, "echo", "valid boolean"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"prompt": ["a"] * 33}, None, "at most 32"),
        ({"messages": USER}, "messages", "unknown field"),
    ],
)  # fmt: skip
def test_completion_requests_that_cannot_be(fake: httpx.Client, more: Any, param: str | None, says: str) -> None:
    response = fake.post(TEXT, json={"model": "fake", "prompt": "a", **more})
    assert response.status_code == 400
    detail = error(response)
    assert says in detail.message
    assert detail.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"3", b"\xff\xfe", b'{"model": "fake", "prompt": "\\ud800"}',
        b'{"model": "fake", "prompt": "a", "temperature": NaN}', b'{"model": "fake", "prompt": "a", "temperature": 1e999}',
        b'{"model": "fake", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "fake", "prompt": "a", "temperature": ' + b"9" * 400 + b"}",
        b'{"model": "fake", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_requests(fake: httpx.Client, body: bytes) -> None:
    response = fake.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error(response)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (TEXT, {"prompt": [-1] * 100_000}),
        (TEXT, {"prompt": [[-1]] * 100_000}),
        (TEXT, {"prompt": "a", **{f"x{number}": 1 for number in range(100_000)}}),
        (TEXT, {"prompt": "a", **{f"x{number}": None for number in range(50_000)}, "temperature": -1}),
        (CHAT, {"messages": USER, "logit_bias": {f"x{number}": 1 for number in range(100_000)}}),
        (CHAT, {"messages": [{**USER[0], **{f"x{number}": 1 for number in range(100_000)}}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{}] * 100_000}]}),
        (CHAT, {"messages": [{"role": "robot"}] * 50_000}),
        (CHAT, {"messages": USER, "tools": [{}] * 100_000}),
    ],
)
def test_a_request_with_very_many_faults_is_refused_at_once(path: str, more: Any) -> None:
    """On the event loop, so all others wait meanwhile. Ten thousand wrong token ids once took nine seconds."""
    body = json.dumps({"model": "fake", **more}).encode()
    began = time.thread_time()
    with pytest.raises(ApiError) as caught:
        parse(CompletionRequest if path == TEXT else ChatRequest, body)
    assert time.thread_time() - began < 2.0  # a tenth of it alone; it was minutes
    assert caught.value.status == 400
    assert len(caught.value.message) < 3000


def test_zero_bytes_are_characters_like_others(serve: Serve) -> None:
    service = FakeService()
    assert serve(service).post(TEXT, json={"model": "fake", "prompt": "a\0b"}).status_code == 200
    assert bytes(service.submitted[0].prompt_ids) == b"a\0b"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_only_json_is_taken(fake: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = fake.post(TEXT, content=b'{"model": "fake", "prompt": "a"}', headers=headers)
    assert response.status_code == 415
    error(response)


def test_paths_and_methods(serve: Serve) -> None:
    client = serve()
    assert error(client.get("/v1/nothing")).code == "not_found"
    wrong = client.put(TEXT, json={})
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert client.put("/v1/models", json={}).headers["allow"] == "GET, HEAD"
    assert error(wrong).code == "method_not_allowed"
    assert client.get("/docs").status_code == 404
    assert client.get("/v1/models/").status_code == 404


def test_openais_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=USER)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="bundled", messages=USER, temperature=-1)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="bundled", prompt=[5] * 5000)
    assert long.value.code == "context_length_exceeded"
    assert wrong.value.request_id


@pytest.mark.parametrize(
    ("refusal", "status", "kind", "code"),
    [
        (QueueFullError("full", retry_after_s=2.5), 429, openai.RateLimitError, "rate_limit_exceeded"),
        (EngineError("the engine failed: send it again"), 500, openai.InternalServerError, "engine_error"),
        (ServiceClosedError("draining"), 503, openai.InternalServerError, "unavailable"),
        (PromptError("shorten the prompt"), 400, openai.BadRequestError, "context_length_exceeded"),
        (ConfigError("cannot be"), 400, openai.BadRequestError, "invalid_value"),
        (ModelError("/home/secret is broken"), 500, openai.InternalServerError, "internal"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_service_refuses(
    serve: Serve, refusal: Any, status: int, kind: type[openai.APIStatusError], code: str, stream: bool
) -> None:
    http = serve(FakeService(refusal=refusal))
    client = openai.OpenAI(base_url=str(http.base_url) + "/v1", api_key="none", max_retries=0)
    with client, pytest.raises(kind) as caught:
        client.chat.completions.create(model="fake", messages=USER, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert "secret" not in str(caught.value)
    if status == 429:
        assert caught.value.response.headers["retry-after"] == "3"


def test_all_choices_or_none_are_begun(serve: Serve) -> None:
    service = FakeService(held=True, refusal=QueueFullError("full"))  # the first is taken, the second one refused
    response = serve(service).post(TEXT, json={"model": "fake", "prompt": "a", "n": 2})
    assert response.status_code == 429
    assert service.cancelled == [service.submitted[0].request_id]


def test_errors_of_a_running_request(serve: Serve) -> None:
    broken = serve(FakeService(failure=ModelError("/home/secret: not finite")))
    response = broken.post(TEXT, json={"model": "fake", "prompt": "a"})
    assert response.status_code == 500
    assert "secret" not in error(response).message
    forbidden = broken.post(TEXT, json={"model": "fake", "prompt": "a", "logit_bias": {"1": -100}})
    assert forbidden.status_code == 400
    stream = broken.post(TEXT, json={"model": "fake", "prompt": "a", "stream": True})
    assert stream.status_code == 200
    first, done, rest = stream.text.split("\n\n")
    assert ErrorReply.model_validate(json.loads(first.removeprefix("data: "))).error.code == "internal"
    assert (done, rest) == ("data: [DONE]", "")


def test_a_bug_of_ours_tells_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService()
    monkeypatch.setattr(service, "submit", lambda *_: {}["secret"])
    response = serve(service).post(TEXT, json={"model": "fake", "prompt": "a"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert error(response).code == "internal"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_time_is_up_ends_with_what_it_has(serve: Serve, stream: bool) -> None:
    client = serve(FakeService(lambda _: [97] * 9, held=True), request_timeout_s=0.05)
    response = client.post(TEXT, json={"model": "fake", "prompt": "a", "stream": stream})
    assert response.status_code == 200
    if stream:
        choices = [json.loads(line[6:])["choices"][0] for line in response.text.split("\n\n")[:-2]]
        assert "".join(choice["text"] for choice in choices) == "aaa"
    else:
        choices = response.json()["choices"]
        assert choices[0]["text"] == "aaa"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("length", "timeout")


def test_a_request_whose_time_is_up_before_it_wrote_is_not_sent_again(serve: Serve) -> None:
    class Late(FakeService):
        def submit(self, submission: Any, sink: Any) -> None:
            row = self._row(submission)
            row.finish_reason = "timeout"
            sink(Update(submission.request_id, completion=self._completion(row, self.default)))

    answer = serve(Late()).post(TEXT, json={"model": "fake", "prompt": "a"})
    assert (answer.status_code, error(answer).code) == (408, "request_timeout")
    assert answer.headers["x-should-retry"] == "false"  # read by OpenAI's clients


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "why"),
    [({}, "context"), ({"max_tokens": 500}, "context"), ({"max_tokens": 12}, None), ({"stop": "c"}, None)],
)
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_text_that_the_context_ends_says_so(
    serve: Serve, path: str, more: Any, why: str | None, stream: bool
) -> None:
    """More tokens than there is room for may be asked for; that fewer came is told."""
    what: Any = {"messages": USER} if path == CHAT else {"prompt": "<user>a<assistant>"}
    client = serve(FakeService(lambda _: list(b"ab" * 4) + list(b"c" * 99), max_model_len=30))
    answer = client.post(path, json={"model": "fake", **what, "stream": stream, **more})
    assert answer.status_code == 200
    (*_, last) = [answer.json()] if not stream else [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    choice = last["choices"][0]
    assert (choice["finish_reason"], choice.get("stop_reason")) == ("stop" if "stop" in more else "length", why)


def test_probes(serve: Serve) -> None:
    service = FakeService()
    client = serve(service)
    assert (client.get("/health").status_code, client.get("/ready").status_code) == (200, 200)
    service.drain(0)
    assert (client.get("/health").status_code, client.get("/ready").status_code) == (200, 503)
    service.close()
    assert error(client.get("/health")).code == "unhealthy"
