"""``foretell launch``: what programs are told, a server that is found or started, and exit statuses."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.app import app
from foretell.cli.commands.launch import CLIENTS

pytest.importorskip("fastapi")
RECORDER = """#!{python}
import json, os, sys, urllib.request
told = {{"argv": sys.argv[1:], "environ": dict(os.environ), "stdin": sys.stdin.read()}}
if os.environ.get("ASK"):
    told["models"] = json.load(urllib.request.urlopen(os.environ["ASK"] + "/v1/models"))
open(os.environ["TOLD"], "w").write(json.dumps(told))
if os.environ.get("DIES"):
    os.kill(os.getpid(), 9)
if os.environ.get("WAITS"):
    import time
    time.sleep(60)
sys.exit(int(os.environ.get("LEAVES", 0)))
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Programs of the table on PATH that write down what they are told; reads it."""
    for name in CLIENTS:
        program = tmp_path / name
        program.write_text(RECORDER.format(python=sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TOLD", str(tmp_path / "told.json"))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of the user")
    monkeypatch.delenv("FORETELL_API_KEY", raising=False)
    return lambda: json.loads((tmp_path / "told.json").read_text())


@pytest.fixture
def served() -> Iterator[Callable[..., int]]:
    """Serves a fake model by a name; returns the port."""
    from contextlib import ExitStack

    from foretell.server.app import build_app
    from foretell.server.options import ServerOptions
    from tests.server.fake import FakeService
    from tests.server.live import live

    with ExitStack() as stack:

        def start(name: str = "a model", **options: Any) -> int:
            made: Any = build_app(FakeService(), ServerOptions(served_model_name=name, **options))  # type: ignore[arg-type]
            return int(stack.enter_context(live(made)).rpartition(":")[2])

        yield start


def run(*words: str) -> int:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SystemExit) as left:
            app(["launch", *words])
        return int(left.value.code or 0)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def configuration(arguments: Sequence[str]) -> dict[str, Any]:
    """Codex' -c arguments, as it reads them."""
    assert arguments[::2] == ["-c"] * (len(arguments) // 2)
    return tomllib.loads("\n".join(arguments[1::2]))


@pytest.mark.parametrize("name", ["a model", 'of "quotes" \\ {url}'])
def test_programs_are_told_of_a_server_that_is_found(told: Any, served: Any, name: str) -> None:
    port = served(name)
    url = f"http://127.0.0.1:{port}"
    for client in CLIENTS:
        assert run(client, "--port", str(port), "--", "-p", "hi", "--model", "x") == 0
        assert told()["argv"][-4:] == ["-p", "hi", "--model", "x"]
        environ, arguments = told()["environ"], told()["argv"][:-4]
        if client == "claude":
            assert (environ["ANTHROPIC_BASE_URL"], environ["ANTHROPIC_MODEL"]) == (url, name)
            assert environ["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == environ["ANTHROPIC_SMALL_FAST_MODEL"] == name
            assert environ["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
            assert "ANTHROPIC_API_KEY" not in environ
            assert arguments == []
        if client == "codex":
            made = configuration(arguments)
            provider = made["model_providers"][made["model_provider"]]
            assert (made["model"], provider["base_url"], provider["wire_api"]) == (name, f"{url}/v1", "responses")
            assert environ[provider["env_key"]] == "none"
        if client == "opencode":
            made = json.loads(environ["OPENCODE_CONFIG_CONTENT"])
            assert made["model"] == made["small_model"] == f"foretell/{name}"
            assert made["provider"]["foretell"]["options"] == {"baseURL": f"{url}/v1", "apiKey": "none"}
            assert list(made["provider"]["foretell"]["models"]) == [name]
        if client == "aider":
            assert (environ["OPENAI_API_BASE"], environ["OPENAI_API_KEY"]) == (f"{url}/v1", "none")
            assert arguments[:2] == ["--model", f"openai/{name}"]


def test_variables_of_the_user(told: Any, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAUDE_CODE_ATTRIBUTION_HEADER", "1")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "https://elsewhere.example")
    assert run("claude", "--port", str(port := served())) == 0
    assert told()["environ"]["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "1"
    assert told()["environ"]["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:{port}"


def test_exit_statuses_are_passed_on(told: Any, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(served())
    monkeypatch.setenv("LEAVES", "7")
    assert run("aider", "--port", port) == 7
    monkeypatch.setenv("DIES", "1")
    assert run("aider", "--port", port) == 137


def test_keys(told: Any, served: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    port = str(served(api_keys=("secret",)))
    assert run("codex", "--port", port) == 2
    assert "FORETELL_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("FORETELL_API_KEY", "secret")
    assert run("codex", "--port", port) == 0
    assert told()["environ"]["FORETELL_API_KEY"] == "secret"
    assert run("claude", "--port", port) == 0
    assert told()["environ"]["ANTHROPIC_AUTH_TOKEN"] == "secret"


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def test_what_cannot_be(
    told: Any, served: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    port = served()
    for words, says in (
        (("claud",), "did you mean 'claude'"),
        (("claude", "--port", str(free_port())), "foretell serve TARGET"),
        (("claude", "--port", str(port), "--model", "other.gguf"), "has 'a model', not 'other.gguf'"),
    ):
        assert run(*words) == 2
        assert says in capsys.readouterr().err
    (tmp_path / "codex").unlink()
    assert run("codex", "--port", str(port)) == 2
    assert "npm install -g @openai/codex" in capsys.readouterr().err
    (tmp_path / "opencode").write_text("no program\0")
    assert run("opencode", "--port", str(port)) == 2
    assert "cannot be run" in capsys.readouterr().err
    assert run("claude", "--port", str(free_port()), "--model", str(tmp_path / "none.gguf")) == 1
    assert "the server did not start: " in (said := capsys.readouterr().err)
    assert "none.gguf" in said.splitlines()[-1]
    assert not (tmp_path / "told.json").exists()


def test_a_server_that_loads_is_waited_for(told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It answers already, but with 503 to what a program asks."""
    from foretell.server import run as server_run
    from foretell.server.loading import loading
    from foretell.server.options import ServerOptions
    from tests.server.fake import FakeService

    service: Any = FakeService()
    with server_run.bind("127.0.0.1", 0) as made:
        port, over = made.getsockname()[1], threading.Event()
        server = server_run.uvicorn.Server(
            server_run.config_of(server_run.build_app(service), ServerOptions(), drain_s=0)
        )

        def serve() -> None:
            with loading(made, ServerOptions(), ["small"], ["loading small"]):
                over.wait()
            server.run(sockets=[made])

        thread = threading.Thread(target=serve)
        thread.start()
        found: list[bool] = []

        def load() -> None:
            found.append(written.exists())
            over.set()

        written, timer = Path(os.environ["TOLD"]), threading.Timer(1.0, load)
        timer.start()
        try:
            assert run("claude", "--port", str(port)) == 0
        finally:
            timer.join()
            server.should_exit = True
            thread.join()
    assert found == [False], "the program begins when the model is there"
    assert "waiting for the server" in capsys.readouterr().err


def test_what_is_no_server_of_models(told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.server.live import live

    async def other(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"[]"})

    with live(other) as url:
        assert run("claude", "--port", url.rpartition(":")[2]) == 2
    assert "no server of models" in capsys.readouterr().err


def test_a_server_is_started_and_stopped(told: Any, tmp_path: Path) -> None:
    port = free_port()
    environment = {**os.environ, "ASK": f"http://127.0.0.1:{port}", "LEAVES": "3"}
    words = [
        sys.executable,
        "-m",
        "foretell",
        "launch",
        "claude",
        "--model",
        "bundled",
        "--port",
        str(port),
        "--",
        "-p",
    ]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, input="typed")
    assert done.returncode == 3, done.stderr
    assert told()["models"]["data"][0]["id"] == told()["environ"]["ANTHROPIC_MODEL"] == "bundled"
    assert (told()["argv"], told()["stdin"]) == (["-p"], "typed")
    with socket.socket() as made:
        assert made.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_server_does_not_outlive_a_closed_terminal(told: Any, tmp_path: Path) -> None:
    port = free_port()
    environment = {**os.environ, "ASK": f"http://127.0.0.1:{port}", "WAITS": "1"}
    words = [sys.executable, "-m", "foretell", "launch", "aider", "--model", "bundled", "--port", str(port)]
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "told.json").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 143
    with socket.socket() as made:
        assert made.connect_ex(("127.0.0.1", port)) != 0
