"""``foretell serve`` as a process: what it refuses before it loads, how it says where it is, and how it ends."""

import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from foretell import Engine, Service, ServiceOptions, bundled
from foretell.cli.commands import serve as of_serve
from foretell.cli.errors import explain
from foretell.core.errors import EngineError, ModelError
from foretell.costs.table import CostTable
from foretell.engine.failures import GuardedPlanner
from foretell.planner.acceptance import Acceptance
from foretell.planner.planner import Planner
from foretell.server import run
from foretell.server.app import build_app
from foretell.service.service import STATES
from tests.engine.harness import table
from tests.engine.integrity import check_service
from tests.server.fake import FakeService
from tests.server.live import live
from tests.stress import size

WAIT_S = 180.0
HIDING = ("FORETELL_MODELS", "FORETELL_OFFLINE")
OPTIONS = ("--speculation", "on", "--kv-memory-gib", "0.25", "--port", "0")


@dataclass
class Process:
    """A server that has said where it is."""

    handle: "subprocess.Popen[str]"
    url: str


@contextmanager
def serving(*options: str) -> Iterator[Process]:
    # Settings of this process are not the server's, but for those that hide the models which the user has pulled.
    kept = {key: value for key, value in os.environ.items() if key in HIDING or not key.startswith("FORETELL_")}
    handle = subprocess.Popen(
        [sys.executable, "-m", "foretell.cli.main", "serve", *OPTIONS, *options],
        stderr=subprocess.PIPE, text=True, env={**kept, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    reader: threading.Thread | None = None
    watchdog = threading.Timer(WAIT_S, handle.kill)
    watchdog.start()
    try:
        said = []
        for line in handle.stderr:
            said.append(line)
            if found := re.search(r"serving \S+ at (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(said))
        reader = threading.Thread(target=handle.stderr.read)  # so that logging never blocks
        reader.start()
        yield Process(handle, found[1])
    finally:
        watchdog.cancel()
        if handle.poll() is None:
            handle.kill()
        handle.wait()
        if reader is not None:
            reader.join()
        handle.stderr.close()


@pytest.mark.slow
def test_a_signal_lets_requests_finish() -> None:
    with serving() as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        assert client.get("/ready").status_code == 200
        body = {"model": "bundled", "prompt": "a", "max_tokens": 1200, "ignore_eos": True, "stream": True, "seed": 1}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))  # no pings
            first = next(lines)
            server.handle.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=server.url, timeout=WAIT_S) as other:
                while other.get("/ready").status_code != 503:
                    pass
                assert other.get("/health").status_code == 200
                assert other.post("/v1/completions", json={"prompt": "a"}).status_code == 503
            *rest, last = [first, *lines]
        assert last == "data: [DONE]"
        ends = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in rest]
        assert ends[-1] == "length"
        assert server.handle.wait(WAIT_S) == 0


@pytest.mark.slow
def test_several_models_from_the_command_line(tmp_path: Path) -> None:
    """Names, directories, and options that hold for each; what is kept is in a directory of each model."""
    folder, kept = tmp_path / "models", tmp_path / "kept"
    folder.mkdir()
    (folder / "small").symlink_to(bundled.path("draft"), target_is_directory=True)
    shutil.copytree(bundled.path("draft"), folder / "found")
    options = ("--models-dir", str(folder), "--max-models", "1", "--prefix-dir", str(kept), "--max-model-len", "512")
    with (
        serving("a=bundled", "b/c=bundled/draft", *options) as served,
        httpx.Client(base_url=served.url, timeout=120) as client,
    ):
        told = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
        assert list(told) == ["a", "b/c", "found", "small"]
        for name in told:
            body = {"model": name, "prompt": "def add(a, b):" * 20, "max_tokens": 4}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
            assert client.get(f"/v1/models/{name}").json()["max_model_len"] == 512
            assert [one["name"] for one in client.get("/api/ps").json()["models"]] == [name]
        served.handle.send_signal(signal.SIGTERM)
        assert served.handle.wait(WAIT_S) == 0
    assert {one.name for one in kept.iterdir()} == {"a", "b%2Fc", "found", "small"}


def test_one_model_may_be_named_where_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a variable names one target, whatever its letters."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        of_serve, "_serve", lambda *given: seen.update(named=given[1], server=given[4], several=given[6])
    )
    assert invoke(monkeypatch, "x=bundled").exit_code == 0
    assert (seen["named"], seen["server"].served_model_name, seen["several"]) == ({"x": "bundled"}, ("x",), None)
    from foretell.cli.app import app

    CliRunner().invoke(app, ["serve"], env={"FORETELL_TARGET": "a b/c d"})
    assert seen["named"] == {"a b/c d": "a b/c d"}
    assert invoke(monkeypatch, "bundled", "--keep-alive", "5m").exit_code == 0
    assert seen["several"].keep_alive == "5m"


def test_a_second_signal_does_not_wait() -> None:
    with serving() as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        body = {"model": "bundled", "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with suppress(httpx.HTTPError), client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.handle.send_signal(signal.SIGINT)
            while httpx.get(server.url + "/ready", timeout=WAIT_S).status_code != 503:  # until the first one was heard
                pass
            server.handle.send_signal(signal.SIGINT)
            assert server.handle.wait(WAIT_S) == 0
            assert "data: [DONE]" not in list(lines)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--method", "ngrma"), "did you mean 'ngram'"),
        (("--method", "prediction"), "use it anyway"),
        (("--also", "medsua"), "did you mean 'medusa'"),
        (("--shared-drafts", "everybody"), "off, key, all"),
        (("--shared-drafts", "key"), "no API key is given"),
        (("--speculation", "maybe"), "auto, on, off"),
        (("--max-num-seqs", "0"), "max_num_seqs"),
        (("--api-key", ""), "API key is empty"),
        (("--log-level", "loud"), "log level"),
        (("--host", "256.0.0.1"), "not an address"),
        (("--allowed-host", "http://a.example"), "without scheme, port and path"),
        (("--allowed-origin", "a.example"), "give scheme and name"),
        (("--max-body-mib", "-1"), "max_body_mib"),
        (("--max-body-mib", "inf"), "max_body_mib"),
        (("--drain-timeout", "inf"), "give a number of seconds"),
        (
            ("bundled", "x=bundled/draft", "x=bundled"),
            "two models would be called 'x': give one of them as NAME=TARGET",
        ),
        (
            ("bundled", "bundled/draft", "--served-model-name", "a"),
            "--served-model-name is of one model: give NAME=TARGET",
        ),
        (("bundled", "bundled/draft", "--lora", "a=b"), "--lora is of one model"),
        (("bundled", "bundled/draft", "--learn"), "--learn is of one model"),
        (("bundled", "bundled/draft", "--revision", "a"), "--revision is of one model: give ID@REV"),
        (("x=bundled", "--served-model-name", "a"), "both name the model: drop one"),
        (("--models-dir", "/nowhere"), "models_dir = /nowhere is no directory"),
        (("bundled", "--keep-alive", "soon"), "keep_alive = 'soon' is no time"),
        (("bundled", "--max-models", "0"), "max-models"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], says: str
) -> None:
    result = invoke(monkeypatch, *options)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("foretell: ")
    assert says in line


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        result = invoke(monkeypatch, "--port", str(other.getsockname()[1]))
    assert result.exit_code == 2
    assert "choose another --port" in result.stderr


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "foretell.server.run", raising=False)
    monkeypatch.delattr("foretell.server.run", raising=False)
    result = invoke(monkeypatch)
    assert result.exit_code == 2
    assert result.stderr.strip().endswith('needs the package uvicorn: pip install "foretell[serve]"')


def test_loopback_has_hosts_and_the_world_has_not() -> None:
    with run.bind("127.0.0.1", 0) as here, run.bind("0.0.0.0", 0) as there:
        assert "localhost" in run.hosts_of(here, "127.0.0.1")
        assert run.hosts_of(there, "0.0.0.0") == ()
        assert {"localhost", "ours.example"} <= set(run.hosts_of(here, "127.0.0.1", ("ours.example",)))
        assert {"localhost", "ours.example"} <= set(run.hosts_of(there, "0.0.0.0", ("ours.example",)))
        assert run.is_local(here)
        assert not run.is_local(there)
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", run.url_of(here))


def test_signals_one_by_one() -> None:
    class Server:
        should_exit = force_exit = False

    server, service = Server(), FakeService()
    heard = run._Exit(server, service, 1.0)  # type: ignore[arg-type]
    heard(signal.SIGTERM, None)
    _until(lambda: server.should_exit)  # nothing was running
    assert not server.force_exit
    heard(signal.SIGTERM, None)
    assert server.force_exit


def test_while_requests_finish_the_port_answers_that_none_is_taken() -> None:
    """A balancer must learn it from /ready: on a closed port it finds nothing."""
    ended = threading.Event()

    class Slow(FakeService):
        def start(self) -> None:
            started.set()

        def drain(self, timeout_s: float) -> bool:
            self.ready = False
            return ended.wait(timeout_s)

    class Server(run.uvicorn.Server):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            servers.append(self)

    service, servers, started = Slow(), list[Any](), threading.Event()
    with run.bind("127.0.0.1", 0) as made, pytest.MonkeyPatch.context() as patched:
        patched.setattr(run.uvicorn, "Server", Server)
        url, options = run.url_of(made), run.ServerOptions()
        serving = threading.Thread(target=run.serve, args=(service, options, made), kwargs={"drain_s": WAIT_S})
        serving.start()
        _until(lambda: servers and servers[0].started)
        assert httpx.get(url + "/ready").status_code == 200
        servers[0].handle_exit(signal.SIGTERM, None)
        _until(lambda: not service.ready)
        assert httpx.get(url + "/ready").status_code == 503
        assert httpx.get(url + "/health").status_code == 200
        ended.set()
        serving.join(WAIT_S)
        assert not serving.is_alive()


def test_while_it_starts_it_is_live_and_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    """An orchestrator starts anew what is not live: costs are measured for a minute, and it must not."""
    go, seen = threading.Event(), list[tuple[int, str]]()

    class Slow(FakeService):
        state = "starting"

        def start(self) -> None:
            assert go.wait(WAIT_S)
            self.state = "ready"

        def drain(self, timeout_s: float) -> bool:
            self.state = "draining"
            return True

        def close(self) -> None:
            self.state = "stopped"

    service = Slow()
    service.ready = False
    with run.bind("127.0.0.1", 0) as made, caplog.at_level("INFO", "foretell"), pytest.MonkeyPatch.context() as patched:
        servers = list[Any]()
        original = run.uvicorn.Server.__init__
        patched.setattr(
            run.uvicorn.Server, "__init__", lambda self, config: (servers.append(self), original(self, config))[1]
        )
        url = run.url_of(made)
        serving = threading.Thread(
            target=run.serve, args=(service, run.ServerOptions(), made), kwargs={"drain_s": WAIT_S}
        )
        serving.start()
        _until(lambda: servers and servers[0].started)

        def probe(path: str) -> None:
            answer = httpx.get(url + path)
            seen.append((answer.status_code, answer.json().get("error", {}).get("message", "")))

        probe("/health")
        probe("/ready")
        go.set()
        _until(lambda: service.state == "ready")
        probe("/ready")
        servers[0].handle_exit(signal.SIGTERM, None)
        serving.join(WAIT_S)
    assert seen == [(200, ""), (503, "the server is starting"), (200, "")]
    (line,) = [record for record in caplog.records if record.getMessage().startswith("draining")]
    assert line.figures == {"timeout_s": WAIT_S, "num_running": 0, "num_waiting": 0}  # type: ignore[attr-defined]


def test_a_server_that_is_stopped_while_it_starts_does_not_say_that_it_serves() -> None:
    """The line came after the one that told of the end."""
    go, said = threading.Event(), list[str]()

    class Slow(FakeService):
        def start(self) -> None:
            assert go.wait(WAIT_S)

    with run.bind("127.0.0.1", 0) as made, pytest.MonkeyPatch.context() as patched:
        patched.setattr(run.uvicorn.Server, "run", lambda self, sockets: (setattr(self, "should_exit", True), go.set()))
        run.serve(Slow(), run.ServerOptions(), made, drain_s=1.0, on_ready=lambda: said.append("serving"))  # type: ignore[arg-type]
        assert said == []
        patched.setattr(run.uvicorn.Server, "run", lambda self, sockets: go.set())
        run.serve(Slow(), run.ServerOptions(), made, drain_s=1.0, on_ready=lambda: said.append("serving"))  # type: ignore[arg-type]
    assert said == ["serving"]


def test_the_state_of_a_service() -> None:
    engine = Engine(table(1), None, speculative="ngram")
    service = Service(engine, ServiceOptions(max_num_seqs=2, max_model_len=64, speculation="on"))
    states = [service.state]
    service.start()
    states.append(service.state)
    assert service.drain(1.0)
    states.append(service.state)
    service.close()
    assert [*states, service.state] == ["starting", "ready", "draining", "stopped"]
    never = Service(engine, ServiceOptions(max_num_seqs=2, max_model_len=64, speculation="on"))
    never.close()
    assert never.state == "stopped"


def test_every_line_of_a_log_that_a_program_reads_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one that says where it serves, a warning, and the error that ends it."""

    def fail(service: Any, options: Any, made: Any, *, drain_s: float, on_ready: Callable[[], None]) -> None:
        on_ready()
        logging.getLogger("py.warnings").warning("a library\nwarns")
        raise ModelError("no room 'here'")

    monkeypatch.setattr(run, "serve", fail)
    options = ("--host", "0.0.0.0", "--port", "0", "--log-level", "error", "--method", "ngram")
    result = invoke(monkeypatch, *options, engine=Engine(table(1), None))
    logging.captureWarnings(False)
    assert result.exit_code == 1
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    told = [
        (line["level"], line["event"].partition(" at ")[0]) for line in lines if line.get("logger") != "py.warnings"
    ]
    assert told == [
        ("warning", "every client that reaches 0.0.0.0 may use this server; --api-key asks for a key"),
        ("info", "serving bundled"),
        ("error", "no room 'here'"),
    ]


def test_the_port_tells_what_a_start_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()

    @contextmanager
    def loading(made: Any, options: Any, names: Sequence[str], said: Sequence[str]) -> Iterator[None]:
        monkeypatch.setattr(
            "foretell.cli.settings.with_kept_text", lambda engine, **_: seen.append([*names, *said]) or (engine, None)
        )
        yield
        seen.append("over")

    monkeypatch.setattr("foretell.server.loading.loading", loading)
    monkeypatch.setattr(run, "serve", lambda *_, **__: seen.append("served"))
    result = invoke(monkeypatch, "x=bundled", "--port", "0", "--method", "ngram", engine=Engine(table(1), None))
    logging.captureWarnings(False)
    assert result.exit_code == 0, result.output
    assert seen == [["x", "loading x: checking that guesses keep the text"], "over", "served"]


@pytest.mark.parametrize(("given", "name"), [("{}", None), ("other={}", "other"), ("small={}", "small")])
def test_a_name_that_is_given_is_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, name: str | None
) -> None:
    """Also where it is the file's own without its ending, by which several models would be called."""
    file, seen = tmp_path / "small.gguf", list[Any]()
    file.write_bytes(b"")
    monkeypatch.setattr(run, "serve", lambda service, options, *_, **__: seen.append(options.served_model_name))
    result = invoke(monkeypatch, given.format(file), "--port", "0", "--method", "ngram", engine=Engine(table(1), None))
    logging.captureWarnings(False)
    assert result.exit_code == 0, result.output
    assert seen == [() if name is None else (name,)]


def _until(good: Callable[[], object]) -> None:
    for _ in range(int(WAIT_S / 0.01)):
        if good():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to be")


def test_a_start_that_fails_ends_the_server() -> None:
    class Broken(FakeService):
        def start(self) -> None:
            raise MemoryError("no room")

    service = Broken()
    with run.bind("127.0.0.1", 0) as made, pytest.raises(MemoryError):
        run.serve(service, run.ServerOptions(), made, drain_s=1.0)  # type: ignore[arg-type]
    assert not service.healthy


def invoke(monkeypatch: pytest.MonkeyPatch, *options: str, engine: Engine | None = None) -> Any:
    from foretell.cli.app import app

    for name in [name for name in os.environ if name.startswith("FORETELL_") and name not in HIDING]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("foretell.cli.settings.load_engine", lambda *_, **__: engine or pytest.fail("it was loaded"))
    return CliRunner().invoke(app, ["serve", *options])


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from foretell.cli.app import app\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.slow
def test_a_server_that_is_killed_knows_what_it_has_written(tmp_path: Path) -> None:
    """A prompt is not read again, texts are guessed from, and what was not to be stored is in no file."""
    state, prefixes = tmp_path / "state", tmp_path / "prefixes"
    options = ("--method", "suffix", "--shared-drafts", "all", "--state-dir", str(state), "--prefix-dir", str(prefixes))
    prompt, hidden = [5 + n % 90 for n in range(400)], [300 + n % 70 for n in range(400)]

    def ask(server: Process, ids: list[int], **fields: Any) -> Any:
        body = {
            "prompt": ids,
            "max_tokens": 40,
            "temperature": 1,
            "seed": 1,
            "ignore_eos": True,
            "include_metrics": True,
            **fields,
        }
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S).raise_for_status().json()

    with serving(*options) as server:
        first, secret = ask(server, prompt), ask(server, hidden, store=False)
        ends = time.monotonic() + 60
        while not (list(state.glob("*.safetensors")) and list(prefixes.glob("*.safetensors"))):
            assert time.monotonic() < ends
            time.sleep(0.1)
        time.sleep(random.uniform(0, 0.1))
        server.handle.kill()
        server.handle.wait()
    content = b"".join(file.read_bytes() for folder in (state, prefixes) for file in folder.iterdir())
    assert struct.pack("<20i", *prompt[:20]) in content
    assert struct.pack("<20i", *hidden[:20]) not in content
    with serving(*options) as server:
        again, hidden_again = ask(server, prompt), ask(server, hidden)
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert hidden_again["choices"][0]["text"] == secret["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
        assert hidden_again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        accepted = [one["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] for one in (first, again)]
        assert accepted[1] > accepted[0] + 10, "the whole output is known"


# -- an engine that fails ----------------------------------------------------------------------------------------------


def test_a_server_whose_engine_fails_for_good_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor starts it anew. Until then probes and clients are told the truth."""
    pair = Engine(table(1), speculative="none")
    service, hold, said = Service(pair, ServiceOptions(max_model_len=64, speculation="on")), threading.Event(), {}
    ended: list[BaseException] = []

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a secret of the machine")

    with run.bind("127.0.0.1", 0) as made:
        made.listen()  # on_ready is called when the engine runs: who asks before the server listens waits
        url = run.url_of(made)

        def serve_it() -> None:
            try:
                run.serve(service, run.ServerOptions(), made, drain_s=5.0, on_ready=hold.set)
            except EngineError as error:
                ended.append(error)

        serving = threading.Thread(target=serve_it)
        serving.start()
        assert hold.wait(WAIT_S)
        monkeypatch.setattr("foretell.engine.batch.step", fail)
        original = service.on_failure

        def tell() -> None:
            for path in ("/health", "/ready"):
                answer = httpx.get(url + path)
                said[path] = answer.status_code, answer.json()["error"]["message"]
            original()

        service.on_failure = tell
        body = {"model": pair.model.spec.name, "prompt": [1, 2], "max_tokens": 8}
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S) for _ in range(3)]
        serving.join(WAIT_S)
    assert said == dict.fromkeys(("/health", "/ready"), (503, STATES["failed"]))
    messages = [answer.json()["error"]["message"] for answer in answers]
    assert [answer.status_code for answer in answers] == [500] * 3
    assert all("send it again" in message and "secret" not in message for message in messages)
    assert [explain(error)[1] for error in ended] == [1]


@pytest.mark.slow
def test_two_suites_of_clients_at_once_get_no_error() -> None:
    """Requests join and leave at random, and the whole method and its light part are planned apart."""
    engine = Engine.load("bundled", speculative={"method": "hybrid", "second": "draft_model"})
    service = Service(engine, ServiceOptions(max_num_seqs=6, speculation="on", kv_memory_gib=0.25))
    service.start()
    draws = {name: {(1, depth): 1e-5 * depth for depth in (1, 2, 4)} for name in ("hybrid", "suffix")}
    costs = CostTable({(1, 1): 1e-3, (1, 5): 1.1e-3}, draws, dict.fromkeys(draws, 0.0))
    planner = Planner(costs, Acceptance(16), {"hybrid": "suffix"})
    service._loop.planner = GuardedPlanner(planner, service._failures)
    answers: list[tuple[int, str]] = []

    def suite(seed: int, url: str) -> None:
        draw = random.Random(seed)
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            for number in range(size(12, 200)):
                body = {
                    "model": "bundled",
                    "prompt": draw.choice(("def f(x):", "1 2 3 1 2 3 1 2", "The")),
                    "seed": number,
                }
                body |= {
                    "max_tokens": draw.choice((1, 4, 16, 40)),
                    "n": draw.choice((1, 1, 2)),
                    "temperature": draw.random(),
                }
                answer = client.post("/v1/completions", json=body)
                answers.append((answer.status_code, answer.text))
                time.sleep(draw.random() * 0.05)

    with live(build_app(service)) as url:
        threads = [threading.Thread(target=suite, args=(seed, url)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    faults = {place: count for place, count in service.snapshot().internal_errors.items() if count}
    check_service(service)
    service.close()
    assert len(answers) == 4 * size(12, 200)
    assert [text for status, text in answers if status != 200] == []
    assert faults == {}
