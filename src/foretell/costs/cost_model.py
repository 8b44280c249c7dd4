"""The cost model: what one step costs, and how much faster than plain decoding that is.

A step is one pass of the target over its nodes (``verify``), ``draft_passes`` passes of the drafter, and what stands around
both (``overhead``: distributions, verification, commit). Speedup is tokens per row and step, times the cost of a plain
step, over the cost of this one (Leviathan et al. 2211.17192, section 3.3, with measured costs in place of constants).
Every part of foretell that predicts speed uses these two functions: theory, bench, the command line and the planner.

Costs are in any one unit: seconds, or plain passes of the target.
"""

from foretell.core.errors import ConfigError


def step_cost(verify: float, draft_passes: float = 0.0, cost_draft: float = 0.0, overhead: float = 0.0) -> float:
    """Cost of a step: ``verify + draft_passes * cost_draft + overhead``.

    verify: the target's pass. draft_passes: passes of the drafter, cost_draft each (an average may be fractional).
    """
    return verify + draft_passes * cost_draft + overhead


def speedup(tokens: float, cost: float, plain: float = 1.0) -> float:
    """Speed relative to plain decoding: ``tokens * plain / cost``.

    tokens: expected tokens a row and step, the one of the target included. cost, plain: of this step and of a plain step of
    the same batch, in one unit. Raises ConfigError where cost is not positive.
    """
    if not cost > 0.0:
        raise ConfigError(f"the cost of a step is positive; given {cost}")
    return tokens * plain / cost
