"""``foretell explain``: what is drawn, on wide and narrow terminals, and each term introduced where it first stands."""

import json

import pytest

from tests.cli.conftest import Invoke
from tests.cli.test_errors import one_line

INTRODUCED = {
    "token": "a token at a time: a word, or a piece of one",
    "law": "These probabilities together are called a law",
    "weights": "the numbers that the model has learned, its weights",
    "pass": "read once: a pass",
    "target": "The target is the model whose text is wanted",
    "drafter": "A drafter is something much cheaper that guesses the next tokens ahead",
    "temperature": "A setting, the temperature, makes the law sharper",
    "method": "(the method draft_model)",
    "speculative decoding": "Guessing ahead, so that one pass writes several tokens, is called speculative decoding",
    "guesses": "guesses the next tokens ahead",
    "kept": "✓ marks those that were kept",
    "race": "By a race: every token gets a random delay",
    "noise": "The delays, called noise",
    "seed": "the seed, a number that makes chance repeatable",
    "bonus": "this token is the bonus of the pass",
    "acceptance rate": "How often they agree is called the acceptance rate",
}
"""Each term of the method, and the words that introduce it."""


def flat(text: str) -> str:
    return " ".join(text.split())


def introduced_late(text: str) -> list[str]:
    """Terms that stand anywhere before the words that introduce them."""
    late = []
    for term, words in INTRODUCED.items():
        if words in text and term in text[: text.index(words)]:
            late.append(term)
    return late


def test_every_term_is_introduced_where_it_first_stands(invoke: Invoke) -> None:
    text = flat(invoke("explain", "--target", "bundled").stdout)
    assert {term for term, words in INTRODUCED.items() if words in text} >= INTRODUCED.keys() - {"bonus"}
    assert introduced_late(text) == []


def test_the_control_of_terms_used_too_early() -> None:
    assert introduced_late("The noise comes. The delays, called noise, come.") == ["noise"]


def test_parts(invoke: Invoke) -> None:
    result = invoke("explain", "--target", "bundled")
    assert (result.exit_code, result.stderr) == (0, "")
    for part in ("1 The text so far", "2 Guess", "3 Check", "4 What came of it", "5 Why the same delays help"):
        assert part in result.stdout
    assert "you agree in 100% of the rounds" in flat(result.stdout)
    assert "You agree in 10% of 100,000 rounds" in flat(result.stdout)


@pytest.mark.parametrize(
    "options",
    [
        ("--method", "ngram"),
        ("--temperature", "0"),
        ("--verify", "rejection"),
        ("--method", "eagle3", "--shape", "static/branching=2x2"),
    ],
)
def test_other_methods_rules_and_shapes(invoke: Invoke, options: tuple[str, ...]) -> None:
    result = invoke("explain", "--target", "bundled", *options, "the cat and the dog and the cat and the")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "What came of it" in result.stdout


def test_json(invoke: Invoke) -> None:
    found = json.loads(invoke("explain", "--target", "bundled", "--json", "--step", 1).stdout)
    assert found["step"]["number"] == 1
    assert found["game"]["shared"] == 1.0


def test_a_narrow_terminal(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "48")
    text = invoke("explain", "--target", "bundled").stdout
    assert max(len(line) for line in text.splitlines()) <= 48


def test_mistakes(invoke: Invoke) -> None:
    assert "nothing guesses" in one_line(invoke("explain", "--target", "bundled", "--method", "none").stderr)
    assert "the prompt is empty" in one_line(invoke("explain", "", "--target", "bundled").stderr)
