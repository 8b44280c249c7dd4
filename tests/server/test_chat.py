"""Chat completions by OpenAI's own client over the bundled pair, and against a script."""

import json
from typing import Any

import httpx
import openai
import pytest

from foretell import Engine
from foretell.core.noise import derive_seed
from foretell.core.params import MAX_SEED
from foretell.server.answer import effect_headers
from foretell.server.replies.completions import ChatReply
from foretell.service.service import Service
from tests.server.conftest import Serve
from tests.server.fake import EOS, FakeService

ASK: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something about dogs."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "feed",
        "parameters": {
            "type": "object",
            "properties": {"cups": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["cups"],
            "additionalProperties": False,
        },
    },
}


def ask(client: httpx.Client, **more: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"model": "fake", "messages": ASK, **more})


# -- the bundled pair ------------------------------------------------------------------------------------------------


def test_the_text_is_the_engines(client: openai.OpenAI, bundled: Service) -> None:
    plain = Engine(bundled.engine.model, bundled.engine.tokenizer)
    for seed, temperature in ((3, 1.0), (4, 0.0), (2**64 - 1, 1.0)):
        done = client.chat.completions.create(
            model="bundled", messages=ASK, seed=seed, temperature=temperature, max_tokens=24
        )
        wanted = plain.generate(plain.chat_prompt(ASK), seed=seed, temperature=temperature, max_new_tokens=24)
        assert done.choices[0].message.content == wanted.text
        assert done.choices[0].finish_reason == wanted.finish_reason
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (wanted.num_prompt_tokens, wanted.num_tokens)


@pytest.mark.parametrize("speculative", [False, {"method": "suffix"}, None])
def test_min_tokens_holds_against_stop_texts(client: openai.OpenAI, speculative: Any) -> None:
    """Whole and streamed, in every choice: a stop text of the first tokens ends nothing, one after them does."""
    given: Any = {"model": "bundled", "messages": ASK, "seed": 8, "max_tokens": 24, "n": 2, "stop": ["e", " "]}
    extra = {"min_tokens": 12, "speculative": speculative}
    done = client.chat.completions.create(**given, extra_body=extra)
    short = client.chat.completions.create(**given, extra_body={"speculative": speculative})
    texts = [choice.message.content or "" for choice in done.choices]
    assert all({"e", " "} & set(text) for text in texts)
    assert done.usage.completion_tokens >= 2 * 12
    assert all(not {"e", " "} & set(choice.message.content or "") for choice in short.choices)
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**given, extra_body=extra, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize(
    "speculative", [False, {"method": "ngram"}, {"num_speculative_tokens": 2}, {"method": "suffix"}]
)
def test_the_text_does_not_depend_on_how_it_is_guessed(client: openai.OpenAI, speculative: Any) -> None:
    texts = [
        client.chat.completions.create(model="bundled", messages=ASK, seed=8, max_tokens=16, extra_body=extra)
        .choices[0]
        .message.content
        for extra in ({}, {"speculative": speculative})
    ]
    assert texts[0] == texts[1] != ""


def test_a_stream_says_the_same_in_order(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="bundled", messages=ASK, seed=5, max_tokens=20)
    stream = client.chat.completions.create(
        model="bundled", messages=ASK, seed=5, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    first, *middle, end, last = chunks
    assert first.choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].finish_reason is None and chunk.usage is None for chunk in (first, *middle))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == whole.choices[0].message.content
    assert end.choices[0].finish_reason == whole.choices[0].finish_reason
    assert end.choices[0].delta.content is None
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert len({chunk.id for chunk in chunks}) == 1


def test_choices_have_seeds_of_their_own_and_can_be_had_again(client: openai.OpenAI) -> None:
    many = client.chat.completions.create(model="bundled", messages=ASK, seed=6, n=3, max_tokens=12)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    seeds = [choice.model_extra["seed"] for choice in many.choices if choice.model_extra]
    assert seeds == [6, derive_seed(6, 1) & MAX_SEED, derive_seed(6, 2) & MAX_SEED]
    for choice, seed in zip(many.choices, seeds, strict=True):
        again = client.chat.completions.create(model="bundled", messages=ASK, seed=seed, max_tokens=12)
        assert again.choices[0].message.content == choice.message.content


def test_stops_end_the_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="bundled", messages=ASK, seed=5, max_tokens=20)
    text = whole.choices[0].message.content or ""
    stop = text[len(text) // 2 :][:3]
    cut = client.chat.completions.create(model="bundled", messages=ASK, seed=5, max_tokens=20, stop=[stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_logprobs_tell_every_token(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="bundled", messages=ASK, seed=5, max_tokens=8, logprobs=True, top_logprobs=3
    )
    content = done.choices[0].logprobs.content if done.choices[0].logprobs else None
    assert b"".join(bytes(entry.bytes or ()) for entry in content).decode() == done.choices[0].message.content
    for entry in content:
        best = [other.logprob for other in entry.top_logprobs]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert entry.logprob <= best[0] + 1e-6


def test_a_schema_is_kept_to(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Rex", "Bello"]}, "age": {"type": "integer", "minimum": 1, "maximum": 20}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    done = client.chat.completions.create(
        model="bundled",
        messages=ASK,
        seed=1,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "dog", "schema": schema, "strict": True}},
    )
    made = json.loads(done.choices[0].message.content or "")
    assert made["name"] in ("Rex", "Bello")
    assert 1 <= made["age"] <= 20


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [1, 4, 8, 14])
def test_a_call_that_the_limit_cuts_off_leaves_no_markup_in_the_text(
    client: openai.OpenAI, limit: int, stream: bool
) -> None:
    given: Any = {"model": "bundled", "messages": ASK, "seed": 2, "tools": [TOOL], "tool_choice": "required"}
    if stream:
        chunks = list(client.chat.completions.create(**given, max_tokens=limit, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
        reply = client.responses.create(
            model="bundled", input="a", max_output_tokens=limit, tool_choice="required",
            tools=[{"type": "function", **TOOL["function"]}],
        )  # fmt: skip
        assert reply.output_text == ""
    else:
        choice = client.chat.completions.create(**given, max_tokens=limit).choices[0]
        text, reason = choice.message.content or "", choice.finish_reason
        assert all(call.function.name == "feed" for call in choice.message.tool_calls or ())
    assert (text, reason) == ("", "length")


LOOSE: Any = {
    "type": "object",
    "properties": {"to": {"type": "string", "pattern": "^(?!a)", "maxLength": 2}, "x": {"not": {"type": "null"}}},
    "required": ["to"],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("chat/completions", {"tools": [TOOL, {"type": "function", "function": {"name": "mail", "parameters": LOOSE}}]},
         "tools.mail.properties/to/pattern, tools.mail.properties/x/not"),
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": LOOSE}}},
         "response_format.properties/to/pattern, response_format.properties/x/not"),
        ("chat/completions", {"tools": [TOOL], "guided_json": LOOSE, "chat_template_kwargs": {"odd": 1}},
         "chat_template_kwargs.odd, guided_json.properties/to/pattern, guided_json.properties/x/not"),
        ("completions", {"prompt": "a", "structured_outputs": {"json": LOOSE}},
         "structured_outputs.json.properties/to/pattern, structured_outputs.json.properties/x/not"),
        ("responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": LOOSE}}},
         "response_format.properties/to/pattern, response_format.properties/x/not"),
        ("chat/completions", {"tools": [TOOL]}, None),
    ],
)  # fmt: skip
def test_what_a_schema_asks_and_no_grammar_holds_is_named_in_a_header(
    url: str, path: str, body: dict[str, Any], told: str | None, stream: bool
) -> None:
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    given = {**({"messages": ASK} if path.startswith("chat") else {}), **body, "seed": 1, limit: 2, "stream": stream}
    answer = httpx.post(f"{url}/v1/{path}", json=given, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-foretell-without-effect") == told


ODD: Any = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "at": {"type": "integer", "minimum": -(2**63)},
        "größe, m": {"const": 2**53 + 1},
    },
    "propertyNames": {"pattern": "^[a-z]"},
}
"""Of each of two tools, as coding agents send them."""
PLACES = (
    "properties/at/minimum",
    "properties/gr%C3%B6%C3%9Fe%2C%20m/const",
    "properties/tags/uniqueItems",
    "propertyNames",
)
NAMES = ("first", "second")
FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": ODD}} for name in NAMES]
FLAT = [{"type": "function", "name": name, "parameters": ODD} for name in NAMES]
TOOLS_OF: Any = {
    "v1/chat/completions": {"messages": ASK, "tools": FUNCTIONS, "max_tokens": 2},
    "v1/responses": {"input": "a", "max_output_tokens": 2, "tools": FLAT},
    "v1/messages": {
        "messages": ASK[1:], "max_tokens": 2, "model": "bundled",
        "tools": [{"name": name, "input_schema": ODD} for name in NAMES],
    },
    "api/chat": {"messages": ASK, "tools": FUNCTIONS, "options": {"num_predict": 2}},
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TOOLS_OF)
def test_keywords_that_no_grammar_holds_twice_in_a_list_of_tools(url: str, path: str, stream: bool) -> None:
    """They were an internal error on every route: llguidance counts equal warnings."""
    answer = httpx.post(f"{url}/{path}", json={**TOOLS_OF[path], "stream": stream}, timeout=60)
    assert answer.status_code == 200, answer.text
    told = answer.headers["x-foretell-without-effect"].split(", ")
    assert told == [f"tools.{name}.{place}" for name in NAMES for place in PLACES]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "format"),
    [
        ("v1/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ODD}}}),
        ("v1/completions", {"json_schema": json.dumps(ODD)}),
        ("v1/completions", {"guided_json": ODD}),
        ("v1/chat/completions", {"messages": ASK, "structured_outputs": {"json": ODD}}),
        ("v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": ODD}}}),
        ("api/chat", {"messages": ASK, "format": ODD}),
        ("api/generate", {"prompt": "a", "format": ODD}),
    ],
)
def test_a_number_of_a_schema_takes_no_request_down(url: str, path: str, format: Any, stream: bool) -> None:
    body: Any = {"prompt": "a"} if path == "v1/completions" else {}
    key = "max_output_tokens" if path == "v1/responses" else "max_tokens"
    limit: Any = {"options": {"num_predict": 2}} if path.startswith("api") else {key: 2}
    answer = httpx.post(f"{url}/{path}", json={**body, **format, **limit, "stream": stream}, timeout=60)
    assert answer.status_code == 200, answer.text
    told = answer.headers["x-foretell-without-effect"].split(", ")
    assert tuple(part.partition(".p")[2] for part in told) == tuple(place[1:] for place in PLACES)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("api/chat", {"messages": ASK, "format": {"$ref": "#"}}),
        ("api/generate", {"prompt": "a", "format": {"$ref": "#"}}),
        ("v1/completions", {"prompt": "a", "guided_json": {"$ref": "#"}}),
        (
            "v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#"}}}},
        ),
    ],
)
def test_a_schema_that_leads_back_to_itself_is_one_clear_error(url: str, path: str, body: Any) -> None:
    answer = httpx.post(f"{url}/{path}", json=body, timeout=60)
    assert answer.status_code == 400
    assert "#: by $ref and allOf alone it leads back to itself" in answer.text
    assert "verbose" not in answer.text


def test_a_header_of_very_many_places_is_short_and_says_so() -> None:
    named = effect_headers([f"tools.{at}.properties/größe {at}" for at in range(1000)])["x-foretell-without-effect"]
    assert len(named) < 2100
    *parts, last = named.split(", ")
    assert parts[0] == "tools.0.properties/gr%C3%B6%C3%9Fe%200"
    assert last == f"and {1000 - len(parts)} more"
    assert effect_headers([]) == {}


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function", "function": {"name": "mail", "parameters": LOOSE, "strict": True}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": LOOSE, "strict": True}}},
    ],
)
def test_a_strict_schema_is_enforced_whole_or_refused(url: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": ASK, **body}, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == next(iter(body))


def test_a_tool_is_called_whole_and_in_a_stream(client: openai.OpenAI) -> None:
    given: Any = {"model": "bundled", "messages": ASK, "seed": 2, "max_tokens": 120, "tools": [TOOL]}
    done = client.chat.completions.create(**given, tool_choice="required", parallel_tool_calls=False)
    (call,) = done.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "feed"
    assert 1 <= json.loads(call.function.arguments)["cups"] <= 9
    assert done.choices[0].finish_reason == "tool_calls"
    assert done.choices[0].message.content is None
    arguments, names, reasons = "", [], []
    for chunk in client.chat.completions.create(
        **given, tool_choice="required", parallel_tool_calls=False, stream=True
    ):
        for part in chunk.choices[0].delta.tool_calls or ():
            if part.function is not None:
                names += [part.function.name] if part.function.name else []
                arguments += part.function.arguments or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert names == ["feed"]
    assert arguments == call.function.arguments
    assert reasons[-1] == "tool_calls"
    after = client.chat.completions.create(
        model="bundled",
        messages=[*ASK, done.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "fed"}],
        max_tokens=4,
    )
    assert after.choices[0].finish_reason in ("stop", "length")


def test_a_prediction_that_is_right_is_accepted(client: openai.OpenAI, bundled: Service) -> None:
    asked: Any = {"model": "bundled", "messages": ASK, "seed": 7, "max_tokens": 30}
    text = client.chat.completions.create(**asked).choices[0].message.content or ""
    done = client.chat.completions.create(**asked, prediction={"type": "content", "content": text})
    assert done.choices[0].message.content == text
    details = done.usage.completion_tokens_details if done.usage else None
    size = len(bundled.engine.tokenizer.encode(text, add_special_tokens=False))  # type: ignore[union-attr]
    assert details.accepted_prediction_tokens > size // 2
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == size
    off = client.chat.completions.create(
        **asked, prediction={"type": "content", "content": text}, extra_body={"speculative": False}
    )
    assert off.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "bundled"
    assert client.models.retrieve("bundled") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


# -- a script --------------------------------------------------------------------------------------------------------


def test_a_reply_is_as_described(serve: Serve) -> None:
    body = ask(serve(), n=2, logprobs=True, top_logprobs=2, provenance=True, trace=True, seed=1).json()
    reply = ChatReply.model_validate(body, strict=True)
    assert [choice.index for choice in reply.choices] == [0, 1]
    first = reply.choices[0]
    assert first.message.content == "Grüße! 1 € and more"
    assert first.finish_reason == "stop"
    assert (
        bytes(byte for entry in first.logprobs.content for byte in entry.bytes or ()).decode() == first.message.content
    )
    sources = [token.source for token in first.provenance]
    assert sources[:3] == ["draft:ngram", "draft:ngram", "bonus"]
    assert len(sources) == len(first.logprobs.content) + 1  # the end token
    assert [token for step in first.trace for token in [*step.token_ids[1:], step.bonus]][:3] == list(b"Gr\xc3")


def test_figures_add_up(serve: Serve) -> None:
    body = ask(serve(), n=2, seed=1).json()
    figures = body["metrics"]["speculative_decoding"]
    steps = figures["num_spec_steps"]
    assert sum(figures["acceptance_histogram"]) == steps
    accepted = sum(count * at for at, count in enumerate(figures["acceptance_histogram"]))
    assert accepted == figures["num_accepted_draft_tokens"]
    assert figures["acceptance_histogram_by_draft_length"] == {"2": figures["acceptance_histogram"]}
    assert figures["num_spec_tokens"] == 2
    assert figures["mean_acceptance_length"] == 1 + figures["num_accepted_draft_tokens"] / steps
    assert figures["draft_acceptance_rate"] == figures["num_accepted_draft_tokens"] / figures["num_draft_tokens"]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] == len("<system>Be brief.<user>Say something about dogs.<assistant>")  # once for two


def test_figures_can_be_left_out(serve: Serve) -> None:
    client = serve(include_metrics=False)
    assert "metrics" not in ask(client).json()
    assert "metrics" in ask(client, include_metrics=True).json()


def test_predictions_are_counted_by_themselves(serve: Serve) -> None:
    service = FakeService(lambda _: [*b"abcdefgh", EOS])
    client = serve(service)
    given = {"type": "content", "content": [{"type": "text", "text": "abcXefgh"}, {"type": "text", "text": "!!"}]}
    details = ask(client, prediction=given).json()["usage"]["completion_tokens_details"]
    assert service.submitted[0].prediction_ids == tuple(b"abcXefgh!!")
    # Two guesses a step: a and b, then c; X is refused, d; e and f, g; h, and the end.
    assert details == {"reasoning_tokens": 0, "accepted_prediction_tokens": 5, "rejected_prediction_tokens": 5}
    other = ask(client, prediction=given, speculative={"method": "ngram"}).json()["usage"]
    details = {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 10}
    assert other["completion_tokens_details"] == details


def test_without_max_tokens_the_context_is_the_limit(serve: Serve) -> None:
    service = FakeService(max_model_len=200)
    client = serve(service, max_tokens_limit=100)
    ask(client)
    assert service.submitted[0].params.max_new_tokens == 100
    refused = ask(client, max_tokens=101)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "a"}, "max_tokens"),
        ("/v1/responses", {"input": "a"}, "max_output_tokens"),
    ],
)
def test_more_tokens_than_the_context_has_may_be_asked_for_at_least(
    serve: Serve, path: str, body: dict[str, Any], name: str
) -> None:
    """Benchmarks send one large number as both: the context ends the text then, as it does without min_tokens."""
    service = FakeService(max_model_len=200)
    client = serve(service)
    for limits in ({"min_tokens": 10000, name: 10000}, {"min_tokens": 190}, {"min_tokens": 10000}):
        answer = client.post(path, json={"model": "fake", **body, **limits})
        assert answer.status_code == 200, answer.text
        params = service.submitted[-1].params
        room = 200 - len(service.submitted[-1].prompt_ids)
        assert params.min_new_tokens == min(limits["min_tokens"], room)
        assert params.min_new_tokens <= params.max_new_tokens <= room
    assert client.post(path, json={"model": "fake", **body, "min_tokens": 9, name: 3}).status_code == 400


def test_what_nobody_asked_for_is_not_refused(serve: Serve) -> None:
    """The 16 tokens of a completion by default contradict neither min_tokens nor the server's limit."""
    service = FakeService()
    client = serve(service, max_tokens_limit=12)
    assert client.post("/v1/completions", json={"model": "fake", "prompt": "a"}).status_code == 200
    assert service.submitted[-1].params.max_new_tokens == 12
    refused = client.post("/v1/completions", json={"model": "fake", "prompt": "a", "min_tokens": 13})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")


@pytest.mark.parametrize(
    "given", [{"num_draft_tokens": 0}, {"speculative": False}, {"speculative": {"method": "none"}}]
)
def test_speculation_can_be_off(serve: Serve, given: Any) -> None:
    body = ask(serve(), **given, provenance=True).json()
    assert {token["source"] for token in body["choices"][0]["provenance"]} == {"plain"}
    assert body["metrics"]["speculative_decoding"]["num_spec_steps"] == 0


@pytest.mark.parametrize(
    ("speculative", "always", "method"),
    [(None, False, None), ({"always": True}, True, None), ({"method": "suffix", "always": True}, True, "suffix")],
)
def test_a_request_may_ask_to_guess_always(serve: Serve, speculative: Any, always: bool, method: str | None) -> None:
    service = FakeService()
    assert ask(serve(service), speculative=speculative).status_code == 200
    (sent,) = service.submitted
    assert sent.always is always
    assert (sent.speculative.method if sent.speculative else None) == method
