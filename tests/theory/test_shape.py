"""The tree program against brute force over every tree and every order of its siblings."""

import itertools
import math
from collections.abc import Sequence

import pytest
from benchmarks.theory.length import best_length, expected_tokens, walltime_factor
from benchmarks.theory.pass_costs import PassCosts
from benchmarks.theory.sizes import BestTree, choose_size

from foretell.core.errors import ConfigError
from foretell.theory import shape
from tests.verify.enumerate import shapes


def expected_length(parent: Sequence[int], rates: Sequence[float]) -> float:
    """E[tokens a step] of a tree: the sum over its nodes of the product of acceptance along the path."""
    worth, children = [1.0], [0] * len(parent)
    for above in parent[1:]:
        rank = children[above]
        children[above] += 1
        worth.append(worth[above] * (rates[rank] if rank < len(rates) else 0.0))
    return sum(worth)


VECTORS = [
    (0.6, 0.2, 0.1, 0.05),
    (0.9,),
    (0.3, 0.29, 0.28),
    (0.2, 0.5, 0.1),  # the second child better than the first
    (0.0, 0.7),
    (0.5, 0.0, 0.5),
    (1.0, 0.0),
    (0.0, 0.0),
]
SMALL = [(-1,), *shapes(6, max_depth=6, max_children=4)]


def depth_of(parent: tuple[int, ...]) -> int:
    depth = [0]
    for above in parent[1:]:
        depth.append(depth[above] + 1)
    return max(depth)


def best_order(parent: tuple[int, ...], rates: tuple[float, ...], node: int = 0) -> float:
    """Worth of a tree under the best order of siblings at every node."""
    children = [best_order(parent, rates, i) for i in range(1, len(parent)) if parent[i] == node]
    padded = [*rates, *[0.0] * len(children)]
    return 1.0 + max(
        sum(a * worth for a, worth in zip(padded, order, strict=False)) for order in itertools.permutations(children)
    )


def brute_force(rates: tuple[float, ...], size: int, depth: int) -> float:
    return max(best_order(tree, rates) for tree in SMALL if len(tree) <= size and depth_of(tree) <= depth)


def check_form(parent: tuple[int, ...], size: int, depth: int) -> None:
    assert parent[0] == -1
    assert all(0 <= above < node for node, above in enumerate(parent) if node)
    assert len(parent) <= size
    assert depth_of(parent) <= depth


@pytest.mark.parametrize("rates", VECTORS)
def test_best_tree_is_the_best_of_all(rates: tuple[float, ...]) -> None:
    for size, depth in itertools.product(range(1, 8), range(5)):
        parent = shape.best_tree(rates, size, depth)
        check_form(parent, size, depth)
        assert expected_length(parent, rates) == pytest.approx(brute_force(rates, size, depth), abs=1e-12)


def test_control_other_trees_are_worse() -> None:
    rates = (0.6, 0.2, 0.1)
    best = expected_length(shape.best_tree(rates, 6, 3), rates)
    worse = [expected_length(tree, rates) for tree in SMALL if len(tree) == 6 and depth_of(tree) <= 3]
    assert sum(value < best - 1e-9 for value in worse) >= 12  # of 14; the rest is the best tree itself, and a tie


def test_one_rate_is_a_chain() -> None:
    for depth in range(6):
        assert shape.best_tree([0.7], 10, depth) == tuple(range(-1, depth))
        assert expected_length(range(-1, depth), [0.7]) == pytest.approx(expected_tokens(0.7, depth))


def test_siblings_stand_in_order_and_the_first_child_leads() -> None:
    parent = shape.best_tree([0.5, 0.2, 0.1], 20, 5)
    assert parent[1] == 0
    leading = 1
    while leading + 1 < len(parent) and parent[leading + 1] == leading:
        leading += 1
    assert leading == depth_of(parent)  # the leading path is 0, 1, 2, ... to the deepest level


@pytest.mark.parametrize("rates", VECTORS)
@pytest.mark.parametrize("cost_draft", [0.0, 0.1, 0.6])
def test_choose_size_is_the_best_of_all(rates: tuple[float, ...], cost_draft: float) -> None:
    table = {1: 1.0, 2: 1.0, 4: 1.3, 7: 2.6}
    verify = PassCosts.of(table)
    found = choose_size(rates, cost_draft, table, 7, 6)
    truth = max(best_order(tree, rates) / (depth_of(tree) * cost_draft + verify(len(tree))) for tree in SMALL)
    check_form(found.parent, 7, 6)
    assert found.speedup == pytest.approx(truth, abs=1e-12)
    assert found.depth == depth_of(found.parent)
    assert found.expected_tokens == pytest.approx(expected_length(found.parent, rates), abs=1e-12)
    spent = found.depth * cost_draft + verify(len(found.parent))
    assert found.expected_tokens / spent == pytest.approx(found.speedup, abs=1e-12)


def test_choose_size_of_a_chain_is_best_length() -> None:
    table = PassCosts.of({1: 2.0, 8: 2.4, 16: 4.0})
    for a, c in ((0.9, 0.05), (0.6, 0.1), (0.2, 0.3)):
        found = choose_size([a], c * 2.0, table, 16, 15)
        assert found.depth == best_length(a, c, table)
        assert found.speedup == pytest.approx(walltime_factor(a, found.depth, c, table))


def test_nothing_to_gain_is_no_speculation() -> None:
    assert choose_size([0.3, 0.1], 0.5, {1: 1.0, 9: 3.0}, 9, 4) == BestTree((-1,), 0, 1.0, 1.0)


def test_64_nodes() -> None:
    rates = [0.55, 0.15, 0.08, 0.05, 0.03, 0.02, 0.01, 0.01]
    found = choose_size(rates, 0.05, {1: 1.0, 64: 2.0}, 64, 16)
    assert found.speedup > 1.0


def test_bad_input() -> None:
    for call in (
        lambda: shape.best_tree([0.5], 0, 1),
        lambda: shape.best_tree([0.5], 1, -1),
        lambda: shape.best_tree([0.5, 0.6], 2, 2),
        lambda: shape.best_tree([-0.1], 2, 2),
        lambda: choose_size([0.5], math.nan, {1: 1.0}, 1, 1),
        lambda: choose_size([0.5], 0.1, {}, 1, 1),
    ):
        with pytest.raises(ConfigError, match="given"):
            call()
    with pytest.raises(ConfigError, match="measure wider"):
        choose_size([0.5], 0.1, {1: 1.0, 4: 1.0}, 8, 2)


@pytest.mark.parametrize(("size", "depth"), [(10**6, 2), (600, 600), (10**9, 10**9)])
def test_trees_that_would_take_for_ever(size: int, depth: int) -> None:
    with pytest.raises(ConfigError, match="too large to plan"):
        shape.best_tree([0.5, 0.2], size, depth)
