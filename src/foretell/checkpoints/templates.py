"""Chat templates, rendered as transformers does: jinja2 in its sandbox, with the functions that templates are written for.

A template is anybody's code. It sees plain data alone, and can change and store nothing.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names by which messages hold the model's reasoning; templates read the first, those of gpt-oss the second."""
_GOES_ON = "FORETELL_GOES_ON "
_HALF = re.compile("[\ud800-\udfff]")
_SAID = "zqsaidqz"
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
_USER = {"role": "user", "content": "a"}
_ASKED: Mapping[str, Sequence[Mapping[str, Any] | None]] = {
    "user": (None,), "assistant": (_USER, None, _USER), "system": (None, _USER), "developer": (None, _USER),
    "tool": (_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, None),
}  # fmt: skip
"""Of each role a conversation that tells how a template reads its text. None: the turn with the text."""


def render_chat(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **values: Any,
) -> str:
    """The text of a conversation. continue_final_message: it ends within the last message, whose content is a text, or
    parts of which one is; values: further ones that the template reads. Raises ValueError, or what the template raises."""
    if not messages:
        raise ValueError("a conversation needs at least one message")
    template = _compiled(source)
    turns = [_turn(message) for message in messages]
    last = None
    if continue_final_message:
        holder, key = _last_text(turns[-1])
        last = holder.get(key)
        if add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if not isinstance(last, str) or "content" not in source:
            raise ValueError("continue_final_message needs a last message with a text that the template reads")
        holder[key] = last + _GOES_ON
    text = template.render(
        messages=turns,
        tools=plain_data(tools),
        documents=plain_data(documents),
        add_generation_prompt=add_generation_prompt,
        **plain_data(values),
    )
    if not isinstance(last, str):
        return text
    mark = _GOES_ON.strip()
    if mark not in text or last.strip() not in text:
        raise ValueError("continue_final_message: the template does not write the last message as it is")
    at = text.rindex(mark)
    return text[:at] if text[at:].startswith(_GOES_ON) else text[:at].rstrip()  # the template has stripped the content


def as_parts(turn: Mapping[str, Any], roles: Set[str]) -> Mapping[str, Any]:
    """A turn as templates take it that read the texts of these roles as lists of parts (``roles_of_parts``)."""
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(content, str) or (role if role in _ASKED else "user") not in roles:
        return turn
    return {**turn, "content": [{"type": "text", "text": content}]}


def roles_of_parts(write: Callable[[Sequence[Mapping[str, Any]]], str]) -> frozenset[str]:
    """The roles whose text a template reads as a list of parts alone, as those of vision models do: of a plain text they
    write nothing. Found by rendering; a role that the template refuses is taken for the user's. write: renders turns."""
    found = set[str]()
    for role, turns in _ASKED.items():
        asked = [{"role": role, "content": _SAID} if turn is None else turn for turn in turns]
        reads = next((kinds for kinds in (found, {*found, role}) if _is_told(asked, kinds, write)), None)
        if role in (reads or ()) or (reads is None and "user" in found):
            found.add(role)
    return frozenset(found)


def _is_told(turns: Sequence[Mapping[str, Any]], roles: Set[str], write: Callable[..., str]) -> bool:
    """Whether a template writes the text, and not the list that it stands in."""
    try:
        text = write([as_parts(turn, roles) for turn in turns]).lower()
    except Exception:  # templates raise their own errors, and any other by what they read
        return False
    return _SAID in text and not re.search(rf"['\"]text['\"]\s*:\s*['\"]{_SAID}", text)


def plain_data(value: Any) -> Any:
    """A value as a template may see it: of JSON's types; anything else by the name of its type."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain_data, value)) if type(value) in (list, tuple) else list(map(plain_data, value))
    if isinstance(value, np.generic):
        return plain_data(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # of pydantic
        return plain_data(value.model_dump())
    return f"<{type(value).__name__}>"


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the template sees it: without keys that hold nothing, its reasoning by both names."""
    turn: dict[str, Any] = plain_data({key: value for key, value in message.items() if value is not None})
    reasoning = next((turn[key] for key in _REASONING if turn.get(key) is not None), None)
    return turn if reasoning is None else {"thinking": reasoning, **turn, "reasoning_content": reasoning}


def _last_text(turn: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(what holds the last text of a turn, its key there)."""
    content = turn.get("content")
    if not isinstance(content, list):
        return turn, "content"
    return next((part for part in reversed(content) if isinstance(part, dict) and "text" in part), {}), "text"


@lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(source)


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, by which templates tell training what the model wrote: shown as it is,
    with a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """Without names that begin with an underscore, by which a template could reach Python's own attributes."""

    def __init__(*args: Any, **values: Any) -> None:  # namespace(self=...) is a value too
        self, *given = args
        found = dict(*given, **values)
        for name in found:
            _check_name(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template stores {name!r}: names begin with no underscore")


class _Dict:
    """``dict`` without its attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """See ``dict.fromkeys``."""
        return dict.fromkeys(*args)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates write it: jinja2's own escapes what HTML would read. Half a surrogate pair, which is no text, stays
    the escape that it was."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _HALF.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)
