"""What of a JSON schema can be enforced. Where one cannot be used, the parts of it that are to blame are left out: patterns
with look-around or back references, pattern properties that overlap, references to other documents.

Keywords that llguidance does not know, such as ``not``, it leaves out by itself.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urldefrag, urljoin

Schema = Mapping[str, Any] | bool

_MALFORMED = re.compile(
    r"error: (un(closed|opened) group|repetition operator missing|incomplete escape|invalid .* range)"
)
"""Mistakes in every dialect of regular expressions: such a pattern is refused, not left out."""

_ONE = {
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
_LISTS = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
_MAPS = {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}


def enforceable(schema: Schema, error_of: Callable[[Schema], str]) -> tuple[Schema, tuple[str, ...]]:
    """(the schema without the parts that cannot be enforced, their keywords). error_of: why a small schema cannot be
    compiled; "" where it can. Raises RecursionError for a schema that is nested too deeply."""
    reader = _Reader(error_of, set(_ids(schema, "")))
    return reader.reduced(schema, ""), tuple(sorted(reader.left_out))


class _Reader:
    def __init__(self, error_of: Callable[[Schema], str], ids: set[str]) -> None:
        """ids: of the documents that the schema holds."""
        self._error_of, self._ids = error_of, ids
        self.left_out: set[str] = set()

    def reduced(self, schema: Any, base: str) -> Any:
        """A schema inside the document of this address."""
        if not isinstance(schema, Mapping):
            return schema
        base = _address(base, schema.get("$id"))
        made, dropped = dict[str, Any](), list[Any]()
        for key, value in schema.items():
            if isinstance(value, str) and not self._holds(key, value, base):
                self.left_out.add(key)
                continue
            parts = _parts(key, value)
            if parts is None:
                made[key] = value
            elif isinstance(value, Mapping) and key in _MAPS:
                made[key] = {name: self.reduced(part, base) for name, part in parts}
            elif isinstance(value, Mapping):
                made[key] = self.reduced(value, base)
            else:
                made[key] = [self.reduced(part, base) for _, part in parts]
        patterns = made.get("patternProperties")
        if isinstance(patterns, Mapping):
            kept = self._kept(patterns)
            dropped = [part for name, part in patterns.items() if name not in kept]
            made["patternProperties"] = kept
        if dropped:
            self.left_out.add("patternProperties")
            others = made.get("additionalProperties", True)
            if others is not True:  # what those patterns permit is still permitted
                made["additionalProperties"] = {"anyOf": [*dropped, *([] if others is False else [others])]}
        return made

    def _holds(self, key: str, value: str, base: str) -> bool:
        """Whether a keyword can be enforced."""
        if key == "pattern":
            return self._is_kept({"type": "string", "pattern": value})
        return key != "$ref" or value.startswith("#") or urldefrag(_address(base, value))[0] in self._ids

    def _kept(self, patterns: Mapping[str, Any]) -> dict[str, Any]:
        """Those of pattern properties that can be told apart."""
        kept = {
            name: part
            for name, part in patterns.items()
            if self._is_kept({"type": "object", "patternProperties": {name: True}})
        }
        numbered = {name: {"const": number} for number, name in enumerate(kept)}
        return kept if len(kept) < 2 or self._is_kept({"type": "object", "patternProperties": numbered}) else {}

    def _is_kept(self, part: Schema) -> bool:
        error = self._error_of(part)
        return not error or _MALFORMED.search(error) is not None


def _parts(key: str, value: Any) -> list[tuple[Any, Any]] | None:
    """The schemas that a keyword holds, by their names or places; None where its value holds none."""
    if key in _MAPS and isinstance(value, Mapping):
        return list(value.items())
    if key in _LISTS and isinstance(value, list):
        return list(enumerate(value))
    return [(key, value)] if key in _ONE and isinstance(value, Mapping) else None


def _ids(schema: Any, base: str) -> Iterator[str]:
    """The addresses of the documents that a schema holds: its own, and those with an ``$id`` inside it."""
    if isinstance(schema, Mapping):
        base = _address(base, schema.get("$id"))
        yield urldefrag(base)[0]
        for key, value in schema.items():
            for _, part in _parts(key, value) or ():
                yield from _ids(part, base)


def _address(base: str, given: Any) -> str:
    try:
        return urljoin(base, given) if isinstance(given, str) else base
    except ValueError:  # it is no address
        return base
