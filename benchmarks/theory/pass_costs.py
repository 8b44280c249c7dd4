"""The cost of one pass of the target by its width, as measured."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from foretell.core.errors import ConfigError
from foretell.costs.table import Surface


@dataclass(frozen=True)
class PassCosts:
    """Cost of one pass of the target over a number of nodes of one row, in any unit: measured points, linear between.

    Noise may make a wider pass look cheaper; the running maximum is taken. Below the first point the cost is that of the
    first; beyond the last it is not known and raises ConfigError.
    """

    points: tuple[tuple[int, float], ...]  # (nodes, cost), ascending in both
    _curve: Surface = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_curve", Surface({(1, nodes): cost for nodes, cost in self.points}))

    @classmethod
    def of(cls, measured: Mapping[int, float]) -> "PassCosts":
        """From a mapping of nodes (>= 1) to costs (> 0)."""
        if not measured:
            raise ConfigError("a cost table has at least one measured width; given none")
        bad = {nodes: cost for nodes, cost in measured.items() if nodes < 1 or not (math.isfinite(cost) and cost > 0)}
        if bad:
            raise ConfigError(f"a cost table maps nodes >= 1 to positive costs; given {bad}")
        points, highest = [], 0.0
        for nodes in sorted(measured):
            highest = max(highest, measured[nodes])
            points.append((nodes, highest))
        return cls(tuple(points))

    @property
    def max_nodes(self) -> int:
        """The widest pass that was measured."""
        return self.points[-1][0]

    def __call__(self, num_nodes: int) -> float:
        """Cost of a pass over num_nodes nodes."""
        if num_nodes > self.max_nodes:
            raise ConfigError(
                f"cost measured up to {self.max_nodes} nodes; asked for {num_nodes}: measure wider passes"
            )
        return self._curve(1, num_nodes)


def check_cost(cost: float, name: str) -> float:
    """The cost itself. Raises ConfigError where it is negative or not finite."""
    if not (math.isfinite(cost) and cost >= 0.0):
        raise ConfigError(f"{name} is finite and not negative; given {cost}")
    return cost
