"""Several models in one server: which are loaded when, for whom, and what clients are told, over fakes."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from structlog.contextvars import get_contextvars

from foretell.core.errors import ConfigError, ModelError
from foretell.server.app import build_app
from foretell.server.entries import models_in
from foretell.server.models import Models
from foretell.server.options import ModelsOptions, ServerOptions, name_of, seconds_of
from foretell.service.memory import TooLittleMemoryError
from tests.server.fake import EOS, FakeService
from tests.server.live import live

anthropic = pytest.importorskip("anthropic", reason="of the extra dev")
ollama = pytest.importorskip("ollama", reason="of the extra dev")
GIB = 2**30


class Farm:
    """Loads fakes that say their name, and remembers what was loaded and what still runs."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.running: dict[str, FakeService] = {}
        self.most = 0  # running at once
        self.gates: dict[str, threading.Event] = {}  # loading waits for them
        self.faults: dict[str, Exception] = {}  # raised once
        self.held: set[str] = set()  # whose requests stop after their first step
        self.given: list[Any] = []  # what was read before, as each load got it

    def load(self, name: str, target: str, prefixes: Any) -> Any:
        self.loaded.append(name)
        self.given.append(prefixes)
        if name in self.gates:
            assert self.gates[name].wait(60)
        if name in self.faults:
            raise self.faults.pop(name)
        service: Any = FakeService(lambda _: [*name.encode(), EOS], held=name in self.held)
        service.prefixes = None
        self.running[name] = service
        self.most = max(self.most, len(self.running))
        close = service.close

        def closed() -> None:
            close()
            self.running.pop(name, None)

        service.close = closed
        return service


def until(seen: Callable[[], Any]) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + 60
    while not seen():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.005)


Start = Callable[..., httpx.Client]


@pytest.fixture
def farm() -> Farm:
    return Farm()


@pytest.fixture
def start(farm: Farm) -> Iterator[Start]:
    """Serves models of the farm by these names; a client of it, whose ``models`` they are."""
    with ExitStack() as stack:

        def begin(*names: str, free: Any = lambda: GIB, options: Any = None, **several: Any) -> httpx.Client:
            made = Models(
                farm.load, {name: name for name in names}, options, ModelsOptions(**several), free=free  # type: ignore[arg-type]
            )  # fmt: skip
            made.preload()
            stack.callback(made.close)
            url = stack.enter_context(live(build_app(made)))
            client = stack.enter_context(httpx.Client(base_url=url, timeout=60))
            client.models = made  # type: ignore[attr-defined]
            return client

        yield begin


def asked(client: httpx.Client, model: str | None = None, **more: Any) -> httpx.Response:
    named = {} if model is None else {"model": model}
    body = {"messages": [{"role": "user", "content": "Hello"}], **named, **more}
    return client.post("/v1/chat/completions", json=body)


def said(client: httpx.Client, model: str | None = None, **more: Any) -> str:
    answer = asked(client, model, **more)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


def test_the_first_is_loaded_and_the_default_and_others_when_they_are_asked_for(start: Start, farm: Farm) -> None:
    client = start("one", "two")
    assert farm.loaded == ["one"]
    assert [said(client), said(client, "two"), said(client, "two"), said(client, "")] == ["one", "two", "two", "one"]
    assert farm.loaded == ["one", "two"]
    assert asked(client, "two").json()["model"] == "two"
    assert said(client, "two:latest") == said(client, "two.gguf") == "two"


def test_the_least_recently_used_goes_for_another(start: Start, farm: Farm) -> None:
    client = start("one", "two", "three", max_models=2)
    said(client, "two")
    said(client, "one")
    assert said(client, "three") == "three"
    assert set(farm.running) == {"one", "three"}
    assert said(client, "two") == "two"
    assert set(farm.running) == {"two", "three"}
    assert farm.most == 2


def test_pinned_models_are_loaded_at_the_start_and_stay(start: Start, farm: Farm, tmp_path: Path) -> None:
    (tmp_path / "late.gguf").touch()
    client = start("one", "two", preload=True, max_models=2, models_dir=str(tmp_path), keep_alive="0")
    assert farm.loaded == ["one", "two"]
    said(client, "one", keep_alive=0)
    client.post("/api/generate", json={"model": "two", "keep_alive": 0})
    refused = asked(client, "late")
    assert refused.status_code == 503
    assert "at most 2" in refused.json()["error"]["message"]
    assert "'one' (never unloaded), 'two' (never unloaded)" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"]
    assert set(farm.running) == {"one", "two"}
    with pytest.raises(ConfigError, match="--max-models 3"):
        Models(farm.load, dict.fromkeys("abc", "x"), None, ModelsOptions(preload=True, max_models=2))


def test_a_model_that_answers_is_not_unloaded_and_what_wants_its_room_waits(start: Start, farm: Farm) -> None:
    farm.held.add("one")
    client = start("one", "two", max_models=1)
    thread, _ = in_thread(lambda: asked(client, "one", request_id="x"))
    service = farm.running["one"]
    assert service.begun.acquire(timeout=60)
    other, found = in_thread(lambda: said(client, "two"))
    until(lambda: client.models.entries["two"].waiters)  # type: ignore[attr-defined]
    time.sleep(0.05)
    assert farm.running == {"one": service}
    assert client.get("/health").status_code == 200  # the event loop goes on
    # Who comes for the one that is to go waits behind, so that a model in steady use cannot keep another out.
    farm.held.clear()
    late, came = in_thread(lambda: said(client, "one"))
    until(lambda: client.models.entries["one"].waiters)  # type: ignore[attr-defined]
    for name in list(service._stops):
        service.cancel(name)
    for one in (thread, other, late):
        one.join(60)
    assert found == ["two"]
    assert came == ["one"]
    assert farm.loaded == ["one", "two", "one"]
    assert farm.most == 1


def test_who_waits_too_long_for_room_is_told_what_is_there(start: Start, farm: Farm) -> None:
    farm.held.add("one")
    client = start("one", "two", max_models=1, options=ServerOptions(request_timeout_s=0.2))
    thread, _ = in_thread(lambda: asked(client, "one", request_timeout=60))
    assert farm.running["one"].begun.acquire(timeout=60)
    farm.running["one"].script = lambda _: [*b"one" * 50, EOS]
    answer = asked(client, "two")
    assert answer.status_code in (200, 503)  # the other request has the same limit, and may have ended just before
    if answer.status_code == 503:
        assert "'one' (answers 1)" in answer.json()["error"]["message"]
    thread.join(60)


def test_two_who_come_at_once_load_a_model_once_and_others_answer_meanwhile(start: Start, farm: Farm) -> None:
    gate = farm.gates["two"] = threading.Event()
    client = start("one", "two")
    pairs = [in_thread(lambda: said(client, "two")) for _ in range(3)]
    until(lambda: len(client.models.entries["two"].waiters) == 3)  # type: ignore[attr-defined]
    assert said(client, "one") == "one"
    assert client.get("/v1/models/two").json()["status"] == {"value": "loading"}
    gate.set()
    for thread, _ in pairs:
        thread.join(60)
    assert [found for _, found in pairs] == [["two"]] * 3
    assert farm.loaded == ["one", "two"]


def test_a_load_that_fails_is_told_to_all_who_wait_and_tried_again(start: Start, farm: Farm) -> None:
    gate = farm.gates["two"] = threading.Event()
    farm.faults["two"] = ModelError("two: the file has 3 bytes")
    client = start("one", "two")
    pairs = [in_thread(lambda: asked(client, "two")) for _ in range(2)]
    until(lambda: len(client.models.entries["two"].waiters) == 2)  # type: ignore[attr-defined]
    gate.set()
    for thread, found in pairs:
        thread.join(60)
        (answer,) = found
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "the model 'two' cannot be loaded: two: the file has 3 bytes"
        assert answer.json()["error"]["code"] == "model_not_loaded"
    assert said(client, "two") == "two"
    farm.faults["two"] = RuntimeError("/secret/path")
    client.post("/api/generate", json={"model": "two", "keep_alive": 0})
    until(lambda: "two" not in farm.running)
    assert "internal error" in (told := asked(client, "two").json()["error"]["message"])
    assert "secret" not in told


def test_paths_of_the_machine_are_not_told(farm: Farm, start: Start, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    client = start("one", models_dir=str(tmp_path))
    farm.faults["a"] = ModelError(f"{tmp_path}/a.gguf: too short")
    assert asked(client, "a").json()["error"]["message"] == "the model 'a' cannot be loaded: a: too short"


def test_a_client_that_leaves_while_a_model_loads_holds_nothing(start: Start, farm: Farm) -> None:
    gate = farm.gates["two"] = threading.Event()
    client = start("one", "two", max_models=1)
    body = {"model": "two", "messages": [{"role": "user", "content": "Hello"}]}
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=body, timeout=0.3)
    gate.set()
    entries = client.models.entries  # type: ignore[attr-defined]
    until(lambda: entries["two"].state == "loaded")
    until(lambda: entries["two"].users == 0)
    assert said(client, "one") == "one"  # it could be unloaded


def test_streams_hold_their_model_until_their_end(start: Start, farm: Farm) -> None:
    farm.held.add("one")
    client = start("one", "two", max_models=1)
    entry = client.models.entries["one"]  # type: ignore[attr-defined]
    body = {"model": "one", "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()  # the connection is closed with it
        next(lines)
        assert entry.users == 1
    until(lambda: entry.users == 0)
    assert said(client, "two") == "two"


def test_memory_that_is_short_unloads_the_others(start: Start, farm: Farm) -> None:
    client = start("one", "two", free=lambda: 2 if "one" not in farm.running else 1)
    client.models.entries["two"].about = client.models.entries["one"].about  # type: ignore[attr-defined] # of one byte
    assert said(client, "two") == "two"
    assert set(farm.running) == {"two"}


def test_what_cannot_fit_is_refused_with_what_it_needs(start: Start, farm: Farm) -> None:
    client = start("one", "two", free=lambda: 0)
    client.models.entries["two"].about = client.models.entries["one"].about  # type: ignore[attr-defined]
    answer = asked(client, "two")
    assert answer.status_code == 503
    assert "it needs about" in answer.json()["error"]["message"]
    assert farm.loaded == ["one"]


def test_keys_and_values_that_find_no_memory_unload_another_and_are_tried_again(start: Start, farm: Farm) -> None:
    client = start("one", "two")
    farm.faults["two"] = TooLittleMemoryError("0 GiB of KV memory")
    assert said(client, "two") == "two"
    assert set(farm.running) == {"two"}
    farm.faults["one"] = TooLittleMemoryError("0 GiB of KV memory")
    client.post("/api/generate", json={"model": "two", "keep_alive": 0})
    until(lambda: not farm.running)
    answer = asked(client, "one")
    assert answer.status_code == 500
    assert "0 GiB of KV memory" in answer.json()["error"]["message"]


def test_keep_alive_unloads_and_a_request_may_say_how_long(start: Start, farm: Farm) -> None:
    client = start("one", "two", keep_alive="-1")
    talk = {"model": "two", "messages": [{"role": "user", "content": "Hello"}], "stream": False}
    assert client.post("/api/chat", json={**talk, "keep_alive": "10ms"}).json()["message"]["content"] == "two"
    until(lambda: "two" not in farm.running)
    assert client.post("/api/chat", json={**talk, "keep_alive": "5m"}).status_code == 200
    loaded = client.get("/api/ps").json()["models"]
    assert {one["name"] for one in loaded} == {"one", "two"}
    assert len({one["expires_at"][:4] for one in loaded}) == 2  # one stays for a hundred years
    assert client.post("/api/generate", json={"model": "two"}).json()["done_reason"] == "load"
    assert "two" in farm.running
    empty = client.post("/api/generate", json={"model": "two", "keep_alive": 0}).json()
    assert (empty["model"], empty["done_reason"], empty["done"]) == ("two", "unload", True)
    until(lambda: "two" not in farm.running)
    assert [one["name"] for one in client.get("/api/ps").json()["models"]] == ["one"]
    assert {one["name"] for one in client.get("/api/tags").json()["models"]} == {"one", "two"}
    wrong = client.post("/api/chat", json={**talk, "keep_alive": "soon"})
    assert wrong.status_code == 400
    assert "'soon'" in wrong.json()["error"]


def test_the_model_of_the_start_is_unloaded_too(start: Start, farm: Farm) -> None:
    client = start("one", keep_alive="20ms")
    until(lambda: not farm.running)
    assert said(client) == "one"


def test_a_model_whose_engine_has_failed_is_loaded_anew(start: Start, farm: Farm) -> None:
    client = start("one", "two")
    farm.running["one"].healthy = False
    assert said(client, "one") == "one"
    assert farm.loaded == ["one", "one"]
    assert client.get("/health").status_code == 200


def test_what_was_read_is_given_to_the_next_load_of_the_same_files(start: Start, farm: Farm, tmp_path: Path) -> None:
    from foretell.engine.prefix import PrefixStore

    file = tmp_path / "a.gguf"
    file.write_bytes(b"1")
    client = start("one", models_dir=str(tmp_path), max_models=1)
    said(client, "a")
    store: Any = PrefixStore(100)
    farm.running["a"].prefixes = store  # type: ignore[attr-defined]
    said(client, "one")
    said(client, "a")
    assert farm.given[-1] is store
    farm.running["a"].prefixes = store  # type: ignore[attr-defined]
    said(client, "one")
    file.write_bytes(b"22")
    said(client, "a")
    assert farm.given[-1] is None


def test_what_is_kept_of_models_that_are_not_loaded_has_a_bound(start: Start, farm: Farm) -> None:
    import torch

    from foretell.engine.prefix import KVPiece as Piece, Prefix, PrefixStore

    def filled() -> PrefixStore:
        store = PrefixStore(1000)
        ids = list(range(16))
        store._take(Prefix(ids, [(Piece([torch.zeros(1, 16, 10)], [], None), 16)], ()), [1])
        assert store.num_bytes == 640
        return store

    client = start("one", "two", "three", max_models=1)
    stores = {}
    for name in ("one", "two", "three"):
        said(client, name)
        stores[name] = farm.running[name].prefixes = filled()  # type: ignore[attr-defined]
    said(client, "one")
    until(lambda: stores["two"].num_bytes == 0)
    assert stores["three"].num_bytes == 640
    assert farm.given[-1] is stores["one"]


def test_models_of_a_directory_are_found_by_name_and_new_ones_without_a_restart(
    start: Start, farm: Farm, tmp_path: Path
) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "sub" / "b.GGUF").touch()
    (tmp_path / "sub" / "deep" / "config.json").touch()
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "hidden.gguf").touch()
    assert models_in(tmp_path) == {
        "a": f"{tmp_path}/a.gguf", "b": f"{tmp_path}/sub/b.GGUF", "deep": f"{tmp_path}/sub/deep"
    }  # fmt: skip
    client = start(models_dir=str(tmp_path))
    assert farm.loaded == []
    nameless = asked(client)
    assert nameless.status_code == 400
    assert "name one; this server has" in nameless.json()["error"]["message"]
    assert said(client, "deep") == "deep"
    unknown = asked(client, "deap")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"].startswith("the model 'deap' does not exist; this server has 'deep', ")
    (tmp_path / "new.gguf").touch()
    assert said(client, "new") == "new"
    (tmp_path / "new2.gguf").touch()
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["a", "b", "deep", "new", "new2"]
    (tmp_path / "new2.gguf").unlink()
    assert asked(client, "new3").status_code == 404
    assert "new2" not in [one["name"] for one in client.get("/api/tags").json()["models"]]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.gguf").touch()
    assert set(models_in(tmp_path)) == {"a", "b", "deep", "new", "other/a"}
    (tmp_path / "back").symlink_to(tmp_path, target_is_directory=True)
    assert len(models_in(tmp_path)) == 5, "a link that leads back ends"
    with pytest.raises(ConfigError, match="is no directory"):
        ModelsOptions(models_dir=str(tmp_path / "a.gguf"))


def test_one_model_of_a_directory_needs_no_name(start: Start, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert said(start(models_dir=str(tmp_path))) == "a"


def test_a_server_without_a_model_yet_says_so(start: Start, tmp_path: Path) -> None:
    client = start(models_dir=str(tmp_path))
    assert client.get("/v1/models").json()["data"] == []
    assert "this server has none" in asked(client, "x").json()["error"]["message"]
    assert client.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hello"}], "stream": False}),
        ("/api/generate", {"prompt": "Hello", "stream": False}),
        ("/tokenize", {"prompt": "Hello"}),
        ("/detokenize", {"tokens": [65]}),
    ],
)
def test_every_route_goes_to_the_model_that_is_named(start: Start, farm: Farm, path: str, body: dict[str, Any]) -> None:
    client = start("one", "two", max_models=1)
    answer = client.post(path, json={**body, "model": "two"})
    assert answer.status_code == 200, answer.text
    assert list(farm.running) == ["two"]
    until(lambda: client.models.entries["two"].users == 0)  # type: ignore[attr-defined]
    unknown = client.post(path, json={**body, "model": "twoo"})
    assert unknown.status_code == 404
    assert "this server has 'two', 'one'" in unknown.text
    assert list(farm.running) == ["two"]


def test_what_is_told_of_models(start: Start, farm: Farm) -> None:
    client = start("one", "two")
    listed = client.get("/v1/models").json()
    assert [(one["id"], one["status"]["value"]) for one in listed["data"]] == [("one", "loaded"), ("two", "unloaded")]
    assert (listed["first_id"], listed["last_id"]) == ("one", "two")
    assert listed["data"][1]["max_model_len"] is None
    assert client.get("/v1/models/two").json()["id"] == "two"
    assert client.get("/v1/models/three").status_code == 404
    shown = client.post("/api/show", json={"model": "two"}).json()
    assert shown["capabilities"] == ["completion"]  # of files that are not there
    assert client.post("/api/pull", json={"model": "two", "stream": False}).json() == {"status": "success"}
    assert client.post("/api/pull", json={"model": "three"}).status_code == 404
    assert farm.loaded == ["one"]  # nothing was loaded to tell it
    assert client.get("/props", params={"model": "two"}).json()["model_alias"] == "two"
    assert client.get("/props").json()["model_alias"] == "one"
    assert client.post("/api/show", json={"model": "two"}).json()["model_info"]["Fake.context_length"] == 4096
    assert "enum" not in str(
        client.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    )
    figures = client.get("/metrics").text
    assert 'foretell:model_loaded{model_name="two"} 1.0' in figures
    assert 'foretell:steps_total{model_name="one"}' in figures
    assert figures.count("# TYPE foretell:steps_total") == 1
    assert figures.count("# TYPE process_resident_memory_bytes ") == 1


def test_the_log_of_a_request_names_its_model(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    client = start("one", "two")
    monkeypatch.setattr("foretell.server.job.log_request", lambda *_, **__: seen.append(dict(get_contextvars())))
    said(client, "two")
    until(lambda: seen)
    assert seen[0]["model"] == "two"


def test_a_server_that_stops_tells_who_waits_and_closes_all(start: Start, farm: Farm) -> None:
    gate = farm.gates["two"] = threading.Event()
    client = start("one", "two")
    thread, found = in_thread(lambda: asked(client, "two"))
    until(lambda: client.models.entries["two"].waiters)  # type: ignore[attr-defined]
    assert client.models.drain(1.0)  # type: ignore[attr-defined]
    assert client.get("/ready").status_code == 503
    assert asked(client, "one").status_code == 503
    gate.set()
    thread.join(60)
    assert found[0].status_code == 503
    client.models.close()  # type: ignore[attr-defined]
    assert farm.running == {}
    assert client.get("/health").status_code == 503


def test_clients_choose_models_by_name(start: Start) -> None:
    url = str(start("one", "two", max_models=1).base_url)
    message: Any = [{"role": "user", "content": "Hello"}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for name in ("one", "two"):
            assert client.chat.completions.create(model=name, messages=message).choices[0].message.content == name
        assert [one.id for one in client.models.list()] == ["one", "two"]
        with pytest.raises(openai.NotFoundError, match="this server has"):
            client.chat.completions.create(model="three", messages=message)
    theirs = ollama.Client(url)
    with theirs._client:
        for name in ("one", "two"):
            assert theirs.chat(name, message).message.content == name
            assert [one.model for one in theirs.ps().models] == [name]
        assert {one.model for one in theirs.list().models} == {"one", "two"}
    with anthropic.Anthropic(base_url=url, api_key="none") as third:
        for name in ("one", "two"):
            made: Any = third.messages.create(model=name, messages=message, max_tokens=9)
            assert made.content[0].text == name
        assert [one.id for one in third.models.list()] == ["one", "two"]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0), ("0", 0), (5, 5), ("5m", 300), ("1h30m", 5400), ("300ms", 0.3), (".5s", 0.5), (-1, float("inf")),
        ("-1m", float("inf")), ("1e99", float("inf")), ("inf", float("inf")), (" 90 ", 90),
    ],
)  # fmt: skip
def test_times_are_read_as_ollama_reads_them(given: float | str, seconds: float) -> None:
    assert seconds_of(given) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["", "soon", "5 m", "5x", "nan", "5m3", "m"])
def test_what_is_no_time_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="is no time"):
        seconds_of(given)


def test_names_of_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.gguf").touch()
    assert [name_of(one) for one in ("x.gguf", "./y.gguf", "/a/b.GGUF", "Qwen/Qwen3-8B", "bundled")] == [
        "x", "y", "b", "Qwen/Qwen3-8B", "bundled"
    ]  # fmt: skip
    assert name_of(".") == tmp_path.name
