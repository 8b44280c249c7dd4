"""Completions by OpenAI's own client over the bundled pair, and against a script."""

import math
from typing import Any

import httpx
import openai
import pytest

from foretell import Engine
from foretell.engine.request.row import Piece
from foretell.engine.request.text import TextStream
from foretell.model.load import load_tokenizer
from foretell.server.replies.completions import TextReply
from foretell.server.texts.tokens import LOWEST, TokenTexts, finite
from foretell.service.service import Service
from tests.server.conftest import Serve
from tests.server.fake import EOS, ByteTokenizer, FakeService


def complete(client: httpx.Client, prompt: Any = "a", **more: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"model": "fake", "prompt": prompt, **more})


def test_the_text_is_the_engines(client: openai.OpenAI, bundled: Service) -> None:
    plain = Engine(bundled.engine.model, bundled.engine.tokenizer)
    prompts = ["def fibonacci(n):", "Once upon a time"]
    done = client.completions.create(model="bundled", prompt=prompts, seed=3, max_tokens=16)
    for choice, prompt in zip(done.choices, prompts, strict=True):
        wanted = plain.generate(prompt, seed=3, max_new_tokens=16)
        assert (choice.text, choice.finish_reason) == (wanted.text, wanted.finish_reason)
    ids = plain.tokenizer.encode(prompts[0])  # type: ignore[union-attr]
    by_ids = client.completions.create(model="bundled", prompt=ids, seed=3, max_tokens=16)
    assert by_ids.choices[0].text == done.choices[0].text


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    given: Any = {"model": "bundled", "prompt": "x = ", "seed": 4, "max_tokens": 16, "n": 2}
    whole = client.completions.create(**given)
    texts, reasons = ["", ""], ["", ""]
    for chunk in client.completions.create(**given, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ],
)
def test_prompts_of_all_shapes(serve: Serve, prompt: Any, wanted: list[bytes]) -> None:
    service = FakeService(lambda sent: [*bytes(sent.prompt_ids).upper(), EOS])
    done = complete(serve(service), prompt, n=2, seed=1)
    assert [bytes(sent.prompt_ids) for sent in service.submitted] == [text for text in wanted for _ in range(2)]
    reply = TextReply.model_validate(done.json(), strict=True)
    assert [choice.text for choice in reply.choices] == [text.decode().upper() for text in wanted for _ in range(2)]
    assert [choice.index for choice in reply.choices] == list(range(2 * len(wanted)))
    assert reply.usage.prompt_tokens == sum(map(len, wanted))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Grüße", list("Grüße".encode())])
def test_echo(serve: Serve, prompt: Any, stream: bool) -> None:
    client = serve(FakeService(lambda _: [*b"!", EOS]))
    if not stream:
        assert complete(client, prompt, echo=True).json()["choices"][0]["text"] == "Grüße!"
        return
    with openai.OpenAI(base_url=str(client.base_url) + "/v1", api_key="none") as reader:
        chunks = reader.completions.create(model="fake", prompt=prompt, echo=True, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Grüße!"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_offsets_into_the_text(serve: Serve, stream: bool) -> None:
    service = FakeService(lambda _: [*"aü€b".encode(), EOS])
    client = serve(service)
    given: Any = {"logprobs": 2, "seed": 1}
    parts = [complete(client, **given).json()["choices"][0]["logprobs"]]
    if stream:
        with openai.OpenAI(base_url=str(client.base_url) + "/v1", api_key="none") as reader:
            chunks = list(reader.completions.create(model="fake", prompt="a", stream=True, **given))
        parts = [chunk.choices[0].logprobs.model_dump() for chunk in chunks if chunk.choices[0].logprobs is not None]
    whole = {key: [one for part in parts for one in part[key]] for key in parts[0]}
    assert len(whole["tokens"]) == len("aü€b".encode())
    # A character's text comes with its last byte.
    assert whole["text_offset"] == [0, 1, 1, 2, 2, 2, 3]
    assert set(whole["token_logprobs"]) == {-0.5}
    assert whole["top_logprobs"][0] == {"a": 0.0, "A": -0.25}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "stop", "text", "offsets"),
    [
        ("x a + y", " a + z", "x a + y", [*range(7)]),  # held back, then written
        ("xa a + z!", " a + z", "xa", [*range(8)]),  # the stop text's own tokens begin where it would stand
        ("ü a€", " a€!", "ü a€", [0, 0, 1, 2, 3, 3, 3]),  # characters of several tokens in held-back text
        ("xa", "ab", "xa", [0, 1]),  # held back until the end token, which has no entry
    ],
)
def test_offsets_of_tokens_whose_text_is_held_back(
    serve: Serve, stream: bool, script: str, stop: str, text: str, offsets: list[int]
) -> None:
    client = serve(FakeService(lambda _: [*script.encode(), EOS]))
    for echo in (False, True):
        given: Any = {"logprobs": 0, "stop": stop, "echo": echo}
        if stream:
            with openai.OpenAI(base_url=str(client.base_url) + "/v1", api_key="none") as reader:
                chunks = list(reader.completions.create(model="fake", prompt="ü:", stream=True, **given))
            written = "".join(chunk.choices[0].text for chunk in chunks)
            parts = [one.choices[0].logprobs.model_dump() for one in chunks if one.choices[0].logprobs is not None]
        else:
            choice = complete(client, "ü:", **given).json()["choices"][0]
            written, parts = choice["text"], [choice["logprobs"]]
        found = [offset for part in parts for offset in part["text_offset"]]
        assert written == ("ü:" if echo else "") + text
        if echo:  # the end token has its entry here
            assert found[:3] == [0, 0, 1]
            assert found[3 : 3 + len(offsets)] == [2 + offset for offset in offsets]
        else:
            assert found == offsets


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_token_has_no_entry_though_held_back_text_comes_with_it(serve: Serve, stream: bool) -> None:
    client = serve(FakeService(lambda _: [*b"xa", EOS]))
    given: Any = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "stop": "ab"}
    with openai.OpenAI(base_url=str(client.base_url) + "/v1", api_key="none") as reader:
        if stream:
            chunks = reader.chat.completions.create(model="fake", stream=True, **given)
            parts = [chunk.choices[0].logprobs for chunk in chunks]
        else:
            parts = [reader.chat.completions.create(model="fake", **given).choices[0].logprobs]
    assert [one.token for part in parts if part is not None for one in part.content or ()] == ["x", "a"]


def test_offsets_into_an_echo_count_the_special_tokens_that_it_shows() -> None:
    """A prompt of ids is shown with its special tokens; one of text has those that it spells, and not the first one that
    the tokenizer adds."""
    tokenizer = load_tokenizer("bundled")
    marker, texts = str(tokenizer.eos_token), TokenTexts(tokenizer)
    inner = tokenizer.encode(f"ab{marker}cd", add_special_tokens=False)
    assert tokenizer.eos_token_id in inner
    for ids, echo in ((inner, f"ab{marker}cd"), ([tokenizer.eos_token_id, *inner], f"ab{marker}cd")):
        stream, pieces = TextStream(tokenizer), []
        for token in ids:
            offset = len(stream.text)
            stream.push(token)
            pieces.append(Piece(token, stream.take(), "prompt", -1.0, offset=offset))
        made = texts.text_logprobs(pieces, 0, echo=echo)
        added = len(ids) - len(inner)
        starts = made["text_offset"][added:]
        assert all(echo[at:].startswith(texts.text(token)) for at, token in zip(starts, inner, strict=True))
        assert len(set(starts)) == len(inner)


def test_sixteen_tokens_by_default(serve: Serve) -> None:
    service = FakeService(lambda _: [97] * 100)
    done = complete(serve(service)).json()
    assert done["choices"][0]["text"] == "a" * 16
    assert done["choices"][0]["finish_reason"] == "length"


def test_best_of_must_be_n(serve: Serve) -> None:
    client = serve()
    assert complete(client, n=2, best_of=2).status_code == 200
    refused = complete(client, n=2, best_of=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")


def test_provenance_in_a_stream(serve: Serve) -> None:
    client = serve(FakeService(lambda _: [*"aü€b".encode(), EOS]))
    with openai.OpenAI(base_url=str(client.base_url) + "/v1", api_key="none") as reader:
        chunks = list(
            reader.completions.create(
                model="fake", prompt="a", stream=True, extra_body={"provenance": True, "trace": True}
            )
        )
    extras = [chunk.choices[0].model_extra or {} for chunk in chunks]
    tokens = [token for extra in extras for token in extra.get("provenance") or ()]
    assert bytes(token["token_id"] for token in tokens[:-1]).decode() == "aü€b"
    assert tokens[-1]["token_id"] == EOS
    assert [token["source"] for token in tokens[:3]] == ["draft:ngram", "draft:ngram", "bonus"]
    trees = [tree for extra in extras for tree in extra.get("trace") or ()]
    assert len(trees) == 3
    assert all(tree["parent"][0] == -1 and len(tree["tokens"]) == len(tree["probability"]) for tree in trees)
    last = chunks[-1].model_extra or {}
    assert last["metrics"]["speculative_decoding"]["num_spec_steps"] == 3


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    texts = TokenTexts(ByteTokenizer())
    pieces = [Piece(token, chr(token), "plain", -1.0, offset=place) for place, token in enumerate(b"abc")]
    first, rest = texts.text_logprobs(pieces[:2], 5), texts.text_logprobs(pieces[2:], 5)
    assert first["text_offset"] + rest["text_offset"] == [5, 6, 7]
    assert first["top_logprobs"] == [{"a": -1.0}, {"b": -1.0}]


def test_halves_of_characters_are_spelled_as_bytes() -> None:
    texts = TokenTexts(ByteTokenizer())
    assert [texts.spelling(token) for token in "ü".encode()] == [[0xC3], [0xBC]]
    assert texts.spelling(97) == [97]
    assert TokenTexts(None).text(7) == "7"
    assert finite(-math.inf) == LOWEST
