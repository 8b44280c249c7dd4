"""A server with two adapters: ``model`` chooses, alone and at the same time, by every API."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import torch

from foretell import ConfigError, Engine
from foretell.checkpoints.directories import resolve
from foretell.checkpoints.weights import SafetensorsWeights
from foretell.server.app import build_app
from foretell.server.options import ServerOptions
from foretell.service.options import ServiceOptions
from foretell.service.service import Service
from tests.engine.integrity import check_service
from tests.model.adapters import write_adapter
from tests.server.conftest import Serve
from tests.server.fake import FakeService
from tests.server.live import live

PROMPT = "The quick brown fox jumps over the lazy dog, and the lazy dog does not mind the fox. "
NAMES = ("bundled", "one", "two")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The bundled pair with two random adapters."""
    source = SafetensorsWeights(resolve("bundled"))
    shapes = {name: torch.empty(source.shape(name)) for name in source.names if len(source.shape(name)) == 2}
    loras = {
        name: write_adapter(tmp_path_factory.mktemp(name), shapes, seed=seed, rank=8, size=0.06)
        for seed, name in enumerate(NAMES[1:])
    }
    engine = Engine.load("bundled", speculative="draft_model", lora=loras)
    options = ServiceOptions(max_num_seqs=4, max_queue=16, speculation="on", kv_memory_gib=0.25)
    service = Service(engine, options)
    service.start()
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(adapted: Service) -> Iterator[httpx.Client]:
    with ExitStack() as stack:
        url = stack.enter_context(live(build_app(adapted, ServerOptions())))
        yield stack.enter_context(httpx.Client(base_url=url, timeout=60))


@pytest.fixture(scope="module")
def expected(adapted: Service) -> dict[str, str]:
    """The text of each name, by plain decoding alone."""
    plain = adapted.engine.with_method("none")
    found = {
        name: plain.generate(PROMPT, temperature=0.0, max_new_tokens=24, ignore_eos=True, lora=lora).text
        for name, lora in zip(NAMES, (None, "one", "two"), strict=True)
    }
    assert len({*found.values()}) == 3
    return found


def asked(name: str, **more: Any) -> dict[str, Any]:
    return {"model": name, "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True, **more}


def streamed(client: httpx.Client, name: str) -> str:
    with client.stream("POST", "/v1/completions", json=asked(name, stream=True)) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    assert {chunk["model"] for chunk in chunks} == {name}
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


def test_models_at_once_whole_and_streamed(client: httpx.Client, expected: dict[str, str]) -> None:
    """Each has its own text beside any other; the base's name, no name and "" are the base."""

    def whole(name: str) -> str:
        answer = client.post("/v1/completions", json=asked(name)).raise_for_status().json()
        assert answer["model"] == (name or NAMES[0])
        text: str = answer["choices"][0]["text"]
        return text

    names = [*NAMES, "", *NAMES[::-1]]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(whole, names))
        streams = list(pool.map(lambda name: streamed(client, name), NAMES))
    assert texts == [expected[name or NAMES[0]] for name in names]
    assert streams == [expected[name] for name in NAMES]


def test_no_prefix_of_one_is_anothers(adapted: Service, client: httpx.Client, expected: dict[str, str]) -> None:
    """What is found again is of the same adapter, and the text stays."""
    adapted._loop.batch.prefixes.clear()  # type: ignore[union-attr]
    for is_cached in (False, True):
        for name in NAMES:
            answer = client.post("/v1/completions", json=asked(name)).raise_for_status().json()
            assert answer["choices"][0]["text"] == expected[name]
            assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == is_cached, name
    check_service(adapted)


def test_other_apis_take_the_name(client: httpx.Client, expected: dict[str, str]) -> None:
    options = {"num_predict": 24, "temperature": 0}
    ollama = {"prompt": PROMPT, "raw": True, "stream": False, "options": options}
    for name in (*NAMES, "one:latest"):
        answer = client.post("/api/generate", json={"model": name, **ollama}).raise_for_status().json()
        assert answer["model"] == name.removesuffix(":latest")
        assert expected[answer["model"]].startswith(answer["response"])
        assert len(answer["response"]) > 10
    vectors = []
    for name in NAMES:
        answer = client.post("/v1/embeddings", json={"model": name, "input": PROMPT}).raise_for_status().json()
        assert answer["model"] == name
        vectors.append(answer["data"][0]["embedding"])
    assert len({*map(tuple, vectors)}) == 3


def test_what_is_served(client: httpx.Client) -> None:
    listed = client.get("/v1/models").raise_for_status().json()
    assert [(each["id"], each["parent"]) for each in listed["data"]] == [
        (NAMES[0], None), ("one", NAMES[0]), ("two", NAMES[0]),
    ]  # fmt: skip
    assert (listed["first_id"], listed["last_id"]) == (NAMES[0], "two")
    assert client.get("/v1/models/two").raise_for_status().json()["id"] == "two"
    assert [each["name"] for each in client.get("/api/tags").json()["models"]] == list(NAMES)
    assert client.post("/api/show", json={"model": "two"}).json()["details"]["parent_model"] == NAMES[0]


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/completions", "prompt"), ("/api/generate", "prompt"), ("/v1/embeddings", "input")]
)
def test_another_name_is_not_found(client: httpx.Client, path: str, field: str) -> None:
    answer = client.post(path, json={"model": "three", field: PROMPT})
    assert answer.status_code == 404
    assert "the model 'three' does not exist; this server has 'bundled', 'one', 'two'" in answer.text


def test_names_must_differ() -> None:
    service: Any = FakeService()
    service.engine.model.loras = ("fake",)
    with pytest.raises(ConfigError, match="an adapter is named 'fake' as the model is"):
        build_app(service, ServerOptions())


def test_requests_carry_the_adapter(serve: Serve) -> None:
    """By OpenAI's chats and responses, Anthropic's messages and Ollama's chats."""
    service: Any = FakeService()
    service.engine.model.loras = ("one",)
    client, messages = serve(service), [{"role": "user", "content": "a"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}), ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 4}), ("/api/chat", {"messages": messages, "stream": False}),
    ):  # fmt: skip
        for name, lora in (("one", "one"), ("fake", None)):
            answer = client.post(path, json={"model": name, **body}).raise_for_status().json()
            assert answer["model"] == name, path
            assert service.submitted[-1].lora == lora, path
