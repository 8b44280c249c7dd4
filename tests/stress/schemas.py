"""Random JSON schemas: with and without speculation the same tokens, and every finished text valid.

    python -m tests.stress.schemas [--schemas 200] [--tokens 200] [--target bundled] [--methods draft_model:4,ngram]

For each schema the prompt asks for a document with its keys (the bundled model is too small to use a whole schema),
once plainly and once by each method, all at temperature 1 with one seed and held to the schema by a grammar that is
checked at every node of every tree of guesses; --batch requests run together. Counted: texts equal to the plain ones
token by token, texts that ended by themselves, and how many of those ``jsonschema`` (which is independent of the
grammar) finds valid. The control is the same prompts without the constraint, 32 tokens each. Exit 1 where a text
differs or a finished one is invalid, or where the control is as valid. --minutes ends a run early; --first goes on
where one ended.
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

from foretell import Completion, Engine, Request, SamplingParams
from foretell.engine.structured.constraint import Constraints

WORDS = (
    "alpha",
    "size",
    "name",
    "kind",
    "total",
    "left",
    "right",
    "tags",
    "note",
    "unit",
    "größe",
    "date",
    "x-y",
    "id",
)
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
    args = parser.parse_args()
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
