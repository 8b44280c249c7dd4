"""Keys, hosts, sizes, and the names of requests."""

import io
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from foretell.core.errors import ConfigError
from foretell.server.logs import configure_logs
from foretell.server.options import ServerOptions
from foretell.server.security import tenant_of
from tests.server.conftest import Serve
from tests.server.fake import FakeService

TEXT = "/v1/completions"
BODY = {"model": "fake", "prompt": "a"}


def test_keys(serve: Serve) -> None:
    client = serve(api_keys=("right", "other"))
    for key in ("right", "other"):
        assert client.post(TEXT, json=BODY, headers={"authorization": f"Bearer {key}"}).status_code == 200
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer righ"},
        {"authorization": "Bearer right2"},
        {"authorization": "right"},
        {"authorization": "Basic right"},
    ):
        refused = client.post(TEXT, json=BODY, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"


def test_what_keys_guard(serve: Serve) -> None:
    client = serve(api_keys=("right",))
    for path in ("/v1/models", "/v1/models/fake", "/models", "/models/fake", "/metrics", "/v1/nothing"):
        assert client.get(path).status_code == client.head(path).status_code == 401
    for path in (TEXT, "/completions", "/chat/completions"):
        assert client.post(path, json=BODY).status_code == 401
    for path in ("/health", "/ready", "/ping", "/version", "/", "/openapi.json"):
        assert client.get(path).status_code == 200
    with openai.OpenAI(base_url=str(client.base_url) + "/v1", api_key="right") as good:
        assert [model.id for model in good.models.list()] == ["fake"]
    bad = openai.OpenAI(base_url=str(client.base_url) + "/v1", api_key="wrong")
    with bad, pytest.raises(openai.AuthenticationError):
        bad.models.list()


def test_keys_that_cannot_be_sent_are_refused() -> None:
    for keys in (("",), ("schlüssel",), ("a\n",)):
        with pytest.raises(ConfigError):
            ServerOptions(api_keys=keys)
        with pytest.raises(ConfigError, match="the metrics key"):
            ServerOptions(metrics_key=keys[0])
    with pytest.raises(ConfigError, match="the metrics key is a client's API key too"):
        ServerOptions(api_keys=("a", "b"), metrics_key="b")


@pytest.mark.parametrize("api_keys", [(), ("client",)])
def test_metrics_have_a_key_of_their_own(serve: Serve, api_keys: tuple[str, ...]) -> None:
    """What scrapes reads no text, and a client does not read the sums of all."""
    client = serve(api_keys=api_keys, metrics_key="scraper")
    statuses = {
        key: client.get("/metrics", headers={"authorization": f"Bearer {key}"}).status_code
        for key in ("scraper", "client", "nobody", "scrape")
    }
    assert statuses == {"scraper": 200, "client": 401, "nobody": 401, "scrape": 401}
    for path in ("/v1/models", "/v1/foretell/learner"):
        assert (client.get(path, headers={"authorization": "Bearer scraper"}).status_code == 401) == bool(api_keys)
    assert client.get("/health").status_code == 200


def test_a_log_line_says_whose_request_it_was_and_no_key(serve: Serve) -> None:
    stream = io.StringIO()
    service = FakeService()
    client = serve(service, api_keys=("sesame", "open"), metrics_key="scraper")
    before = [*logging.getLogger().handlers]
    try:
        configure_logs("debug", json=True, stream=stream)
        for key in ("sesame", "open"):
            client.post(TEXT, json=BODY, headers={"authorization": f"Bearer {key}"}).raise_for_status()
        client.get("/metrics", headers={"authorization": "Bearer scraper"}).raise_for_status()
        client.get("/health").raise_for_status()
    finally:
        logging.getLogger().handlers[:] = before
        logging.captureWarnings(False)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    told = [line["key_id"] for line in lines if line["event"] == "request"]
    assert told == [tenant_of("sesame"), tenant_of("open")]
    assert {line.get("key_id") for line in lines if line.get("path") in ("/metrics", "/health")} <= {None}
    assert not any(key in stream.getvalue() for key in ("sesame", "scraper"))


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_are_measured_while_they_are_read(serve: Serve, chunked: bool) -> None:
    service = FakeService()
    client = serve(service, max_body_mib=0.01)
    body = b'{"model": "fake", "prompt": "' + b"a" * 12000 + b'"}'

    def parts() -> Iterator[bytes]:
        yield from (body[at : at + 1000] for at in range(0, len(body), 1000))

    headers = {"content-type": "application/json"}
    refused = client.post(TEXT, content=parts() if chunked else body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    assert service.submitted == []
    assert client.post(TEXT, json=BODY).status_code == 200


def test_a_body_that_does_not_come(serve: Serve) -> None:
    client = serve(body_timeout_s=0.1)
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as sender:
        sender.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
        )
        answer = b""
        while part := sender.recv(4096):  # until the server closes the connection
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"request_timeout" in answer


def test_hosts(serve: Serve) -> None:
    client = serve(allowed_hosts=("localhost", "127.0.0.1", "[::1]"))
    for host, status in (
        ("localhost", 200), ("127.0.0.1:99", 200), ("[::1]:8000", 200), ("LOCALHOST:1", 200), ("evil.example", 400),
        ("localhost.evil.example", 400), ("", 400),
    ):  # fmt: skip
        assert client.get("/v1/models", headers={"host": host}).status_code == status, host


def test_probes_are_answered_under_any_name(serve: Serve) -> None:
    """Orchestrators ask by a container's address."""
    client = serve(allowed_hosts=("ours.example",))
    for path in ("/health", "/ready", "/ping"):
        assert client.get(path, headers={"host": "10.0.0.7:8000"}).status_code == 200
    for path in ("/", "/metrics", "/v1/models", "/openapi.json"):
        assert client.get(path, headers={"host": "10.0.0.7:8000"}).status_code == 400
        assert client.get(path, headers={"host": "OURS.example:99"}).status_code == 200


def test_any_name_can_be_allowed(serve: Serve) -> None:
    client = serve(allowed_hosts=("localhost", "*"))
    assert client.get("/v1/models", headers={"host": "any.example"}).status_code == 200


@pytest.mark.parametrize("name", ["http://a.example", "a.example:80", "a/b", "", "::1"])
def test_hosts_that_are_no_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed host"):
        ServerOptions(allowed_hosts=(name,))


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "", "https://a b"])
def test_origins_that_are_none_are_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="allowed origin"):
        ServerOptions(allowed_origins=(origin,))


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def test_pages_of_other_sites_get_nothing_by_default(serve: Serve) -> None:
    client = serve()
    asked = client.options(TEXT, headers={"origin": "https://app.example", **PREFLIGHT})
    assert asked.status_code == 405
    told = client.get("/v1/models", headers={"origin": "https://app.example"})
    assert not [name for name in (*asked.headers, *told.headers) if name.startswith("access-control")]


@pytest.mark.parametrize("allowed", ["https://app.example", "*"])
def test_pages_of_an_allowed_site(serve: Serve, allowed: str) -> None:
    client = serve(allowed_origins=(allowed,), api_keys=("right",))
    origin = {"origin": "https://app.example"}
    asked = client.options(TEXT, headers={**origin, **PREFLIGHT})  # a browser sends no key with it
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == allowed
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    for key, status in (("right", 200), ("wrong", 401)):  # errors can be read too
        done = client.post(TEXT, json=BODY, headers={**origin, "authorization": f"Bearer {key}"})
        assert (done.status_code, done.headers["access-control-allow-origin"]) == (status, allowed)
        assert "x-request-id" in done.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in done.headers
    streamed = client.post(TEXT, json={**BODY, "stream": True}, headers={**origin, "authorization": "Bearer right"})
    assert (streamed.status_code, streamed.headers["access-control-allow-origin"]) == (200, allowed)


def test_pages_of_another_site_than_the_allowed_one(serve: Serve) -> None:
    client = serve(allowed_origins=("https://app.example",))
    asked = client.options(TEXT, headers={"origin": "https://evil.example", **PREFLIGHT})
    assert asked.status_code == 400
    told = client.get("/v1/models", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in {**asked.headers, **told.headers}


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/metrics", "/v1/models", "/models", "/version", "/openapi.json"]
)
def test_head_is_get_without_a_body(serve: Serve, path: str) -> None:
    client = serve()
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    if path != "/metrics":  # its figures move
        assert head.headers["content-length"] == get.headers["content-length"] == str(len(get.content))
    assert client.get("/health").json() == {"status": "ok"}  # on the same connection


def test_head_where_there_is_no_get(serve: Serve) -> None:
    client = serve()
    assert (client.head(TEXT).status_code, client.head("/nothing").status_code) == (405, 404)
    assert client.head(TEXT).content == b""


def answer_of(made: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    made.settimeout(30)
    answer = b""
    while part := made.recv(4096):
        answer += part
    return answer


GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"G", b"HTTP/1.1 408 "),
        (GET + b"x: y", b"HTTP/1.1 408 "),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999\r\n\r\n", b"HTTP/1.1 200 "),
    ],
)
def test_a_head_that_does_not_come(serve: Serve, sent: bytes, answer: bytes) -> None:
    """However often a byte comes. The last one is whole, and a body follows that nobody reads."""
    client = serve(header_timeout_s=0.3)
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as made:
        stop = threading.Event()

        def dribble() -> None:
            with suppress(OSError):
                made.sendall(sent)
                while not stop.wait(0.05) and sent:
                    made.sendall(b"x")

        writer = threading.Thread(target=dribble)
        writer.start()
        try:
            began = time.monotonic()
            with suppress(ConnectionResetError):  # bytes that the server had not read when it closed
                assert answer_of(made).startswith(answer)
            assert time.monotonic() - began < 10
        finally:
            stop.set()
            writer.join()


def test_a_second_head_that_does_not_come(serve: Serve) -> None:
    """On a connection that is kept: a pause between requests is none of its business, half a head is."""
    client = serve(header_timeout_s=0.3)
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as made:
        for _ in range(2):
            made.sendall(GET + b"\r\n")
            got = b""
            while not got.endswith(b"}"):
                got += made.recv(4096)
            assert got.startswith(b"HTTP/1.1 200 ")
            time.sleep(0.5)  # longer than a head may take
        made.sendall(GET)
        rest = answer_of(made)
    assert rest.startswith(b"HTTP/1.1 408 ")
    assert b'"code": "request_timeout"' in rest


def test_a_request_that_takes_longer_than_its_head_may(serve: Serve) -> None:
    service = FakeService(lambda _: [97] * 9, held=True)
    client = serve(service, header_timeout_s=0.2, request_timeout_s=0.6)
    assert client.post(TEXT, json=BODY).json()["choices"][0]["stop_reason"] == "timeout"


def test_slow_connections_do_not_live_on(serve: Serve) -> None:
    """Two hundred of them, as one machine can open: none is left, and others are served meanwhile."""
    client = serve(header_timeout_s=0.5)
    address = (client.base_url.host, client.base_url.port or 0)
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection(address)) for _ in range(200)]
        for one in made:
            one.sendall(GET)
        assert client.get("/health").status_code == 200
        assert all(answer_of(one).startswith(b"HTTP/1.1 408 ") for one in made)


@pytest.mark.parametrize("sent", [b"garbage\r\n\r\n", GET + b"x: " + b"y" * 70_000])
def test_what_is_no_http_is_refused_in_the_form_of_all_errors(serve: Serve, sent: bytes) -> None:
    client = serve()
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as made:
        made.sendall(sent)
        head, _, body = answer_of(made).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_names_of_requests(serve: Serve) -> None:
    client = serve()
    assert client.get("/health", headers={"x-request-id": "abc-1.2"}).headers["x-request-id"] == "abc-1.2"
    for odd in ("a b", "a" * 129, "<script>", ""):
        given = client.get("/health", headers={"x-request-id": odd}).headers["x-request-id"]
        assert given != odd
        assert len(given) == 32
    assert client.get("/nothing", headers={"x-request-id": "x"}).headers["x-request-id"] == "x"


def test_two_requests_of_one_name_do_not_meet(serve: Serve) -> None:
    service = FakeService()
    client = serve(service)
    for _ in range(2):
        assert client.post(TEXT, json=BODY, headers={"x-request-id": "same"}).status_code == 200
    assert len({sent.request_id for sent in service.submitted}) == 2


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("{0}/", "models"),
        ("{0}/tiny.Q4_1.gguf", "tiny.Q4_1.gguf"),
        ("{0}/gone.gguf", "gone.gguf"),
        (".", "models"),
        ("./tiny.Q4_1.gguf", "tiny.Q4_1.gguf"),
        ("tiny.Q4_1.gguf", "tiny.Q4_1.gguf"),
        ("../models/tiny.Q4_1.gguf", "tiny.Q4_1.gguf"),
        ("~/tiny.Q4_1.gguf", "tiny.Q4_1.gguf"),
        ("owner/name@main", "owner/name@main"),
        ("bundled/target", "bundled/target"),
    ],
)
def test_a_path_of_this_machine_is_not_named(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, shown: str
) -> None:
    home = tmp_path / "models"
    home.mkdir()
    (home / "tiny.Q4_1.gguf").touch()
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    service = FakeService()
    service.engine.model.spec = replace(service.engine.model.spec, name=given.format(home))
    client = serve(service)
    told = client.get("/v1/models").json()["data"][0]
    assert (told["id"], told["root"]) == (shown, shown)
    reply = client.post(TEXT, json={"prompt": "a"})
    assert reply.json()["model"] == shown
    refused = client.post(TEXT, json={**BODY, "model": "another"})
    assert refused.status_code == 404
    metrics = client.get("/metrics").text
    assert f'model_name="{shown}"' in metrics
    for text in (str(told), reply.text, refused.text, metrics, client.get("/openapi.json").text):
        assert str(tmp_path) not in text


def test_the_page_runs_under_its_policy(serve: Serve) -> None:
    page = serve().get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
