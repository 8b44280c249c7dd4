"""Numbers and programs out of answers, and a judge of both."""

import pytest

from foretell.bench.answers import AnswerCheck, final_number, number_check, program, python_check, same_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", 7),
        ("#### 5\nno:\n#### 1,234.50.", 1234.5),
        ("#### $18 and 3 more", 18),
        ("####\nthe last number is 9", 9),
        (r"we get \boxed{12} in 5 steps", 12),
        (r"\boxed{x} then \boxed{-3}", -3),
        ("The answer is 42, since 6 * 7 = 42 and 8 > 7.", 42),
        ("Answer: 8 apples out of 10", 8),
        ("the answer is unclear", None),
        ("First 3, then 11.", 11),
        ("5-3 leaves 2", 2),
        ("it fell to -4", -4),
        ("10-4", 4),
        (".5", 0.5),
        ("3/4", 4),
        ("1,2,3", 3),
        ("no digits", None),
        ("", None),
    ],
)
def test_final_number(text: str, number: float | None) -> None:
    assert final_number(text) == number


def test_equal_numbers() -> None:
    assert same_number("#### 1,000.0", "1000.0")
    assert same_number("about 0.3333333333", str(1 / 3))
    assert not same_number("#### 1001", "1000.0")
    assert not same_number("none", "0.0")
    assert number_check("no number") is None


GIVEN = 'import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef area(r):\n    """The area."""\n'
CHECK = python_check("def check(f):\n    assert f(2) == 4\n", "area", GIVEN)
BODY = "    return r * r\n"


@pytest.mark.parametrize(
    "answer",
    [
        f"Sure:\n```python\ndef area(r):\n{BODY}```\nThat is it. def nothing(",
        f"```\nx = 1\n```\nand\n```py\ndef area(r):\n{BODY}```",
        f"```python\ndef area(r):\n{BODY}",  # cut short
        f"def area(r):\n{BODY}",
        f"{BODY}\n\nprint(area(3))\n",  # continued from the head
        f"```python\n{BODY}```",
        f"```python\ndef area(r: float) -> float:\n{BODY}```",
    ],
)
def test_the_program_of_an_answer(answer: str) -> None:
    source = program(answer, CHECK)
    scope: dict[str, object] = {}
    exec(source, scope)
    assert scope["area"](2) == 4  # type: ignore[operator]
    assert "half" in scope
    assert "math" in scope


def test_a_name_that_begins_alike_is_another() -> None:
    source = program("```python\ndef area_of(r):\n    return 1\n```", CHECK)
    assert source.startswith(GIVEN)


def test_checks_compare_by_value() -> None:
    assert number_check("#### 3") == AnswerCheck("number", "3.0")
