"""``foretell explain``: what is drawn, on wide and narrow terminals, and each term introduced where it first stands."""

import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from foretell import Engine
from foretell.analysis.explain import explain, number_game
from foretell.cli.commands.explain import PROMPT, _time, show
from foretell.core.visible import quoted
from tests.cli.conftest import Invoke
from tests.cli.test_errors import one_line

Drawn = Callable[..., str]
INTRODUCED = {
    "prompt": "This is the prompt",
    "token": "a token at a time: a word, or a piece of one",
    "probability": "a probability: how likely it is to come next",
    "law": "These probabilities together are called a law",
    "weights": "the numbers that the model has learned, its weights",
    "pass": "read once: a pass",
    "target": "The target is the model whose text is wanted",
    "drafter": "A drafter is something much cheaper that guesses the next tokens ahead",
    "temperature": "A setting, the temperature, makes the law sharper",
    "method": "(the method ",
    "speculative decoding": "Guessing ahead, so that one pass writes several tokens, is called speculative decoding",
    "guesses": "guesses the next tokens ahead",
    "step": "This is one step of it: guess, check, write",
    "kept": "✓ marks those that were kept",
    "alternatives": "Several guesses after the same token are alternatives",
    "tree": "together the guesses form a tree",
    "its own law, p": "So it has its own law, p, after every guess",
    "p, target": "So it has its own law, p, after every guess",
    "q": "The drafter's law is q",
    "time, target": "its time is the delay divided by its probability",
    "first to arrive": "The first to arrive is written",
    "Rejected": "not kept is rejected",
    "bonus": "this token is the bonus of the pass",
    "race": "By a race: every token gets a random delay",
    "noise": "The delays, called noise",
    "seed": "the seed, a number that makes chance repeatable",
    "acceptance rate": "How often drafter and target agree is called the acceptance rate",
}
"""Each term of the method, and the words that introduce it."""


def flat(text: str) -> str:
    return " ".join(text.split())


def introduced_late(text: str) -> list[str]:
    """Terms that stand as words of their own anywhere before the words that introduce them, or without them."""
    late = []
    for term, words in INTRODUCED.items():
        found = re.search(rf"(?<![\w']){re.escape(term)}s?(?!\w)", text)
        if found and (words not in text or found.start() < text.index(words)):
            late.append(term)
    return late


def told(text: str) -> str:
    """The sentences and the heads of tables, without what the models wrote: tokens in quotes, and the title."""
    return flat(re.sub(r"(?<!\w)'[^'\n]*'|\"[^\"\n]*\"", "", text.partition("\n2 Guess")[0].split("\n", 3)[-1]
                       + text.partition("\n2 Guess")[2]))  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("bundled", speculative="draft_model")


@pytest.fixture
def drawn(engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Drawn:
    """What the command draws on a terminal of so many columns, by one engine for all."""

    def run(columns: int, *, temperature: float = 0.7, step: int | None = None, **config: Any) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        made = engine.with_method({"method": "draft_model", **config})
        prompt = "the cat and the dog and the cat and the" if config.get("method") == "ngram" else PROMPT
        show(explain(made, prompt, temperature=temperature, step=step), number_game(), no_color=True)
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"temperature": 0.0},
        {"shape": "static/branching=2x2", "num_speculative_tokens": 2},
        {"method": "ngram"},
        {"verify": "rejection"},
        {"verify": "typical"},
        {"step": 1},
    ],
    ids=str,
)
def test_every_term_is_introduced_where_it_first_stands(drawn: Drawn, config: dict[str, Any]) -> None:
    """At temperature 0 the seed stood at the end, and nowhere before; a lossy rule never said what "rejected" is."""
    text = told(drawn(120, **config))
    assert introduced_late(text) == []
    said = {term for term, words in INTRODUCED.items() if words in text}
    assert said >= {"token", "law", "pass", "target", "drafter", "temperature", "speculative decoding", "step", "kept"}
    if not config:
        assert said >= {"q", "race", "noise", "seed", "time, target", "acceptance rate"}


def test_the_control_of_terms_used_too_early() -> None:
    assert introduced_late("The noise comes. The delays, called noise, come.") == ["noise"]
    assert introduced_late("Rejected: it is not known what that is.") == ["Rejected"]


def test_a_table_fits_in_eighty_columns(drawn: Drawn) -> None:
    """Figures and heads were cut to "55923.…" and "drafte…"."""
    for config in ({}, {"verify": "rejection"}, {"temperature": 0.0}):
        text = drawn(80, **config)
        assert "…" not in text
        assert "p, target " in text
        assert max(map(len, drawn(48, **config).splitlines())) <= 48


def test_at_temperature_0_tokens_without_a_chance_are_left_out(engine: Engine) -> None:
    """Beside the token of 100% stood four of the vocabulary's first ones, at 0.0%."""
    for place in explain(engine, PROMPT, temperature=0.0, step=1).places:
        assert {one.text for one in place.runners} == {place.winner, *place.guesses}


def test_how_a_time_and_a_token_are_shown() -> None:
    assert [_time(time, first=False).strip() for time in (None, 0.123, 55.4, 2671.9)] == [
        "never",
        "0.12",
        "55",
        "> 1000",
    ]
    assert _time(0.5, first=True).endswith("0.50 first")
    assert (quoted(" a\n"), quoted("it's"), quoted("'\"")) == ("' a\\n'", '"it\'s"', "''\"'")


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
    result = invoke("explain", "--target", "bundled", "--raw", *options, "the cat and the dog and the cat and the")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "What came of it" in result.stdout


def test_json(invoke: Invoke) -> None:
    found = json.loads(invoke("explain", "--target", "bundled", "--json", "--step", 1).stdout)
    assert found["step"]["number"] == 1
    assert found["game"]["shared"] == 1.0


def test_mistakes(invoke: Invoke) -> None:
    assert "nothing guesses" in one_line(invoke("explain", "--target", "bundled", "--method", "none").stderr)
    for wrong in ("nan", "inf"):
        refused = invoke("explain", "--target", "/nonexistent", "--method", "ngram", "--temperature", wrong)
        assert f"temperature = {wrong} must be finite and at least 0" in one_line(refused.stderr)
    assert "the prompt is empty" in one_line(invoke("explain", "", "--target", "bundled").stderr)


def test_of_tokens_with_one_text_the_one_that_was_taken_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from rich.console import Console

    from foretell.cli.commands.explain import _place

    found = explain(Engine.load("bundled", speculative="draft_model"), PROMPT, temperature=0.7, seed=0)
    place = found.places[0]
    alike = replace(
        place, runners=[replace(runner, text="\ufffd") for runner in place.runners], winner="\ufffd", guesses=["\ufffd"],
    )  # fmt: skip
    console = Console(width=120, record=True, file=io.StringIO())
    _place(console, found, alike, "")
    firsts = [line.count(" first") for line in console.export_text().splitlines()]
    assert sum(count > 0 for count in firsts) <= 2  # in the target's race, and in the drafter's
    assert sum(firsts) == 2
