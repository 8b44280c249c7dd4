"""What is possible, against replays of every choice of trees; and the advice, against causes that were planted."""

import itertools
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from foretell.core.errors import ConfigError
from foretell.theory.headroom import (
    CAUSES,
    MeanStep,
    advise,
    least_costs,
    line_costs,
    replayed,
)

Tree = frozenset[tuple[int, ...]]


def trees(nodes: int) -> Iterator[Tree]:
    """Every tree of at most so many guesses over two tokens: sets of paths that hold all beginnings of their paths."""
    paths = [path for size in range(1, nodes + 1) for path in itertools.product((0, 1), repeat=size)]
    for count in range(nodes + 1):
        for chosen in itertools.combinations(paths, count):
            if all(path[:-1] in chosen or len(path) == 1 for path in chosen):
                yield frozenset(chosen)


def replay(text: tuple[int, ...], allowed: list[Tree], cost: dict[tuple[int, int], float]) -> float:
    """Least cost of writing a text, by trying every tree in every step. cost: of (nodes, depth)."""

    @cache
    def left(at: int) -> float:
        if at >= len(text):
            return 0.0
        best = float("inf")
        for tree in allowed:
            kept = 0
            while text[at : at + kept + 1] in tree and at + kept < len(text):
                kept += 1
            step = cost[len(tree), max(map(len, tree), default=0)]
            best = min(best, step + left(at + kept + 1))
        return best

    return left(0)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_possible_is_the_best_of_all_trees_in_all_steps(seed: int) -> None:
    """A step's cost grows with its nodes and its depth: among all trees of up to N nodes right lines are the best, and
    among trees of N nodes those that hold the right line."""
    rng, most = np.random.default_rng(seed), 3
    by_nodes, by_depth = np.cumsum(rng.uniform(0.0, 0.6, most + 1)), np.cumsum(rng.uniform(0.0, 0.5, most + 1))
    cost = {(n, d): 1.0 + float(by_nodes[n] + by_depth[d]) for n in range(most + 1) for d in range(n + 1)}
    every = list(trees(most))
    full = [tree for tree in every if len(tree) in (0, most)]
    for length in range(1, 7):
        text = tuple(rng.integers(0, 2, length).tolist())
        lines = line_costs([cost[n, n] for n in range(most + 1)])
        assert least_costs(length, lines)[length] == pytest.approx(replay(text, every, cost))
        for depth in (2, 3):  # three nodes beside each other would need three tokens
            flat = [tree for tree in full if max(map(len, tree), default=0) in (0, depth)]
            found = least_costs(length, line_costs([cost[0, 0], *[cost[most, depth]] * depth]))[length]
            assert found == pytest.approx(replay(text, flat, cost))


def test_texts_are_put_together_by_their_tokens() -> None:
    costs = line_costs([1.0, 1.5, 1.6])
    least = least_costs(10, costs)
    assert replayed([10, 4, 0], costs) == pytest.approx(14 / (least[10] + least[4]))
    assert replayed([], costs) == 1.0
    assert replayed([30], [2.0, 9.0]) == pytest.approx(1.0), "guesses that are too dear are not made"
    assert replayed([3000], [1.0, 1.0]) == pytest.approx(2.0)
    assert line_costs([1.0, 2.0, 1.5]) == [1.0, 2.0, 2.0], "noise makes no longer line cheaper"
    with pytest.raises(ConfigError, match="positive"):
        line_costs([1.0, 0.0])


GOOD = MeanStep(
    tokens=1 + 0.9 + 0.81 + 0.73, found=1.0, rates=[0.9, 0.9, 0.9], guesses=3, depth=3, draft=0.1, width=0.1, rest=0.05
)


def step(**changes: object) -> MeanStep:
    """A good method's step with one thing planted in it."""
    made = MeanStep(**{**vars(GOOD), **changes})  # type: ignore[arg-type]
    total, kept = 0.0, 1.0
    for rate in made.rates:
        kept *= rate
        total += kept
    return MeanStep(**{**vars(made), "tokens": 1.0 + made.found * total})


PLANTED = {
    "found": (step(found=0.15), "15% of them"),
    "first": (step(rates=[0.3, 0.9, 0.9]), "first place is what is missing: 0.30"),
    "later": (step(rates=[0.95, 0.95, 0.1, 0.95, 0.95], guesses=5, depth=5), "place 3 is what is missing: 0.10"),
    "draft": (step(draft=2.4), "2.40 plain steps"),
    "width": (step(width=2.0), "one over 4 takes 3.00 plain steps"),
    "overhead": (step(rest=1.1), "1.10 plain steps"),
    "length": (step(rates=[0.97], guesses=1, depth=1, draft=0.02, width=0.02), "longer proposals are what is missing"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_named(cause: str) -> None:
    planted, said = PLANTED[cause]
    found = advise(20.0, planted.speed, planted)
    assert found.cause == cause
    assert said in found.says
    assert found.line == f"possible 20.0, reached {planted.speed:.2f}: {found.says}"


def test_proposals_that_are_too_long_are_named_shorter() -> None:
    long = step(rates=[0.9, 0.5, 0.3] + [0.3] * 9, guesses=12, depth=12, draft=0.6, width=0.6)
    found = advise(5.0, long.speed, long)
    assert found.gains["length"] > 1.2
    only = advise(long.speed, long.speed, MeanStep(**{**vars(long), "draft": 0.3, "width": 0.3}))
    assert "shorter proposals are what is missing" in only.says or only.cause in ("draft", "width")


def test_where_perfect_guesses_would_bring_no_more_costs_are_named() -> None:
    """Nearly all guesses are kept, so that better ones are not what is missing, whatever the rates say."""
    dear = step(rates=[0.5, 0.99, 0.99], width=0.4)
    assert advise(9.0, dear.speed, dear).cause == "first"
    assert advise(dear.speed * 1.01, dear.speed, dear).cause in ("draft", "width", "overhead")


def test_a_method_that_lacks_nothing_is_told_so_and_bad_rates_are_refused() -> None:
    best = step(rates=[1.0], guesses=1, depth=2, draft=0.0, width=0.0, rest=-0.1)
    found = advise(2.0, 2.0, best)
    assert (found.cause, found.says) == ("", "no part by itself would bring much more")
    assert advise(1.0, 1.0, step(rates=[], found=0.0, draft=0.0, width=0.0, rest=0.0)).cause == ""
    with pytest.raises(ConfigError, match="rates is a probability"):
        advise(1.0, 1.0, MeanStep(**{**vars(GOOD), "rates": [1.5]}))
