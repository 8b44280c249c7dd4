"""One client of Python in a conversation with a tool: ``python talk.py CLIENT URL MODEL``, by any Python that has it.

Every reply goes back into the conversation as the client's own object, with whatever the client has added to it. Only
the standard library and the client are imported.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
            "maxProperties": 1,  # litellm drops the line above
        },
    },
}
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it warm in Rome?"}]
NAMED = {"type": "function", "function": {"name": "weather"}}
RESULT, AGAIN = '{"degrees": 31}', {"role": "user", "content": "And in Oslo?"}


def check(call: str) -> None:
    """The arguments of a call are those of the tool."""
    assert json.loads(call)["city"] in ("Rome", "Oslo"), call


def openai(url: str, model: str, stream: bool) -> None:
    """OpenAI's own client."""
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessage

    with OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:

        def reply(messages: list[Any], **more: Any) -> Any:
            given: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 100, "seed": 1, **more}
            if not stream:
                return client.chat.completions.create(**given).choices[0].message
            if "tools" in more and more["tool_choice"] == NAMED:  # the helper raises where a text is cut at max_tokens
                with client.chat.completions.stream(**given) as events:
                    return events.get_final_completion().choices[0].message
            chunks = client.chat.completions.create(**given, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            return ChatCompletionMessage(role="assistant", content=text)

        _talk(reply)


def _litellm(prefix: str, path: str) -> Callable[[str, str, bool], None]:
    def talk(url: str, model: str, stream: bool) -> None:
        import litellm

        def reply(messages: list[Any], **more: Any) -> Any:
            done = litellm.completion(
                model=f"{prefix}/{model}", api_base=url + path, api_key="none", messages=messages, max_tokens=100, seed=1,
                stream=stream, num_retries=0, **more,
            )  # fmt: skip
            if stream:
                done = litellm.stream_chunk_builder(list(done), messages=messages)
            return done.choices[0].message

        _talk(reply)

    return talk


def langchain(url: str, model: str, stream: bool) -> None:
    """ChatOpenAI of langchain-openai."""
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url + "/v1", api_key="none", model=model, max_tokens=100, seed=1, max_retries=0)

    def reply(runnable: Any, messages: list[Any]) -> Any:
        if not stream:
            return runnable.invoke(messages)
        first, *rest = list(runnable.stream(messages))
        for chunk in rest:
            first = first + chunk
        return first

    messages: list[Any] = [SystemMessage("Be brief."), HumanMessage("Is it warm in Rome?")]
    called = reply(chat.bind_tools([TOOL], tool_choice="weather"), messages)
    (call,) = called.tool_calls
    check(json.dumps(call["args"]))
    messages += [called, ToolMessage(RESULT, tool_call_id=call["id"])]
    told = reply(chat, messages)
    assert told.text, told
    assert not told.tool_calls, told
    messages += [told, HumanMessage("And in Oslo?")]
    assert reply(chat, messages).text


def _talk(reply: Callable[..., Any]) -> None:
    """The conversation, by a function that has the reply's message. It may change no message."""
    messages: list[Any] = list(ASK)
    called = reply(messages, tools=[TOOL], tool_choice=NAMED)
    (call,) = called.tool_calls
    check(call.function.arguments)
    messages += [called, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    told = reply(messages, tools=[TOOL], tool_choice="none")
    assert told.content, told
    assert not told.tool_calls, told
    messages += [told, AGAIN]
    assert reply(messages).content


CLIENTS: dict[str, Callable[[str, str, bool], None]] = {
    "openai": openai,
    "litellm openai/": _litellm("openai", "/v1"),
    "litellm openai/ at the root": _litellm("openai", ""),
    "litellm hosted_vllm/": _litellm("hosted_vllm", "/v1"),
    "langchain-openai": langchain,
}

if __name__ == "__main__":
    name, url, model = sys.argv[1:]
    for stream in (False, True):
        CLIENTS[name](url, model, stream)
