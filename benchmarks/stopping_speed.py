"""The gain of stopping a chain of guesses at the best place, computed from recorded steps.

A record holds, of each of S steps, how many of G guesses in a line the target would have kept. Every policy is judged by
tokens over cost on these steps, as if how far one step drafts did not change where the next begins. Costs are in passes
of the target: ``draft_cost`` for a pass of the drafter, ``target_cost(nodes)`` for one of the target over so many nodes
(1 by default, whatever the width).
"""

from collections.abc import Callable

import torch
from benchmarks.theory.pass_costs import check_cost
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.costs.cost_model import speedup, step_cost

TargetCost = Callable[[int], float]


def one_pass(num_nodes: int) -> float:
    """Every pass of the target costs the same."""
    return 1.0


def policy_speed(
    accepted: Tensor,
    drafted: Tensor,
    draft_cost: float,
    *,
    passes: Tensor | None = None,
    target_cost: TargetCost = one_pass,
) -> float:
    """Tokens per pass of the target where step s drafts drafted[s] guesses, in passes[s] passes of the drafter (as many by
    default). accepted, drafted, passes [S] int64: min(accepted, drafted) are kept, and the target adds one."""
    tokens = torch.minimum(accepted, drafted) + 1
    costs = {nodes: target_cost(nodes + 1) for nodes in set(drafted.tolist())}
    verify = sum(cost * int((drafted == nodes).sum()) for nodes, cost in costs.items())
    return speedup(
        float(tokens.sum()), step_cost(verify, float((drafted if passes is None else passes).sum()), draft_cost)
    )


def oracle_speed(accepted: Tensor, draft_cost: float, *, target_cost: TargetCost = one_pass) -> float:
    """The most that any choice of lengths reaches on these steps, with no rejected guess drafted.

    A step that can keep a guesses drafts the g <= a that makes g + 1 - speed * cost(g) largest, at the speed that results
    (Dinkelbach's iteration, exact in a few rounds). Where a guess costs less than it brings, that is g = a. Raises
    ConfigError without any step, and for a cost that is negative or not finite.
    """
    check_cost(draft_cost, "draft_cost")
    if not len(accepted):
        raise ConfigError(
            "the speed of no steps is unknown; expected accepted guesses of one step at least, given none"
        )
    most = int(accepted.max())
    cost = torch.tensor([step_cost(target_cost(g + 1), g, draft_cost) for g in range(most + 1)], dtype=torch.float64)
    gain = torch.arange(1, most + 2, dtype=torch.float64)
    allowed = torch.arange(most + 1) <= accepted[:, None]  # [S, G + 1]
    speed = 0.0
    while True:
        worth = torch.where(allowed, gain - speed * cost, -torch.inf)
        chosen = worth.argmax(1)
        found = float(gain[chosen].sum() / cost[chosen].sum())
        if found <= speed * (1 + 1e-12):
            return max(found, speed)
        speed = found
