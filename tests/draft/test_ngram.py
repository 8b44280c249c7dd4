"""Prompt lookup against a brute force reference."""

import tracemalloc

import pytest
from hypothesis import given, strategies as st

from foretell.core.errors import ConfigError
from foretell.draft.automaton import MAX_READ, Automaton
from foretell.draft.ngram import MAX_NGRAM, Ngram, NgramIndex


def reference(ids: list[int], smallest: int, largest: int, num_tokens: int) -> list[int]:
    """By the definition: the longest suffix that occurred before, at its latest earlier place; guesses may go on with
    guesses. An occurrence must be followed by a token of the text, so a suffix is never its own match."""
    for size in range(min(largest, len(ids)), smallest - 1, -1):
        suffix = ids[len(ids) - size :]
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == suffix:
                text, at = list(ids), start + size
                for k in range(num_tokens):
                    text.append(text[at + k])
                return text[len(ids) :]
    return []


@given(
    ids=st.lists(st.integers(0, 3), max_size=40),
    smallest=st.integers(1, 3),
    extra=st.integers(0, 3),
    num_tokens=st.integers(1, 12),
    cut=st.integers(0, 40),
)
def test_longest_and_most_recent(ids: list[int], smallest: int, extra: int, num_tokens: int, cut: int) -> None:
    index = NgramIndex(smallest, smallest + extra)
    index.extend(ids[:cut])
    index.extend(ids[cut:])
    assert index.lookup(num_tokens) == reference(ids, smallest, smallest + extra, num_tokens)


@given(ids=st.lists(st.integers(0, 3), max_size=30))
def test_every_step_of_a_growing_text(ids: list[int]) -> None:
    index = NgramIndex(1, 4)
    for end, token in enumerate(ids):
        assert index.lookup(5) == reference(ids[:end], 1, 4, 5)
        index.extend([token])


def test_a_suffix_never_matches_itself() -> None:
    index = NgramIndex(1, 4)
    index.extend([1, 2, 3, 4, 5])
    assert index.lookup(3) == []


def test_a_period_goes_on() -> None:
    index = NgramIndex(1, 4)
    index.extend([7, 8, 9, 7, 8, 9, 7])
    assert index.lookup(8) == [8, 9, 7, 8, 9, 7, 8, 9]


def test_the_latest_of_equals_wins_and_the_longest_before_it() -> None:
    index = NgramIndex(1, 3)
    index.extend([1, 2, 5, 9, 2, 6, 9, 2, 7, 1, 2])
    assert index.lookup(1) == [5], "two tokens match at the start: longer than the later match of one"
    index.extend([0, 2])
    assert index.lookup(1) == [0], "only one token matches: its latest place"


@pytest.mark.parametrize("text", ["ab" * 250, "a" * 500, "".join(chr(33 + k * k % 89) for k in range(500))])
def test_memory_is_linear_in_the_text_whatever_the_match_length(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the n-grams themselves as keys, 500 tokens took 0.17 GB at 4,096 (the cube of the length)."""
    monkeypatch.setattr("foretell.draft.ngram.new_automaton", Automaton)  # the twin, which counts what it does
    held, hops = [], []
    for largest in (2, MAX_NGRAM):
        tracemalloc.start()
        index = NgramIndex(1, largest)
        index.extend([ord(letter) for letter in text])
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        hops.append(index.automaton.num_hops)
    assert held[1] < 1.1 * held[0]
    assert held[1] < 1000 * len(text)
    assert hops[1] <= (MAX_NGRAM + 8) * len(text)


def test_a_long_text_is_read_over_several_steps() -> None:
    text = [*range(100, 100 + MAX_READ), *range(100, 100 + MAX_READ), 7, *range(100, 120)]
    index = NgramIndex(1, 4)
    index.extend(text)
    assert index.automaton.num_tokens == MAX_READ
    assert index.lookup(3) == [], "what has not been read gives no guess"
    index.extend([])
    assert index.lookup(3) == []
    index.extend([120])
    assert index.lookup(3) == [121, 122, 123]


@pytest.mark.parametrize(("smallest", "largest"), [(0, 3), (4, 3), (-1, -1), (1, 65), (2, 10**9)])
def test_bounds_that_cannot_be(smallest: int, largest: int) -> None:
    with pytest.raises(ConfigError, match="expected 1 <= min <= max"):
        Ngram(min_ngram=smallest, max_ngram=largest)
