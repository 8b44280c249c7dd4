"""Two clients with a key each: what the second is told is what it would be told if the first had never been there."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from foretell import Engine
from foretell.server.app import build_app
from foretell.server.options import ServerOptions
from foretell.service.options import ServiceOptions
from foretell.service.service import Service
from tests.server.conftest import Serve
from tests.server.fake import FakeService
from tests.server.live import live

KEYS = ("first-key", "second-key")
TEXT = "/v1/completions"
PROMPT = "The quick brown fox jumps over the lazy dog, and the lazy dog does not mind the fox. "


@contextmanager
def clients(engine: Engine, **options: Any) -> Iterator[list[httpx.Client]]:
    """A client of each key, of a service of its own."""
    service = Service(engine, ServiceOptions(max_num_seqs=4, speculation="on", kv_memory_gib=0.1, **options))
    service.start()
    with ExitStack() as stack:
        stack.callback(service.close)
        url = stack.enter_context(live(build_app(service, ServerOptions(api_keys=KEYS))))
        yield [
            stack.enter_context(httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {key}"}))
            for key in KEYS
        ]


def told(client: httpx.Client) -> dict[str, Any]:
    """All that an answer says, but for its id and time."""
    body = {
        "model": "bundled", "prompt": PROMPT, "seed": 1, "max_tokens": 24, "temperature": 0, "trace": True,
        "provenance": True, "ignore_eos": True, "speculative": {"method": "suffix"},
    }  # fmt: skip
    answer: dict[str, Any] = client.post(TEXT, json=body).raise_for_status().json()
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("shared", ["off", "key"])
def test_the_second_client_is_told_nothing_of_the_first(bundled: Service, shared: str) -> None:
    with clients(bundled.engine, shared_drafts=shared) as (_, alone):
        expected = told(alone)
    assert cached(expected) == 0
    with clients(bundled.engine, shared_drafts=shared) as (first, second):
        told(first)
        again = told(first)
        assert told(second) == expected
    assert cached(again) > 0, "within a key prefixes are reused"
    shares = again["choices"][0]["trace"] != expected["choices"][0]["trace"]
    assert shares == (shared == "key"), "within a key texts are learned from where that is asked for"


def test_control_where_all_share_the_second_client_sees_the_first(bundled: Service) -> None:
    with clients(bundled.engine, shared_drafts="all") as (_, alone):
        expected = told(alone)
    with clients(bundled.engine, shared_drafts="all") as (first, second):
        told(first)
        assert told(second)["choices"][0]["trace"] != expected["choices"][0]["trace"]


def test_a_key_is_a_tenant_and_its_name_tells_nothing(serve: Serve) -> None:
    service = FakeService()
    client = serve(service, api_keys=KEYS)
    for key in (*KEYS, KEYS[0]):
        body = {"model": "fake", "prompt": "a"}
        assert client.post(TEXT, json=body, headers={"authorization": f"Bearer {key}"}).status_code == 200
    names = [submission.tenant for submission in service.submitted]
    assert names[0] == names[2] != names[1]
    assert all(name is not None and key not in name for name, key in zip(names, KEYS, strict=False))


def test_without_keys_nobody_is_a_tenant(serve: Serve) -> None:
    service = FakeService()
    assert serve(service).post(TEXT, json={"model": "fake", "prompt": "a"}).status_code == 200
    assert [submission.tenant for submission in service.submitted] == [None]


def test_a_request_cannot_ask_for_more_memory(fake: httpx.Client) -> None:
    speculative = {"method": "suffix", "suffix_decoding_max_cached_tokens": 10**9}
    refused = fake.post(TEXT, json={"model": "fake", "prompt": "a", "speculative": speculative})
    assert refused.status_code == 400
    assert "suffix_decoding_max_cached_tokens" in refused.json()["error"]["message"]
