"""Calls without the form's marks: a whole answer that is one JSON object, alone or in one fence, which names a given tool.

Models that were trained for other marks, or for few, write ``{"name": ..., "arguments": {...}}`` and leave out the
``<tool_call>`` around it (Qwen2.5-Coder does): as text it would end an agent's work.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schemas of their arguments, by name."""
_FENCE = re.compile(r"```(?:json|tool_call|tool_code)?[ \t]*\r?\n")
_FENCES = ("```json\n", "```tool_call\n", "```tool_code\n", "```\n")
_NAMED = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)(?P<end>"?)')
_BEFORE = re.compile(r'\{\s*(?:"n?a?m?e?"?\s*:?\s*"?)?')
"""Beginnings of what ``_NAMED`` matches, as loose as it needs to be: what is held back is read again later."""
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def may_begin(text: str, tools: Tools) -> bool:
    """Whether an answer that begins so may be a call."""
    rest = text.lstrip()
    if rest.startswith("`"):
        fence = _FENCE.match(rest)
        if fence is None:
            return any(one.startswith(rest.replace("\r", "").replace(" ", "")) for one in _FENCES)
        rest = rest[fence.end() :].lstrip()
    named = _NAMED.match(rest)
    if named is None:
        return not rest or _BEFORE.fullmatch(rest) is not None
    return named["name"] in tools if named["end"] else any(name.startswith(named["name"]) for name in tools)


def call_of(text: str, tools: Tools) -> tuple[str, str] | None:
    """(name, arguments as JSON) of an answer that is a call of a tool with arguments that fit it; None: it is text."""
    inner = text.strip()
    fence = _FENCE.match(inner)
    if fence is not None:
        if not inner.endswith("```") or len(inner) < fence.end() + 3:
            return None
        inner = inner[fence.end() : -3].strip()
    try:
        given = json.loads(inner)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or not isinstance(given.get("name"), str) or given["name"] not in tools:
        return None
    if len(given) > 2 or (len(given) == 2 and not {"arguments", "parameters"} & given.keys()):
        return None
    arguments, schema = given.get("arguments", given.get("parameters", {})), tools[given["name"]]
    if takes_nothing(schema):  # some models give its schema back
        arguments = {}
    return (given["name"], json.dumps(arguments, ensure_ascii=False)) if _fits(arguments, schema) else None


def takes_nothing(schema: Mapping[str, Any]) -> bool:
    """Whether a tool's schema has no argument. One without ``properties`` takes any object."""
    only = {"type", "properties", "required", "additionalProperties", "description", "title", "$schema"}
    empty = not schema or ("properties" in schema and not schema["properties"])
    return empty and schema.keys() <= only and not schema.get("additionalProperties")


def _fits(arguments: Any, schema: Mapping[str, Any]) -> bool:
    """Whether arguments have the names and kinds that a schema asks for, at its first level."""
    if not isinstance(arguments, dict):
        return False
    known = schema.get("properties") or {}
    if any(name not in arguments for name in schema.get("required") or ()):
        return False
    if known and schema.get("additionalProperties") is not True and not arguments.keys() <= known.keys():
        return False
    return all(_is_kind(value, known.get(name)) for name, value in arguments.items())


def _is_kind(value: Any, schema: Any) -> bool:
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list):  # a schema of another form
        return True
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _TYPES.get(kind, (object,))) for kind in kinds if isinstance(kind, str))
