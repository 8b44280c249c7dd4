"""Is an answer right? Numbers of word problems are compared; programs are run against their tests (``sandbox.py``); where
nobody knows the answer, one that says so is right (``quality.py``).

The rule for numbers, in this order: what follows the last "####"; what is in the last \\boxed{}; the first number after the
last "answer is", "answer:" or "answer ="; the last number of the text. Currency signs, thousands separators and a full
stop at the end are not part of a number; "3/4" is none: the rule takes the 4. Numbers are equal where their difference
is at most 1e-6 of the larger.
"""

import math
import re
from dataclasses import dataclass

NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
ANSWER = re.compile(r"answer\s*(?:is|:|=)", re.IGNORECASE)
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
FENCE = re.compile(r"```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)
TOLERANCE = 1e-6


@dataclass(frozen=True)
class AnswerCheck:
    """How an answer is judged."""

    kind: str  # "number", "python", or "unknown": nobody knows, and the answer has to say so (``quality.py``)
    # The right number; the program that defines ``check(candidate)`` and raises where it is wrong; or empty
    expected: str
    entry_point: str = ""  # python: the function that is asked for
    given: str = ""  # python: what the question gave of the program: imports, helpers, the function's head


def number_check(reference: str) -> AnswerCheck | None:
    """For a reference that ends in the right number; None where it has none."""
    value = final_number(reference)
    return None if value is None else AnswerCheck("number", repr(value))


def python_check(test: str, entry_point: str, given: str) -> AnswerCheck:
    """For a task with HumanEval's tests."""
    return AnswerCheck("python", test, entry_point, given)


def final_number(text: str) -> float | None:
    """The number that a text gives as its answer, by the module's rule; None where it has no number."""
    marked = text.rpartition("####")
    if marked[1]:
        found = NUMBER.search(marked[2])
        if found:
            return _value(found[0])
    for boxed in reversed(BOXED.findall(text)):
        found = NUMBER.search(boxed)
        if found:
            return _value(found[0])
    said = list(ANSWER.finditer(text))
    if said:
        found = NUMBER.search(text, said[-1].end())
        if found:
            return _value(found[0])
    numbers = NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def same_number(text: str, expected: str) -> bool:
    """Whether a text's answer is the expected number."""
    value = final_number(text)
    return value is not None and math.isclose(value, float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def program(text: str, check: AnswerCheck) -> str:
    """The program that an answer is: its first code block that defines the function, behind what the question gave of
    imports and helpers; otherwise the text as the function's body."""
    head = re.compile(rf"^[ \t]*(?:async\s+)?def\s+{re.escape(check.entry_point)}\s*\(", re.MULTILINE)
    blocks: list[str] = [body for _, body in FENCE.findall(text)]
    for body in blocks or [text]:
        if head.search(body):
            start = head.search(check.given)
            return (check.given[: start.start()] if start else "") + body + "\n"
    return check.given + _body(blocks[0] if blocks else text)


def _body(text: str) -> str:
    """The lines of a continued function: up to the first one that is neither empty nor indented."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if number and line.strip() and not line[0].isspace():
            return "\n".join(lines[:number]) + "\n"
    return text + "\n"


def _value(digits: str) -> float:
    return float(digits.replace(",", ""))
