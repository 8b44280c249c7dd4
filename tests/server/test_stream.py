"""Streams: their form, and what becomes of a request whose client hangs up or stops reading."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sse_starlette.sse import AppStatus
from starlette.responses import Response
from starlette.types import Message

from foretell import Engine
from foretell.engine.request.result import Sink, Update
from foretell.engine.request.row import Submission
from foretell.server.app import build_app
from foretell.server.options import ServerOptions
from foretell.server.replies.completions import ChatChunk, TextReply
from foretell.server.stream import DONE, KEEP_ALIVE, EventStream, event
from foretell.service.options import ServiceOptions
from foretell.service.service import Service
from tests.engine.integrity import check_service
from tests.server.conftest import Serve
from tests.server.fake import EOS, FakeService
from tests.server.live import live

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WAIT_S = 60.0  # an upper bound: what is waited for has no time of its own
ENDLESS: Any = {"model": "fake", "prompt": "a", "max_tokens": 3000}


def events(response: httpx.Response) -> list[Any]:
    """The JSON of a stream's events; its form is checked."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2] if not block.startswith(":")]


def begin(client: httpx.Client, body: dict[str, Any], path: str = TEXT) -> socket.socket:
    """Send a request and leave the answer unread."""
    made = socket.create_connection((client.base_url.host, client.base_url.port or 0))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    made.sendall(head.encode() + data)
    return made


@pytest.fixture
def own() -> Iterator[Service]:
    """A service whose figures nobody else changes."""
    options = ServiceOptions(max_num_seqs=4, max_queue=8, speculation="on", kv_memory_gib=0.25)
    service = Service(Engine.load("bundled", speculative="draft_model"), options)
    service.start()
    yield service
    service.close()


@pytest.mark.parametrize("usage", [False, True])
def test_a_chat_stream_is_as_described(fake: httpx.Client, usage: bool) -> None:
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
    messages = [{"role": "user", "content": "a"}]
    body = {"model": "fake", "messages": messages, "stream": True, "n": 2, "seed": 3, "logprobs": True, **more}
    chunks = [ChatChunk.model_validate(data, strict=True) for data in events(fake.post(CHAT, json=body))]
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert mine[-1].finish_reason == "stop"
        assert all(choice.finish_reason is None for choice in mine[:-1])
        text = "".join(choice.delta.content or "" for choice in mine)
        tokens = [entry for choice in mine if choice.logprobs is not None for entry in choice.logprobs.content]
        assert bytes(byte for entry in tokens for byte in entry.bytes or ()).decode() == text
        assert text.endswith("€ and more")
    assert [chunk.metrics is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [usage]
    assert bool(chunks[-1].choices) != usage


def test_a_completion_stream_is_as_described(fake: httpx.Client) -> None:
    body = {"model": "fake", "prompt": ["a", "b"], "stream": True, "max_tokens": 5, "stop": "zz"}
    chunks = [TextReply.model_validate(data, strict=True) for data in events(fake.post(TEXT, json=body))]
    reasons = {chunk.choices[0].index: chunk.choices[0].finish_reason for chunk in chunks}
    assert reasons == {0: "length", 1: "length"}


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("more", [{}, {"provenance": True}])
def test_the_end_token_alone_has_no_log_probabilities(serve: Serve, path: str, more: Any) -> None:
    """The last step writes it and nothing else: no chunk has an empty list of them."""
    read = threading.Event()

    class Stepwise(FakeService):
        def submit(self, submission: Submission, sink: Sink) -> None:
            def tell(update: Update) -> None:
                sink(update)
                assert read.wait(WAIT_S)  # so that the end comes by itself

            super().submit(submission, tell)

    what: Any = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    body = {"model": "fake", **what, "stream": True, "logprobs": True if path == CHAT else 1, **more}
    choices = []
    with serve(Stepwise(lambda _: [*b"abc", EOS])).stream("POST", path, json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices.append(json.loads(line.removeprefix("data: "))["choices"][0])
            if choices and choices[-1]["logprobs"] is not None:
                read.set()
    told = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    assert [len(one["content"] if path == CHAT else one["tokens"]) for one in told] == [3]
    texts = [choice["delta"].get("content") if path == CHAT else choice["text"] for choice in choices]
    end = [""] if more else []  # where the end token came from
    assert texts == (["", "abc", *end, None] if path == CHAT else ["abc", ""])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_who_hangs_up_is_cancelled(serve: Serve, path: str, stream: bool) -> None:
    service = FakeService(lambda _: [97] * 5000, held=True)
    what: Any = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    made = begin(serve(service), {"model": "fake", "n": 3, "stream": stream, **what}, path)
    for _ in range(3):
        assert service.begun.acquire(timeout=WAIT_S)
    made.close()
    for _ in range(3):
        assert service.ended.acquire(timeout=WAIT_S)
    assert sorted(service.cancelled) == sorted(sent.request_id for sent in service.submitted)


def test_who_hangs_up_in_the_queue_is_cancelled(serve: Serve, own: Service) -> None:
    """Of the real service, whose rows are taken: those that wait are let go without ever having run."""
    client = serve(own)
    body = {"model": "bundled", "prompt": "a", "max_tokens": 3000, "ignore_eos": True}
    made = [begin(client, body) for _ in range(8)]
    _until(lambda: own.snapshot().num_waiting > 0 and own.snapshot().num_running == 4)
    for one in made:
        one.close()
    _until(lambda: own.snapshot().num_running + own.snapshot().num_waiting == 0)
    assert own.snapshot().num_finished["cancelled"] == 8
    check_service(own)


def test_who_stops_reading_is_cut(serve: Serve) -> None:
    service = FakeService(lambda _: list(b"word ") * 100_000, max_model_len=400_000)
    client = serve(service, write_timeout_s=0.2)
    made = begin(client, {**ENDLESS, "max_tokens": 300_000, "stream": True, "provenance": True})
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    assert service.ended.acquire(timeout=WAIT_S)  # it wrote all of it, or was cancelled
    _until(lambda: service.cancelled or not service.submitted)
    made.close()


def test_who_reads_nothing_of_an_answer_is_cut() -> None:
    """Closing would wait until all is read: a few such clients held as many answers as they liked, for ever."""
    size = 16 << 20  # beyond what the system buffers
    app = build_app(FakeService(), ServerOptions(write_timeout_s=0.3))
    app.add_route("/large", lambda _: Response(bytes(size)))
    with live(app) as url, socket.socket() as made:
        at = httpx.URL(url)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect((at.host, at.port or 0))
        made.sendall(b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n")
        assert made.recv(9, socket.MSG_PEEK)  # the answer has begun
        time.sleep(1.0)
        made.settimeout(WAIT_S)
        got = 0
        while got < size and (part := made.recv(1 << 20)):
            got += len(part)
    assert 0 < got < size


def test_a_stream_without_news_says_that_it_lives(serve: Serve) -> None:
    service = FakeService(lambda _: [97, 97, 97, EOS], held=True)
    client = serve(service, keepalive_s=0.05, request_timeout_s=2.0)
    with client.stream("POST", TEXT, json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        assert any(line == ": keep-alive" for line in lines)


class FakeJob:
    def __init__(self) -> None:
        self.backend = SimpleNamespace(options=ServerOptions(write_timeout_s=0.1))
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


async def sent_by(job: Any, stuck_at: int | None) -> list[Message]:
    """The messages of a stream of two parts; the client's connection takes none from number stuck_at on."""
    messages: list[Message] = []

    async def parts() -> AsyncIterator[bytes]:
        yield event({"text": "one"})
        await asyncio.sleep(0.01)
        yield DONE

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if len(messages) == stuck_at:
            await asyncio.Event().wait()
        messages.append(message)

    async with asyncio.timeout(WAIT_S):
        await EventStream(job, parts())({"type": "http", "method": "POST"}, receive, send)
    return messages


@pytest.mark.parametrize("stuck_at", [0, 1, 2, 3])
def test_who_stops_reading_is_cut_at_any_message(stuck_at: int) -> None:
    """Head, parts and end alike: each may be the one that finds the connection's buffer full."""
    job = FakeJob()
    assert len(asyncio.run(sent_by(job, stuck_at))) == stuck_at
    assert job.num_closed == 1


def test_a_stream_outlives_the_signal_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the server stops, requests are let finish: the library's own way is to cut streams at once."""
    monkeypatch.setattr(AppStatus, "should_exit", True)
    messages = asyncio.run(sent_by(FakeJob(), None))
    assert [message.get("body") for message in messages] == [None, b'data: {"text":"one"}\n\n', DONE, b""]
    assert messages[0]["headers"] == [
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
        (b"content-type", b"text/event-stream; charset=utf-8"),
    ]


def test_an_event_is_one_line_of_json() -> None:
    assert event({"a": "\r\n\ud800é"}) == 'data: {"a":"\\r\\n?é"}\n\n'.encode()
    assert (DONE, KEEP_ALIVE) == (b"data: [DONE]\n\n", b": keep-alive\n\n")


def test_what_python_takes_for_the_end_of_a_line_cuts_no_event(serve: Serve) -> None:
    """httpx's own reader of lines is one that does; the SSE standard and OpenAI's client do not."""
    said = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1ee"
    client = serve(FakeService(lambda _: [*said.encode(), EOS]))
    with client.stream("POST", TEXT, json={"model": "fake", "prompt": "a", "max_tokens": 99, "stream": True}) as got:
        lines = [line.removeprefix("data: ") for line in got.iter_lines() if line not in ("", "data: [DONE]")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == said


def test_many_streams_at_once(serve: Serve) -> None:
    service = FakeService(lambda sent: [*bytes(sent.prompt_ids), EOS])
    client = serve(service)
    texts: dict[int, str] = {}

    def one(number: int) -> None:
        body = {"model": "fake", "prompt": f"prompt {number}", "stream": True, "max_tokens": 50}
        got = events(client.post(TEXT, json=body))
        texts[number] = "".join(data["choices"][0]["text"] for data in got)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert texts == {number: f"prompt {number}" for number in range(24)}


def _until(good: Callable[[], object]) -> None:
    event = threading.Event()
    for _ in range(int(WAIT_S / 0.02)):
        if good():
            return
        event.wait(0.02)
    raise AssertionError("it never came to be")
