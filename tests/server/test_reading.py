"""Tokens, texts, hidden states: what clients ask beside answers; and figures of tokens within answers."""

import asyncio
import base64
import time
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from torch.nn import functional as F

from foretell import Engine
from foretell.core.tree import chain_parent, layout
from foretell.model.target import PassOptions
from foretell.server.routes.embeddings import _read
from foretell.service.service import Service
from tests.server.conftest import Serve
from tests.server.fake import EOS, FakeService

USER: Any = [{"role": "user", "content": "def f(x):"}]


@pytest.fixture
def http(url: str) -> Any:
    with httpx.Client(base_url=url, timeout=60) as made:
        yield made


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(client: httpx.Client, path: str, **body: Any) -> tuple[str, str]:
    reply = client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]["param"], reply.json()["error"]["message"]


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_in_both_forms_and_back(http: httpx.Client, bundled: Service) -> None:
    tokenizer, text = bundled.engine.tokenizer, "def f(x):\n    return x  # ü"
    whole = list(tokenizer.encode(text))
    bare = list(tokenizer.encode(text, add_special_tokens=False))
    made = post(http, "/tokenize", prompt=text, return_token_strs=True)
    assert made == {
        "tokens": whole, "count": len(whole), "max_model_len": 4096,
        "token_strs": [tokenizer.decode([token]) for token in whole],
    }  # fmt: skip
    assert post(http, "/tokenize", prompt=text, add_special_tokens=False)["tokens"] == bare
    assert post(http, "/tokenize", content=text) == {"tokens": bare}
    pieces = post(http, "/tokenize", content=text, with_pieces=True)["tokens"]
    assert [(one["id"], one["piece"]) for one in pieces] == [(token, tokenizer.decode([token])) for token in bare]
    assert post(http, "/detokenize", tokens=bare) == {"prompt": text, "content": text}


def test_a_conversation_has_the_tokens_that_its_answer_counts(http: httpx.Client) -> None:
    made = post(http, "/tokenize", messages=USER)
    reply = post(http, "/v1/chat/completions", messages=USER, max_tokens=2, return_token_ids=True)
    assert made["tokens"] == reply["prompt_token_ids"]
    assert made["count"] == reply["usage"]["prompt_tokens"]
    shorter = post(http, "/tokenize", messages=USER, add_generation_prompt=False)
    assert shorter["count"] < made["count"]


def test_markers_are_tokens_or_text(http: httpx.Client, bundled: Service) -> None:
    marker = str(bundled.engine.tokenizer.eos_token)  # type: ignore[union-attr]
    assert len(post(http, "/tokenize", content=marker)["tokens"]) == 1
    assert len(post(http, "/tokenize", content=marker, parse_special=False)["tokens"]) > 1


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/tokenize", {}, "prompt", "found none"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt", "found prompt and content"),
        ("/detokenize", {"tokens": [300]}, "tokens", "token id 300 is not one of 0 to 257"),
        ("/detokenize", {"tokens": "a"}, "tokens", "valid array"),
        ("/v1/embeddings", {"input": ""}, "input", ""),
        ("/v1/embeddings", {"input": "a", "dimensions": 7}, "dimensions", "have 1 numbers"),
        ("/v1/embeddings", {"input": [258]}, "input", "token id 258"),
        ("/v1/embeddings", {"input": "a" * 5000}, "input", "shorten it"),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": [258]}, "allowed_token_ids", "token id 258"),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "exclude"),
        (
            "/v1/completions", {"prompt": "a", "prompt_logprobs": 1, "echo": True, "logprobs": 1}, "prompt_logprobs",
            "exclude each other",
        ),
        ("/v1/chat/completions", {"messages": USER, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "exclude"),
    ],
)  # fmt: skip
def test_what_is_refused(fake: httpx.Client, path: str, body: dict[str, Any], param: str, message: str) -> None:
    found = refused(fake, path, **body)
    assert found[0] == param
    assert message in found[1]


# -- hidden states ---------------------------------------------------------------------------------------------------


def test_embeddings_are_the_last_hidden_states(client: openai.OpenAI, bundled: Service) -> None:
    model, tokenizer = bundled.engine.model, bundled.engine.tokenizer
    assert tokenizer is not None
    texts = ["def f(x):", "Once upon a time there was a fox."]
    for pooling in ("mean", "last"):
        made = client.embeddings.create(model="bundled", input=texts, extra_body={"pooling": pooling})
        assert (made.model_extra or {})["pooling"] == pooling
        for one, text in zip(made.data, texts, strict=True):
            ids = tokenizer.encode(text)
            plan = layout(
                chain_parent(len(ids), torch.device("cpu"))[None], torch.zeros(1, dtype=torch.int64), len(ids)
            )
            with torch.inference_mode():
                out = model.forward(torch.tensor([ids]), plan, model.new_cache(1, len(ids)), PassOptions(head=False))
                states = model.normed(out.hidden)[0].float()
            wanted = F.normalize(states.mean(0) if pooling == "mean" else states[-1], dim=0)
            assert torch.allclose(torch.tensor(one.embedding), wanted, atol=1e-6)
    assert made.usage.total_tokens == sum(len(tokenizer.encode(text)) for text in texts)


def test_a_client_that_leaves_ends_the_reading_at_its_next_pass(bundled: Service) -> None:
    """No other text is read beside the rest of it."""
    backend: Any = SimpleNamespace(service=bundled)
    passes: list[int] = []
    model = bundled.engine.model
    normed = type(model).normed

    def counted(self: Any, hidden: Any) -> Any:
        passes.append(hidden.shape[1])
        time.sleep(0.2)
        return normed(self, hidden)

    async def leave() -> None:
        task = asyncio.ensure_future(_read(backend, [1] * 1500, "mean", None))
        while not passes:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(passes) == 1
        await asyncio.sleep(0.3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "normed", counted)
        asyncio.run(leave())
    assert len(passes) == 1
    assert passes[0] < 1500


def test_no_text_is_read_while_the_server_stops(bundled: Service, http: httpx.Client) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Service, "state", property(lambda self: "draining"))
        reply = http.post("/v1/embeddings", json={"input": "a"})
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "the server is stopping"
    assert post(http, "/v1/embeddings", input="a")["usage"]["prompt_tokens"] == 1


def test_embeddings_as_base64_and_of_ids(http: httpx.Client, bundled: Service) -> None:
    ids = list(bundled.engine.tokenizer.encode("def f(x):"))  # type: ignore[union-attr]
    plain = post(http, "/v1/embeddings", input="def f(x):")["data"][0]["embedding"]
    packed = post(http, "/v1/embeddings", input=[ids], encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == pytest.approx(plain, abs=1e-7)


def test_a_text_of_several_chunks_has_the_mean_of_all(http: httpx.Client, bundled: Service) -> None:
    model, ids = bundled.engine.model, [5 + index % 90 for index in range(700)]  # more than one pass reads
    plan = layout(chain_parent(700, torch.device("cpu"))[None], torch.zeros(1, dtype=torch.int64), 700)
    with torch.inference_mode():
        out = model.forward(torch.tensor([ids]), plan, model.new_cache(1, 700), PassOptions(head=False))
        states = model.normed(out.hidden)[0]
    found = torch.tensor(post(http, "/v1/embeddings", input=ids)["data"][0]["embedding"])
    assert torch.allclose(found, F.normalize(states.float().mean(0), dim=0), atol=1e-5)


# -- tokens within answers -------------------------------------------------------------------------------------------


def test_token_ids_whole_and_in_a_stream(http: httpx.Client, bundled: Service) -> None:
    asked = {"prompt": "def f(x):", "max_tokens": 12, "seed": 4, "return_token_ids": True}
    (choice,) = post(http, "/v1/completions", **asked)["choices"]
    plain = Engine(bundled.engine.model, bundled.engine.tokenizer)
    wanted = plain.generate("def f(x):", max_new_tokens=12, seed=4)
    assert choice["token_ids"] == wanted.token_ids
    assert choice["prompt_token_ids"] == list(bundled.engine.tokenizer.encode("def f(x):"))  # type: ignore[union-attr]
    with openai.OpenAI(base_url=str(http.base_url) + "/v1", api_key="none") as reader:
        chunks = list(
            reader.completions.create(
                model="bundled", prompt="def f(x):", max_tokens=12, seed=4, stream=True,
                extra_body={"return_token_ids": True},
            )
        )  # fmt: skip
        chats = list(
            reader.chat.completions.create(
                model="bundled",
                messages=USER,
                max_tokens=12,
                seed=4,
                stream=True,
                extra_body={"return_token_ids": True},
            )
        )
    extras = [chunk.choices[0].model_extra or {} for chunk in chunks]
    assert [token for extra in extras for token in extra.get("token_ids", ())] == wanted.token_ids
    assert [extra["prompt_token_ids"] for extra in extras if "prompt_token_ids" in extra] == [
        choice["prompt_token_ids"]
    ]
    whole = post(http, "/v1/chat/completions", messages=USER, max_tokens=12, seed=4, return_token_ids=True)
    told = [token for chunk in chats for token in (chunk.choices[0].model_extra or {}).get("token_ids", ())]
    assert told == whole["choices"][0]["token_ids"]
    assert (chats[0].model_extra or {})["prompt_token_ids"] == whole["prompt_token_ids"]


def test_log_probabilities_of_a_prompt(http: httpx.Client) -> None:
    asked: dict[str, Any] = {"prompt": "def f(x):", "max_tokens": 1, "seed": 1}
    (choice,) = post(http, "/v1/completions", **asked, prompt_logprobs=3, return_token_ids=True)["choices"]
    (echoed,) = post(http, "/v1/completions", **asked, echo=True, logprobs=3)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    ids = choice["prompt_token_ids"][1:]
    for token, found, wanted in zip(ids, others, echoed["logprobs"]["token_logprobs"][1 : len(ids) + 1], strict=True):
        assert found[str(token)]["logprob"] == pytest.approx(wanted, abs=1e-6)
        ranks = [one["rank"] for one in found.values() if one["rank"] is not None]
        assert sorted(ranks) == [1, 2, 3]
        assert found[str(token)]["rank"] in (1, 2, 3, None)
    chat = post(http, "/v1/chat/completions", messages=USER, max_tokens=1, prompt_logprobs=0, return_token_ids=True)
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
    assert all(len(one) == 1 for one in chat["prompt_logprobs"][1:])


def test_no_likeliest_tokens_is_the_token_alone(http: httpx.Client) -> None:
    (choice,) = post(http, "/v1/completions", prompt="def f(x):", max_tokens=4, logprobs=0)["choices"]
    logprobs = choice["logprobs"]
    assert [list(one.values()) for one in logprobs["top_logprobs"]] == [[one] for one in logprobs["token_logprobs"]]


def test_an_output_of_allowed_tokens(http: httpx.Client, bundled: Service) -> None:
    """The same text with guesses and without, at temperature 1."""
    allowed = list(bundled.engine.tokenizer.encode(" a b c d", add_special_tokens=False))  # type: ignore[union-attr]
    asked = {"prompt": "x =", "max_tokens": 12, "seed": 3, "temperature": 4.0, "allowed_token_ids": allowed}
    asked["return_token_ids"] = True
    (choice,) = post(http, "/v1/completions", **asked)["choices"]
    assert set(choice["token_ids"]) <= set(allowed)
    assert len(set(choice["token_ids"])) > 1
    (plain,) = post(http, "/v1/completions", **asked, speculative=False)["choices"]
    assert plain["token_ids"] == choice["token_ids"]
    param, message = refused(http, "/v1/completions", **asked, regex="a+")
    assert (param, "exclude each other" in message) == ("allowed_token_ids", True)


def test_what_ended_a_text(serve: Serve) -> None:
    client = serve(FakeService(lambda _: [*b"abcd", EOS]))
    for more, wanted in (
        ({}, EOS),
        ({"stop": ["x", "c"]}, "c"),
        ({"stop_token_ids": [98]}, 98),
        ({"max_tokens": 2}, None),
    ):
        (text,) = post(client, "/v1/completions", prompt="a", **more)["choices"]
        (chat,) = post(client, "/v1/chat/completions", messages=USER, **more)["choices"]
        assert text.get("matched_stop") == chat.get("matched_stop") == wanted


# -- what else clients send ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"id_slot": 3}, {"n_probs": 0}, {"cache_prompt": False}, {"timings_per_token": True}, {"samplers": []},
        {"samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]},
        {"cache_salt": "x"}, {"request_id": "r"}, {"rid": "r"}, {"include_reasoning": True}, {"enable_thinking": True},
        {"provider": {"order": ["a"]}}, {"keep_alive": "5m"}, {"options": {}}, {"stream_options": {"include_usage": True}},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_no_text_is_taken(fake: httpx.Client, more: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"messages": USER, "seed": 1}
    plain = post(fake, "/v1/chat/completions", **asked)
    assert post(fake, "/v1/chat/completions", **asked, **more)["choices"] == plain["choices"]


@pytest.mark.parametrize("more", [{"samplers": ["top_k"]}, {"n_probs": 3}, {"options": {"top_k": 3}}], ids=str)
def test_what_changes_the_text_is_refused(fake: httpx.Client, more: dict[str, Any]) -> None:
    assert refused(fake, "/v1/chat/completions", messages=USER, **more)[0] == next(iter(more))


def test_formats_in_other_servers_forms(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    forms: tuple[dict[str, Any], ...] = (
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"schema": schema}},
    )
    for form in forms:
        reply = post(http, "/v1/chat/completions", messages=USER, max_tokens=40, response_format=form)
        assert reply["choices"][0]["message"]["content"].replace(" ", "").replace("\n", "") == '{"n":7}'


def test_what_clients_ask_before_they_begin(http: httpx.Client, serve: Serve) -> None:
    props = http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["chat_template"]
    assert http.get("/v1/health").json() == {"status": "ok"}
    assert http.get("/favicon.ico").status_code == 204
    closed = serve(api_keys=("k" * 20,))
    assert [closed.get(path).status_code for path in ("/v1/health", "/favicon.ico", "/props")] == [200, 204, 401]
