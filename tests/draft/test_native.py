"""Native suffix automata against their slow twins: state for state, place for place, guess for guess."""

import gc
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, strategies as st

from foretell.draft import native
from foretell.draft.automaton import NOWHERE, Automaton
from foretell.draft.native import NativeAutomaton, new_automaton
from foretell.draft.suffix import MAX_MATCH, Library, SuffixOptions, SuffixRow, best_first, best_of_sources
from foretell.kernels.small import suffix_library

Texts = list[list[int]]
LIBRARY = suffix_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="suffix.c could not be built here")
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=4)
WINDOWS = st.integers(1, 5)


def pair(window: int) -> tuple[Automaton, NativeAutomaton]:
    assert LIBRARY is not None
    return Automaton(window), NativeAutomaton(LIBRARY, window)


def grow(automata: Sequence[Automaton | NativeAutomaton], texts: Texts) -> None:
    for automaton in automata:
        for text in texts:
            automaton.begin()
            automaton.extend(text)


def edges(automaton: NativeAutomaton) -> Iterator[tuple[int, int, int]]:
    """(state, token, state) of all transitions, as a walk over places of one token more finds them."""
    for state in range(automaton.num_states):
        size = automaton.view.length[state]
        if size > automaton.window:
            continue
        for token in range(4):
            after, longer = automaton.follow_all((state, size), [token])
            if longer == size + 1:
                yield state, token, after


def assert_alike(slow: Automaton, quick: NativeAutomaton) -> None:
    count, view = slow.num_states, quick.view
    assert (quick.num_states, quick.num_tokens) == (count, slow.num_tokens)
    for name in ("length", "link", "count", "latest", "earlier"):
        assert getattr(view, name)[:count] == getattr(slow, name), name
    assert view.num_edges == sum(map(len, slow.next))
    for state, token, after in edges(quick):
        if slow.length[state] < slow.window:
            assert slow.next[state][token] == after


@given(texts=TEXTS, more=TEXTS, window=WINDOWS)
def test_every_state_is_the_same(texts: Texts, more: Texts, window: int) -> None:
    slow, quick = pair(window)
    for part in (texts, more):
        grow((slow, quick), part)
        assert_alike(slow, quick)
        assert quick.repeat() == slow.repeat()
        assert all(quick.end_before(state) == slow.end_before(state) for state in range(slow.num_states))


@pytest.mark.parametrize("kind", ["random", "one token", "period", "words"])
def test_long_texts(kind: str) -> None:
    """Thousands of states: lists grow, and the hash table is made anew, many times."""
    generator = random.Random(3)
    words = [[generator.randrange(50_000) for _ in range(6)] for _ in range(40)]
    text = {
        "random": [generator.randrange(50_000) for _ in range(4000)],
        "one token": [1] * 4000,
        "period": [k % 10 for k in range(4000)],
        "words": [token for _ in range(700) for token in generator.choice(words)][:4000],
    }[kind]
    slow, quick = pair(16)
    at = NOWHERE
    for start in range(0, 4000, 37):
        part = text[start : start + 37]
        slow.extend(part)
        quick.extend(part)
        assert quick.repeat() == slow.repeat()
        assert quick.follow_all(at, part) == (at := slow.follow_all(at, part))
        limits = {"depth": 8, "size": 12, "width": 3, "least_score": 0.01, "least_match": 1}
        assert best_first(quick, quick.repeat(), **limits) == best_first(slow, slow.repeat(), **limits)  # type: ignore[arg-type]
    assert_alike(slow, quick)
    assert quick.num_bytes < slow.num_bytes / 2


@given(texts=TEXTS, text=st.lists(st.integers(0, 3), max_size=20), window=WINDOWS, every=st.integers(1, 7))
def test_following_goes_on_while_the_automaton_grows(texts: Texts, text: list[int], window: int, every: int) -> None:
    slow, quick = pair(window)
    waiting, place, other = list(texts), NOWHERE, NOWHERE
    for start in range(0, len(text), every):
        if waiting:
            grow((slow, quick), [waiting.pop()])
        place, other = (one.follow_all(at, text[start : start + every]) for one, at in ((slow, place), (quick, other)))
        assert other == place
    assert quick.follow_all(other, []) == other


@given(
    texts=TEXTS,
    text=st.lists(st.integers(0, 2), max_size=12),
    window=WINDOWS,
    depth=st.integers(1, 6),
    size=st.integers(1, 20),
    width=st.integers(1, 4),
    least_score=st.sampled_from([0.0, 0.05, 0.1, 0.34, 1.0]),
    least_match=st.integers(1, 3),
)
def test_the_same_guesses_to_the_bit(
    texts: Texts, text: list[int], window: int, depth: int, size: int, width: int, least_score: float, least_match: int
) -> None:
    slow, quick = pair(window)
    grow((slow, quick), texts)
    place = slow.follow_all(NOWHERE, text)
    limits = {
        "depth": depth, "size": size, "width": width, "least_score": least_score, "least_match": least_match,
    }  # fmt: skip
    assert best_first(quick, place, **limits) == best_first(slow, place, **limits)  # type: ignore[arg-type]


def test_rows_and_libraries_guess_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that goes on beside a library that forgets: every guess of either kind, hence every use of the automata."""
    found = []
    for build in (new_automaton, Automaton):
        monkeypatch.setattr("foretell.draft.suffix.new_automaton", build)
        generator, options = random.Random(5), SuffixOptions(max_cached_tokens=400)
        library = Library(options.max_cached_tokens, MAX_MATCH)
        row, guesses = SuffixRow([], 0, build(MAX_MATCH)), []
        phrases = [[generator.randrange(30) for _ in range(5)] for _ in range(12)]
        for _ in range(120):
            row.text += generator.choice(phrases)
            row.read()
            guesses.append(best_of_sources(row, library, options, depth=6, size=9, width=2))
            library.add([token for _ in range(8) for token in generator.choice(phrases)])
        found.append(guesses)
    assert found[0] == found[1]
    assert sum(bool(nodes) for nodes, _ in found[0]) > 60, "control: there was something to guess"


def test_a_place_for_every_token_that_the_engine_may_name() -> None:
    slow, quick = pair(4)
    grow((slow, quick), [[0, 2**31 - 1, 7, 2**31 - 1, 0, 2**31 - 1]])
    assert_alike(slow, quick)
    assert quick.repeat() == slow.repeat() != NOWHERE


def test_memory_is_given_back() -> None:
    """Closed when the last reference goes; a reader's view keeps it alive until then."""
    _, quick = pair(8)
    quick.extend(range(1000))
    close = quick._close
    assert close.alive
    del quick
    gc.collect()
    assert not close.alive


def test_no_memory_is_an_error_not_a_crash() -> None:
    """More states than an index can number: refused before anything is written."""
    _, quick = pair(4)
    quick.extend([1, 2, 3])
    quick.view.num_states = quick.view.room_states = 2**31 - 2
    with pytest.raises(MemoryError):
        quick.extend([9])
    quick.view.num_states = quick.view.room_states = 0  # what was allocated is still freed


def test_without_the_kernel_the_twin_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(new_automaton(4), NativeAutomaton)
    monkeypatch.setattr(native, "suffix_library", lambda: None)
    assert isinstance(new_automaton(4), Automaton)
