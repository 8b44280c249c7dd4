"""What an answer's text must look like, under every name that clients give it: one wish, made into a constraint."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from foretell.core.errors import ConfigError
from foretell.core.params import schema_of
from foretell.engine.structured.constraint import json_options
from foretell.engine.structured.format import Kind, OutputFormat, grammar_kind
from foretell.server.backend import Backend
from foretell.server.errors import bad, of_engine
from foretell.server.protocol.formats import Formatted, SchemaFormat, TagFormat, TextFormat

KINDS: Mapping[str, Kind | Literal["grammar"]] = {
    "json_schema": "json", "guided_json": "json", "regex": "regex", "guided_regex": "regex", "ebnf": "grammar",
    "grammar": "grammar", "guided_grammar": "grammar", "guided_choice": "choice",
    "json": "json", "choice": "choice", "pattern": "regex", "value": "choice",
}  # fmt: skip
"""What the fields of a request say that have a format, then those of ``structured_outputs`` and of tags."""
OF_TAGS = {"const_string": "value", "json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}
"""The field of each type of tag."""


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
        name = OF_TAGS[given.format.type]
        made.append(_wish("response_format", name, getattr(given.format, name)))
    elif given is not None and not isinstance(given, TextFormat):
        made.append(OutputFormat("response_format", "json", given.schema_ or {"type": "object"}))
    made += [_wish(field, field, getattr(body, field)) for field in KINDS if field in Formatted.model_fields]
    if (asked := body.structured_outputs) is not None:
        place = "structured_outputs."
        made += [
            _wish(f"{place}{name}", name, value) for name, value in asked.model_dump(exclude={"json_object"}).items()
        ]
        made += [OutputFormat(f"{place}json_object", "json", {"type": "object"})] if asked.json_object else []
    return [one for one in made if one is not None]


def _wish(field: str, name: str, given: Any) -> OutputFormat | None:
    """A format as it was given in a field of this name (``KINDS``). Raises ApiError 400."""
    kind = KINDS[name]
    if given is None:
        return None
    if kind == "json" and isinstance(given, str):
        try:
            given = schema_of(given, field)
        except ConfigError as error:
            raise bad(str(error), field) from None
    return OutputFormat(
        field, grammar_kind(given) if kind == "grammar" else kind, [given] if name == "value" else given
    )
