"""Suffix automata and the trees found in them, against brute force."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, strategies as st

from foretell.core.errors import ConfigError
from foretell.draft.automaton import NOWHERE, Automaton, Place
from foretell.draft.native import AnyAutomaton, depth_first
from foretell.draft.suffix import Library, SuffixOptions, SuffixReader, best_first

Texts = list[list[int]]
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=4)
WINDOWS = st.integers(1, 5)


def grown(texts: Texts, window: int) -> Automaton:
    automaton = Automaton(window)
    for text in texts:
        automaton.begin()
        automaton.extend(text)
    return automaton


def ends(texts: Texts, part: Sequence[int]) -> list[int]:
    """Number of tokens read at each end of a substring, by the definition."""
    size, found, before = len(part), [], 0
    for text in texts:
        found += [before + end for end in range(size, len(text) + 1) if text[end - size : end] == list(part)]
        before += len(text)
    return found


def longest_known(texts: Texts, text: Sequence[int], window: int) -> list[int]:
    """The longest suffix of text, of at most window tokens, that occurs in texts."""
    for size in range(min(window, len(text)), 0, -1):
        if ends(texts, text[-size:]):
            return list(text[-size:])
    return []


def substring(automaton: Automaton, place: Place, texts: Texts) -> list[int]:
    """The tokens of a place: looked up where its class ended last."""
    state, size = place
    joined = [token for text in texts for token in text]
    end = automaton.latest[state]
    return joined[end - size : end]


@given(texts=TEXTS, window=WINDOWS)
def test_all_substrings_with_their_counts_and_nothing_else(texts: Texts, window: int) -> None:
    automaton = grown(texts, window)
    for text in texts:
        for start in range(len(text)):
            state = 0
            for end in range(start + 1, len(text) + 1):
                state = automaton.next[state][text[end - 1]]
                found = ends(texts, text[start:end])
                if end - start <= window + 1:
                    assert automaton.count[state] == len(found)
                    assert automaton.latest[state] == max(found)
    joined = [token for text in texts for token in text]

    def visit(state: int, path: list[int]) -> int:
        following = automaton.next[state].items()
        return 1 + sum(visit(after, [*path, token]) for token, after in following if ends(texts, [*path, token]))

    distinct = {tuple(text[i:j]) for text in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    assert visit(0, []) == 1 + len(distinct)
    assert all(ends(texts, [token]) for token in automaton.next[0])
    assert len(automaton.length) <= 2 * len(joined) + 1


@given(text=st.lists(st.integers(0, 2), max_size=30), window=WINDOWS)
def test_repeat_is_the_longest_suffix_with_an_earlier_end(text: list[int], window: int) -> None:
    automaton = Automaton(window)
    for end, token in enumerate(text, start=1):
        automaton.extend([token])
        known = text[:end]
        sizes = [size for size in range(1, min(window, end) + 1) if len(ends([known], known[-size:])) > 1]
        place = automaton.repeat()
        assert place[1] == max(sizes, default=0)
        assert substring(automaton, place, [known]) == known[end - place[1] :]


@given(texts=TEXTS, text=st.lists(st.integers(0, 3), max_size=20), window=WINDOWS)
def test_following_finds_the_longest_known_suffix(texts: Texts, text: list[int], window: int) -> None:
    automaton = grown(texts, window)
    place = NOWHERE
    for end, token in enumerate(text, start=1):
        place = automaton.follow(place, token)
        assert substring(automaton, place, texts) == longest_known(texts, text[:end], window)


@given(texts=TEXTS, text=st.lists(st.integers(0, 3), max_size=20), window=WINDOWS, every=st.integers(1, 7))
def test_a_reader_sees_what_came_in_meanwhile(texts: Texts, text: list[int], window: int, every: int) -> None:
    automaton = Automaton(window)
    reader = SuffixReader(automaton)
    waiting, there = list(texts), []
    for end in range(len(text) + 1):
        if end % every == 0 and waiting:
            there.append(waiting.pop())
            automaton.begin()
            automaton.extend(there[-1])
        place = reader.read(text[:end])
        assert substring(automaton, place, there) == longest_known(there, text[:end], window)


@given(texts=TEXTS, more=TEXTS, text=st.lists(st.integers(0, 2), max_size=12), window=WINDOWS)
def test_a_place_survives_growth(texts: Texts, more: Texts, text: list[int], window: int) -> None:
    """A class that is split under a place: the place goes on as the same substring."""
    automaton = grown(texts, window)
    place = NOWHERE
    for token in text:
        place = automaton.follow(place, token)
    part = substring(automaton, place, texts)
    for other in more:
        automaton.begin()
        automaton.extend(other)
    for token in range(3):
        after = automaton.follow(place, token)
        assert substring(automaton, after, texts + more) == longest_known(texts + more, [*part, token], window)


def test_a_class_split_under_a_place_does_not_lengthen_it() -> None:
    automaton = grown([[0, 1, 2]], 4)
    place = automaton.follow(NOWHERE, 2)
    automaton.begin()
    automaton.extend([3, 1, 2, 0])
    assert automaton.follow(place, 0)[1] == 2, "the place was that of one token"


def test_a_reader_looks_again_when_texts_came_in() -> None:
    automaton = grown([[1, 3, 5]], 4)
    reader = SuffixReader(automaton)
    assert reader.read([1, 2, 3])[1] == 1
    automaton.begin()
    automaton.extend([1, 2, 3, 4])
    assert reader.read([1, 2, 3])[1] == 3


def continuations(texts: Texts, part: Sequence[int], least: int) -> dict[int, float]:
    """Shares of the tokens that followed a substring, or the longest shorter suffix that anything followed."""
    for size in range(len(part), least - 1, -1):
        tail = list(part[len(part) - size :])
        after = Counter(text[end] for text in texts for end in range(size, len(text)) if text[end - size : end] == tail)
        if after:
            return {token: times / after.total() for token, times in after.items()}
    return {}


@given(
    texts=TEXTS,
    text=st.lists(st.integers(0, 2), max_size=12),
    window=WINDOWS,
    least=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.25, 0.4]),
)
def test_followers(texts: Texts, text: list[int], window: int, least: int, share: float) -> None:
    automaton = grown(texts, window)
    place = NOWHERE
    for token in text:
        place = automaton.follow(place, token)
    part = longest_known(texts, text, window)
    found = automaton.followers(place, least, share)
    expected = {token: part for token, part in continuations(texts, part, least).items() if part >= share}
    assert {way.token: way.share for way in found} == pytest.approx(expected)
    assert [way.share for way in found] == sorted((way.share for way in found), reverse=True)
    for way in found:
        assert way.place[1] <= window
        assert substring(automaton, way.place, texts)[-1] == way.token


def best_by_definition(
    texts: Texts, part: list[int], window: int, *, depth: int, size: int, least_score: float, least_match: int
) -> list[float]:
    """Scores of the best nodes of the whole tree of continuations."""
    scores: list[float] = []

    def visit(context: list[int], score: float, level: int) -> None:
        if level == depth:
            return
        for token, share in continuations(texts, context, least_match).items():
            if score * share >= least_score:
                scores.append(score * share)
                # The context of the next guess is the longest known suffix of this one's and the guess.
                tail = longest_known(texts, [*_shortened(texts, context, least_match), token], window)
                visit(tail, score * share, level + 1)

    visit(part, 1.0, 0)
    return sorted(scores, reverse=True)[:size]


def _shortened(texts: Texts, context: list[int], least: int) -> list[int]:
    """The suffix of a context that continuations were read from."""
    for size in range(len(context), least - 1, -1):
        if continuations(texts, context[len(context) - size :], size):
            return context[len(context) - size :]
    return []


@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=14),
    window=WINDOWS,
    depth=st.integers(1, 4),
    size=st.integers(1, 9),
    least_score=st.sampled_from([0.05, 0.1, 0.34]),
    least_match=st.integers(1, 2),
)
def test_the_best_nodes_of_all(
    text: list[int], window: int, depth: int, size: int, least_score: float, least_match: int
) -> None:
    automaton = grown([text], window)
    place = automaton.repeat()
    limits = {"depth": depth, "size": size, "least_score": least_score, "least_match": least_match}
    if place[1] < least_match:
        assert automaton.followers(place, least_match) == []
        return
    nodes, score = best_first(automaton, place, width=99, **limits)  # type: ignore[arg-type]
    expected = best_by_definition([text], text[len(text) - place[1] :], window, **limits)  # type: ignore[arg-type]
    assert len(nodes) == len(expected)
    assert score == pytest.approx(sum(expected))
    assert all(parent < node for node, (parent, _) in enumerate(nodes, start=1))
    chain, chain_score = best_first(automaton, place, width=1, **limits)  # type: ignore[arg-type]
    assert [parent for parent, _ in chain] == list(range(len(chain)))
    assert chain_score <= score + 1e-12


def test_a_period_goes_on_past_the_end_of_the_text() -> None:
    automaton = grown([[7, 8, 9, 7, 8, 9, 7, 8, 9]], 8)
    nodes, score = best_first(automaton, automaton.repeat(), depth=9, size=9, width=1, least_score=0.1, least_match=2)
    assert nodes == [(0, 7), (1, 8), (2, 9), (3, 7), (4, 8), (5, 9), (6, 7), (7, 8), (8, 9)]
    assert score == 9.0


def test_the_more_frequent_first_and_of_equals_the_latest() -> None:
    automaton = grown([[1, 2, 5], [1, 2, 6], [1, 2, 7], [1, 2, 5]], 4)
    place = automaton.follow(automaton.follow(NOWHERE, 1), 2)
    assert [(way.token, way.share) for way in automaton.followers(place, 2)] == [(5, 0.5), (7, 0.25), (6, 0.25)]
    assert best_first(automaton, place, depth=1, size=9, width=2, least_score=0.1, least_match=2)[0] == [(0, 5), (0, 7)]
    assert best_first(automaton, place, depth=1, size=9, width=9, least_score=0.3, least_match=2)[0] == [(0, 5)]


@pytest.mark.parametrize("kind", ["random", "one token", "period", "words"])
def test_growth_costs_a_constant_number_of_hops_a_token(kind: str) -> None:
    """Counted, not timed: the text grows eightfold, the cost of a token by less than a third."""
    generator, window = random.Random(3), 16
    words = [[generator.randrange(500) for _ in range(6)] for _ in range(40)]
    text = {
        "random": [generator.randrange(50) for _ in range(8000)],
        "one token": [1] * 8000,
        "period": [k % 10 for k in range(8000)],
        "words": [token for _ in range(1400) for token in generator.choice(words)][:8000],
    }[kind]
    automaton, costs = Automaton(window), []
    for end in (1000, 2000, 4000, 8000):
        before, start = automaton.num_hops, automaton.num_tokens
        automaton.extend(text[start:end])
        costs.append((automaton.num_hops - before) / (end - start))
    assert costs[-1] <= 1.3 * costs[0]
    assert costs[-1] <= window + 4


def test_control_counting_to_the_root_is_not_constant() -> None:
    """Without the window a text of one token pays for its whole past."""
    automaton, costs = Automaton(10**6), []
    for _ in range(2):
        before = automaton.num_hops
        automaton.extend([1] * 500)
        costs.append(automaton.num_hops - before)
    assert costs[1] > 2.5 * costs[0]


# -- the library -----------------------------------------------------------------------------------------------------


@given(outputs=st.lists(st.lists(st.integers(0, 5), max_size=9), max_size=12), max_tokens=st.integers(0, 24))
def test_the_library_keeps_the_latest_whole_outputs(outputs: Texts, max_tokens: int) -> None:
    library = Library(max_tokens, 12)
    for output in outputs:
        library.add(output)
        assert sum(automaton.num_tokens for automaton in library.automata) <= max_tokens
    half = max_tokens // 2
    whole = [output[-half:] for output in outputs if output] if half else []
    held = sum(automaton.num_tokens for automaton in library.automata)
    newest = 0
    while held and newest < len(whole) and sum(map(len, whole[-newest - 1 :])) <= held:
        newest += 1
    remembered = whole[len(whole) - newest :]
    assert sum(map(len, remembered)) == held, "whole outputs, the latest ones"
    assert held >= min(half - 8, sum(map(len, whole))), "at least a half, but for the output that did not fit"
    for output in remembered:
        assert any(longest(automaton, output) for automaton in library.automata)


def longest(automaton: AnyAutomaton, text: Sequence[int]) -> bool:
    """Whether the automaton knows all of a text."""
    return automaton.follow_all(NOWHERE, text)[1] == len(text)


# -- values ----------------------------------------------------------------------------------------------------------


def test_depth_first_keeps_the_tree() -> None:
    nodes = [(0, 10), (0, 20), (1, 11), (2, 21), (1, 12), (3, 13)]
    assert depth_first(nodes) == [(0, 10), (1, 11), (2, 13), (1, 12), (0, 20), (5, 21)]
    assert depth_first([]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_token_prob": 1.5}, "min_token_prob = 1.5"),
        ({"min_token_prob": float("nan")}, "min_token_prob = nan"),
        ({"max_cached_tokens": -1}, "max_cached_tokens = -1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SuffixOptions(**options)  # type: ignore[arg-type]


@given(
    texts=st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=9), later=TEXTS, most=st.integers(0, 40),
    text=st.lists(st.integers(0, 2), max_size=12),
)  # fmt: skip
def test_a_library_that_reads_again_what_it_held_is_the_same(
    texts: Texts, later: Texts, most: int, text: list[int]
) -> None:
    """Also afterwards: it forgets the same outputs."""

    def guesses(library: Library) -> list[object]:
        found = list[object]()
        for automaton in library.automata:
            place = SuffixReader(automaton).read(text)
            limits = {"depth": 4, "size": 6, "width": 9, "least_score": 0.05, "least_match": 1}
            found.append((place, automaton.num_tokens, best_first(automaton, place, **limits)))  # type: ignore[arg-type]
        return found

    first, second = Library(most, 3), Library(most, 3)
    for output in texts:
        first.add(output)
    second.recall(first.memory())
    assert guesses(second) == guesses(first)
    for output in later:
        first.add(output)
        second.add(output)
    assert guesses(second) == guesses(first)
    theirs = second.memory()
    assert all(torch.equal(mine, theirs[key]) for key, mine in first.memory().items())
