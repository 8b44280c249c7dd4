"""Keys, hosts, sizes, and the names of requests."""

import socket
from collections.abc import Iterator

import openai
import pytest

from foretoken.core.errors import ConfigError
from foretoken.server.options import ServerOptions
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
    for path in ("/v1/models", "/v1/models/fake", "/metrics", "/v1/nothing"):
        assert client.get(path).status_code == 401
    for path in ("/health", "/ready", "/", "/openapi.json"):
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


def test_a_folder_of_this_machine_is_not_named(serve: Serve, tmp_path: object) -> None:
    from dataclasses import replace

    service = FakeService()
    service.engine.model.spec = replace(service.engine.model.spec, name=f"{tmp_path}/")
    client = serve(service)
    assert "/" not in client.get("/v1/models").json()["data"][0]["id"]
    assert str(tmp_path) not in client.get("/openapi.json").text


def test_the_page_runs_under_its_policy(serve: Serve) -> None:
    page = serve().get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
