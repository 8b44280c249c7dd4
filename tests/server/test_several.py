"""Two models in one server, loaded and unloaded in turn: each writes what a server of its own writes, and nothing stays."""

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from foretell import Engine, Service, ServiceOptions
from foretell.server.app import build_app
from foretell.server.models import Models
from foretell.server.options import ModelsOptions
from tests.server.live import live

TARGETS = {"large": "bundled", "small": "bundled/draft"}
OPTIONS = ServiceOptions(max_num_seqs=4, speculation="on", kv_memory_gib=0.1)
PROMPTS = ("def add(a, b):", "Rain falls on the", "class Node:")
LONG = "The quick brown fox jumps over the lazy dog. " * 12


class Loads:
    """Loads real models, and knows those that are not yet freed."""

    def __init__(self, **options: Any) -> None:
        self.seen: list[weakref.ref[Any]] = []
        self.options = options

    def __call__(self, name: str, target: str, prefixes: Any) -> Service:
        options = ServiceOptions(**{**vars(OPTIONS), **self.options})
        service = Service(Engine.load(target, speculative="suffix"), options, prefixes=prefixes)
        service.start()
        self.seen.append(weakref.ref(service.engine.model))
        return service

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(one() is not None for one in self.seen)


@contextmanager
def several(loads: Loads, **options: Any) -> Iterator[httpx.Client]:
    models = Models(loads, TARGETS, None, ModelsOptions(**options))
    models.preload()
    try:
        with live(build_app(models)) as url, httpx.Client(base_url=url, timeout=120) as client:
            yield client
    finally:
        models.close()


def written(client: httpx.Client, name: str | None, prompt: str, temperature: float) -> str:
    body = {"prompt": prompt, "max_tokens": 16, "temperature": temperature, "seed": 11, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body if name is None else {**body, "model": name})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str, float], str]:
    """What each writes in a server of its own."""
    texts = {}
    for name in TARGETS:
        service = Loads()(name, TARGETS[name], None)
        with live(build_app(service)) as url, httpx.Client(base_url=url, timeout=120) as client:
            for prompt in PROMPTS:
                for temperature in (0.0, 1.0):
                    texts[name, prompt, temperature] = written(client, None, prompt, temperature)
        service.close()
    return texts


def test_twenty_swaps_change_no_text_and_leave_nothing(alone: dict[tuple[str, str, float], str]) -> None:
    loads = Loads()
    with several(loads, max_models=1) as client:
        for turn in range(20):
            name = ("small", "large")[turn % 2]
            prompt = PROMPTS[turn % 3]
            for temperature in (0.0, 1.0):
                assert written(client, name, prompt, temperature) == alone[name, prompt, temperature]
            assert loads.alive == 1
        assert len(loads.seen) == 21


def test_a_model_goes_with_its_last_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the collector, which holds up the models that answer; after every kind of request."""
    loads, looked = Loads(), list[int]()
    texts = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "logprobs": 2, "echo": True}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8, "response_format": {"type": "json_object"}}
    with several(loads, max_models=1) as client:
        monkeypatch.setattr("foretell.service.memory.gc.collect", lambda: looked.append(1))
        gc.disable()
        try:
            for turn in range(4):
                name = ("large", "small")[turn % 2]
                for path, body in (("completions", texts), ("chat/completions", chat), ("embeddings", {"input": "a"})):
                    answer = client.post(f"/v1/{path}", json={**body, "model": name})
                    assert answer.status_code in (200, 400), answer.text  # without a chat template
                assert [one() is not None for one in loads.seen] == [False] * turn + [True]
        finally:
            gc.enable()
        assert not looked


def test_two_that_answer_at_once_change_no_text(alone: dict[tuple[str, str, float], str]) -> None:
    """Also where they take the place of each other while requests wait."""
    for most in (2, 1):
        with several(Loads(), max_models=most) as client, ThreadPoolExecutor(4) as pool:
            asked = [key for key in alone for _ in range(2)]
            made = [pool.submit(written, client, *key) for key in asked]
            assert [one.result() for one in made] == [alone[key] for key in asked]


def cached(client: httpx.Client, name: str) -> int:
    """Tokens of a long prompt that were known."""
    body = {"model": name, "prompt": LONG, "max_tokens": 1, "temperature": 0}
    details = client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]
    return int((details or {}).get("cached_tokens", 0))


def test_vectors_of_one_while_the_other_decodes() -> None:
    """Each is that of a server of its own, and the text does not change."""
    given = {"input": ["a text", "def add(a, b):", LONG], "model": "small"}
    with several(Loads(), max_models=2) as client:
        vectors = client.post("/v1/embeddings", json=given).json()["data"]
        body = {"model": "large", "prompt": PROMPTS[0], "max_tokens": 150, "temperature": 0, "ignore_eos": True}
        text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(client.post, "/v1/completions", json=body)
            for _ in range(3):
                assert client.post("/v1/embeddings", json=given).json()["data"] == vectors
            assert writing.result().json()["choices"][0]["text"] == text


def test_what_was_read_of_a_prompt_survives_an_unload() -> None:
    with several(Loads(), max_models=1) as client:
        assert cached(client, "large") == 0
        count = cached(client, "large")
        assert count > 64
        for _ in range(2):
            assert cached(client, "small") in (0, count)
            assert cached(client, "large") == count


def test_what_was_read_is_on_disk_too(tmp_path: Path) -> None:
    """As of one model; and what comes back from memory is written where the model is loaded again."""
    loads = Loads(prefix_dir=str(tmp_path))
    with several(loads, max_models=1) as client:
        assert cached(client, "large") == 0
        cached(client, "small")
        assert cached(client, "large") > 64
    with several(loads, max_models=1) as client:
        assert cached(client, "large") > 64


def counted(client: httpx.Client, name: str) -> dict[str, float]:
    """What a model's counters say that only grow."""
    told = text_string_to_metric_families(client.get("/metrics").text)
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in told
        if family.type in ("counter", "histogram")
        for sample in family.samples
        if sample.labels.get("model_name") == name and not sample.name.endswith("loads_total")
    }


def test_counters_go_on_where_a_model_is_loaded_again() -> None:
    with several(Loads(), max_models=1) as client:
        seen = list[dict[str, float]]()
        for name in ("large", "small", "large", "small", "large"):
            written(client, name, PROMPTS[0], 0.0)
            seen.append(counted(client, "large"))
        tokens = "foretell:generation_tokens_total[('model_name', 'large')]"
        assert [one[tokens] for one in seen] == [16, 16, 32, 32, 48]
        ended = "foretell:request_generation_tokens_count[('model_name', 'large')]"
        assert [one[ended] for one in seen] == [1, 1, 2, 2, 3]
        for earlier, later in pairwise(seen):
            assert all(later[key] >= value for key, value in earlier.items())


def test_vectors_are_those_of_the_model_that_is_named() -> None:
    with several(Loads(), max_models=1) as client:
        for name, size in (("large", 256), ("small", 128), ("large", 256)):
            made = client.post("/v1/embeddings", json={"model": name, "input": "a text"}).json()
            assert (made["model"], len(made["data"][0]["embedding"])) == (name, size)
            theirs = client.post("/api/embed", json={"model": name, "input": "a text", "keep_alive": "1m"}).json()
            assert theirs["embeddings"] == [made["data"][0]["embedding"]]
