"""Constraints: pure, masked at every node, an end only where the grammar is complete, errors before decoding."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits

from foretell import ConfigError, Engine, ForetellError
from foretell.engine.request.request import token_ids
from foretell.engine.structured.constraint import Constraint, ConstraintProcessor, Constraints, json_grammar
from tests.engine.harness import TreeMethod
from tests.stress.schemas import is_valid, random_schema

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
        ({"type": "string", "pattern": "(a"}, "unclosed"),
        ({"type": "object", "patternProperties": {"a)": True}}, "unopened"),
        ({"anyOf": [{"pattern": "(?=a)"}, {"type": "strin"}]}, "strin"),
        ({"const": float("nan")}, "not JSON"),
        ({"const": b"bytes"}, "not JSON"),
        (["type"], "list"),
    ],
)
def test_schemas_that_cannot_be_are_refused(constraints: Constraints, schema: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        constraints.json_schema(schema)


def test_strict_refuses_what_lenient_leaves_out(constraints: Constraints) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    with pytest.raises(ConfigError, match="not"):
        constraints.json_schema(schema, strict=True)
    assert constraints.json_schema(schema).left_out == ("not",)
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
    assert constraint.left_out == (left_out,)
    assert constraint.permits(encode(engine, text % good)), text % good
    assert not constraint.permits(encode(engine, "7")), "the rest is enforced"
    with pytest.raises(ConfigError):
        constraints.json_schema(schema, strict=True)


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
    assert left_out == ("pattern",)
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
