"""The best size of a Sequoia tree for the costs of a machine (Chen et al. 2402.12374, section 4.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from benchmarks.theory.pass_costs import PassCosts, check_cost

from foretell.costs.cost_model import speedup, step_cost
from foretell.theory.shape import Parent, _build, _check, _plan


@dataclass(frozen=True)
class BestTree:
    """A tree and its expected figures."""

    parent: (
        Parent  # parent[0] = -1, parent < child, siblings in order; depth first, so the leading path is 0, 1, 2, ...
    )
    depth: int  # levels below the root: the number of draft steps
    expected_tokens: float  # a step, the bonus counted
    speedup: float  # expected tokens times v(1), over depth * c + v(nodes): against plain decoding


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
