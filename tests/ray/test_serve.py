"""Ray Serve: replicas on one machine, with a stand-in for the model, and once with the real server."""

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

import foretell  # noqa: E402
from foretell.core.errors import ConfigError  # noqa: E402
from tests.ray.stand_in import Diary, build  # noqa: E402


@dataclass
class Client:
    """What a client of a server that may lose a process does: ask again, and count it."""

    port: int
    retries: int = 0

    def ask(self, name: str, seconds: float = 0.0, session: str | None = None, path: str = "/work") -> dict[str, Any]:
        headers = {"content-type": "application/json"} | ({"x-session-id": session} if session else {})
        for attempt in range(600):
            connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
            try:
                body = json.dumps({"id": name, "attempt": attempt, "seconds": seconds})
                connection.request("POST", path, body, headers)
                response = connection.getresponse()
                answer = response.read()
                if response.status == 200:
                    return json.loads(answer)
                assert response.status >= 500, answer
            except (HTTPException, OSError):
                pass
            finally:
                connection.close()
            self.retries += 1
            time.sleep(0.1)
        raise AssertionError(f"{name} was never answered")


@dataclass
class Served:
    """A running application, and what its replicas wrote down."""

    client: Client
    diary: Diary

    def processes(self, among: int = 40) -> set[int]:
        """The replicas that answer."""
        with ThreadPoolExecutor(4) as pool:
            return {row["pid"] for row in pool.map(lambda i: self.client.ask(f"who-{i}"), range(among))}


@pytest.fixture(scope="module")
def port(cluster: None) -> int:
    """Of Serve's proxy: free a moment ago."""
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})
    return port


@pytest.fixture(scope="module")
def served(port: int, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Two replicas of the stand-in; Serve looks at their health often."""
    import foretell.ray
    from ray import serve

    folder = tmp_path_factory.mktemp("served")
    application = foretell.ray.app(str(folder), num_replicas=2, health_check_period_s=0.3, build=build)
    serve.run(application, name="stand-in", route_prefix="/work")
    return Served(Client(port), Diary(folder))


def until(holds: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"still not: {what}"
        time.sleep(0.2)


def test_a_session_stays_with_its_replica_and_sessions_use_all(served: Served) -> None:
    seen = {f"s{i}": {served.client.ask(f"s{i}-{j}", session=f"s{i}")["pid"] for j in range(5)} for i in range(16)}
    assert all(len(processes) == 1 for processes in seen.values())
    assert len(set.union(*seen.values())) == 2
    assert set.union(*seen.values()) == served.processes()  # and so do requests without a session


def test_one_of_two_replicas_killed_under_load(served: Served) -> None:
    victim = min(served.processes())
    names = [f"load-{i}" for i in range(240)]  # some seconds: a busy machine may look late
    before = served.client.retries
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(served.client.ask, name, 0.15) for name in names]
        until(lambda: sum(answer.done() for answer in answers) >= 12, "some are answered")
        until(lambda: served.diary.num_open(victim) >= 2, "the victim is at work")
        os.kill(victim, signal.SIGKILL)
        told = [answer.result() for answer in answers]
    assert Counter(row["id"] for row in told) == Counter(names)
    ends = [words for words in served.diary.read("end") if words[0].startswith("load-")]
    begins = [words for words in served.diary.read("begin") if words[0].startswith("load-")]
    # Nothing is sent twice by Serve itself: what a client asked once was worked on once.
    assert max(Counter((name, attempt) for name, attempt, _ in begins).values()) == 1
    # A second end can only be one whose first answer died with the victim on its way.
    ended = Counter(name for name, _, _ in ends)
    assert set(ended) == set(names)
    for name in (name for name, count in ended.items() if count > 1):
        first, last = (int(process) for found, _, process in ends if found == name)
        assert first == victim != last
    lost = {(name, attempt) for name, attempt, _ in begins} - {(name, attempt) for name, attempt, _ in ends}
    assert 0 < len(lost) <= served.client.retries - before  # the victim was at work, and clients had to ask again
    assert all(int(process) == victim for name, attempt, process in begins if (name, attempt) in lost)
    until(lambda: len(served.processes()) == 2, "a new replica in place of the dead one")
    assert victim not in served.processes()


def test_a_replica_that_is_not_healthy_is_replaced(served: Served) -> None:
    sick = max(served.processes())
    (served.diary.folder / f"sick-{sick}").touch()
    until(lambda: sick not in served.processes(), "the sick replica is out")
    until(lambda: len(served.processes()) == 2, "a new replica in place of the sick one")


def test_stopping_waits_for_the_requests_that_run(served: Served) -> None:
    from ray import serve

    processes = served.processes()
    with ThreadPoolExecutor(4) as pool:
        before = served.client.retries
        answers = [pool.submit(served.client.ask, f"last-{i}", 1.5, f"s{i}") for i in range(4)]
        until(lambda: sum(words[0].startswith("last-") for words in served.diary.read("begin")) == 4, "all four run")
        serve.delete("stand-in")
        told = {answer.result()["id"] for answer in answers}
    assert told == {f"last-{i}" for i in range(4)}
    assert served.client.retries == before
    for event in ("drain", "close"):
        assert processes <= {int(words[0]) for words in served.diary.read(event)}


def test_the_real_server_behind_serve(port: int) -> None:
    from foretell.ray import app
    from ray import serve

    speculative = {"method": "draft_model", "num_speculative_tokens": 3}
    application = app(
        "bundled",
        speculative=speculative,
        service_options={"max_num_seqs": 4, "speculation": "on"},
        server_options={"served_model_name": "bundled-by-ray"},
    )
    serve.run(application, name="real", route_prefix="/")
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    asked = {"model": "bundled-by-ray", "prompt": "def f(x):", "max_tokens": 12, "temperature": 0.8, "seed": 3}
    connection.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
    response = connection.getresponse()
    whole = json.loads(response.read())
    assert response.status == 200, whole
    params = foretell.SamplingParams(max_new_tokens=12, temperature=0.8, seed=3)
    assert whole["choices"][0]["text"] == foretell.Engine.load("bundled").generate("def f(x):", params).text
    connection.request(
        "POST", "/v1/completions", json.dumps(asked | {"stream": True}), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    events = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    parts = [json.loads(event)["choices"] for event in events[:-1]]
    assert "".join(choice["text"] for choices in parts for choice in choices) == whole["choices"][0]["text"]
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    assert response.status == 200
    connection.close()
    serve.delete("real")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"service_options": {"max_num_seq": 4}}, "did you mean 'max_num_seqs'"),
        ({"service_options": {"max_num_seqs": 0}}, "max_num_seqs = 0"),
        ({"server_options": {"api_key": "x"}}, "did you mean 'api_keys'"),
        ({"server_options": 3}, "server_options = 3"),
        ({"speculative": "oracle"}, "oracle"),
        ({"engine_options": {"devise": "cpu"}}, "did you mean 'device'"),
        ({"num_replicas": 2, "autoscaling": {"max_replicas": 3}}, "give one of them"),
        ({"autoscaling": {"max_replicas": -3}}, "max_replicas"),
        ({"replicas": 2}, "did you mean 'num_replicas'"),
        ({"build": "tests.ray.stand_in:build"}, "unknown key 'build' in the arguments"),
    ],
)
def test_options_are_refused_before_anything_is_deployed(args: dict[str, Any], says: str) -> None:
    from foretell.ray import from_args

    with pytest.raises(ConfigError, match=says):
        from_args(args)


def test_what_a_deployment_asks_of_ray() -> None:
    from foretell.ray import app, from_args

    def options(application: Any) -> Any:
        return application._bound_deployment

    plain = options(app(service_options={"max_num_seqs": 16}))
    assert (plain.num_replicas, plain.max_ongoing_requests) == (1, 20)
    assert plain.ray_actor_options["num_cpus"] == 1
    assert "ConsistentHashRouter" in str(plain._deployment_config.request_router_config.request_router_class)
    assert "ConsistentHash" not in str(options(app(affinity=False))._deployment_config.request_router_config)
    on_gpu = options(app(engine_options={"device": "cuda"}, max_ongoing_requests=7, drain_timeout_s=9))
    assert on_gpu.ray_actor_options["num_gpus"] == 1
    assert (on_gpu.max_ongoing_requests, on_gpu._deployment_config.graceful_shutdown_timeout_s) == (7, 9)
    texts = {"autoscaling": '{"min_replicas": 1, "max_replicas": 3}', "speculative": "ngram", "affinity": "false"}
    scaled = options(from_args(texts))._deployment_config
    assert scaled.autoscaling_config.max_replicas == 3
    assert scaled.autoscaling_config.target_ongoing_requests == 16
    assert "ConsistentHash" not in str(scaled.request_router_config)


def test_the_config_files_of_the_guide_are_what_serve_deploy_takes() -> None:
    import yaml
    from ray._common.utils import import_attr
    from ray.serve.schema import ServeDeploySchema

    guide = (Path(foretell.__path__[0]).parents[1] / "docs" / "ray.md").read_text(encoding="utf-8")
    blocks = [block.split("```")[0] for block in guide.split("```yaml\n")[1:]]
    assert blocks
    for block in blocks:
        for application in ServeDeploySchema.model_validate(yaml.safe_load(block)).applications:
            import_attr(application.import_path)(application.args)


def test_without_ray_there_is_one_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    import foretell.ray as module

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("app", "generate_files"):
        monkeypatch.delitem(vars(module), name, raising=False)
        with pytest.raises(ConfigError, match=r"pip install 'foretell\[ray\]'"):
            getattr(module, name)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = module.nothing_such
