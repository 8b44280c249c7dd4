"""What of a JSON schema a grammar can hold: the schema without the rest, and the places of what is left out.

``reduced`` knows by itself, from the tables of ``keywords``. Where a grammar cannot be made of what it keeps, ``loosened``
finds the keywords at fault by trying. What is malformed, or permits nothing, is refused and never left out.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from time import monotonic
from typing import Any, NamedTuple

from foretell.core.errors import ConfigError
from foretell.engine.structured.keywords import (
    BOUNDS,
    HELD,
    IN_PLACE,
    LISTS,
    MAPS,
    MOST_STATES,
    NOT_HELD,
    ONE,
    SMALL,
    Place,
    References,
    asks,
    at,
    common,
    fault_of,
    is_held,
    multiple,
    normal,
    pointer,
    states,
    types_of,
    unheld_bounds,
    values_of,
    written,
)

Schema = Mapping[str, Any] | bool
Reduced = tuple[dict[str, Any], tuple[str, ...]]
"""(a schema, the JSON pointers, without their first slash, of what was left out of it)"""

_REFUSED = re.compile(
    r"Unsatisfiable schema|error: (un(closed|opened) group|repetition operator missing|incomplete escape|invalid .* range)"
)
"""llguidance's words for what permits nothing, and for mistakes in every dialect of regular expressions. Said in other
words, such a keyword is left out and named."""
_OLD = re.compile(r"json-schema\.org/(draft-0[3-7]|draft/2019-09)/")
_DEEPEST, _MOST_PAIRS = 8, 50_000  # of schemas that are compared
_REMEMBERED = 1 << 17  # characters of a schema: reading so many takes a fifth of a second


def reduced(schema: Schema) -> Reduced:
    """A schema without the keywords that no grammar holds, or not exactly. Raises ConfigError for one that is malformed or
    no JSON."""
    if not isinstance(schema, (Mapping, bool)):
        raise ConfigError(f"the JSON schema is not JSON: a schema is an object, true or false; got {_kind(schema)}")
    try:
        text = json.dumps(schema if isinstance(schema, bool) else dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the JSON schema is not JSON: {error}") from error
    return _reduced(text) if len(text) <= _REMEMBERED else _SchemaReader(json.loads(text)).read()


@lru_cache(64)
def _reduced(text: str) -> Reduced:
    return _SchemaReader(json.loads(text)).read()


def loosened(
    schema: Mapping[str, Any], error_of: Callable[[Mapping[str, Any]], str], seconds: float, *, strict: bool
) -> Reduced | None:
    """A schema of which no grammar can be made, without the keywords at fault; None where they are not to blame.

    error_of: why a schema cannot be compiled; "" where it can. After so many seconds all that was not tried is left out.
    Raises ConfigError for a keyword that is malformed or permits nothing, and where strict for the first at fault.
    """
    units, end = _SchemaReader(schema).units(), monotonic() + seconds
    if not units or error_of(_without(schema, units)):
        return None
    dropped, known = list[_Unit](), 0  # of the first ``known`` those that were not dropped are usable together
    while known < len(units) and (error := error_of(_without(schema, dropped))):
        works, fails = known, len(units)
        while fails - works > 1 and monotonic() < end:
            middle = (works + fails) // 2
            said = error_of(_without(schema, [*dropped, *units[middle:]]))
            works, fails, error = (works, middle, said) if said else (middle, fails, error)
        if strict or _REFUSED.search(error):
            raise ConfigError(f"the JSON schema cannot be used: #/{pointer(units[fails - 1].place)}: {error}")
        dropped += units[works:fails]  # one, where there was the time to find it
        known = fails
    return _without(schema, dropped), tuple(sorted(pointer(unit.place) for unit in dropped))


class _Unit(NamedTuple):
    """What may be left out alone."""

    place: Place
    is_pattern: bool  # a pattern of patternProperties; else a keyword


def _without(schema: Mapping[str, Any], dropped: Sequence[_Unit]) -> dict[str, Any]:
    """A copy without some keywords and pattern properties. What those permit is still permitted."""
    made: dict[str, Any] = json.loads(json.dumps(schema))
    for place, is_pattern in sorted(dropped, key=lambda unit: -len(unit.place)):
        removed = at(made, place[:-1]).pop(place[-1])
        if is_pattern:
            owner = at(made, place[:-2])
            others = owner.get("additionalProperties", True)
            if others is not True:
                owner["additionalProperties"] = {"anyOf": [removed, *([] if others is False else [others])]}
    return made


class _SchemaReader:
    """Reads one schema; ``made`` is what is left of it."""

    def __init__(self, schema: Any) -> None:
        """schema: of JSON's types. Raises ConfigError for false."""
        self.given: dict[str, Any] = schema if isinstance(schema, dict) else {}
        if schema is False:
            raise ConfigError("the JSON schema is false: it permits nothing")
        self.made: dict[str, Any] = json.loads(json.dumps(self.given))
        self.left_out = set[Place]()
        self.edges = dict[Place, list[tuple[str, Place]]]()  # from a schema to those inside it, by keyword
        self.is_old = _OLD.search(str(self.given.get("$schema"))) is not None
        self._pairs = _MOST_PAIRS
        self._refs = References(self.given)

    def read(self) -> Reduced:
        """See ``reduced``."""
        for place in self._reachable():
            node = at(self.made, place)
            self._check(place, node)
            self._rewrite(node)
            for key in list(node):
                if self._is_lost(place, node, key):
                    self._leave_out(place, node, key)
        self._refuse_circles()
        self._leave_out_together()
        self._clear()
        return self.made, tuple(sorted(map(pointer, self.left_out)))

    def units(self) -> list[_Unit]:
        """What may be left out alone."""
        found = list[_Unit]()
        for place in self._reachable():
            node = at(self.made, place)
            found += [_Unit((*place, key), False) for key in node if key in SMALL or key == "$ref"]
            found += [_Unit((*place, "patternProperties", name), True) for name in node.get("patternProperties", ())]
        return found

    def _reachable(self) -> Iterator[Place]:
        """All schemas that hold for a part of a value, each once; the schemas inside one are looked for after it."""
        waiting, seen = [Place()], {Place()}
        while waiting:
            place = waiting.pop()
            node = at(self.made, place)
            if not isinstance(node, bool):
                if not isinstance(node, dict):
                    raise ConfigError(f"{_named(place)}: a schema is an object, true or false; got {_kind(node)}")
                yield place
                self.edges[place] = list(self._inside(place, node))
                new = [inner for _, inner in self.edges[place] if inner not in seen]
                seen.update(new)
                waiting += reversed(list(dict.fromkeys(new)))

    def _inside(self, place: Place, node: Mapping[str, Any]) -> Iterator[tuple[str, Place]]:
        for key, value in node.items():
            if key == "$ref":
                if (target := self._refs.target(place, value)) is not None:
                    yield key, target
            elif key in LISTS or (key == "items" and isinstance(value, list)):
                yield from ((key, (*place, key, index)) for index in range(len(value)))
            elif key in MAPS:
                yield from ((key, (*place, key, name)) for name in value)
            elif key in ONE:
                yield key, (*place, key)

    # -- one schema ------------------------------------------------------------------------------------------------------

    def _check(self, place: Place, node: Mapping[str, Any]) -> None:
        for key, value in node.items():
            fault = fault_of(key, value)
            if not fault and key == "$ref":
                target = self._refs.target(place, value)
                fault = (
                    f"{value} does not exist in the schema"
                    if target is not None and not self._refs.exists(target)
                    else ""
                )
            if fault:
                raise ConfigError(f"{_named((*place, key))}: {fault}")

    def _rewrite(self, node: dict[str, Any]) -> None:
        """The same in the words that llguidance reads rightly, wherever they stand."""
        for key in ("const", "enum"):
            if key in node:
                node[key] = normal(node[key])
        for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and bound in node:  # draft 4's
                node[exclusive] = node.pop(bound)
        for key in [key for key in node if key.startswith(("min", "max")) and key not in BOUNDS and key in HELD]:
            node[key] = int(node[key])
        if "additionalItems" in node and not isinstance(node.get("items"), list):
            del node["additionalItems"]  # it says nothing
        if "additionalItems" in node:  # side by side, or the second is not read
            node["additionalItems"], node["items"] = node.pop("additionalItems"), node.pop("items")

    def _is_lost(self, place: Place, node: Mapping[str, Any], key: str) -> bool:
        """Whether a keyword is not held, as far as its schema alone tells."""
        value = node[key]
        if key in NOT_HELD:
            return asks(node, key)
        if key == "format" and "string" not in (types_of(node) or {"string"}):
            return False  # formats are of texts
        if key == "$ref":
            return self._refs.target(place, value) is None
        if key == "multipleOf":
            return multiple(value) is None
        if key == "prefixItems" and (self.is_old or isinstance(node.get("items"), list)):
            return True
        return key in HELD and not is_held(key, value)

    def _leave_out(self, place: Place, node: dict[str, Any], key: str) -> None:
        self.left_out.add((*place, key))
        if key in NOT_HELD or key == "oneOf":
            return  # see _clear; a oneOf is held as anyOf is
        if key in ("const", "enum") and "type" not in node:
            numbers = [value for value in values_of(node) or () if isinstance(value, float)]
            node["type"] = [
                "integer" if one == "number" and not numbers else one
                for one in sorted(types_of({key: node[key]}) or ())
            ]
        del node[key]

    def _clear(self) -> None:
        """Delete what no grammar holds, but for what references lead into."""
        targets = {
            to[:end]
            for inner in self.edges.values()
            for key, to in inner
            if key == "$ref"
            for end in range(len(to) + 1)
        }
        for place in self.edges:
            node = at(self.made, place)
            for key in [key for key in node if key in NOT_HELD and (*place, key) not in targets]:
                del node[key]

    # -- schemas together ------------------------------------------------------------------------------------------------

    def _refuse_circles(self) -> None:
        """What a value must be before it is read further may not lead back to itself."""
        done = set[Place]()
        for start in self.edges:
            path, waiting = dict[Place, None](), [(start, False)]
            while waiting:
                place, is_over = waiting.pop()
                if is_over:
                    path.popitem()
                    done.add(place)
                elif place in path:
                    raise ConfigError(
                        f"{_named(place)}: by $ref and allOf alone it leads back to itself, so that it describes nothing: "
                        "refer to a schema that says what the value is"
                    )
                elif place not in done:
                    path[place] = None
                    waiting.append((place, True))
                    waiting += [(to, False) for key, to in self.edges.get(place, ()) if key in ("$ref", "allOf")]

    def _leave_out_together(self) -> None:
        """Keywords that are held alone and not beside others, in their own schema or in one of the same value."""
        mixed, spent = self._mixed(), set[Fraction]()
        for place in self.edges:
            if place not in mixed:
                self._leave_out_beside([place])
        self._leave_out_beside([place for place in self.edges if place in mixed])
        for place in self.edges:
            node = at(self.made, place)
            self._count_properties(place, node, is_mixed=place in mixed)
            if "oneOf" in node and not self._is_one_at_most(place):
                self._leave_out(place, node, "oneOf")
            if (number := _multiple_in(node)) is not None:
                if sum(map(states, spent | {number})) > 2 * MOST_STATES:
                    self._leave_out(place, node, "multipleOf")
                else:
                    spent.add(number)

    def _mixed(self) -> set[Place]:
        """Schemas of whose values others say more: whether something is held may depend on both."""
        mixed, waiting = set[Place](), list[Place]()
        for place in self.edges:
            node = at(self.made, place)
            count = sum(len(node[key]) if key == "allOf" else 1 for key in node if key in IN_PLACE)
            if count > 1 or (count and any(key in HELD for key in node if key not in IN_PLACE)):
                waiting.append(place)
        while waiting:
            place = waiting.pop()
            if place not in mixed:
                mixed.add(place)
                waiting += [to for _, to in self.edges.get(place, ())]
        return mixed

    def _leave_out_beside(self, places: Sequence[Place]) -> None:
        """places: of schemas that may be of one value."""
        nodes = [(place, at(self.made, place)) for place in places]
        found = [(place, node, key) for place, node in nodes for key in BOUNDS if key in node]
        for index in unheld_bounds([(key, node[key]) for _, node, key in found]):
            self._leave_out(*found[index])
        together: Fraction | None = None
        for place, node in nodes:
            if (number := _multiple_in(node)) is not None:
                both = number if together is None else common(together, number)
                if both is None:
                    self._leave_out(place, node, "multipleOf")
                else:
                    together = both

    def _count_properties(self, place: Place, node: dict[str, Any], *, is_mixed: bool) -> None:
        """Numbers of properties are held where all that are named are required, and in one more case. A grammar counts a
        name twice that stands twice, so that of names that are not given no more than one can be asked for."""
        required = node.get("required", ())
        least = node.get("minProperties", 0) - len(set(required))
        if "maxProperties" not in node and least <= 0:
            return
        optional = [name for name, part in node.get("properties", {}).items() if name not in required]
        most = node["maxProperties"] - len(set(required)) if "maxProperties" in node else 1
        is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
        if is_mixed or (optional and not (least <= 1 and most == 1 and is_closed)):
            for key in ("minProperties", "maxProperties"):
                if key in node:
                    self._leave_out(place, node, key)
        elif least > 1:
            self.left_out.add((*place, "minProperties"))  # it is held as far as names differ

    def _is_one_at_most(self, place: Place) -> bool:
        """Whether no value can be of two of the schemas of ``oneOf``."""
        parts = at(self.given, place)["oneOf"]
        return all(
            self._are_apart((*place, "oneOf", one), (*place, "oneOf", other), _DEEPEST)
            for one in range(len(parts)) for other in range(one)
        )  # fmt: skip

    def _are_apart(self, here: Place, there: Place, depth: int) -> bool:
        """Whether no value is of both schemas, as far as types, values and required properties tell."""
        self._pairs -= 1
        if depth < 0 or self._pairs < 0 or not (self._refs.exists(here) and self._refs.exists(there)):
            return False
        one, other = at(self.given, here), at(self.given, there)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        types, others = types_of(one), types_of(other)
        if types is not None and others is not None and types.isdisjoint(others):
            return True
        values, more = values_of(one), values_of(other)
        if values is not None and more is not None and set(map(written, values)).isdisjoint(map(written, more)):
            return True
        for node, place, beside in ((one, here, there), (other, there, here)):
            target = self._refs.target(place, node["$ref"]) if isinstance(node.get("$ref"), str) else None
            if target is not None and self._are_apart(target, beside, depth - 1):
                return True
            for key, each in (("allOf", any), ("anyOf", all), ("oneOf", all)):
                parts = node.get(key)
                if isinstance(parts, list) and parts and each(
                    self._are_apart((*place, key, index), beside, depth - 1) for index in range(len(parts))
                ):  # fmt: skip
                    return True
        if {"object"} not in (types, others):
            return False
        names = [name for node in (one, other) for name in node.get("required", ())]
        return any(
            name in one.get("properties", {}) and name in other.get("properties", {})
            and self._are_apart((*here, "properties", name), (*there, "properties", name), depth - 1)
            for name in names
        )  # fmt: skip


def _multiple_in(node: Mapping[str, Any]) -> Fraction | None:
    return multiple(node["multipleOf"]) if "multipleOf" in node else None


def _named(place: Place) -> str:
    return f"the JSON schema cannot be used: #/{pointer(place)}" if place else "the JSON schema cannot be used: #"


def _kind(value: Any) -> str:
    return type(value).__name__
