"""A constraint forces nothing that the model did not choose: wherever an answer is complete, its end is permitted."""

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from foretell.engine.structured.constraint import Constraint, Constraints
from foretell.server.texts.tools import ToolUse
from tests.server.test_tools import CALL, NAMED, TIME, TOOLS, tokenizer_with
from tests.stress.schemas import is_valid

ENDS, WIDTH = (2, 0), 8200
NUMBER = {"type": "number"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}
BODY = re.compile(r'<tool_call>\s*(\{"name": "(?:weather|now)", "arguments": \{.*?\}\})\s*</tool_call>', re.DOTALL)


def are_calls(text: str) -> bool:
    bodies = BODY.findall(text)
    try:
        [json.loads(body) for body in bodies]
    except ValueError:
        return False
    return bool(bodies) and not BODY.sub("", text).strip()


def is_json(text: str) -> bool:
    return is_valid(text, SCHEMA)


def auto(text: str) -> bool:
    before, opener, _ = text.partition("<tool_call>")
    return not opener or are_calls(text[len(before) :])


def of_tools(choice: Any, parallel: bool = True, text: str | None = None) -> Callable[[Constraints], Constraint]:
    def make(constraints: Constraints) -> Constraint:
        made = ToolUse.of(TOOLS, choice, parallel).constraint(constraints, text)
        assert made is not None
        return made

    return make


KINDS: dict[str, tuple[Callable[[Constraints], Constraint], Callable[[str], bool], list[str]]] = {
    "required": (of_tools("required"), are_calls, [CALL, TIME + "\n" + CALL, CALL + "\n"]),
    "one call": (of_tools("required", False), are_calls, [CALL, TIME + "\n"]),
    "named": (of_tools(NAMED), are_calls, [TIME, TIME + "\n"]),
    "auto": (of_tools("auto"), auto, ["", "Hi <tool\n", "See:\n" + CALL, TIME + "\n" + TIME + "\n"]),
    "auto, one call": (of_tools("auto", False), auto, ["", "See: " + CALL + "\n"]),
    "tools or json": (
        of_tools("auto", text="%json " + json.dumps(SCHEMA)),
        lambda text: are_calls(text) or is_json(text),
        [TIME + "\n", '{"n": 1.5e3}'],
    ),
    "json schema": (lambda made: made.json_schema(SCHEMA), is_json, ['{"n": 1.5e3, "m": [1, "a"]}', '{"n":\n  7}']),
    "a number": (lambda made: made.json_schema(NUMBER), lambda text: is_valid(text, NUMBER), ["12.5", "-7e3"]),
    "regex": (
        lambda made: made.grammar(r"a+(,b\n?)*", kind="regex"),
        lambda text: re.fullmatch(r"a+(,b\n?)*", text) is not None,
        ["aaa,b\n,b", "a"],
    ),
    "choice": (
        lambda made: made.grammar('["yes", "yes, but", "no"]', kind="choice"),
        lambda text: text in ("yes", "yes, but", "no"),
        ["yes, but", "no"],
    ),
    "gbnf": (
        lambda made: made.grammar('root ::= "a" (" " "a")* "\\n"?', kind="gbnf"),
        lambda text: re.fullmatch(r"a( a)*\n?", text) is not None,
        ["a a a\n"],
    ),
    "lark": (
        lambda made: made.grammar("start: WORD (\" \" WORD)*\nWORD: /[a-z]+/", kind="lark"),
        lambda text: re.fullmatch(r"[a-z]+( [a-z]+)*", text) is not None,
        ["ab cd e"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=["none", "added"])
def vocabulary(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Constraints]]:
    """Of a model whose markers are spelled, and of one that has them as tokens."""
    tokenizer = tokenizer_with(request.param)
    constraints = Constraints(tokenizer, WIDTH, ENDS)
    yield tokenizer, constraints
    constraints.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_is_permitted_wherever_an_answer_is_complete(vocabulary: tuple[Any, Constraints], kind: str) -> None:
    """Along texts that the constraint permits, and along random ways on from their ends, blanks before all."""
    tokenizer, constraints = vocabulary
    make, is_complete, texts = KINDS[kind]
    processor, source = make(constraints).processor(0), random.Random(kind)
    blank = {token for token in range(len(tokenizer)) if tokenizer.decode([token]).isspace()}
    num_complete = 0

    def permitted(ids: list[int]) -> set[int]:
        made = processor(torch.tensor(ids, dtype=torch.int64), torch.zeros(WIDTH))
        return set(torch.nonzero(made > -torch.inf)[:, 0].tolist())

    for text in texts:
        given = tokenizer.encode(text, add_special_tokens=False)
        for walk in range(6):
            ids: list[int] = []
            while len(ids) < len(given) + 8:
                may = permitted(ids)
                whole = tokenizer.decode(ids, skip_special_tokens=True)
                if is_complete(whole):
                    num_complete += 1
                    assert may.issuperset(ENDS), whole
                onward = may.difference(ENDS)
                if len(ids) < len(given):
                    assert given[len(ids)] in onward, whole
                    ids.append(given[len(ids)])
                    continue
                if not onward:
                    break
                ids.append(source.choice(sorted(onward & blank if walk % 2 and onward & blank else onward)))
    assert num_complete >= 6 * len(texts)
