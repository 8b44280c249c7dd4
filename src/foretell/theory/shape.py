"""The best static tree of a size: Sequoia's dynamic program (2402.12374, section 4.1), and the best size.

acceptance[k] is the chance that the (k+1)-th child of a node is the one accepted, given that the walk is at the node:
measured per position, the same everywhere, at most 1 in sum. A node is worth the product of these along its path, and
E[tokens a step] is the sum over all nodes: the root's 1 is the bonus.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretell.core.errors import ConfigError
from foretell.costs.cost_model import speedup, step_cost
from foretell.theory.length import check_rates
from foretell.theory.pass_costs import PassCosts, check_cost
from foretell.theory.race import Array, Integers

Parent = tuple[int, ...]
DEEPEST = 500
MOST_STEPS = 4_000_000_000
"""Of the dynamic program: some ten seconds."""


@dataclass(frozen=True)
class BestTree:
    """A tree and its expected figures."""

    parent: (
        Parent  # parent[0] = -1, parent < child, siblings in order; depth first, so the leading path is 0, 1, 2, ...
    )
    depth: int  # levels below the root: the number of draft steps
    expected_tokens: float  # a step, the bonus counted
    speedup: float  # expected tokens times v(1), over depth * c + v(nodes): against plain decoding


@dataclass(frozen=True)
class _Plan:
    """values[d, m]: best worth of at most m nodes and d levels below the root; first[d, b, m]: nodes given to child b
    where m nodes are left for the children from b on; 0: no more children."""

    values: Array  # [D + 1, N + 1]
    first: Integers  # [D + 1, K, N + 1]; row d is for children with d levels below them


def best_tree(acceptance: Sequence[float], size: int, depth: int) -> Parent:
    """Parent vector of the tree of at most ``size`` nodes (the root counts) and ``depth`` levels below the root that
    has the largest ``expected_length``. It is smaller than ``size`` only where further nodes add nothing."""
    rates = _check(acceptance, size, depth)
    return _build(_plan(rates, size, depth), size, depth)


def expected_length(parent: Sequence[int], acceptance: Sequence[float]) -> float:
    """E[tokens a step] of a tree: the sum over its nodes of the product of acceptance along the path.

    Children beyond the known ones are worth nothing.
    """
    rates = _check_acceptance(acceptance)
    if len(parent) == 0 or parent[0] != -1 or any(not 0 <= above < node for node, above in enumerate(parent) if node):
        raise ConfigError(f"a parent vector starts with -1 and has parent < child; given {tuple(parent)}")
    worth, children = [1.0], [0] * len(parent)
    for above in parent[1:]:
        rank = children[above]
        children[above] += 1
        worth.append(worth[above] * (rates[rank] if rank < len(rates) else 0.0))
    return sum(worth)


def choose_size(
    acceptance: Sequence[float],
    cost_draft: float,
    cost_target: Mapping[int, float] | PassCosts,
    max_size: int,
    max_depth: int,
) -> BestTree:
    """The tree that maximises E[tokens] / (depth * c + v(nodes)): sizes 1 .. max_size, depths 0 .. max_depth.

    c = cost_draft is the time of one draft step, which adds a level whatever its width; v = cost_target that of the
    target's pass over a number of nodes, in the same unit, measured up to max_size at least (``PassCosts``). Of equals
    the smallest wins; one node means: do not speculate.
    """
    rates = _check(acceptance, max_size, max_depth)
    check_cost(cost_draft, "cost_draft")
    table = cost_target if isinstance(cost_target, PassCosts) else PassCosts.of(cost_target)
    plan = _plan(rates, max_size, max_depth)
    verify = [table(size) for size in range(1, max_size + 1)]
    rows = [zip(row.tolist(), verify, strict=True) for row in plan.values[:, 1:]]  # a depth each
    speed = np.array(
        [
            [speedup(tokens, step_cost(cost, depth, cost_draft), verify[0]) for tokens, cost in row]
            for depth, row in enumerate(rows)
        ]
    )  # [D + 1, N]
    near = speed >= speed.max() * (1 - 1e-12)
    size = int(near.any(0).argmax()) + 1
    depth = int(near[:, size - 1].argmax())
    tokens = float(plan.values[depth, size])
    return BestTree(_build(plan, size, depth), depth, tokens, float(speed[depth, size - 1]))


def _check_acceptance(acceptance: Sequence[float]) -> list[float]:
    rates = check_rates(acceptance)
    if sum(rates) > 1.0 + 1e-9:
        raise ConfigError(f"at most one child is accepted: acceptance sums to 1 at most; given a sum of {sum(rates)}")
    return rates


def _check(acceptance: Sequence[float], size: int, depth: int) -> list[float]:
    if size < 1 or depth < 0:
        raise ConfigError(f"a tree has at least one node and no negative depth; given size {size}, depth {depth}")
    rates = _check_acceptance(acceptance)
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
