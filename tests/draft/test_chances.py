"""What a looked-up guess is worth is learned by the length of its match, and decides whether it is made."""

import itertools

import numpy as np
import pytest

from foretell.draft import suffix
from foretell.draft.chances import ENDS, FIRST, Chances
from foretell.draft.native import new_automaton
from foretell.draft.suffix import MAX_MATCH, Library, SuffixOptions, SuffixRow, best_of_sources


@pytest.mark.parametrize("least", [0.05, 0.21, 0.3, 0.5, 0.9])
def test_a_line_goes_as_deep_as_its_product_of_rates_reaches(least: float) -> None:
    rates = [FIRST[sum(match > end for end in ENDS)] for match in range(1, 40)]
    for match, most in itertools.product(range(1, 20), range(6)):
        products = np.cumprod(rates[match - 1 : match - 1 + most])
        assert Chances().depth(match, most, least) == int((products >= least).sum())


def test_rates_become_what_was_seen_and_follow_a_change() -> None:
    rng, chances = np.random.default_rng(0), Chances()
    for rate in (0.8, 0.1):
        for _ in range(1500):
            chances.observe(3, [7], [7 if rng.random() < rate else 8])
        assert chances.means[2].value == pytest.approx(rate, abs=0.07)
    untouched = [place for place in range(len(FIRST)) if place != 2]
    assert [chances.means[place].value for place in untouched] == [FIRST[place] for place in untouched]


def test_only_guesses_behind_right_ones_and_tokens_that_came_count() -> None:
    chances = Chances()
    chances.observe(1, [5, 6, 7, 8], [5, 0, 7, 8])  # behind the wrong one nothing is known
    assert chances.means[0].value > FIRST[0]
    assert chances.means[1].value < FIRST[1]
    assert [mean.value for mean in chances.means[2:]] == list(FIRST[2:])
    chances = Chances()
    chances.observe(1, [5, 6, 7], [5])  # the text ended
    assert [mean.value for mean in chances.means[1:]] == list(FIRST[1:])


def row_of(text: list[int]) -> SuffixRow:
    row = SuffixRow(text, 0, new_automaton(MAX_MATCH))
    row.read()
    return row


def test_a_guess_that_does_not_pay_is_not_made_and_yet_learned_from() -> None:
    options, library = SuffixOptions(), Library(64, 64)
    row = row_of([1, 2, 3, 9, 1])  # a match of one token: 2 came after it
    limits = {"depth": 4, "size": 4, "width": 1}
    assert best_of_sources(row, library, options, **limits)[0] == [(0, 2)]
    assert best_of_sources(row, library, options, **limits, least=0.3) == ([], 0.0)
    assert (row.line, row.match) == ([2], 1), "what would have been guessed is known"
    for _ in range(12):
        row.chances.observe(row.match, row.line, [2])
    assert best_of_sources(row, library, options, **limits, least=0.3)[0] == [(0, 2)], "it came true often"
    for _ in range(30):
        row.chances.observe(row.match, row.line, [3])
    assert best_of_sources(row, library, options, **limits, least=0.3)[0] == [], "and then no more"


def test_a_long_match_is_followed_only_as_far_as_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    options, library = SuffixOptions(), Library(64, 64)
    row = row_of([1, 2, 3, 4, 5, 6, 7, 0, 1, 2])  # a match of two
    monkeypatch.setattr(suffix, "PER_TOKEN", 3.0)
    full, _ = best_of_sources(row, library, options, depth=5, size=5, width=1)
    assert [token for _, token in full] == [3, 4, 5, 6, 7]
    some, _ = best_of_sources(row, library, options, depth=5, size=5, width=1, least=0.15)
    assert [token for _, token in some] == [3, 4], "0.4, 0.2, 0.12"
    assert best_of_sources(row, library, options, depth=5, size=5, width=1, least=0.41)[0] == []
