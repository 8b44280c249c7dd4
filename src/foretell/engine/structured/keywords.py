"""The keywords of JSON Schema: which of them a grammar holds a text to, what their values must be, and which numbers are
exact in a grammar. A test asks llguidance of every keyword and format, so that these tables and the library agree."""

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
"""Of the same value; all other schemas inside a schema are of parts of it."""
LISTS, MAPS = ("allOf", "anyOf", "oneOf", "prefixItems"), ("properties", "patternProperties")
ONE = ("items", "additionalItems", "additionalProperties")
SMALL = ("const", "enum", "pattern", "format", "multipleOf", *BOUNDS, *COUNTS)
"""Keywords that may be left out alone: the schema without them permits more."""
HELD = frozenset(("type", "required", *IN_PLACE, *LISTS, *MAPS, *ONE, *SMALL))
_NO_CHANGE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "not": (False,), "if": (), "then": (True, {}), "else": (True, {}), "contains": (),
    "minContains": (0,), "maxContains": (), "propertyNames": (True, {}), "dependentRequired": ({},),
    "dependentSchemas": ({},), "dependencies": ({},), "unevaluatedItems": (True, {}), "unevaluatedProperties": (True, {}),
    "$dynamicRef": (), "$recursiveRef": (),
}  # fmt: skip
"""Keywords that no grammar holds, with the values by which they ask for nothing."""
_PARTNERS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that ask for nothing without another one; an ``if`` asks for nothing by itself."""
NOT_HELD = frozenset(_NO_CHANGE)
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
EXACT = 2**53
"""Whole numbers up to here are exact as floats, which is how llguidance reads a number."""
_MOST_DIGITS = 15  # of a bound after its point, as llguidance reads them
_MOST_COUNT = 2**32 - 1
MOST_STATES = 16_384
"""Of the multiples in a schema: a number m takes as many states as m has without its factors 2 and 5. 65,521 states take
0.9 s to compile."""


def asks(schema: Mapping[str, Any], key: str) -> bool:
    """Whether a keyword that no grammar holds asks for anything in this schema."""
    if key not in NOT_HELD or any(_same(schema[key], one) for one in _NO_CHANGE[key]):
        return False
    if key == "if":
        return any(asks(schema, other) for other in ("then", "else") if other in schema)
    return _PARTNERS.get(key, key) in schema


def fault_of(key: str, value: Any) -> str:
    """What is wrong with the value of a keyword, in every dialect; "" where nothing is."""
    if key in COUNTS and not (_is_number(value) and value >= 0 and value == int(value)):
        return f"{_short(value)} must be a whole number of at least 0"
    if key in BOUNDS and not (_is_number(value) or (isinstance(value, bool) and key.startswith("exclusive"))):
        return f"{_short(value)} must be a number"
    if key == "multipleOf" and not (_is_number(value) and value != 0):
        return f"{_short(value)} must be a number other than 0"
    if key in ("pattern", "format", "$ref") and not isinstance(value, str):
        return f"{_short(value)} must be a text"
    if key == "required" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        return f"{_short(value)} must be a list of names"
    if key == "type":
        wrong = [one for one in (value if isinstance(value, list) else [value]) if one not in TYPES]
        return f"{_short(wrong[0])} is no type of JSON: known are {', '.join(TYPES)}" if wrong else _if_empty(value)
    if key == "enum":
        return _if_empty(value) if isinstance(value, list) else f"{_short(value)} must be a list of values"
    if key in LISTS and not isinstance(value, list):
        return f"{_short(value)} must be a list of schemas"
    if key in ("anyOf", "oneOf"):
        return _if_empty(value)
    if key in MAPS and not isinstance(value, dict):
        return f"{_short(value)} must be an object with a schema for each name"
    return ""


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that ``const`` or ``enum`` permit; None where there is neither."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def types_of(schema: Mapping[str, Any]) -> set[str] | None:
    """The types that a schema permits by itself, integers among the numbers; None: any."""
    given, values = schema.get("type"), values_of(schema)
    if given is None:
        return None if values is None else {_type_of(value) for value in values}
    named = {given} if isinstance(given, str) else set(given)
    return {"number" if one == "integer" else one for one in named}


def written(value: Any) -> str:
    """A value of JSON as a text: equal for equal values, so that 1.0 is 1."""
    return json.dumps(normal(value), sort_keys=True)


def normal(value: Any) -> Any:
    """A value of JSON whose whole numbers are integers, as JSON Schema has them: llguidance reads 1.0 as no integer."""
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, list):
        return [normal(one) for one in value]
    return {name: normal(one) for name, one in value.items()} if isinstance(value, dict) else value


def is_exact(value: Any) -> bool:
    """Whether a grammar permits this value of JSON, and no number beside those in it. The value is normal."""
    if isinstance(value, (list, dict)):
        return all(map(is_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or (abs(value) < 2**63 and int(float(value)) == value)


def is_held(key: str, value: Any) -> bool:
    """Whether a grammar holds texts to this keyword with this value exactly, as far as it alone tells."""
    if key in ("const", "enum"):
        return is_exact(value)
    if key == "format":
        return value in FORMATS
    if key in ("minLength", "maxLength"):
        return int(value) <= _MOST_COUNT
    if key in COUNTS:
        return int(value) < 2**63
    if key not in BOUNDS:
        return True
    number = Decimal(repr(value))
    exponent = number.normalize().as_tuple().exponent
    digits = -exponent if isinstance(exponent, int) else 0
    return abs(number) <= (EXACT - 1 if key.startswith("exclusive") else EXACT) and digits <= _MOST_DIGITS


def unheld_bounds(bounds: Sequence[tuple[str, Any]]) -> list[int]:
    """The places of exclusive bounds that are not held beside the others: llguidance permits a whole number n itself where
    another bound lies within 1 of it, as in 0 < x <= 0.5."""
    beside = {end for _, value in bounds if value != int(value) for end in (math.floor(value), math.ceil(value))}
    return [
        at for at, (key, value) in enumerate(bounds)
        if key.startswith("exclusive") and value == int(value) and value in beside
    ]  # fmt: skip


def multiple(value: Any) -> Fraction | None:
    """A ``multipleOf``, above 0; None where llguidance reads another number, or none, or takes too many states."""
    if abs(value) >= EXACT:
        return None
    scaled, places = abs(float(value)), 0
    while scaled != int(scaled) and places < _MOST_DIGITS:
        scaled, places = scaled * 10, places + 1
    read = Fraction(int(scaled), 10**places)
    is_right = read == abs(Fraction(Decimal(repr(value)))) and scaled < 2**32
    return read if is_right and states(read) <= MOST_STATES else None


def common(one: Fraction, other: Fraction) -> Fraction | None:
    """The least common multiple; None where llguidance's numbers of 32 bits overflow, or it takes too many states."""
    places = 0
    while (one * 10**places).denominator > 1 or (other * 10**places).denominator > 1:
        places += 1
    first, second = (one * 10**places).numerator, (other * 10**places).numerator
    both = Fraction(math.lcm(first, second), 10**places)
    return both if first * second < 2**32 and states(both) <= MOST_STATES else None


def states(number: Fraction) -> int:
    """About how many states the multiples of a number take."""
    count = number.numerator
    for factor in (2, 5):
        while count % factor == 0:
            count //= factor
    return count


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _if_empty(value: Any) -> str:
    return "" if value else "an empty list permits nothing: name what may be, or leave it out"


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


Place = tuple[str | int, ...]
"""Of a schema or keyword in the whole schema: names, and numbers in lists."""


def at(schema: Any, place: Place) -> Any:
    """The value at a place, which is there."""
    for step in place:
        schema = schema[step]
    return schema


def pointer(place: Place) -> str:
    """A place as a JSON pointer, without its first slash."""
    return "/".join(str(step).replace("~", "~0").replace("/", "~1") for step in place)


class References:
    """Those of one schema, whose documents may have addresses of their own (``$id``)."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self._addresses = dict[str, Place]()
        self._find()

    def target(self, place: Place, ref: str) -> Place | None:
        """The place that a reference names, there or not; None in another document."""
        base, root = "", Place()
        for end in range(len(place) + 1):
            node = at(self.given, place[:end]) if self.exists(place[:end]) else None
            if isinstance(node, dict) and isinstance(node.get("$id"), str):
                base, root = _joined(base, node["$id"]), place[:end] if "#" not in node["$id"][:1] else root
        address, fragment = urldefrag(_joined(base, ref))
        if not ref.startswith("#"):
            if address not in self._addresses:
                return None
            root = self._addresses[address]
        if fragment and not fragment.startswith("/"):
            return self._addresses.get(f"{address}#{fragment}", (*root, "#" + fragment))
        steps = [unquote(step).replace("~1", "/").replace("~0", "~") for step in fragment.split("/")[1:]]
        for step in steps:
            holder = at(self.given, root) if self.exists(root) else None
            root = (*root, int(step) if isinstance(holder, list) and step.isdecimal() else step)
        return root

    def exists(self, place: Place) -> bool:
        """Whether there is a value at a place."""
        node: Any = self.given
        for step in place:
            known = range(len(node)) if isinstance(node, list) else node if isinstance(node, dict) else ()
            if step not in known:
                return False
            node = node[step]
        return True

    def _find(self) -> None:
        """The documents that the schema holds, its own and those with an ``$id`` inside it, and their anchors."""
        waiting = [(Place(), "")]
        while waiting:
            place, base = waiting.pop()
            node = at(self.given, place)
            if isinstance(node, list):
                waiting += [((*place, at), base) for at, part in enumerate(node) if isinstance(part, (dict, list))]
                continue
            if isinstance(node.get("$id"), str):
                base = _joined(base, node["$id"])
            if not place or "$id" in node:
                self._addresses.setdefault(urldefrag(base)[0] if "#" not in base[:-1] else base, place)
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(node.get(key), str):
                    self._addresses.setdefault(f"{urldefrag(base)[0]}#{node[key]}", place)
            waiting += [
                ((*place, key), base) for key, part in node.items()
                if isinstance(part, (dict, list)) and key not in ("const", "enum", "default", "examples")
            ]  # fmt: skip


def _joined(base: str, given: Any) -> str:
    try:
        return urljoin(base, given) if isinstance(given, str) else base
    except ValueError:  # it is no address
        return base
