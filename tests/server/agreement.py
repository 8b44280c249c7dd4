"""Bodies near the border of what a schema admits, to compare the document with what validates requests."""

import re
from collections.abc import Mapping
from random import Random
from typing import Any

ODD: tuple[Any, ...] = (None, True, False, 0, 1, -1, 2, 0.5, "", "a", "text", "none", [], {}, [None], ["a"], {"a": 1})
"""Values that are put where others belong. No number like 1.0: to JSON schema it is an integer, to many programs not."""


def resolved(schema: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with its reference followed."""
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rsplit("/", 1)[1]]
    return dict(schema)


class Bodies:
    """Draws instances of schemas; with ``fault`` at about one place in so many, another value."""

    def __init__(self, definitions: Mapping[str, Any], random: Random, fault: float) -> None:
        self.definitions, self.random, self.fault = definitions, random, fault

    def draw(self, schema: Any, depth: int = 0) -> Any:
        """One instance, valid but for its faults."""
        if self.random.random() < self.fault:
            return self.random.choice(ODD)
        schema = resolved(schema, self.definitions)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self.draw(self.random.choice(schema[key]), depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        return getattr(self, "_" + schema.get("type", "any"))(schema, depth)

    def _any(self, schema: Any, depth: int) -> Any:
        return self.random.choice(ODD)

    def _null(self, schema: Any, depth: int) -> None:
        return None

    def _boolean(self, schema: Any, depth: int) -> bool:
        return self.random.random() < 0.5

    def _integer(self, schema: Any, depth: int) -> int:
        least, most = schema.get("minimum", -3), schema.get("maximum", 5)
        return self.random.choice([least, most, min(most, least + 1), least - (self.random.random() < self.fault)])

    def _number(self, schema: Any, depth: int) -> float:
        return self.random.choice([0.5, 0.25, schema.get("maximum", 0.5), schema.get("minimum", 0.5)])

    def _string(self, schema: Any, depth: int) -> str:
        made = ["a", "now", "7", "[ ]", "ab"]
        if "pattern" in schema:
            made = [one for one in made if re.search(schema["pattern"], one)]
        return self.random.choice(made) * max(1, schema.get("minLength", 1))

    def _array(self, schema: Any, depth: int) -> list[Any]:
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", 3), max(least, 3 - depth // 3))
        return [self.draw(schema.get("items", {}), depth + 1) for _ in range(self.random.randint(least, most))]

    def _object(self, schema: Any, depth: int) -> dict[str, Any]:
        made = {}
        needed, known = set(schema.get("required", ())), schema.get("properties", {})
        for name, inner in known.items():
            chance = 1 - self.fault if name in needed else 0.3 if depth else 0.08
            if self.random.random() < chance:
                made[name] = self.draw(inner, depth + 1)
        if depth and self.random.random() < self.fault:
            made["surplus"] = self.random.choice(ODD)
        return made
