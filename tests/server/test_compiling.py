"""Grammars that take too long are refused, by a process that can be ended; all others are not affected by it."""

import time
from collections.abc import Iterator

import pytest

from foretell import ConfigError, Engine
from foretell.server import compiling
from foretell.server.compiling import CompileCheck
from foretell.server.constraint import Constraints, json_grammar

MULTIPLE = {"type": "integer", "multipleOf": 765432}
PATTERNS = {"type": "object", "patternProperties": {f"^a{at:04d}x": {"type": "integer"} for at in range(2000)}}
SMALL = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def made() -> Iterator[Constraints]:
    engine = Engine.load("bundled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "CPU_S", 0.3)
        constraints = Constraints(engine.tokenizer, engine.model.spec.vocab_size, engine.model.spec.eos_token_ids)
        yield constraints
        constraints.close()


@pytest.mark.parametrize("schema", [MULTIPLE, PATTERNS])
def test_what_takes_too_long_is_refused_in_time(made: Constraints, schema: dict[str, object]) -> None:
    """The first took 17 s (twice), the second minutes; the thread that reads all texts waited for it."""
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"takes more than 0\.3 s to compile"):
        made.json_schema(schema)
    assert time.monotonic() - began < 15.0
    again = time.monotonic()
    with pytest.raises(ConfigError, match="takes more than"):
        made.json_schema(schema)
    assert time.monotonic() - again < 0.2, "remembered"
    assert made.json_schema(SMALL).warnings == (), "the next one is not affected"


def test_what_is_too_large_is_refused_at_once(made: Constraints) -> None:
    schema = {"type": "object", "properties": {f"name {at}": {"type": "integer"} for at in range(10_000)}}
    with pytest.raises(ConfigError, match="this server takes 262144"):
        made.json_schema(schema)


def test_a_process_that_died_is_replaced(made: Constraints) -> None:
    check: CompileCheck = made._check
    check.check(json_grammar(SMALL), "JSON schema")
    assert check._process is not None
    check._process.kill()
    check._process.wait()
    check.check(json_grammar({"type": "boolean"}), "JSON schema")
    first = check._process
    assert first.poll() is None
    check.close()
    assert first.poll() is not None


def test_errors_of_a_grammar_are_left_to_the_compiler(made: Constraints) -> None:
    with pytest.raises(ConfigError, match="unclosed"):
        made.json_schema({"type": "string", "pattern": "(a"})
