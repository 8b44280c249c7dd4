"""Calls in a conversation's history, and their results: one rule of how they become text, by whichever door they come."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretell.checkpoints.templates import tojson

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def arguments_in(given: Any) -> Any:
    """A call's arguments as a template reads them: the value of a text of JSON, {} where there are none. What is no JSON,
    or a text in it, stays the text that it is; whole numbers keep all their digits."""
    if not isinstance(given, str):
        return {} if given is None else given
    try:
        found = json.loads(given, parse_float=_finite, parse_constant=_finite) if given.strip() else None
    except (ValueError, RecursionError):
        return given
    return {} if found is None else given if isinstance(found, str) else found


def arguments_text(given: Any) -> str:
    """The same as a text: of one value one text, whatever its blanks and escapes were."""
    found = arguments_in(given)
    try:
        return found if isinstance(found, str) else tojson(found)
    except RecursionError:  # some depths can be read and not written
        return str(given)


def with_arguments(turn: Mapping[str, Any], *, as_text: bool = False) -> Mapping[str, Any]:
    """A turn whose calls have their arguments as ``arguments_in``, or ``arguments_text``, gives them."""
    if not functions_of(turn):
        return turn
    change = arguments_text if as_text else arguments_in
    calls = with_functions(turn["tool_calls"], lambda one: {**one, "arguments": change(one.get("arguments"))})
    return {**turn, "tool_calls": calls}


def functions_of(turn: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a turn calls: objects with a name and arguments."""
    calls = turn.get("tool_calls")
    found = [_function(call) for call in calls] if isinstance(calls, list | tuple) else []
    return [function for function in found if function is not None]


def with_functions(calls: Sequence[Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> list[Any]:
    """Calls whose functions are changed."""
    made = []
    for call in calls:
        function = _function(call)
        if function is None:
            made.append(call)
        else:
            made.append({**call, "function": change(function)} if "function" in call else change(function))
    return made


def _function(call: Any) -> Mapping[str, Any] | None:
    """What a call names: in its ``function``, or in itself."""
    found = call.get("function", call) if isinstance(call, Mapping) else None
    return found if isinstance(found, Mapping) and isinstance(found.get("name"), str) else None


def knows_tools(template: str) -> bool:
    """Whether a model's own template renders tools, and in the form that the server's grammar holds calls to.

    Templates of another form (``<function=...>``, ``[TOOL_CALLS]``) would show the model calls that the grammar
    forbids: for them, and for templates without tools, use ``messages_with_tools``.
    """
    is_own = (OPEN in template and "<function=" not in template) or in_channels(template)
    return bool(re.search(r"\btools\b", template)) and is_own


def in_channels(template: str) -> bool:
    """Whether a template shows calls as gpt-oss writes them: messages of a channel that go to a function."""
    return "<|channel|>" in template and "functions." in template


def messages_with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """A conversation for a template without tools, where calls and their results are texts.

    The tools come first, in the system message; calls become ``<tool_call>`` texts, results ``<tool_response>`` texts of
    the user's.
    """
    made: list[dict[str, Any]] = []
    answers = False
    for message in messages:
        text, calls = message.get("content") or "", functions_of(message)
        if isinstance(text, list) and calls:
            text = "".join(part["text"] for part in text if part.get("type") == "text")
        if message.get("role") == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if answers:
                made[-1]["content"] += "\n" + text
            else:
                made.append({"role": "user", "content": text})
            answers = True
            continue
        answers = False
        parts = [text] if text or not calls else []
        for call in calls:
            head = f'{{"name": {tojson(call["name"])}, "arguments": {arguments_text(call.get("arguments"))}}}'
            parts.append(f"{OPEN}\n{head}\n{CLOSE}")
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        made.append({**rest, "content": "\n".join(parts) if calls else text})
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        system = _SYSTEM.format(tools=lines)
        if made and made[0]["role"] == "system":
            made[0]["content"] = f"{made[0]['content']}\n\n{system}" if made[0]["content"] else system
        else:
            made.insert(0, {"role": "system", "content": system})
    return made


def _finite(text: str) -> float:
    """A number of JSON. Raises ValueError for others: NaN, and 1e999, which nothing can write again."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return number
