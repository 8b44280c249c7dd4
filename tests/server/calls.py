"""Lists of calls: each is a function of OpenAI's client that asserts what comes back."""

import json
from collections.abc import Callable
from typing import Any

import openai

Call = Callable[[openai.OpenAI], None]
USER: Any = [{"role": "user", "content": "Write a function."}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "cups": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "cups"],
    "additionalProperties": False,
}
FEED: Any = {"type": "function", "function": {"name": "feed", "parameters": SCHEMA, "strict": True}}
WALK: Any = {"type": "function", "function": {"name": "walk", "parameters": SCHEMA, "strict": True}}
DOG: Any = {"type": "json_schema", "json_schema": {"name": "dog", "schema": SCHEMA, "strict": True}}


class Calls(dict[str, Call]):
    """The calls of one list, by what they are about."""

    def __call__(self, name: str) -> Callable[[Call], Call]:
        """Add one."""

        def add(call: Call) -> Call:
            assert name not in self, name
            self[name] = call
            return call

        return add


def chat(client: openai.OpenAI, messages: Any = USER, **more: Any) -> Any:
    """A conversation, of few tokens, that can be had again."""
    extra = {"seed": 1, "max_tokens": 8, **more}
    return client.chat.completions.create(model="bundled", messages=messages, **extra)


def said(reply: Any) -> str:
    """The text of the first choice."""
    return str(reply.choices[0].message.content)


def is_dog(text: str) -> bool:
    """Whether a text keeps to SCHEMA."""
    made = json.loads(text)
    return set(made) == {"name", "cups"} and len(made["name"]) <= 4 and made["cups"] in range(1, 10)


def called(chunks: Any) -> dict[int, tuple[str, str]]:
    """Of a stream of one choice: name and arguments of each call by its index."""
    found: dict[int, tuple[str, str]] = {}
    for chunk in chunks:
        for part in chunk.choices[0].delta.tool_calls or ():
            name, arguments = found.get(part.index, ("", ""))
            found[part.index] = (name + (part.function.name or ""), arguments + (part.function.arguments or ""))
    return found
