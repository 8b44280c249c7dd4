"""Random JSON schemas: with and without speculation the same tokens, and every finished text valid.

    python -m tests.stress.schemas [--schemas 200] [--tokens 200] [--target bundled] [--methods draft_model:4,ngram]

For each schema the prompt asks for a document with its keys (the bundled model is too small to use a whole schema),
once plainly and once by each method, all at temperature 1 with one seed and held to the schema by a grammar that is
checked at every node of every tree of guesses; --batch requests run together. Counted: texts equal to the plain ones
token by token, texts that ended by themselves, and how many of those ``jsonschema`` (which is independent of the
grammar) finds valid. The control is the same prompts without the constraint, 32 tokens each. Exit 1 where a text
differs or a finished one is invalid, or where the control is as valid. --minutes ends a run early; --first goes on
where one ended.

    python -m tests.stress.schemas --keywords 20000 [--first 0]

No model: schemas of all keywords, numbers at all limits, and texts at random of what the grammar of each permits. Each is
valid for the schema without what was named as left out. Exit 1 where one is not, or where a schema takes a request down.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import numpy as np

from foretell import Completion, ConfigError, Engine, Request, SamplingParams
from foretell.engine.structured.constraint import Constraint, Constraints
from foretell.model.load import load_tokenizer

WORDS = (
    "alpha", "size", "name", "kind", "total", "left", "right", "tags", "note", "unit", "größe", "date", "x-y", "id",
)  # fmt: skip
PATTERNS = (
    "^[a-z]{2,6}$",
    "^[A-Z][a-z]{1,5}-[0-9]{2}$",
    "^(red|green|blue)[0-9]?$",
    "^[0-9A-F]{4}$",
    "^v[0-9]\\.[0-9]$",
)
FORMATS = ("ipv4", "uuid")  # those that end soon, and that jsonschema checks by itself
VALUES = (None, True, False, 0, -7, 3.5, "", "yes", "nö ☃", 'a "b" \\', [1, "two"], {"k": [None]})


# -- schemas -------------------------------------------------------------------------------------------------------------


def random_schema(seed: int) -> dict[str, Any]:
    """A schema of an object whose documents are short: all strings and arrays are bounded."""
    source = random.Random(seed)
    schema = an_object(source, 0)
    if source.random() < 0.25:  # one of the properties by reference, twice
        schema["$defs"] = {"shared": any_schema(source, 1)}
        for name in list(schema["properties"])[:2]:
            schema["properties"][name] = {"$ref": "#/$defs/shared"}
    return schema


def any_schema(source: random.Random, depth: int) -> dict[str, Any]:
    """One of all kinds; flat ones only from the second level on."""
    makers: list[Callable[[random.Random, int], dict[str, Any]]] = [
        a_string, a_string, an_integer, a_number, a_boolean, a_null, an_enum, a_const,
    ]  # fmt: skip
    if depth < 2:
        makers += [an_object, an_object, an_array, an_array, a_tuple, an_any_of]
    return source.choice(makers)(source, depth)


def an_object(source: random.Random, depth: int) -> dict[str, Any]:
    names = source.sample(WORDS, source.randint(1 if depth else 2, 3))
    required = [name for name in names if source.random() < 0.8]
    return {
        "type": "object",
        "properties": {name: any_schema(source, depth + 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def an_array(source: random.Random, depth: int) -> dict[str, Any]:
    least = source.randint(0, 2)
    return {
        "type": "array",
        "items": any_schema(source, depth + 1),
        "minItems": least,
        "maxItems": least + source.randint(0, 2),
    }


def a_tuple(source: random.Random, depth: int) -> dict[str, Any]:
    parts = [any_schema(source, depth + 1) for _ in range(source.randint(1, 2))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def an_any_of(source: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [any_schema(source, depth + 1) for _ in range(source.randint(2, 3))]}


def a_string(source: random.Random, depth: int) -> dict[str, Any]:
    kind = source.random()
    if kind < 0.25:
        return {"type": "string", "pattern": source.choice(PATTERNS)}
    if kind < 0.35:
        return {"type": "string", "format": source.choice(FORMATS)}
    least = source.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + source.randint(0, 12)}


def an_integer(source: random.Random, depth: int) -> dict[str, Any]:
    least = source.randint(-200, 200)
    bounds = {"type": "integer", "minimum": least, "maximum": least + source.randint(0, 5000)}
    if source.random() < 0.25:
        return {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": least + source.randint(2, 50)}
    return bounds


def a_number(source: random.Random, depth: int) -> dict[str, Any]:
    least = round(source.uniform(-50, 50), 2)
    return {"type": "number", "minimum": least, "maximum": round(least + source.uniform(1, 200), 2)}


def a_boolean(source: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def a_null(source: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}


def an_enum(source: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": source.sample(VALUES, source.randint(2, 4))}


def a_const(source: random.Random, depth: int) -> dict[str, Any]:
    return {"const": source.choice(VALUES)}


# -- schemas of all keywords ---------------------------------------------------------------------------------------------

NUMBERS = (
    0, 1, -1, 2, 7, 10, 100, 0.5, -0.5, 0.25, 2.5, 1e-7, 0.1, -3.75, 12345.678, 1e15, 2**53, -(2**53), 2**53 + 1, 2**60,
    2**63 - 1, -(2**63), 2**64, 10**19, 1e300, -1.7976931348623157e308, 5e-324, 1e-20, 1234567890123456789, -0.0, 1.0,
)  # fmt: skip
COUNTS = (0, 0, 1, 1, 2, 3, 5, 2.0, 2**31, 2**32, 10**9, 2**64)
LAST = {
    "uniqueItems": (True, False), "not": ({"type": "null"}, False, {}), "propertyNames": ({"pattern": "^a"}, True),
    "contains": ({"type": "null"}, {}), "minContains": (0, 2), "maxContains": (1,), "unevaluatedItems": (False, True),
    "dependentRequired": ({"a": ["b"]}, {}), "dependentSchemas": ({"a": {"required": ["b"]}},), "then": ({"minLength": 2},),
    "unevaluatedProperties": (False, True), "if": ({"type": "string"},), "else": ({"type": "null"},),
}  # fmt: skip
"""Keywords that no grammar holds, and those that ask for nothing."""


def any_keywords(source: random.Random, depth: int = 0) -> Any:
    """A schema of any keywords together, also of those that contradict each other."""
    if depth > 2:
        return source.choice(
            ({"type": "integer"}, {"const": source.choice(NUMBERS)}, True, {"type": ["null", "boolean"]})
        )
    made: dict[str, Any] = {}
    if source.random() < 0.7:
        kinds = ["null", "boolean", "integer", "number", "string", "array", "object"]
        made["type"] = source.choice([source.choice(kinds), source.choice(kinds), source.sample(kinds, 2)])
    for _ in range(source.randint(0, 3)):
        key = source.choice(
            ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"] * 2 + ["multipleOf", "minLength", "maxLength"]
            + ["minItems", "maxItems", "minProperties", "maxProperties", "enum", "const", "pattern", "oneOf", "anyOf"]
            + ["allOf", "properties", "properties", "items", "prefixItems", "required", "$ref", "additionalProperties"]
            + [source.choice(list(LAST))]
        )  # fmt: skip
        made[key] = a_value_of(source, key, depth)
    return made


def a_value_of(source: random.Random, key: str, depth: int) -> Any:
    """The value of a keyword."""
    if key in LAST:
        return source.choice(LAST[key])
    if key in ("const", "enum"):
        values = [source.choice((*NUMBERS, *VALUES)) for _ in range(source.randint(1, 4))]
        return values[0] if key == "const" else values
    if key == "multipleOf":
        return source.choice((1, 2, 3, 0.5, 0.25, 7.0, 97, 1000, 65521, 765432, 1e-300, 2**53 + 1))
    if key.endswith("imum"):
        return source.choice(NUMBERS)
    if key.startswith(("min", "max")):
        return source.choice(COUNTS)
    if key == "pattern":
        return source.choice((*PATTERNS, "(?=a)b", "^[^x]*$", "b"))
    if key == "required":
        return source.sample("abc", source.randint(0, 2))
    if key == "$ref":
        return source.choice(("#/$defs/one", "#/$defs/two"))
    if key == "properties":
        return {name: any_keywords(source, depth + 1) for name in source.sample("abc", source.randint(1, 3))}
    if key in ("items", "additionalProperties"):
        return source.choice((True, False, any_keywords(source, depth + 1)))
    return [any_keywords(source, depth + 1) for _ in range(source.randint(1, 2))]


def keyword_schema(seed: int) -> dict[str, Any]:
    """A schema of any keywords with definitions, which may refer to each other."""
    source = random.Random(seed)
    schema = any_keywords(source)
    while not isinstance(schema, dict):
        schema = any_keywords(source)
    if "$ref" in json.dumps(schema):
        schema["$defs"] = {name: any_keywords(source, 1) for name in ("one", "two")}
    return schema


def without(schema: dict[str, Any], left_out: Sequence[str]) -> dict[str, Any]:
    """A schema without the keywords at these JSON pointers. A oneOf of which a part is wider then is an anyOf: a text of
    two of the parts that are left may be one of a single part as it was given."""
    made: dict[str, Any] = json.loads(json.dumps(schema))
    wider = dict[int, Any]()
    for pointer in sorted(left_out, key=lambda one: -one.count("/")):
        *steps, last = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")]
        node: Any = made
        for step in steps:
            if isinstance(node, dict) and step == "oneOf" and isinstance(node[step], list):
                wider[id(node)] = node
            node = node[int(step)] if isinstance(node, list) else node[step]
        del node[last]
    for node in wider.values():
        if "oneOf" in node:
            node.setdefault("allOf", []).append({"anyOf": node.pop("oneOf")})
    return made


def a_text(
    constraint: Constraint, source: random.Random, decode: Callable[[list[int]], str], limit: int = 80
) -> str | None:
    """A text at random of those that a constraint permits, None where it did not end: ends are taken as soon as they may
    be, or later, and short tokens more often than long ones."""
    matcher, ids = constraint._matcher.deep_copy(), list[int]()
    for _ in range(limit):
        if matcher.is_accepting() and (matcher.is_stopped() or source.random() < 0.5):
            return decode(ids)
        permitted = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        some = [int(permitted[source.randrange(len(permitted))]) for _ in range(3)]
        ids.append(min(some, key=lambda token: len(decode([token]))) if source.random() < 0.7 else some[0])
        if ids[-1] in constraint.eos_token_ids:
            return decode(ids[:-1])
        if matcher.try_consume_tokens(ids[-1:]) != 1:
            raise AssertionError(f"a token that is permitted is refused: {decode(ids)!r}")
    return decode(ids) if matcher.is_accepting() else None


@dataclass
class Keywords:
    """What was seen of schemas of all keywords."""

    num_schemas: int = 0
    num_refused: int = 0  # they permit nothing, or lead back to themselves
    num_left_out: int = 0  # schemas of which something was
    num_texts: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, seed: int, constraints: Constraints, decode: Callable[[list[int]], str], num_texts: int = 6) -> None:
        """Try one schema. It may be refused where it is strict, or contradicts itself, and for nothing else."""
        schema, source = keyword_schema(seed), random.Random(seed)
        self.num_schemas += 1
        try:
            constraint = constraints.json_schema(schema)
        except ConfigError as error:
            self.num_refused += 1
            if not any(words in str(error) for words in ("Unsatisfiable", "leads back to itself", "does not exist")):
                self.faults.append(f"schema {seed} is refused: {error}: {json.dumps(schema)}")
            return
        self.num_left_out += bool(constraint.left_out)
        try:
            constraints.json_schema(schema, strict=True)
        except ConfigError as error:
            if not constraint.left_out:
                self.faults.append(f"schema {seed} is refused where strict alone: {error}: {json.dumps(schema)}")
        else:
            if constraint.left_out:
                self.faults.append(f"schema {seed} is taken where strict, of which {constraint.left_out} is left out")
        rest = without(schema, constraint.left_out)
        validator = jsonschema.Draft202012Validator(rest)
        for _ in range(num_texts):
            text = a_text(constraint, source, decode)
            if text is None:
                continue
            self.num_texts += 1
            try:
                is_right = validator.is_valid(json.loads(text))
            except RecursionError:  # a schema that leads back to itself by anyOf
                continue
            if not is_right:
                self.faults.append(f"schema {seed}, {text!r}: {json.dumps(rest)}, left out {constraint.left_out}")


def of_keywords(seeds: Sequence[int], *, minutes: float = 60.0) -> Keywords:
    """Try schemas of all keywords with the bundled tokenizer."""
    tokenizer, seen, end = load_tokenizer("bundled"), Keywords(), time.monotonic() + 60 * minutes
    constraints = Constraints(tokenizer, len(tokenizer), (2, 0))
    try:
        for seed in seeds:
            seen.add(seed, constraints, tokenizer.decode)
            if time.monotonic() > end:
                break
    finally:
        constraints.close()
    return seen


# -- the run -------------------------------------------------------------------------------------------------------------


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is one JSON document that the schema permits, formats included."""
    try:
        document = json.loads(text)
    except ValueError:
        return False
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return bool(jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(document))


@dataclass
class Tally:
    """One way of decoding, over all schemas."""

    label: str
    num_texts: int = 0
    num_identical: int = 0
    num_finished: int = 0
    num_valid: int = 0  # of the finished ones
    num_tokens: int = 0
    num_steps: int = 0
    num_accepted: int = 0
    seconds: float = 0.0  # of the batches, prefill included
    invalid: list[tuple[int, str]] = field(default_factory=list)  # (schema, text), finished
    different: list[int] = field(default_factory=list)  # schemas

    def add(self, seed: int, schema: dict[str, Any], made: Completion, expected: Completion) -> None:
        """Count one text."""
        self.num_texts += 1
        self.num_tokens += made.num_tokens
        self.num_steps += made.num_steps
        self.num_accepted += made.num_accepted_tokens
        if (made.token_ids, made.finish_reason) == (expected.token_ids, expected.finish_reason):
            self.num_identical += 1
        else:
            self.different.append(seed)
        if made.finish_reason == "stop":
            self.num_finished += 1
            if is_valid(made.text, schema):
                self.num_valid += 1
            else:
                self.invalid.append((seed, made.text))

    @property
    def acceptance_length(self) -> float:
        """1 + accepted guesses a step."""
        return 1 + self.num_accepted / self.num_steps


def compare(
    engine: Engine,
    methods: Sequence[dict[str, Any] | None],
    seeds: Sequence[int],
    *,
    max_new_tokens: int = 200,
    batch_size: int = 8,
) -> Iterator[list[Tally]]:
    """Tallies after each batch: of the control, of plain decoding, of each method."""
    plain, *others = (engine.with_method(method) for method in (None, *methods))
    tallies = [Tally("none, unconstrained"), Tally("none"), *(Tally(one.speculative.method) for one in others)]
    spec = engine.model.spec
    constraints = Constraints(engine.tokenizer, spec.vocab_size, spec.eos_token_ids)
    for start in range(0, len(seeds), batch_size):
        batch = seeds[start : start + batch_size]
        schemas = [random_schema(seed) for seed in batch]

        def requests(limit: int, *, held: bool, batch: Any = batch, schemas: Any = schemas) -> list[Request]:
            made = []
            for seed, schema in zip(batch, schemas, strict=True):
                ask = f"Write a JSON document with the keys {', '.join(schema['properties'])}."
                prompt = engine.chat_prompt([{"role": "user", "content": ask}])
                processor = constraints.json_schema(schema, strict=True).processor(len(prompt)) if held else None
                params = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=limit, logits_processor=processor)
                made.append(Request(prompt, params))
            return made

        expected: list[Completion] | None = None
        lanes = [(plain, min(32, max_new_tokens), False), *((one, max_new_tokens, True) for one in (plain, *others))]
        for tally, (one, limit, held) in zip(tallies, lanes, strict=True):
            asked = requests(limit, held=held)
            begun = time.perf_counter()
            made = one.generate_batch(asked, batch_size=batch_size)
            tally.seconds += time.perf_counter() - begun
            expected = made if expected is None or tally is tallies[1] else expected
            for seed, schema, completion, right in zip(batch, schemas, made, expected, strict=True):
                tally.add(seed, schema, completion, right)
        yield tallies


def report(tallies: Sequence[Tally]) -> str:
    """A table, and every text that is wrong."""
    lines = [
        "| method | texts | identical | finished | valid of finished | tokens | tokens/s | acceptance length |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {tally.label} | {tally.num_texts} | {tally.num_identical} | {tally.num_finished} | {tally.num_valid} | "
        f"{tally.num_tokens} | {tally.num_tokens / tally.seconds:.1f} | {tally.acceptance_length:.2f} |"
        for tally in tallies
    ]
    for tally in tallies[1:]:
        lines += [f"{tally.label}: schema {seed} differs from plain decoding" for seed in tally.different]
        lines += [f"{tally.label}: schema {seed} is not met by {text!r}" for seed, text in tally.invalid]
    return "\n".join(lines)


def parse_method(text: str) -> dict[str, Any]:
    """``draft_model:4`` as a configuration."""
    name, _, count = text.partition(":")
    return {"method": name, **({"num_speculative_tokens": int(count)} if count else {})}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--methods", default="draft_model:4,ngram")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first schema")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--keywords", type=int, default=0, help="schemas of all keywords, without a model")
    args = parser.parse_args()
    if args.keywords:
        seen = of_keywords(range(args.first, args.first + args.keywords), minutes=args.minutes)
        print(
            f"{seen.num_schemas} schemas, {seen.num_refused} refused, of {seen.num_left_out} something left out; ",
            end="",
        )
        print(f"{seen.num_texts} texts, {len(seen.faults)} faults", *seen.faults, sep="\n")
        return int(bool(seen.faults))
    methods = [parse_method(text) for text in args.methods.split(",")]
    engine = Engine.load(args.target, speculative=methods[0])
    tallies: list[Tally] = []
    begun = time.monotonic()
    seeds = range(args.first, args.first + args.schemas)
    for so_far in compare(engine, methods, seeds, max_new_tokens=args.tokens, batch_size=args.batch):
        tallies = so_far
        print(f"{tallies[0].num_texts} of {args.schemas}", file=sys.stderr, flush=True)
        if time.monotonic() - begun > 60 * args.minutes:
            break
    print(report(tallies))
    right = all(not tally.different and not tally.invalid for tally in tallies[1:])
    return int(not right or tallies[0].num_valid >= tallies[1].num_valid)


if __name__ == "__main__":
    sys.exit(main())
