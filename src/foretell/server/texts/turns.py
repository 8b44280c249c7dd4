"""A request's messages as turns, one rule for all templates: texts, roles, and results in the order of their calls."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.engine.request.calls import in_channels, knows_tools, messages_with_tools
from foretell.engine.request.conversation import THOUGHTS, Messages, Tools
from foretell.engine.structured.thoughts import family_of
from foretell.server.backend import Backend
from foretell.server.errors import ApiError, bad
from foretell.server.protocol.messages import AssistantTurn, Message, Parts, SaidParts, TextPart, ToolMessage
from foretell.server.protocol.tools import GivenCall

Turn = dict[str, Any]
CHANGING = re.compile(r"\A(x-anthropic-billing-header):[^\n]*\n*")
"""A line that a client puts before its system text, and that is another one in each conversation (Claude Code's): all that
comes after it would be read again. Other servers leave it out too (vLLM's issue 36829, llama.cpp's 21793)."""
MOST_SHOWN = 8
"""Ids that an error lists."""


@dataclass(frozen=True)
class Form:
    """How a conversation is rendered."""

    template: str  # its source, "" where there is none
    tools: Tools | None
    compose: Callable[[Messages, Tools], Messages] | None  # where calls and tools must be texts


def form_of(backend: Backend, messages: Sequence[Message], tools: Tools, *, channels: bool = True) -> Form:
    """The form of a conversation with these tools. The template's own is used where it is the one that is generated;
    channels: whether it is gpt-oss's, of a template that shows that."""
    if tools and knows_tools(source := backend.template(tools=True)) and (channels or not in_channels(source)):
        return Form(source, list(tools), None)
    source = backend.template()
    has_calls = any(
        isinstance(one, ToolMessage) or (isinstance(one, AssistantTurn) and one.tool_calls) for one in messages
    )
    if tools or (has_calls and not knows_tools(source)):
        return Form(source, list(tools), messages_with_tools)
    return Form(source, None, None)


def turns(messages: Sequence[Message], form: Form) -> list[Turn]:
    """The conversation, as the form's template and its composer read it: every content is a text. Raises ApiError 400 for
    results that answer no call, or not each."""
    return _paired([_turn(message, form) for message in messages])


def cut_changing(given: list[Turn]) -> str:
    """Cut such a line off a conversation's system text, in place; its name, or "" where there is none."""
    first = given[0] if given and given[0]["role"] in ("system", "developer") else {}
    found = CHANGING.match(first["content"]) if isinstance(first.get("content"), str) else None
    if found is None:
        return ""
    first["content"] = first["content"][found.end() :]
    return found[1]


def text_of(content: str | Parts | SaidParts) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def _turn(message: Message, form: Form) -> Turn:
    role = "tool" if isinstance(message, ToolMessage) else message.role  # also where the client calls it a function's
    made: Turn = {"role": role, "content": text_of(message.content or "")}
    if message.name is not None:
        made["name"] = message.name
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantTurn):
        if message.tool_calls:
            made["tool_calls"] = [_call(call) for call in message.tool_calls]
        thought = message.reasoning_content or message.reasoning
        if thought:
            _add_thought(made, thought, form)
    return made


def _add_thought(turn: Turn, thought: str, form: Form) -> None:
    """An earlier thought where the template reads it: by a name, as a part of the content, or in the content's text, where
    templates look for its end (to leave out all but the last). Templates that know no thoughts get none."""
    template, family = form.template, family_of(form.template)
    if form.compose is None and re.search(r"==\s*['\"]thinking['\"]", template):  # Mistral's
        turn["content"] = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": turn["content"]}]
        return
    name = next((name for name in THOUGHTS if re.search(rf"(\.|\bget\(['\"]|\[['\"]){name}\b", template)), None)
    if name is not None or "reasoning_content" in template:
        turn[name or "reasoning_content"] = thought
    elif family is not None and re.search(rf"split\(\s*['\"]{re.escape(family.closer)}", template):
        turn["content"] = f"{family.openers[0]}\n{thought}\n{family.closer}\n\n{turn['content']}"


def _call(call: GivenCall) -> Turn:
    named = {} if call.id is None else {"id": call.id}
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {**named, "type": call.type, "function": function}


def _paired(given: list[Turn]) -> list[Turn]:
    """The turns, results in the order of the calls: templates write no ids, so the place alone says what they answer."""
    made: list[Turn] = []
    at = 0
    while at < len(given):
        calls: list[Turn] = []
        while at < len(given) and given[at]["role"] == "assistant":  # some clients send a turn for each call
            calls += given[at].get("tool_calls", ())
            made.append(given[at])
            at += 1
        begun = at
        while at < len(given) and given[at]["role"] == "tool":
            at += 1
        if at > begun:
            made += _in_order(calls, given[begun:at], begun)
        elif at < len(given):
            made.append(given[at])
            at += 1
    return made


def _in_order(calls: Sequence[Turn], results: Sequence[Turn], begun: int) -> list[Turn]:
    """The results of some calls, one of each, in their order; what has no id goes by its name, or by its place. begun: the
    place of the first result in the conversation."""
    ids = [call.get("id") or None for call in calls]
    places: dict[str, int] = {}
    for at, one in enumerate(ids):
        if one is not None and places.setdefault(one, at) != at:
            raise _unpaired(begun, f"two calls of the turn before it have the id {_short(one)}: give each its own")
    found: dict[int, Turn] = {}
    others: list[tuple[int, Turn]] = []
    for place, result in enumerate(results, begun):
        known = places.get(result.get("tool_call_id") or "")
        if known is None:
            others.append((place, result))
        elif known in found:
            raise _unpaired(place, f"a second result of the call {_short(ids[known])}: give one of each call")
        else:
            found[known] = result
    listed: dict[tuple[bool, str | None], list[int]] = {}  # by whether all are without an id, and by their name
    for at, (one, call) in enumerate(zip(ids, calls, strict=True)):
        for is_bare in (False, True) if one is None else (False,):
            for name in (call["function"]["name"], None):
                listed.setdefault((is_bare, name), []).append(at)
    free = {key: iter(each) for key, each in listed.items()}
    for place, result in others:
        named = result.get("tool_call_id") or None
        keys = [(named is not None, name) for name in (result.get("name"), None)]
        unknown = next((at for key in keys for at in free.get(key, ()) if at not in found), None)
        if unknown is not None:
            found[unknown] = result
        elif calls or named is not None:
            raise _unpaired(place, _unknown(named, [one for one in ids if one is not None], len(calls)))
    missing = [ids[at] or f"number {at + 1}" for at in range(len(calls)) if at not in found]
    if missing:
        raise _unpaired(
            begun + len(results) - 1,
            f"no result of the call {_listed(missing)}: results of all calls follow their turn",
        )
    return [found[at] for at in range(len(calls))] if calls else list(results)


def _unknown(named: str | None, ids: Sequence[str], num_calls: int) -> str:
    if not num_calls:
        return f"{_short(named)} answers no call: no turn of the assistant with calls stands right before its results"
    expected = f"expected {_listed(ids)}" if ids else "its calls have no ids"
    what = (
        "one result more than there are calls" if named is None else f"{_short(named)} is no call of the turn before it"
    )
    return f"{what}: {expected}"


def _unpaired(place: int, reason: str) -> ApiError:
    param = f"messages.{place}.tool_call_id"
    return bad(f"{param}: {reason}", param)


def _listed(ids: Sequence[str]) -> str:
    shown = [_short(one) for one in ids[:MOST_SHOWN]]
    return ", ".join(shown) + (f" or {len(ids) - MOST_SHOWN} others" if len(ids) > MOST_SHOWN else "")


def _short(text: Any) -> str:
    return repr(text) if len(str(text)) <= 64 else repr(str(text)[:61] + "...")
