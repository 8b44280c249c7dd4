"""The covering arrays that the default run takes, and the list of what it thins out."""

import ast
import itertools
from pathlib import Path

import pytest

from tests.pairwise import covering
from tests.tiers import CORE, EXHAUSTIVE, SLOW, THINNED, kept, numbered, spared

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 4, 5), (2, 2, 2, 2, 2), (7, 3, 1, 4), (1, 1, 1)])
def test_every_pair_is_there_in_few_combinations(sizes: tuple[int, ...]) -> None:
    whole = list(itertools.product(*map(range, sizes)))
    found = covering(whole, 2)
    for one, two in itertools.combinations(range(len(sizes)), 2):
        pairs = {(row[one], row[two]) for row in found}
        assert pairs == set(itertools.product(range(sizes[one]), range(sizes[two])))
    largest = sorted(sizes)[-2:]
    assert largest[0] * largest[1] <= len(found) <= 2 * largest[0] * largest[1]
    assert found == sorted(found), "in their order"


def test_every_value_is_there_in_as_many_combinations_as_the_longest_axis() -> None:
    whole = list(itertools.product(range(5), "abc", [True, False]))
    found = covering(whole, 1)
    assert len(found) == 5
    for axis in range(3):
        assert {row[axis] for row in found} == {row[axis] for row in whole}


def test_what_is_not_among_the_combinations_is_not_asked_for() -> None:
    whole = [row for row in itertools.product(range(4), range(4), range(3)) if row[0] + row[1] != row[2]]
    found = covering(whole, 2)
    assert set(found) < set(whole)
    for one, two in itertools.combinations(range(3), 2):
        assert {(row[one], row[two]) for row in found} == {(row[one], row[two]) for row in whole}


def test_few_or_no_axes() -> None:
    assert covering([(1,), (2,), (1,)], 2) == [(1,), (2,)]
    assert covering([], 2) == []


def test_what_a_thinned_test_keeps() -> None:
    rows = list(itertools.product(range(3), range(4)))
    assert kept(rows, "values") == covering(rows, 1)
    assert kept(rows, "pairs") == rows, "two axes have no fewer"
    assert kept(rows, "first") == rows[:1]
    assert kept(rows, "third") == rows[::3]
    assert kept(rows, "fourth") == rows[::4]
    assert kept(rows, "none") == kept([], "first") == []


def test_equal_values_have_one_number() -> None:
    shared: list[int] = []
    cases = [
        {"a": "x", "b": shared},
        {"a": "x", "b": []},
        {"a": "y", "b": shared},
        {"a": 1, "b": {}},
        {"a": True, "b": {}},
    ]
    assert [row[0] for row in numbered(cases)] == [0, 0, 1, 2, 3]
    assert [row[1] for row in numbered(cases)] == [0, 1, 0, 2, 3]


def test_the_cheapest_case_of_what_carries_the_promise_stays() -> None:
    one, two = CORE[:2]
    assert spared({f"{one}[a]": 2.0, f"{one}[b]": 1.0, two: 9.0, "tests/test_other.py::test_a": 0.1}) == {
        f"{one}[b]",
        two,
    }


@pytest.mark.parametrize("node", [*THINNED, *sorted(SLOW), *EXHAUSTIVE, *CORE])
def test_what_is_thinned_exists(node: str) -> None:
    path, name = node.split("[")[0].split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {item.name for item in tree.body if isinstance(item, ast.FunctionDef)}, node
