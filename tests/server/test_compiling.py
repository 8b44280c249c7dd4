"""Grammars that take too long are refused, by a process that can be ended; all others are not affected by it."""

import time
from collections.abc import Iterator

import pytest

from foretell import ConfigError, Engine
from foretell.engine.structured import compiling
from foretell.engine.structured.compiling import CompileCheck
from foretell.engine.structured.constraint import Constraints, json_grammar
from foretell.server.texts.tools import ToolUse

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


def test_what_takes_too_long_is_refused_in_time(made: Constraints) -> None:
    """It took minutes, and the thread that reads all texts waited for it."""
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"takes more than 0\.3 s to compile"):
        made.json_schema(PATTERNS)
    assert time.monotonic() - began < 15.0
    again = time.monotonic()
    with pytest.raises(ConfigError, match="takes more than"):
        made.json_schema(PATTERNS)
    assert time.monotonic() - again < 0.2, "remembered"
    assert made.json_schema(SMALL).left_out == (), "the next one is not affected"


def test_what_is_too_large_is_refused_at_once(made: Constraints) -> None:
    schema = {"type": "object", "properties": {f"name {at}": {"type": "integer"} for at in range(10_000)}}
    with pytest.raises(ConfigError, match="262144 are taken"):
        made.json_schema(schema)


def test_a_process_that_died_is_replaced(made: Constraints) -> None:
    check: CompileCheck = made._check
    check.check(json_grammar(SMALL), "JSON schema")
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


def test_a_gbnf_grammar_is_converted_where_it_can_be_stopped(made: Constraints) -> None:
    """The converter is Python: 48 kB of rules took 5 s of the interpreter's time, which everybody waited for."""
    made.json_schema(SMALL)  # the process runs
    chain = "\n".join(f'r{at} ::= "a" r{at + 1}' for at in range(2500))
    began = time.thread_time()
    with pytest.raises(ConfigError, match=r"the gbnf grammar takes more than 0\.3 s to compile"):
        made.grammar(f'root ::= r0\n{chain}\nr2500 ::= "b"', kind="gbnf")
    assert time.thread_time() - began < 1.0, "the work is another process's"
    assert made.grammar('root ::= "a"+ "b"', kind="gbnf").left_out == ()
    with pytest.raises(ConfigError, match=r"the gbnf grammar cannot be read: .*Expected"):
        made.grammar("root ::= +", kind="gbnf")


def test_finding_the_tool_at_fault_takes_a_while_at_most(made: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 tools, each almost too slow: one request held up everybody's grammars for minutes."""
    asked = []

    def slow(self: Constraints, schema: object, *, strict: bool) -> None:
        asked.append(schema)
        time.sleep(0.02)

    monkeypatch.setattr(Constraints, "json_schema", slow)
    monkeypatch.setattr("foretell.engine.structured.constraint.CULPRIT_S", 0.1)
    large = {"type": "object", "properties": {f"name {at}": {"type": "integer"} for at in range(100)}}
    given = [{"type": "function", "function": {"name": f"f{at}", "parameters": large}} for at in range(128)]
    with pytest.raises(ConfigError, match="262144 are taken"):
        ToolUse.of(given).constraint(made)
    assert 0 < len(asked) < 20
