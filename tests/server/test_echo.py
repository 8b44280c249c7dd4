"""Prompts that are scored: ``echo`` with ``logprobs``, ``max_tokens: 0``, and what programs that score texts read of it."""

from typing import Any

import httpx
import openai
import pytest

from foretell import Engine
from foretell.server.replies.completions import ChatReply, TextReply
from foretell.service.service import Service
from tests.server.conftest import Serve
from tests.server.fake import EOS, FakeService
from tests.server.test_completions import complete

TEXT = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_offsets_and_scores_of_prompt_and_output(serve: Serve, stream: bool) -> None:
    client = serve(FakeService(lambda _: [*b"!?", EOS]))
    given: Any = {"echo": True, "logprobs": 2, "seed": 1}
    if stream:
        with openai.OpenAI(base_url=str(client.base_url) + "/v1", api_key="none") as reader:
            chunks = list(reader.completions.create(model="fake", prompt="aü", stream=True, **given))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "aü!?"
        parts = [chunk.choices[0].logprobs.model_dump() for chunk in chunks if chunk.choices[0].logprobs is not None]
    else:
        reply = TextReply.model_validate(complete(client, "aü", **given).json(), strict=True)
        assert reply.choices[0].text == "aü!?"
        assert reply.choices[0].logprobs is not None
        parts = [reply.choices[0].logprobs.model_dump()]
    whole = {key: [one for part in parts for one in part[key]] for key in parts[0]}
    assert whole["tokens"] == ["a", "\ufffd", "\ufffd", "!", "?", ""]  # the end token has its entry here
    assert whole["text_offset"] == [0, 1, 1, 2, 3, 4]
    assert whole["token_logprobs"] == [None, -0.25, -0.5, -0.5, -0.5, -0.5]
    assert whole["top_logprobs"][:2] == [None, {"\ufffd": -0.25, "B": -9.0}]


def test_all_choices_have_the_prompts_scores(serve: Serve) -> None:
    client = serve(FakeService(lambda _: [*b"!", EOS]))
    given: Any = {"echo": True, "logprobs": 0, "n": 2}
    choices = complete(client, ["ab", "c"], **given).json()["choices"]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [["a", "b", "!", ""]] * 2 + [["c", "!", ""]] * 2
    assert choices[0]["logprobs"]["top_logprobs"] == [None, {"b": -0.25}, {"!": -0.5}, {"": -0.5}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("more", "text"), [({}, ""), ({"echo": True}, "ab"), ({"echo": True, "logprobs": 1}, "ab")])
def test_nothing_is_written_where_nothing_is_asked_for(
    serve: Serve, more: dict[str, Any], text: str, stream: bool
) -> None:
    service = FakeService()
    client = serve(service)
    if stream:
        with openai.OpenAI(base_url=str(client.base_url) + "/v1", api_key="none") as reader:
            usage: Any = {"include_usage": True}
            chunks = list(
                reader.completions.create(
                    model="fake", prompt="ab", max_tokens=0, stream=True, stream_options=usage, **more
                )
            )
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text
        assert chunks[-2].choices[0].finish_reason == "length"
        counted = chunks[-1].usage
        assert (counted.prompt_tokens, counted.completion_tokens) == (2, 0)
    else:
        reply = TextReply.model_validate(complete(client, "ab", max_tokens=0, **more).json(), strict=True)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == (text, "length")
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2, 0)
    assert service.submitted[0].write is False


def test_a_conversation_of_which_nothing_is_written(serve: Serve) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0}
    reply = ChatReply.model_validate(serve().post("/v1/chat/completions", json=body).json(), strict=True)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("", "length")
    assert reply.usage.completion_tokens == 0


def test_a_prompt_may_fill_the_context_where_nothing_is_written(serve: Serve) -> None:
    client = serve(FakeService(max_model_len=8))
    assert complete(client, "a" * 8, max_tokens=0, echo=True, logprobs=1).status_code == 200
    for text, limit in (("a" * 8, 1), ("a" * 9, 0)):
        error = complete(client, text, max_tokens=limit).json()["error"]
        assert error["code"] == "context_length_exceeded"
    assert complete(client, "a", max_tokens=0, min_tokens=1).status_code == 400


def test_every_chunk_counts_where_that_was_asked_for(serve: Serve) -> None:
    client = serve(FakeService(lambda _: [*b"abcdef", EOS]))
    asked: Any = {"include_usage": True, "continuous_usage_stats": True}
    user: Any = [{"role": "user", "content": "ab"}]
    with openai.OpenAI(base_url=str(client.base_url) + "/v1", api_key="none") as reader:
        texts = list(reader.completions.create(model="fake", prompt="ab", stream=True, stream_options=asked))
        chats = list(reader.chat.completions.create(model="fake", messages=user, stream=True, stream_options=asked))
    for chunks in (texts, chats):
        counts = []
        for chunk in chunks:
            assert chunk.usage.prompt_tokens == chunks[-1].usage.prompt_tokens > 0  # type: ignore[union-attr]
            assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
            counts.append(chunk.usage.completion_tokens)
        assert counts == sorted(counts)
        assert counts[-1] == 7
        assert chunks[-1].choices == []
    error = client.post(
        "/v1/completions",
        json={"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}},
    ).json()["error"]
    assert "include_usage" in error["message"]


def test_scores_over_http_are_the_engines_and_do_not_depend_on_guesses(url: str, bundled: Service) -> None:
    """As lm-eval's local-completions asks: one greedy token more, whose entry it drops."""
    engine = Engine(bundled.engine.model, bundled.engine.tokenizer)
    (pieces,) = engine.score([TEXT], num_logprobs=1)
    with httpx.Client(base_url=url, timeout=120) as client:
        body = {"prompt": [piece.token_id for piece in pieces], "max_tokens": 1, "temperature": 0, "echo": True}
        for more in ({}, {"speculative": False}, {"speculative": {"method": "suffix"}}):
            answer = client.post("/v1/completions", json={**body, "logprobs": 1, **more}).json()
            found = answer["choices"][0]["logprobs"]
            assert found["token_logprobs"][:-1] == [piece.logprob for piece in pieces]
            assert len(found["tokens"]) == len(pieces) + 1
            for piece, top in zip(pieces[1:], found["top_logprobs"][1:-1], strict=True):
                assert max(top.values()) == piece.top_logprobs[0][1]
