"""Fifty calls of OpenAI's Python client to the bundled pair, as programs make them."""

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.calls import DOG, FEED, SCHEMA, USER, WALK, Calls, called, chat, is_dog, said

CALLS = Calls()


class Dog(BaseModel):
    """As programs describe what they want to have parsed."""

    name: str = Field(max_length=4)
    cups: int = Field(ge=1, le=9)


@CALLS("chat")
def _(client: Any) -> None:
    reply = chat(client)
    assert (reply.object, reply.model, reply.choices[0].message.role) == ("chat.completion", "bundled", "assistant")
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert said(reply)


@CALLS("chat: system, developer and user")
def _(client: Any) -> None:
    told: Any = [{"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Be brief."}]
    assert chat(client, [*told, *USER]).usage.prompt_tokens > chat(client).usage.prompt_tokens


@CALLS("chat: parts of a user's message are one text")
def _(client: Any) -> None:
    parts: Any = [{"type": "text", "text": "Write a "}, {"type": "text", "text": "function."}]
    assert said(chat(client, [{"role": "user", "content": parts}])) == said(chat(client))


@CALLS("chat: parts of the assistant's message are one text")
def _(client: Any) -> None:
    parts: Any = [{"type": "text", "text": "def "}, {"type": "text", "text": "f():"}]
    texts = [said(chat(client, [*USER, {"role": "assistant", "content": one}, *USER])) for one in (parts, "def f():")]
    assert texts[0] == texts[1]


@CALLS("chat: the assistant declined before")
def _(client: Any) -> None:
    declined: Any = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert said(chat(client, [*USER, declined, *USER])) == said(
        chat(client, [*USER, {"role": "assistant", "content": "No."}, *USER])
    )


@CALLS("chat: a reply is sent back as the client has it")
def _(client: Any) -> None:
    first = chat(client)
    again = chat(client, [*USER, first.choices[0].message, *USER])
    assert again.usage.prompt_tokens > first.usage.total_tokens


@CALLS("chat: max_tokens 0 writes nothing and counts the prompt")
def _(client: Any) -> None:
    reply = chat(client, max_tokens=0)
    assert (said(reply), reply.choices[0].finish_reason) == ("", "length")
    assert (reply.usage.completion_tokens, reply.usage.prompt_tokens > 0) == (0, True)


@CALLS("chat: max_completion_tokens")
def _(client: Any) -> None:
    reply = chat(client, max_tokens=None, max_completion_tokens=3, extra_body={"ignore_eos": True})
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (3, "length")


@CALLS("chat: n")
def _(client: Any) -> None:
    reply = chat(client, n=2)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert said(reply) == said(chat(client))


@CALLS("chat: the same seed")
def _(client: Any) -> None:
    assert said(chat(client, seed=7)) == said(chat(client, seed=7)) != said(chat(client, seed=8))


@CALLS("chat: temperature 0 needs no seed")
def _(client: Any) -> None:
    assert said(chat(client, seed=None, temperature=0)) == said(chat(client, seed=3, temperature=0.0))


@CALLS("chat: the smallest top_p is greedy")
def _(client: Any) -> None:
    assert said(chat(client, top_p=1e-6)) == said(chat(client, temperature=0))


@CALLS("chat: stop, a text and a list")
def _(client: Any) -> None:
    text = said(chat(client, max_tokens=16))
    stop = text[len(text) // 2]
    for given in (stop, [stop, "never written"]):
        reply = chat(client, max_tokens=16, stop=given)
        assert (said(reply), reply.choices[0].finish_reason) == (text[: text.index(stop)], "stop")


@CALLS("chat: logit_bias")
def _(client: Any) -> None:
    reply = chat(client, max_tokens=2, logit_bias={"65": 100}, extra_body={"provenance": True})
    assert {one["token_id"] for one in reply.choices[0].provenance} == {65}


@CALLS("chat: penalties")
def _(client: Any) -> None:
    given: Any = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    assert said(chat(client, **given, presence_penalty=2, frequency_penalty=2)) != said(chat(client, **given))


@CALLS("chat: logprobs")
def _(client: Any) -> None:
    (entry, *_) = chat(client, logprobs=True, top_logprobs=4).choices[0].logprobs.content
    assert len(entry.top_logprobs) == 4
    assert entry.logprob <= entry.top_logprobs[0].logprob + 1e-6 <= 1e-5


@CALLS("chat: response_format json_object")
def _(client: Any) -> None:
    reply = chat(client, max_tokens=200, response_format={"type": "json_object"}, temperature=0)
    assert said(reply).lstrip().startswith("{")
    assert reply.choices[0].finish_reason == "length" or isinstance(json.loads(said(reply)), dict)


@CALLS("chat: response_format json_schema")
def _(client: Any) -> None:
    assert is_dog(said(chat(client, max_tokens=64, response_format=DOG)))


@CALLS("chat: parsed into a class")
def _(client: Any) -> None:
    reply = client.chat.completions.parse(model="bundled", messages=USER, seed=1, max_tokens=64, response_format=Dog)
    assert isinstance(reply.choices[0].message.parsed, Dog)


@CALLS("chat: tools that may be called")
def _(client: Any) -> None:
    (choice,) = chat(client, tools=[FEED, WALK]).choices
    assert choice.finish_reason in ("stop", "length", "tool_calls")
    assert choice.message.content or choice.message.tool_calls


@CALLS("chat: a tool that must be called")
def _(client: Any) -> None:
    (choice,) = chat(client, tools=[FEED], tool_choice="required", parallel_tool_calls=False, max_tokens=64).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason, choice.message.content) == ("feed", "tool_calls", None)
    assert is_dog(call.function.arguments)


@CALLS("chat: a tool that is named")
def _(client: Any) -> None:
    named = {"type": "function", "function": {"name": "walk"}}
    (call,) = chat(client, tools=[FEED, WALK], tool_choice=named, max_tokens=64).choices[0].message.tool_calls
    assert call.function.name == "walk"
    assert is_dog(call.function.arguments)


@CALLS("chat: tools that must not be called")
def _(client: Any) -> None:
    (choice,) = chat(client, tools=[FEED], tool_choice="none").choices
    assert (choice.message.tool_calls, choice.finish_reason != "tool_calls") == (None, True)


@CALLS("chat: allowed_tools")
def _(client: Any) -> None:
    only = {"mode": "required", "tools": [{"type": "function", "function": {"name": "walk"}}]}
    for seed in (1, 2):
        reply = chat(
            client, tools=[FEED, WALK], tool_choice={"type": "allowed_tools", "allowed_tools": only}, seed=seed,
            parallel_tool_calls=False, max_tokens=64,
        )  # fmt: skip
        assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["walk"]


@CALLS("chat: a call and its result")
def _(client: Any) -> None:
    given: Any = {"tools": [FEED], "parallel_tool_calls": False}
    message = chat(client, **given, tool_choice="required", max_tokens=64).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "fed"}
    reply = chat(client, [*USER, message, result], **given, tool_choice="none")
    assert reply.choices[0].message.role == "assistant"
    assert reply.usage.prompt_tokens > chat(client).usage.prompt_tokens


@CALLS("chat: response_format and tools together")
def _(client: Any) -> None:
    for seed in (1, 2, 3):
        (choice,) = chat(client, tools=[FEED], response_format=DOG, max_tokens=100, seed=seed).choices
        texts = [call.function.arguments for call in choice.message.tool_calls or ()] or [choice.message.content]
        assert all(map(is_dog, texts))


@CALLS("chat: reasoning_effort, with a word that this template does not read it")
def _(client: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="bundled", messages=USER, seed=1, max_tokens=8, reasoning_effort="low"
    )
    assert raw.headers["x-foretell-without-effect"] == "reasoning_effort"
    assert said(raw.parse()) == said(chat(client))


@CALLS("chat: a predicted output")
def _(client: Any) -> None:
    text = said(chat(client, max_tokens=24))
    reply = chat(client, max_tokens=24, prediction={"type": "content", "content": [{"type": "text", "text": text}]})
    assert said(reply) == text
    assert reply.usage.completion_tokens_details.accepted_prediction_tokens > 0


@CALLS("chat: what belongs to OpenAI's own service")
def _(client: Any) -> None:
    reply = chat(
        client, user="u", metadata={"k": "v"}, store=False, service_tier="auto", safety_identifier="s",
        prompt_cache_key="p", modalities=["text"], verbosity="medium",
    )  # fmt: skip
    assert said(reply) == said(chat(client))


@CALLS("chat: a stream")
def _(client: Any) -> None:
    first, *rest = chat(client, stream=True)
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == said(chat(client))
    assert rest[-1].choices[0].finish_reason


@CALLS("chat: a stream with usage")
def _(client: Any) -> None:
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert (last.choices, last.usage) == ([], chat(client).usage)


@CALLS("chat: a stream with usage in every chunk")
def _(client: Any) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == chat(client).usage.completion_tokens > 0


@CALLS("chat: a stream of two choices")
def _(client: Any) -> None:
    ends = [0, 0]
    texts = ["", ""]
    for chunk in chat(client, stream=True, n=2):
        (choice,) = chunk.choices
        ends[choice.index] += choice.finish_reason is not None
        texts[choice.index] += choice.delta.content or ""
    assert (ends, texts) == ([1, 1], [choice.message.content for choice in chat(client, n=2).choices])


@CALLS("chat: a stream of a call")
def _(client: Any) -> None:
    given: Any = {"tools": [FEED], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 64}
    ((name, arguments),) = called(chat(client, stream=True, **given)).values()
    assert name == "feed"
    assert arguments == chat(client, **given).choices[0].message.tool_calls[0].function.arguments


@CALLS("chat: the stream helper")
def _(client: Any) -> None:
    text = said(chat(client))
    given: Any = {"model": "bundled", "messages": USER, "seed": 1, "max_tokens": 8, "stop": text[5]}
    with client.chat.completions.stream(**given) as stream:  # it refuses a text that its limit cut
        kinds = {event.type for event in stream}
        whole = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert said(whole) == text[: text.index(text[5])]


@CALLS("chat: the assistant's message is continued")
def _(client: Any) -> None:
    begun: Any = [*USER, {"role": "assistant", "content": "def add("}]
    reply = chat(client, begun, extra_body={"continue_final_message": True})
    assert not said(reply).startswith("def add(")
    assert reply.usage.prompt_tokens < chat(client, begun).usage.prompt_tokens


@CALLS("chat: asynchronously, several at once")
def _(client: Any) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as other:
            made = [
                other.chat.completions.create(model="bundled", messages=USER, seed=seed, max_tokens=8)
                for seed in (1, 2)
            ]
            return await asyncio.gather(*made)

    assert [said(reply) for reply in asyncio.run(ask())] == [said(chat(client, seed=seed)) for seed in (1, 2)]


def text(client: Any, prompt: Any = "def add(", **more: Any) -> Any:
    return client.completions.create(**{"model": "bundled", "prompt": prompt, "seed": 1, "max_tokens": 8, **more})


@CALLS("completions")
def _(client: Any) -> None:
    reply = text(client)
    assert (reply.object, len(reply.choices)) == ("text_completion", 1)
    assert reply.choices[0].text


@CALLS("completions: several prompts")
def _(client: Any) -> None:
    reply = text(client, ["def add(", "import "], n=2, best_of=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.choices[0].text == text(client).choices[0].text
    assert reply.choices[2].text == text(client, "import ").choices[0].text


@CALLS("completions: token ids, echoed")
def _(client: Any) -> None:
    scored = text(client, echo=True, max_tokens=0, logprobs=0).choices[0]
    assert (scored.text, len(scored.logprobs.tokens) > 1) == ("def add(", True)
    reply = text(client, [300, 301, 302], echo=True)
    assert reply.usage.prompt_tokens == 3
    assert reply.choices[0].text.endswith(text(client, [300, 301, 302]).choices[0].text)


@CALLS("completions: log probabilities of a prompt")
def _(client: Any) -> None:
    scored = text(client, echo=True, max_tokens=0, logprobs=2)
    found = scored.choices[0].logprobs
    assert scored.usage.completion_tokens == 0
    assert found.token_logprobs[0] is None
    assert all(one <= 0 for one in found.token_logprobs[1:])
    assert "".join(found.tokens) == "def add("
    assert all(len(one) in (2, 3) for one in found.top_logprobs[1:])  # the token itself comes beside the likeliest


@CALLS("completions: a stream")
def _(client: Any) -> None:
    chunks = list(text(client, stream=True, logprobs=1))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text(client).choices[0].text
    assert [bool(chunk.choices[0].finish_reason) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@CALLS("completions: regular expression, grammar, choice")
def _(client: Any) -> None:
    for given, pattern in (
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"ebnf": 'root ::= "x" | "y" root'}, "y*x?"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
    ):
        assert re.fullmatch(pattern, text(client, extra_body=given).choices[0].text)


def respond(client: Any, **more: Any) -> Any:
    given = {"model": "bundled", "input": "Write a function.", "max_output_tokens": 8, "extra_body": {"seed": 1}}
    return client.responses.create(**{**given, **more})


@CALLS("responses")
def _(client: Any) -> None:
    reply = respond(client)
    assert reply.output_text == said(chat(client))
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens


@CALLS("responses: instructions, items and what was answered before")
def _(client: Any) -> None:
    first = respond(client)
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, *first.output]
    reply = respond(client, input=[*items, {"role": "user", "content": "b"}], instructions="Be brief.")
    assert (reply.instructions, reply.usage.input_tokens > first.usage.input_tokens) == ("Be brief.", True)


@CALLS("responses: a function is called")
def _(client: Any) -> None:
    tool = {"type": "function", "name": "feed", "parameters": SCHEMA, "strict": True}
    reply = respond(client, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_output_tokens=64)
    (item,) = reply.output
    assert (item.type, item.name, is_dog(item.arguments), reply.status) == ("function_call", "feed", True, "completed")
    again = [{"role": "user", "content": "a"}, item]
    told = [{"type": "function_call_output", "call_id": item.call_id, "output": [{"type": "input_text", "text": "ok"}]}]
    assert respond(client, input=[*again, *told], tools=[tool], tool_choice="none").output[0].type == "message"


@CALLS("responses: a stream")
def _(client: Any) -> None:
    events = list(respond(client, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
        events[-1].response.output_text
    )
    assert events[-1].type in ("response.completed", "response.incomplete")


@CALLS("responses: text of a schema, and log probabilities")
def _(client: Any) -> None:
    shape = {"format": {"type": "json_schema", "name": "dog", "schema": SCHEMA, "strict": True}}
    reply = respond(client, text=shape, max_output_tokens=64, include=["message.output_text.logprobs"], top_logprobs=2)
    assert is_dog(reply.output_text)
    assert "".join(one.token for one in reply.output[0].content[0].logprobs) == reply.output_text


@CALLS("models")
def _(client: Any) -> None:
    (model,) = client.models.list()
    assert (model.id, model.root, client.models.retrieve("bundled")) == ("bundled", "bundled", model)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.models.retrieve("other")


@CALLS("errors are those of OpenAI's client, and say which field")
def _(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=USER)
    assert missing.value.code == "model_not_found"
    for more, field in (({"temperature": -1}, "temperature"), ({"extra_body": {"temprature": 1}}, "temprature")):
        with pytest.raises(openai.BadRequestError) as wrong:
            chat(client, **more)
        assert wrong.value.param == field
    with pytest.raises(openai.BadRequestError, match="shorten"):
        chat(client, [{"role": "user", "content": "word " * 5000}])


def test_there_are_fifty() -> None:
    assert len(CALLS) == 50


@pytest.mark.parametrize("name", CALLS)
def test_call(client: openai.OpenAI, name: str) -> None:
    CALLS[name](client)
