"""A server at its default options, as a user starts it: predicted outputs guess, and what does not guess says why."""

from collections.abc import Iterator

import openai
import pytest

from foretell import Engine
from foretell.server.app import build_app
from foretell.server.options import ServerOptions
from foretell.service.options import ServiceOptions
from foretell.service.service import Service
from tests.server.live import live

MESSAGES: list[dict[str, str]] = [{"role": "user", "content": "Write a function that adds two numbers."}]


@pytest.fixture(scope="module")
def default_client() -> Iterator[openai.OpenAI]:
    service = Service(Engine.load("bundled", speculative="draft_model"), ServiceOptions(kv_memory_gib=0.25))
    service.start()
    service.measure()  # a server is ready before, and measures while it is idle
    with live(build_app(service, ServerOptions())) as url:
        yield openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)
    service.close()


@pytest.mark.slow
def test_an_exact_prediction_is_mostly_accepted(default_client: openai.OpenAI) -> None:
    """It was a silent no-op: 0 accepted, unless the server was started with ``--also prediction``."""
    chat = default_client.chat.completions
    plain = chat.create(model="bundled", seed=1, max_tokens=96, temperature=0, messages=MESSAGES)  # type: ignore[arg-type]
    text = plain.choices[0].message.content
    assert text
    accepted = []
    for _ in range(
        60
    ):  # what passes cost is measured between requests, and beside other programs guessing may stop again
        again = chat.create(
            model="bundled",
            seed=1,
            max_tokens=96,
            temperature=0,
            messages=MESSAGES,  # type: ignore[arg-type]
            prediction={"type": "content", "content": text},
        )
        assert again.choices[0].message.content == text
        accepted.append(again.usage.completion_tokens_details.accepted_prediction_tokens or 0)
    assert max(accepted) > 0.75 * again.usage.completion_tokens, accepted


def test_one_token_has_its_own_reason_for_no_guess(default_client: openai.OpenAI) -> None:
    """It was told that guessing was not expected to pay, though it was asked for in every step."""
    reply = default_client.completions.create(
        model="bundled",
        prompt="def add(a, b):",
        max_tokens=1,
        extra_body={"speculative": {"method": "ngram", "always": True}, "include_metrics": True},
    )
    figures = reply.model_extra["metrics"]["speculative_decoding"]
    assert figures["plain_reason"] == "one token takes one pass, guessed or not"


@pytest.mark.slow
def test_the_example_of_the_readme_guesses_or_says_why(default_client: openai.OpenAI) -> None:
    reply = default_client.chat.completions.create(
        model="bundled",
        seed=1,
        max_tokens=96,
        messages=MESSAGES,  # type: ignore[arg-type]
        extra_body={"speculative": {"method": "ngram"}, "include_metrics": True},
    )
    figures = reply.model_extra["metrics"]["speculative_decoding"]
    assert bool(figures["num_draft_tokens"]) != bool(figures["plain_reason"]), figures
