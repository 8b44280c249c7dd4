"""Constraints: pure, masked at every node, an end only where the grammar is complete, errors before decoding."""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jsonschema import (
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
)
from llguidance import LLMatcher, LLParserLimits

from foretell import ConfigError, Engine, ForetellError
from foretell.engine.request.request import token_ids
from foretell.engine.structured.constraint import Constraint, ConstraintProcessor, Constraints, _unnamed, json_grammar
from foretell.engine.structured.enforceable import loosened
from foretell.engine.structured.keywords import BOUNDS, COUNTS, FORMATS, HELD, LISTS, MAPS, NOT_HELD, ONE
from foretell.server.texts.tools import ToolUse
from tests.engine.harness import TreeMethod
from tests.stress.schemas import Keywords, is_valid, random_schema

EOS = (2, 0)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", "c ☃"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer", "minimum": 0, "maximum": 9},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("bundled", speculative={"method": "draft_model", "num_speculative_tokens": 4})


@pytest.fixture(scope="module")
def constraints(engine: Engine) -> Constraints:
    return Constraints(engine.tokenizer, engine.model.spec.vocab_size, engine.model.spec.eos_token_ids)


def encode(engine: Engine, text: str) -> list[int]:
    return token_ids(text, engine.tokenizer, add_special_tokens=False)


def allowed(
    processor: ConstraintProcessor, output: Sequence[int], *, prompt: Sequence[int] = (), width: int = 8192
) -> set[int]:
    logits = torch.linspace(-1, 1, width)
    made = processor(torch.tensor([*prompt, *output], dtype=torch.int64), logits.clone())
    kept = torch.nonzero(made > -torch.inf)[:, 0]
    assert torch.equal(made[kept], logits[kept])  # what is permitted is left as it was
    return set(kept.tolist())


def oracle(constraints: Constraints, grammar: str, output: Sequence[int]) -> set[int]:
    """From the beginning, with a matcher that never went back; only ends after an end or a forbidden token."""
    matcher = LLMatcher(constraints._tokenizer, grammar)
    if any(not matcher.consume_token(token) for token in output):
        return set(EOS)
    bits = matcher.compute_bitmask()
    return {token for token in range(8192) if bits[token // 8] >> (token % 8) & 1}


def walk(processor: ConstraintProcessor, source: random.Random, length: int) -> list[list[int]]:
    """A random permitted output, and side branches from it: permitted, forbidden, ended ones."""
    output: list[int] = []
    found: list[list[int]] = [[]]
    for _ in range(length):
        choices = sorted(allowed(processor, output) - set(EOS))
        if not choices:
            break
        found.append([*output, source.randrange(8192)])
        found.append([*output, source.choice(choices), source.randrange(8192), source.randrange(8192)])
        found.append([*output, EOS[0], source.choice(choices)])
        output = [*output, source.choice(choices)]
        found.append(output)
    return found


@pytest.mark.parametrize("schema", [PERSON, TREE, {"type": "object"}, *(random_schema(seed) for seed in range(4))])
def test_the_mask_is_a_function_of_the_output_alone(constraints: Constraints, schema: dict[str, Any]) -> None:
    """Any order of calls, rejected branches, ends and nonsense among them: always what a fresh matcher says."""
    source = random.Random(7)
    constraint, grammar = constraints.json_schema(schema, compact=True), json_grammar(schema, compact=True)
    asked = walk(constraint.processor(0), source, 40)
    expected = {tuple(output): oracle(constraints, grammar, output) for output in asked}
    processor = constraint.processor(3)
    for _ in range(3):
        source.shuffle(asked)
        for output in asked:
            assert allowed(processor, output, prompt=(5, 6, 7)) == expected[tuple(output)], output
    assert processor.error == ""


def test_requests_of_one_constraint_do_not_meet(constraints: Constraints, engine: Engine) -> None:
    constraint = constraints.json_schema(PERSON)
    one, other = constraint.processor(0), constraint.processor(2)
    ids = encode(engine, '{"name": "Ann", "age": 7}')
    alone = constraint.processor(0)
    expected = [allowed(alone, ids[:count]) for count in range(len(ids) + 1)]
    for count in range(len(ids) + 1):
        assert allowed(one, ids[:count]) == expected[count]
        back = len(ids) - count
        assert allowed(other, ids[:back], prompt=(1, 1)) == expected[back]


def test_long_outputs_and_jumps_back(constraints: Constraints, engine: Engine) -> None:
    """Past the memo's anchor, there and back again."""
    text = json.dumps({f"k{i}": [i, "wörd ☃", None] for i in range(40)}, ensure_ascii=False, separators=(",", ":"))
    ids = encode(engine, text)
    assert len(ids) > 400
    grammar = json_grammar({"type": "object"}, compact=True)
    processor = constraints.json_object(compact=True).processor(0)
    for count in (0, 1, 70, 300, 299, 400, 64, 65, 128, len(ids), 10, len(ids) - 1, len(ids)):
        assert allowed(processor, ids[:count]) == oracle(constraints, grammar, ids[:count]), count
    assert allowed(processor, ids) == set(EOS)


# -- every draft position ------------------------------------------------------------------------------------------------


def generate(engine: Engine, constraint: Constraint, seed: int, **options: Any) -> Any:
    prompt = encode(engine, "A person:\n")
    settings = {"temperature": 1.0, "max_new_tokens": 60, **options}
    return engine.generate(prompt, seed=seed, logits_processor=constraint.processor(len(prompt)), **settings)


@pytest.mark.parametrize("verify", ["coupled", "rejection", "traversal"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_guesses_are_never_emitted(
    engine: Engine, constraints: Constraints, verify: str, temperature: float
) -> None:
    """A drafter whose every guess breaks the grammar, at depth 1 and below a permitted one: none is accepted."""
    constraint, num_prompt = constraints.json_schema(PERSON), len(encode(engine, "A person:\n"))
    source, own = random.Random(3), constraint.processor(0)
    forbidden_guesses = []

    def guess(ids: list[int], depth: int) -> list[tuple[int, int]]:
        if depth < 2:
            return []
        output = ids[num_prompt:]
        permitted = sorted(allowed(own, output))
        barred = source.choice(sorted(set(range(8192)) - set(permitted)))
        first = source.choice(permitted)
        below = set(range(8192)) - allowed(own, [*output, first])
        second = source.choice(sorted(below))
        forbidden_guesses.extend([(*output, barred), (*output, first, second)])
        return [(0, barred), (1, permitted[0]), (0, first), (3, second)]

    config = {"method": "none", "num_speculative_tokens": 4, "verify": verify}
    adverse = Engine(engine.model, engine.tokenizer, speculative=config, method=TreeMethod(guess))
    plain = engine.with_method({"method": "none", "verify": verify})
    for seed in range(3):
        forbidden_guesses.clear()
        made = generate(adverse, constraint, seed, temperature=temperature)
        prefixes = {tuple(made.token_ids[:count]) for count in range(len(made.token_ids) + 1)}
        assert len(forbidden_guesses) > 10
        assert not prefixes & set(forbidden_guesses)
        assert all(accepted == 0 for accepted in made.num_accepted_tokens_per_pos[1:])  # none of depth 2
        if made.finish_reason == "stop":
            assert is_valid(made.text, PERSON)
        if verify == "coupled" or temperature == 0:
            assert made.token_ids == generate(plain, constraint, seed, temperature=temperature).token_ids


def test_right_guesses_are_accepted_under_a_constraint(engine: Engine, constraints: Constraints) -> None:
    """The control of the test above: what the target says itself, guessed, comes at four tokens a step and more."""
    constraint, num_prompt = constraints.json_schema(PERSON), len(encode(engine, "A person:\n"))
    expected = generate(engine.with_method(None), constraint, 5)

    def guess(ids: list[int], depth: int) -> list[tuple[int, int]]:
        done = len(ids) - num_prompt
        return list(enumerate(expected.token_ids[done : done + min(4, depth)]))

    config = {"method": "none", "num_speculative_tokens": 4}
    found = generate(
        Engine(engine.model, engine.tokenizer, speculative=config, method=TreeMethod(guess)), constraint, 5
    )
    assert found.token_ids == expected.token_ids
    assert found.acceptance_rate > 0.9
    assert found.mean_acceptance_length > 3.5


# -- where an output may end ---------------------------------------------------------------------------------------------


def test_an_end_only_at_completion(engine: Engine, constraints: Constraints) -> None:
    ids = encode(engine, '{"name": "Ann", "age": 7}')
    processor = constraints.json_schema(PERSON).processor(0)
    for count in range(len(ids)):
        assert not allowed(processor, ids[:count]) & set(EOS)
    assert allowed(processor, ids) == set(EOS)
    assert allowed(processor, [*ids, EOS[0], 77]) == set(EOS)


def test_a_grammar_that_may_go_on_leaves_the_choice(constraints: Constraints, engine: Engine) -> None:
    processor = constraints.grammar("(ab)+", kind="regex").processor(0)
    ab = encode(engine, "ab")
    assert allowed(processor, ab) > set(EOS)
    assert not allowed(processor, encode(engine, "aba")) & set(EOS)


def test_min_new_tokens_waits_only_where_the_grammar_can(engine: Engine, constraints: Constraints) -> None:
    longer = generate(engine, constraints.grammar("(ab)+", kind="regex"), 1, min_new_tokens=20, max_new_tokens=60)
    assert longer.num_tokens > 20
    assert set(longer.text) == {"a", "b"}
    whole = generate(engine, constraints.grammar('["yes"]', kind="choice"), 1, min_new_tokens=20)
    assert (whole.text, whole.finish_reason) == ("yes", "stop")


def test_limits_and_stop_texts_end_early(engine: Engine, constraints: Constraints) -> None:
    cut = generate(engine, constraints.json_schema(PERSON), 2, max_new_tokens=6)
    assert (cut.finish_reason, cut.num_tokens) == ("length", 6)
    assert not is_valid(cut.text, PERSON)
    stopped = generate(engine, constraints.json_schema(PERSON, compact=True), 2, stop=('","age"', '":"'))
    assert (stopped.text, stopped.finish_reason) == ('{"name', "stop")


def test_nothing_left_to_choose_is_an_error_of_its_own(engine: Engine, constraints: Constraints) -> None:
    """Not an end in the middle of a document."""
    constraint = constraints.json_object()
    openers = tuple(allowed(constraint.processor(0), []))
    with pytest.raises(ForetellError, match="no token is possible"):
        generate(engine, constraint, 1, banned_token_ids=openers)


def test_a_matcher_that_gives_up_permits_nothing(constraints: Constraints, engine: Engine) -> None:
    """... and the reason is kept; elsewhere in the text the processor is what it was."""
    grammar, limits = (
        json_grammar({"type": "object"}),
        LLParserLimits(max_items_in_row=1, precompute_large_lexemes=False),
    )

    def fresh() -> LLMatcher:
        return LLMatcher(constraints._tokenizer, grammar, limits=limits, log_level=0)

    processor, opened = ConstraintProcessor(fresh, 8192, EOS, 0), encode(engine, "{")
    before = allowed(processor, [])
    assert set(opened) <= before
    assert allowed(processor, opened) == set()
    assert "max is 1" in processor.error
    assert allowed(processor, []) == before
    assert allowed(processor, [opened[0], 7]) in (set(), set(EOS))


# -- bytes, recursion, vocabularies --------------------------------------------------------------------------------------


def test_characters_in_pieces(engine: Engine, constraints: Constraints) -> None:
    """☃ is three tokens here: after the first one only bytes that go on with it, and no closing quote."""
    snow = encode(engine, "☃")
    assert len(snow) == 3
    processor = constraints.json_schema({"type": "string", "maxLength": 1}).processor(0)
    start = encode(engine, '"')
    for count in (1, 2):
        for token in allowed(processor, [*start, *snow[:count]]):
            piece = constraints._tokenizer.decode_bytes([token])
            assert piece
            assert 0x80 <= piece[0] < 0xC0
    closing = encode(engine, '"')[0]
    assert allowed(processor, [*start, *snow]) == {closing}
    made = generate(engine, constraints.json_schema({"const": "ñ ☃ 😀"}), 1)
    assert json.loads(made.text) == "ñ ☃ 😀"


def test_recursion(engine: Engine, constraints: Constraints) -> None:
    constraint = constraints.json_schema(TREE, strict=True)
    nested: dict[str, Any] = {"v": 0}
    for level in range(1, 40):
        nested = {"v": level % 10, "kids": [nested, {"v": 3}]}
    ids = encode(engine, json.dumps(nested))
    assert constraint.permits(ids)
    assert not constraint.permits(ids[:-1])
    assert not constraint.permits(encode(engine, json.dumps({"v": 1, "kids": [{"v": 10}]})))
    made = [generate(engine, constraint, seed, max_new_tokens=120) for seed in range(4)]
    assert sum(one.finish_reason == "stop" for one in made) >= 1
    assert all(is_valid(one.text, TREE) for one in made if one.finish_reason == "stop")


@pytest.mark.parametrize("width", [8192 + 8, 8192 + 128, 5000, 5003])
def test_a_vocabulary_wider_or_narrower_than_the_tokenizer(
    engine: Engine, constraints: Constraints, width: int
) -> None:
    mine = Constraints(engine.tokenizer, width, EOS)
    for constraint, same in (
        (mine.json_object(), constraints.json_object()),
        (mine.grammar(r"(.|\n)*", kind="regex"), constraints.grammar(r"(.|\n)*", kind="regex")),
    ):
        found = allowed(constraint.processor(0), [], width=width)
        assert found == {token for token in allowed(same.processor(0), []) if token < width}


def test_white_space_is_bounded(engine: Engine, constraints: Constraints) -> None:
    loose, compact = constraints.json_object(), constraints.json_object(compact=True)
    document = {"a": [1, {"b": None}]}
    assert loose.permits(encode(engine, json.dumps(document)))
    assert loose.permits(encode(engine, json.dumps(document, indent=4)))
    assert not loose.permits(encode(engine, '{\n\n\n"a": 1}'))
    assert compact.permits(encode(engine, json.dumps(document, separators=(",", ":"))))
    assert not compact.permits(encode(engine, json.dumps(document)))


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("lark", 'start: "yes" | "no" /[0-9]{2}/', "no42", "no4"),
        ("gbnf", 'root ::= "a" [0-9]+', "a12", "b"),
        ("regex", "[a-c]{2}x?", "abx", "abc"),
        ("choice", '["red", "green \\"g\\""]', 'green "g"', "green"),
    ],
)
def test_grammars(engine: Engine, constraints: Constraints, kind: Any, text: str, good: str, bad: str) -> None:
    constraint = constraints.grammar(text, kind=kind)
    assert constraint.permits(encode(engine, good))
    assert not constraint.permits(encode(engine, bad))


# -- errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strin"}, "strin"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "#"}, "leads back to itself"),
        ({"items": {"allOf": [{}, {"$ref": "#/items"}]}}, "#/items: by .* leads back to itself"),
        (
            {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            "leads back",
        ),
        (False, "permits nothing"),
        ({"enum": []}, "#/enum: an empty list permits nothing"),
        ({"items": {"type": []}}, "#/items/type: an empty list"),
        ({"multipleOf": 0}, "#/multipleOf: 0 must be a number other than 0"),
        ({"properties": {"a/b": {"maxLength": -1}}}, "#/properties/a~1b/maxLength: -1 must be a whole number"),
        ({"required": True}, "#/required: true must be a list of names"),
        ({"anyOf": {}}, "#/anyOf: {} must be a list of schemas"),
        ({"properties": {"a": 5}}, "#/properties/a: a schema is an object, true or false; got int"),
        ({"minimum": "3"}, '#/minimum: "3" must be a number'),
        ({"type": "string", "pattern": "(a"}, "unclosed"),
        ({"type": "object", "patternProperties": {"a)": True}}, "unopened"),
        ({"anyOf": [{"pattern": "(?=a)"}, {"type": "strin"}]}, "strin"),
        ({"const": float("nan")}, "not JSON"),
        ({"const": b"bytes"}, "not JSON"),
        (["type"], "list"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_schemas_that_cannot_be_are_refused(constraints: Constraints, schema: Any, reason: str, strict: bool) -> None:
    with pytest.raises(ConfigError, match=reason) as found:
        constraints.json_schema(schema, strict=strict)
    assert "non-verbose" not in str(found.value)
    assert "NoExtensionBias" not in str(found.value)


def test_strict_refuses_what_lenient_leaves_out(constraints: Constraints) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    with pytest.raises(ConfigError, match="not"):
        constraints.json_schema(schema, strict=True)
    assert constraints.json_schema(schema).left_out == ("properties/a/not",)
    assert constraints.json_schema(PERSON).left_out == ()


MAIL = r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z]+$"  # with look-ahead, as zod writes it


@pytest.mark.parametrize(
    ("part", "left_out", "good"),
    [
        ({"type": "string", "pattern": MAIL, "maxLength": 3}, "pattern", '".."'),
        ({"type": "string", "pattern": "(?<=a)b"}, "pattern", '"x"'),
        ({"type": "string", "pattern": r"^(a)\1$"}, "pattern", '"x"'),
        ({"type": "string", "pattern": r"^(?<n>a)\k<n>$"}, "pattern", '"x"'),
        ({"type": "string", "pattern": r"\bfoo\b"}, "pattern", '"x"'),
        ({"type": "string", "pattern": r"[^[\]]"}, "pattern", '"x"'),
        ({"$ref": "https://example.com/x.json"}, "$ref", '"x"'),
        ({"$ref": "other.json#/$defs/x"}, "$ref", "7"),
        ({"type": "string", "format": "idn-email"}, "format", '"x"'),
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "[1, 1]"),
        ({"type": "object", "patternProperties": {"^(?!x)": {"type": "integer"}}}, "patternProperties", '{"x": "y"}'),
        (
            {"patternProperties": {"^(?!x)": {"type": "integer"}}, "additionalProperties": False},
            "patternProperties",
            '{"a": 1}',
        ),
        (
            {"patternProperties": {"^a": {"type": "integer"}, "^ab": {"type": "null"}}, "additionalProperties": False},
            "patternProperties",
            '{"abc": 1}',
        ),
    ],
)
@pytest.mark.parametrize(
    "place",
    [
        lambda part: part,
        lambda part: {"anyOf": [part, {"type": "null"}]},
        lambda part: {"allOf": [part]},
        lambda part: {"$ref": "#/$defs/part", "$defs": {"part": part}},
    ],
)
@pytest.mark.parametrize(
    ("outer", "text"),
    [
        (lambda part: {"type": "array", "items": part, "minItems": 1}, "[%s]"),
        (lambda part: {"type": "array", "prefixItems": [part], "minItems": 1}, "[%s]"),
        (lambda part: {"type": "object", "additionalProperties": part}, '{"pattern": %s}'),
        (lambda part: {"type": "object", "properties": {"pattern": part}, "required": ["pattern"]}, '{"pattern": %s}'),
    ],
)
def test_what_cannot_be_enforced_is_left_out_wherever_it_stands(
    engine: Engine, constraints: Constraints, part: Any, left_out: str, good: str, place: Any, outer: Any, text: str
) -> None:
    made = place(part)
    schema = outer({name: value for name, value in made.items() if name != "$defs"})
    schema |= {"$defs": made["$defs"]} if "$defs" in made else {}
    constraint = constraints.json_schema(schema)
    assert [name for name in constraint.left_out[0].split("/") if name == left_out], "its place ends with the keyword"
    assert len(constraint.left_out) == 1
    assert constraint.permits(encode(engine, text % good)), text % good
    assert not constraint.permits(encode(engine, "7")), "the rest is enforced"
    with pytest.raises(ConfigError):
        constraints.json_schema(schema, strict=True)


# -- every keyword -------------------------------------------------------------------------------------------------------

NO_GRAMMAR: dict[str, dict[str, Any]] = {
    "uniqueItems": {"uniqueItems": True},
    "not": {"not": {"type": "null"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 1}},
    "else": {"if": {"type": "string"}, "else": {"type": "null"}},
    "contains": {"contains": {"type": "null"}},
    "minContains": {"contains": {}, "minContains": 2},
    "maxContains": {"contains": {}, "maxContains": 2},
    "propertyNames": {"propertyNames": {"pattern": "^a"}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "unevaluatedItems": {"unevaluatedItems": False},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "$ref": {"$ref": "https://example.com/x"},
    "format": {"format": "idn-email"},
    "pattern": {"pattern": "(?=a)b"},
    "patternProperties": {"patternProperties": {"(?=a)b": False}},
    "minProperties": {"minProperties": 1, "properties": {"p": {}, "q": {}}},
    "oneOf": {"oneOf": [{"minLength": 1}, {"maxLength": 2}]},
    "minimum": {"minimum": -(2**63)},
    "maximum": {"maximum": 1.7976931348623157e308},
    "exclusiveMinimum": {"exclusiveMinimum": 2**53},
    "exclusiveMaximum": {"exclusiveMaximum": -(2**53)},
    "multipleOf": {"multipleOf": 1e-300},
    "const": {"const": 1234567890123456789},
    "enum": {"enum": [{"a": [2**53 + 1]}, "x"]},
    "minLength": {"minLength": 2**32},
    "maxLength": {"maxLength": 2**64},
    "minItems": {"minItems": 2**64},
    "maxItems": {"maxItems": 2**64},
}
"""Of every keyword that can be left out a schema of which it is."""


def said_by_llguidance(constraints: Constraints, schema: dict[str, Any]) -> str:
    """Its error of a schema of which it is to leave nothing out."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"lenient": False})
    error: str = LLMatcher(constraints._tokenizer, grammar, log_level=0).get_error()
    return error


def test_what_is_held_is_what_llguidance_holds(constraints: Constraints) -> None:
    """Every keyword of every draft, and every format."""
    drafts = (Draft202012Validator, Draft201909Validator, Draft7Validator, Draft6Validator, Draft4Validator)
    known = {key for draft in drafts for key in draft.VALIDATORS} | {"$recursiveRef", "minContains", "maxContains"}
    known |= {"then", "else", "unevaluatedItems"}
    assert known <= HELD | NOT_HELD
    values = {**dict.fromkeys((*COUNTS, *BOUNDS, "multipleOf", "const"), 1), **{key: {} for key in (*MAPS, *ONE)}}
    values |= {"enum": [1], "type": "string", "required": ["a"], "$ref": "#/$defs/a", "pattern": "a", "format": "date"}
    values |= {key: [{}] for key in LISTS}
    for key in HELD:
        schema = {key: values[key], "$defs": {"a": {"type": "null"}}}
        assert said_by_llguidance(constraints, schema) == "", key
        assert constraints.json_schema(schema, strict=True).left_out == (), key
    for key in NOT_HELD - {"then", "else", "if", "minContains", "maxContains"}:
        assert "nimplemented" in said_by_llguidance(constraints, NO_GRAMMAR[key]), key
    for name in {*Draft202012Validator.FORMAT_CHECKER.checkers, *FORMATS, "int32", "no such"}:
        error = said_by_llguidance(constraints, {"type": "string", "format": name})
        assert (name in FORMATS) is (error == ""), name


@pytest.mark.parametrize("key", NO_GRAMMAR)
def test_a_keyword_that_no_grammar_holds_is_named_and_refuses_nothing(constraints: Constraints, key: str) -> None:
    """Once, twice, nested, and twice in two tools: the library counts equal warnings, and its words changed with that."""
    part = NO_GRAMMAR[key]
    last = f"{key}/(?=a)b" if key == "patternProperties" else key
    twice = {"type": "object", "properties": {"a": part, "b": {"items": {"anyOf": [part, {"type": "null"}]}}}}
    places = {f"properties/a/{last}", f"properties/b/items/anyOf/0/{last}"}
    assert last in constraints.json_schema(part).left_out
    assert places <= set(constraints.json_schema(twice).left_out)
    with pytest.raises(ConfigError, match=re.escape(key)):
        constraints.json_schema(twice, strict=True)
    tools = [{"type": "function", "function": {"name": name, "parameters": twice}} for name in ("one", "two")]
    for mode in ("auto", "required"):
        made = ToolUse.of(tools, mode).constraint(constraints)
        assert {f"{name}.{place}" for name in ("one", "two") for place in places} <= set(made.left_out)


def test_a_keyword_that_asks_for_nothing_is_not_named(constraints: Constraints) -> None:
    asked: dict[str, Any] = {
        "uniqueItems": False,
        "not": False,
        "propertyNames": True,
        "dependentRequired": {},
        "if": {},
    }
    asked |= {"minContains": 1, "then": {}, "format": "int32", "type": "integer", "unevaluatedProperties": {}}
    assert constraints.json_schema(asked, strict=True).left_out == ()


def test_another_version_of_llguidance_may_say_what_it_likes() -> None:
    """A keyword that it does not hold and this code takes for held is named, and words that are none say nothing."""
    said = [
        'Unimplemented keys: ["maxItems", "$ref"] (2 times)',
        "Unknown format: 'idn' (3x)",
        "oneOf not supported",
        "☃",
        "",
    ]
    assert _unnamed(said, ("a/$ref",)) == {"maxItems", "format"}


def test_schemas_of_oneof_that_exclude_each_other_are_held(engine: Engine, constraints: Constraints) -> None:
    """A union that a property tells apart, as pydantic writes it: llguidance calls it not supported."""
    cat, dog = (
        {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"], "additionalProperties": False}
        for kind in ("cat", "dog")
    )
    schema: dict[str, Any] = {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "$defs": {"cat": cat, "dog": dog},
    }
    constraint = constraints.json_schema(schema, strict=True)
    assert constraint.permits(encode(engine, '{"kind": "dog"}'))
    assert not constraint.permits(encode(engine, '{"kind": "cow"}'))
    del dog["required"]
    assert constraints.json_schema(schema).left_out == (), "a cat has its kind"
    del cat["required"]
    assert constraints.json_schema(schema).left_out == ("oneOf",)


# -- numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"const": 2**53}, ["9007199254740992"], ["9007199254740991", "9007199254740993"]),
        ({"const": 2**60}, ["1152921504606846976"], ["1152921504606846975", "1152921504606846977"]),
        ({"const": -(2**63) + 1024}, ["-9223372036854774784"], ["-9223372036854774783", "-9223372036854774785"]),
        ({"const": 1.0}, ["1"], ["2"]),
        ({"const": -0.0}, ["0"], ["1"]),
        ({"const": 1e15}, ["1000000000000000"], ["1000000000000001"]),
        ({"const": 1e-7}, ["0.0000001"], ["0.0000002", "0"]),
        ({"enum": [2.5, 7, 3.0]}, ["2.5", "7", "3"], ["2", "3.5"]),
        ({"type": "integer", "minimum": -(2**53), "maximum": 2**53}, ["9007199254740992"], ["9007199254740993"]),
        ({"type": "integer", "exclusiveMaximum": 2**53 - 1}, ["9007199254740990"], ["9007199254740991"]),
        ({"type": "number", "minimum": 0.25, "maximum": 0.75}, ["0.25", "0.5"], ["0", "0.2", "0.76"]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": 5}, ["6"], ["5", "3"]),
        ({"minimum": 3, "anyOf": [{}], "exclusiveMinimum": True}, ["4"], ["3"]),
        ({"type": "number", "multipleOf": 0.01}, ["0.07", "-1.5"], ["0.075"]),
        ({"type": "integer", "multipleOf": 12345}, ["24690", "0"], ["24691"]),
        ({"allOf": [{"multipleOf": 6}, {"multipleOf": 4}]}, ["12", "-24"], ["4", "6", "18"]),
        ({"type": "string", "maxLength": 2.0}, ['"ab"'], ['"abc"']),
        ({"items": [{"type": "string"}], "anyOf": [{}], "additionalItems": False}, ['["a"]'], ['["a", 1]']),
        ({"prefixItems": [{"const": 1}], "items": {"type": "null"}, "additionalItems": False}, ["[1, null]"], ["[null]"]),
    ],
)  # fmt: skip
def test_a_number_is_held_exactly(
    engine: Engine, constraints: Constraints, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    constraint = constraints.json_schema(schema, strict=True)
    assert [text for text in good if not constraint.permits(encode(engine, text))] == []
    assert [text for text in bad if constraint.permits(encode(engine, text))] == []


@pytest.mark.parametrize(
    ("schema", "left_out", "permitted"),
    [
        ({"const": 1234567890123456789}, "const", ["1234567890123456789", "1234567890123456768"]),
        ({"type": "integer", "const": 10**19}, "const", [str(10**19)]),
        ({"const": 1e300}, "const", ["5"]),
        ({"enum": [2**53 + 1, 1.5]}, "enum", ["9007199254740993", "1.5"]),
        ({"type": "integer", "maximum": 2**53 + 1}, "maximum", ["9007199254740993"]),
        ({"type": "number", "minimum": 2**64, "maximum": 5}, "minimum", ["5"]),
        ({"type": "number", "minimum": 5e-324}, "minimum", ["1"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum", ["0.1", "0"]),
        ({"allOf": [{"exclusiveMaximum": 0}, {"minimum": -0.5}]}, "allOf/0/exclusiveMaximum", ["-0.1"]),
        ({"multipleOf": 0.07}, "multipleOf", ["0.07"]),
        ({"multipleOf": 2**53 + 1}, "multipleOf", ["7"]),
        ({"multipleOf": 765432}, "multipleOf", ["765432"]),  # it took 17 s to compile
        ({"multipleOf": 1.1e-15}, "multipleOf", ["1"]),
        ({"allOf": [{"multipleOf": 100000}, {"multipleOf": 65536}]}, "allOf/1/multipleOf", ["100000"]),
        ({"type": "object", "minProperties": 2}, "minProperties", ['{"a": 1, "b": 1}']),  # a name may come twice
    ],
)  # fmt: skip
def test_a_number_that_is_not_held_exactly_is_left_out(
    engine: Engine, constraints: Constraints, schema: dict[str, Any], left_out: str, permitted: list[str]
) -> None:
    constraint = constraints.json_schema(schema)
    assert constraint.left_out == (left_out,)
    assert [text for text in permitted if not constraint.permits(encode(engine, text))] == []
    assert not constraint.permits(encode(engine, '"x"')) or "type" not in schema, "the rest is enforced"
    with pytest.raises(ConfigError, match=f"#/{left_out}"):
        constraints.json_schema(schema, strict=True)


@given(st.integers(0, 10**9))
@settings(max_examples=12, deadline=None)
def test_what_a_grammar_permits_is_valid(constraints: Constraints, engine: Engine, seed: int) -> None:
    """Random schemas of all keywords; ``tests/stress`` has more of them."""
    seen = Keywords()
    seen.add(seed, constraints, engine.tokenizer.decode, num_texts=3)
    assert seen.faults == []


def test_a_search_for_what_is_at_fault_takes_a_while_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what could not be tried in time all is left out, and what is known to be usable stays."""
    schema = {"properties": {f"p{at}": {"maxLength": at, "pattern": "x"} for at in range(50)}}
    tried = list[Any]()

    def error_of(part: Any) -> str:
        tried.append(part)
        return "no" if "pattern" in json.dumps(part["properties"]["p20"]) else ""

    monkeypatch.setattr("foretell.engine.structured.enforceable.monotonic", lambda: float(len(tried)))  # a second each
    found = loosened(schema, error_of, 100.0, strict=False)
    assert found[1] == ("properties/p20/pattern",)
    assert len(tried) < 12
    tried.clear()
    hasty = loosened(schema, error_of, 3.5, strict=False)
    assert "properties/p20/pattern" in hasty[1]
    assert (len(tried), len(hasty[1])) == (5, 25), "of a hundred, the quarter that two trials found"
    assert loosened({"type": "null"}, error_of, 1.0, strict=False) is None


def test_what_stands_in_the_schema_itself_is_no_reference_to_another_document(constraints: Constraints) -> None:
    """And words of a schema that stand in values are no keywords."""
    inner = {
        "$id": "inner.json",
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "null"}},
    }
    schema = {
        "$id": "https://example.com/outer.json",
        "type": "object",
        "properties": {"i": {"$ref": "inner.json"}, "o": {"$ref": "outer.json#/$defs/s"}, "x": {"pattern": "(?=a)"}},
        "$defs": {"inner": inner, "s": {"type": "string"}, "c": {"const": {"pattern": "(?=a)", "$ref": "else.json"}}},
    }  # fmt: skip
    reduced, left_out = constraints.enforceable(schema)
    assert left_out == ("properties/x/pattern",)
    assert isinstance(reduced, dict)
    assert reduced == {**schema, "properties": {**schema["properties"], "x": {}}}


def test_a_schemas_own_options_do_not_override(constraints: Constraints) -> None:
    schema = {"not": {"type": "string"}, "x-guidance": {"lenient": True}}
    with pytest.raises(ConfigError):
        constraints.json_schema(schema, strict=True)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lark", "start: missing"),
        ("regex", "(a"),
        ("choice", "not json"),
        ("choice", "3"),
        ("gbnf", "root ::= ("),
        ("bnf", "x"),
    ],
)
def test_grammars_that_cannot_be_are_refused(constraints: Constraints, kind: Any, text: str) -> None:
    with pytest.raises(ConfigError, match="grammar"):
        constraints.grammar(text, kind=kind)


def test_what_constraints_need(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="end token"):
        Constraints(engine.tokenizer, 8192, ())
    with pytest.raises(ConfigError, match="fast tokenizer"):
        Constraints([b"a", b"b"], 2, (1,))


def test_the_same_schema_is_compiled_once(constraints: Constraints) -> None:
    assert constraints.json_schema(PERSON) is constraints.json_schema(dict(PERSON))
    assert constraints.json_schema(PERSON) is not constraints.json_schema(PERSON, compact=True)


def test_compiled_grammars_that_are_kept_are_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their size and not by their number alone: 64 of the largest would take more than a GiB."""
    made = Constraints(engine.tokenizer, engine.model.spec.vocab_size, engine.model.spec.eos_token_ids)
    schemas: list[dict[str, Any]] = [
        {"type": "object", "properties": {f"{name}{index}": {"type": "null"} for index in range(40)}}
        for name in "abcdefgh"
    ]
    size = len(json_grammar(schemas[0]))
    monkeypatch.setattr("foretell.engine.structured.constraint._COMPILED_CHARACTERS", 3 * size)
    kept = [made.json_schema(schema) for schema in schemas]
    assert made.json_schema(schemas[-1]) is kept[-1]
    assert made.json_schema(schemas[-3]) is kept[-3]
    assert made.json_schema(schemas[0]) is not kept[0], "the least recently used is dropped"
    assert sum(map(len, made._made)) <= 3 * size
    monkeypatch.setattr("foretell.engine.structured.constraint._COMPILED_CHARACTERS", size // 2)
    large = made.json_schema(schemas[1])
    assert large.permits([]) is False
    assert not made._made, "one that is larger than all that is kept is not kept"
