"""What an answer's text must look like, under every name that clients give it: one wish, made into a constraint."""

import json
from collections.abc import Callable
from typing import Any

from foretell.core.errors import ConfigError
from foretell.core.params import schema_of
from foretell.engine.structured.constraint import json_options
from foretell.engine.structured.format import Kind, OutputFormat, grammar_kind
from foretell.server.backend import Backend
from foretell.server.errors import bad, of_engine
from foretell.server.protocol.formats import (
    ConstantTag,
    Formatted,
    GrammarTag,
    RegexTag,
    SchemaFormat,
    SchemaTag,
    TagFormat,
    TextFormat,
)


def wanted_format(body: Formatted) -> OutputFormat | None:
    """The one format that a request asks for. Raises ApiError 400 for two."""
    found = list(_formats(body))
    if len(found) > 1:
        raise bad(
            f"{found[0].field} and {found[1].field} both say what the text must look like: give one", found[1].field
        )
    return found[0] if found else None


def term_of(format: OutputFormat) -> str:
    """A format as a term of a Lark grammar, beside tool calls. A schema is one that is ``enforceable``. Raises ConfigError
    where it cannot be one."""
    if format.kind == "json":
        options = json_options(strict=format.strict, compact=False)
        return f"%json {json.dumps({**format.given, 'x-guidance': options})}"
    if format.kind == "choice":
        return "(" + " | ".join(json.dumps(text) for text in format.given) + ")"
    raise ConfigError(
        f"{format.field} and tools exclude each other: give a JSON schema or a choice of texts beside tools, drop one of "
        "the two, or set tool_choice to 'none'"
    )


def format_processor(backend: Backend, format: OutputFormat) -> tuple[Callable[[int], Any], tuple[str, ...]]:
    """(what makes a choice's processor, what its format leaves out). Slow: see ``Constraints``. Raises ApiError 400."""
    try:
        return format.constraint(backend.constraints).processor, format.left_out(backend.constraints)
    except ConfigError as error:
        raise of_engine(error, format.field) from None


def _formats(body: Formatted) -> list[OutputFormat]:
    made: list[OutputFormat | None] = []
    given = body.response_format
    if isinstance(given, SchemaFormat):
        schema = given.json_schema
        made.append(OutputFormat("response_format", "json", schema.schema_ or {}, bool(schema.strict)))
    elif isinstance(given, TagFormat):
        made.append(_tag("response_format", given.format))
    elif given is not None and not isinstance(given, TextFormat):
        made.append(OutputFormat("response_format", "json", given.schema_ or {"type": "object"}))
    made += [_schema(field, getattr(body, field)) for field in ("json_schema", "guided_json")]
    made += [_text(field, "regex", getattr(body, field)) for field in ("regex", "guided_regex")]
    made += [_grammar(field, getattr(body, field)) for field in ("ebnf", "grammar", "guided_grammar")]
    if body.guided_choice is not None:
        made.append(OutputFormat("guided_choice", "choice", body.guided_choice))
    if (asked := body.structured_outputs) is not None:
        place = "structured_outputs."
        made += [
            _schema(place + "json", asked.json_),
            _text(place + "regex", "regex", asked.regex),
            _grammar(place + "grammar", asked.grammar),
            None if asked.choice is None else OutputFormat(place + "choice", "choice", asked.choice),
            OutputFormat(place + "json_object", "json", {"type": "object"}) if asked.json_object else None,
        ]
    return [one for one in made if one is not None]


def _tag(field: str, tag: ConstantTag | SchemaTag | RegexTag | GrammarTag) -> OutputFormat | None:
    if isinstance(tag, ConstantTag):
        return OutputFormat(field, "choice", [tag.value])
    if isinstance(tag, SchemaTag):
        return OutputFormat(field, "json", tag.json_schema)
    return _text(field, "regex", tag.pattern) if isinstance(tag, RegexTag) else _grammar(field, tag.grammar)


def _schema(field: str, given: str | dict[str, Any] | None) -> OutputFormat | None:
    if given is None:
        return None
    try:
        return OutputFormat(field, "json", schema_of(given, field) if isinstance(given, str) else given)
    except ConfigError as error:
        raise bad(str(error), field) from None


def _text(field: str, kind: Kind, given: str | None) -> OutputFormat | None:
    return None if given is None else OutputFormat(field, kind, given)


def _grammar(field: str, given: str | None) -> OutputFormat | None:
    return None if given is None else OutputFormat(field, grammar_kind(given), given)
