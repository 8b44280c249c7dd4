"""The best static tree of a size: Sequoia's dynamic program (2402.12374, section 4.1).

acceptance[k] is the chance that the (k+1)-th child of a node is the one accepted, given that the walk is at the node:
measured per position, the same everywhere, at most 1 in sum. A node is worth the product of these along its path, and
E[tokens a step] is the sum over all nodes: the root's 1 is the bonus.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretell.core.errors import ConfigError

Parent = tuple[int, ...]
DEEPEST = 500
MOST_STEPS = 4_000_000_000
"""Of the dynamic program: some ten seconds."""


@dataclass(frozen=True)
class _Plan:
    """values[d, m]: best worth of at most m nodes and d levels below the root; first[d, b, m]: nodes given to child b
    where m nodes are left for the children from b on; 0: no more children."""

    values: NDArray[np.float64]  # [D + 1, N + 1]
    first: NDArray[np.int64]  # [D + 1, K, N + 1]; row d is for children with d levels below them


def best_tree(acceptance: Sequence[float], size: int, depth: int) -> Parent:
    """Parent vector of the tree of at most ``size`` nodes (the root counts) and ``depth`` levels below the root that
    has the largest expected length. It is smaller than ``size`` only where further nodes add nothing."""
    rates = _check(acceptance, size, depth)
    return _build(_plan(rates, size, depth), size, depth)


def check_rates(acceptance: Sequence[float]) -> list[float]:
    """The rates as floats. Raises ConfigError where one is outside [0, 1]."""
    rates = [float(rate) for rate in acceptance]
    if not all(0.0 <= rate <= 1.0 for rate in rates):
        raise ConfigError(f"acceptance is a probability in [0, 1]; given {rates}")
    return rates


def _check(acceptance: Sequence[float], size: int, depth: int) -> list[float]:
    if size < 1 or depth < 0:
        raise ConfigError(f"a tree has at least one node and no negative depth; given size {size}, depth {depth}")
    rates = check_rates(acceptance)
    if sum(rates) > 1.0 + 1e-9:
        raise ConfigError(f"at most one child is accepted: acceptance sums to 1 at most; given a sum of {sum(rates)}")
    steps = depth * max(1, len(rates)) * size**2
    if depth > DEEPEST or steps > MOST_STEPS:
        raise ConfigError(
            f"a tree of {size} nodes, {depth} levels and {len(rates)} children a node is too large to plan: expected "
            f"{DEEPEST} levels at most, and levels * children * nodes^2 at most {MOST_STEPS:.0e}; given {steps:.0e}"
        )
    return rates


def _plan(rates: Sequence[float], size: int, depth: int) -> _Plan:
    """O(D K N^2): children from the last slot to the first, each a max-plus product of the child's worth and the rest."""
    values = np.ones((depth + 1, size + 1))
    values[:, 0] = 0.0
    first = np.zeros((depth + 1, len(rates), size + 1), dtype=np.int64)
    nodes = np.arange(size + 1)
    left = nodes[:, None] - nodes  # [m, y] nodes left of m when y go to this child
    for level in range(depth):
        forest = np.zeros(size + 1)
        for b in range(len(rates) - 1, -1, -1):
            worth = np.where(left >= 0, rates[b] * values[level] + forest[left.clip(0)], -np.inf)
            worth[:, 0] = 0.0  # no child here, hence none after it
            # Of equals the fewest nodes; 0 where none is worth anything.
            pick = (worth > worth.max(1, keepdims=True) * (1 - 1e-14)).argmax(1)
            forest = worth[nodes, pick]
            first[level, b] = pick
        values[level + 1, 1:] = 1.0 + forest[:-1]
    return _Plan(values, first)


def _build(plan: _Plan, size: int, depth: int) -> Parent:
    """Depth first, from what the plan chose."""
    parent: list[int] = []

    def grow(above: int, budget: int, levels: int) -> None:
        node = len(parent)
        parent.append(above)
        if levels == 0:
            return
        left = budget - 1
        for b in range(plan.first.shape[1]):
            share = int(plan.first[levels - 1, b, left])
            if share == 0:
                return
            grow(node, share, levels - 1)
            left -= share

    grow(-1, size, depth)
    return tuple(parent)
