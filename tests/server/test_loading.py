"""The port while weights are read: every route tells what is done, and nothing is lost when it is over."""

import socket
import threading

import httpx
import pytest

from foretell.server import run
from foretell.server.loading import loading
from foretell.server.options import ServerOptions
from foretell.server.replies.about import ModelList
from tests.server.fake import FakeService

SAID = "loading small: reading weights"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/health", None),
        ("/ready", None),
        ("/metrics", None),
        ("/v1/foretell/learner", None),
        ("/v1/chat/completions", {"messages": []}),
        ("/nothing", None),
    ],
)
def test_every_route_says_what_is_done(path: str, body: object) -> None:
    with run.bind("127.0.0.1", 0) as made, loading(made, ServerOptions(), ["small"], [SAID]):
        answer = httpx.request("GET" if body is None else "POST", run.url_of(made) + path, json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["error"] == {"message": SAID, "type": "server_error", "param": None, "code": "loading"}
    assert answer.headers["x-request-id"]


def test_other_clients_get_their_form() -> None:
    with run.bind("127.0.0.1", 0) as made, loading(made, ServerOptions(), ["small"], [SAID]):
        url = run.url_of(made)
        assert httpx.post(f"{url}/api/chat", json={}).json() == {"error": SAID}
        told = {"type": "overloaded_error", "message": SAID}
        assert httpx.post(f"{url}/v1/messages", json={}).json() == {"type": "error", "error": told}


def test_what_is_said_last_is_told_and_models_have_names() -> None:
    said = list[str]()
    with run.bind("127.0.0.1", 0) as made, loading(made, ServerOptions(), ["one", "two"], said):
        url = run.url_of(made)
        assert httpx.get(f"{url}/health").json()["error"]["message"] == "loading"
        said[:] = [SAID]
        assert httpx.get(f"{url}/health").json()["error"]["message"] == SAID
        for path in ("/v1/models", "/models"):
            listed = httpx.get(url + path).json()
            ModelList.model_validate(listed)
            assert [(one["id"], one["status"]["value"]) for one in listed["data"]] == [
                ("one", "loading"),
                ("two", "unloaded"),
            ]


def test_the_gate_stands_before_it() -> None:
    options = ServerOptions(api_keys=("secret",), allowed_hosts=("localhost",))
    with run.bind("127.0.0.1", 0) as made, loading(made, options, ["small"], [SAID]):
        port = made.getsockname()[1]
        assert httpx.get(f"http://localhost:{port}/v1/models").status_code == 401
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 400
        assert httpx.get(f"http://localhost:{port}/ready").status_code == 503


def test_who_comes_when_it_is_over_is_answered_by_the_server() -> None:
    """Also where the socket is not listened on for a while, and while a client keeps a connection open."""
    service = FakeService()
    with run.bind("127.0.0.1", 0) as made, socket.socket() as slow:
        with loading(made, ServerOptions(), ["small"], [SAID]):
            slow.connect(made.getsockname())
            slow.send(b"GET /health HTTP/1.1\r\n")
            with httpx.Client(base_url=run.url_of(made)) as client:
                assert [client.get("/ready").status_code for _ in range(2)] == [503, 503]
        with socket.create_connection(made.getsockname()) as early:
            early.send(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            server = run.uvicorn.Server(run.config_of(run.build_app(service), ServerOptions(), drain_s=0))  # type: ignore[arg-type]
            thread = threading.Thread(target=server.run, kwargs={"sockets": [made]})
            thread.start()
            try:
                answer = b""
                while more := early.recv(4096):
                    answer += more
                assert answer.startswith(b"HTTP/1.1 200")
                assert httpx.get(f"{run.url_of(made)}/ready").status_code == 200
            finally:
                server.should_exit = True
                thread.join()


def test_what_loading_raises_is_raised() -> None:
    with (
        run.bind("127.0.0.1", 0) as made,
        pytest.raises(MemoryError, match="no room"),
        loading(made, ServerOptions(), ["small"], [SAID]),
    ):
        raise MemoryError("no room")
