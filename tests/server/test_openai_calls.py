"""Calls of OpenAI's Python client to the bundled pair, as programs make them, beside those of test_chat.py."""

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.calls import DOG, FEED, SCHEMA, USER, WALK, Calls, chat, is_dog, said

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


@CALLS("chat: the same seed")
def _(client: Any) -> None:
    assert said(chat(client, seed=7)) == said(chat(client, seed=7)) != said(chat(client, seed=8))


@CALLS("chat: temperature 0 needs no seed")
def _(client: Any) -> None:
    assert said(chat(client, seed=None, temperature=0)) == said(chat(client, seed=3, temperature=0.0))


@CALLS("chat: the smallest top_p is greedy")
def _(client: Any) -> None:
    assert said(chat(client, top_p=1e-6)) == said(chat(client, temperature=0))


@CALLS("chat: logit_bias")
def _(client: Any) -> None:
    reply = chat(client, max_tokens=2, logit_bias={"65": 100}, extra_body={"provenance": True})
    assert {one["token_id"] for one in reply.choices[0].provenance} == {65}


@CALLS("chat: penalties")
def _(client: Any) -> None:
    given: Any = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    assert said(chat(client, **given, presence_penalty=2, frequency_penalty=2)) != said(chat(client, **given))


@CALLS("chat: response_format json_object")
def _(client: Any) -> None:
    reply = chat(client, max_tokens=200, response_format={"type": "json_object"}, temperature=0)
    assert said(reply).lstrip().startswith("{")
    assert reply.choices[0].finish_reason == "length" or isinstance(json.loads(said(reply)), dict)


@CALLS("chat: parsed into a class")
def _(client: Any) -> None:
    reply = client.chat.completions.parse(model="bundled", messages=USER, seed=1, max_tokens=64, response_format=Dog)
    assert isinstance(reply.choices[0].message.parsed, Dog)


@CALLS("chat: tools that may be called")
def _(client: Any) -> None:
    (choice,) = chat(client, tools=[FEED, WALK]).choices
    assert choice.finish_reason in ("stop", "length", "tool_calls")
    assert choice.message.content or choice.message.tool_calls


@CALLS("chat: allowed_tools")
def _(client: Any) -> None:
    only = {"mode": "required", "tools": [{"type": "function", "function": {"name": "walk"}}]}
    for seed in (1, 2):
        reply = chat(
            client, tools=[FEED, WALK], tool_choice={"type": "allowed_tools", "allowed_tools": only}, seed=seed,
            parallel_tool_calls=False, max_tokens=64,
        )  # fmt: skip
        assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["walk"]


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


@CALLS("chat: what belongs to OpenAI's own service")
def _(client: Any) -> None:
    reply = chat(
        client, user="u", metadata={"k": "v"}, store=False, service_tier="auto", safety_identifier="s",
        prompt_cache_key="p", modalities=["text"], verbosity="medium",
    )  # fmt: skip
    assert said(reply) == said(chat(client))


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


@CALLS("responses: text of a schema, and log probabilities")
def _(client: Any) -> None:
    shape = {"format": {"type": "json_schema", "name": "dog", "schema": SCHEMA, "strict": True}}
    reply = respond(client, text=shape, max_output_tokens=64, include=["message.output_text.logprobs"], top_logprobs=2)
    assert is_dog(reply.output_text)
    assert "".join(one.token for one in reply.output[0].content[0].logprobs) == reply.output_text


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


@pytest.mark.parametrize("name", CALLS)
def test_call(client: openai.OpenAI, name: str) -> None:
    CALLS[name](client)
