"""Following a predicted text through edits."""

import tracemalloc
from collections.abc import Sequence

from hypothesis import given, strategies as st

from foretell.draft.prediction import MAX_ANCHOR, PredictionFollower


def follow(prediction: Sequence[int], output: Sequence[int], num_tokens: int = 4) -> list[list[int]]:
    """The guess before each token of the output, and after the last."""
    follower, guesses = PredictionFollower(prediction), []
    for token in output:
        guesses.append(follower.guess(num_tokens))
        follower.extend([token])
    return [*guesses, follower.guess(num_tokens)]


TEXT = list(range(10, 40))


def test_agreement_to_the_end() -> None:
    guesses = follow(TEXT, TEXT)
    assert guesses[0] == TEXT[:4]
    assert guesses[7] == TEXT[7:11]
    assert guesses[-2] == TEXT[-1:]
    assert guesses[-1] == []


def test_a_replacement_in_the_middle() -> None:
    output = [*TEXT[:10], 99, *TEXT[11:20]]
    guesses = follow(TEXT, output)
    assert guesses[11] == [], "the edit is nowhere in the prediction"
    assert guesses[12] == TEXT[12:16], "one agreeing token finds the place again"
    assert guesses[-1] == TEXT[20:24]


def test_an_insertion() -> None:
    output = [*TEXT[:10], 90, 91, 92, *TEXT[10:20]]
    guesses = follow(TEXT, output)
    assert guesses[13] == []
    assert guesses[14] == TEXT[11:15]


def test_a_deletion() -> None:
    output = [*TEXT[:10], *TEXT[15:]]
    guesses = follow(TEXT, output)
    assert guesses[10] == TEXT[10:14]
    assert guesses[11] == TEXT[16:20]
    assert guesses[-1] == []


def test_repeated_lines_stay_in_order() -> None:
    """Three equal lines with different ends: after an edit, the one behind the last known place is meant."""
    line = [1, 2, 3]
    prediction = [*line, 50, *line, 51, *line, 52]
    output = [*line, 50, 99, *line]  # the second line after an insertion
    guesses = follow(prediction, output, 2)
    assert guesses[6] == [2, 3]
    assert guesses[7] == [3, 51]
    assert guesses[-1] == [51, 1]
    assert follow(prediction, [*line, 50, *line, 99, 2, 3], 1)[-1] == [52]


def test_going_back_where_nothing_lies_ahead() -> None:
    guesses = follow(TEXT, [*TEXT, *TEXT[3:8]])
    assert guesses[-1] == TEXT[8:12]


def test_a_longer_anchor_beats_a_nearer_one() -> None:
    prediction = [5, 1, 60, 7, 8, 1, 61]
    assert follow(prediction, [9, 7, 8, 1], 1)[-1] == [61]
    assert follow(prediction, [9, 1], 1)[-1] == [60]


def test_many_tokens_at_once_are_as_many_calls() -> None:
    """An accepted path and its bonus come in one call."""
    prediction = [*TEXT, *TEXT[:5]]
    output = [*TEXT[:6], 99, *TEXT[7:9], *TEXT[12:18]]
    one, many = PredictionFollower(prediction), PredictionFollower(prediction)
    for token in output:
        one.extend([token])
    many.extend(output[:6])
    many.extend(output[6:])
    assert many.guess(5) == one.guess(5) == TEXT[18:23]


def test_empty() -> None:
    assert follow([], [1, 2, 3]) == [[], [], [], []]


def find(prediction: Sequence[int], output: Sequence[int], known: int) -> int | None:
    """Brute force: the longest suffix; the first place at or behind ``known``, else the last before it."""
    for size in range(min(MAX_ANCHOR, len(output)), 0, -1):
        suffix = list(output[len(output) - size :])
        ends = [end for end in range(size, len(prediction) + 1) if list(prediction[end - size : end]) == suffix]
        if ends:
            return min((end for end in ends if end >= known), default=ends[-1])
    return None


@given(prediction=st.lists(st.integers(0, 4), max_size=30), output=st.lists(st.integers(0, 4), max_size=30))
def test_against_brute_force(prediction: list[int], output: list[int]) -> None:
    follower = PredictionFollower(prediction)
    place: int | None = 0
    known = 0
    for end, token in enumerate(output, start=1):
        follower.extend([token])
        if place is not None and place < len(prediction) and prediction[place] == token:
            place += 1
        else:
            place = find(prediction, output[:end], known)
        known = place if place is not None else known
        assert follower.place == place
        assert follower.guess(3) == ([] if place is None else prediction[place : place + 3])


@given(prediction=st.lists(st.integers(0, 3), max_size=30), output=st.lists(st.integers(0, 4), max_size=30))
def test_the_place_is_that_of_a_search_through_all(prediction: list[int], output: list[int]) -> None:
    """Against the definition: the longest suffix, of equals the first at or after the last known place, else the last."""

    def find(written: list[int], known: int) -> int | None:
        for size in range(min(MAX_ANCHOR, len(written)), 0, -1):
            ends = [e for e in range(size, len(prediction) + 1) if prediction[e - size : e] == written[-size:]]
            if ends:
                return next((end for end in ends if end >= known), ends[-1])
        return None

    follower = PredictionFollower(prediction)
    place: int | None = 0
    known = 0
    for end, token in enumerate(output, start=1):
        follower.extend([token])
        if place is not None and place < len(prediction) and prediction[place] == token:
            place = known = place + 1
        else:
            place = find(output[:end], known)
            known = known if place is None else place
        assert follower.place == place


def test_memory_is_a_few_numbers_a_token() -> None:
    tracemalloc.start()
    follower = PredictionFollower(list(range(20_000)))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert follower.guess(2) == [0, 1]
    assert held < 100 * 20_000, "n-grams as keys took some 2,000 bytes a token"
