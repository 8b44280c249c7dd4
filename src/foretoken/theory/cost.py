"""What a pass of the target costs at each width, from a few measurements."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretoken.errors import ConfigError


@dataclass(frozen=True)
class CostTable:
    """Cost of one pass over a number of nodes, in any unit: measured points, interpolated linearly, never decreasing.

    Noise may make a wider pass look cheaper; the table takes the running maximum. Below the first point the cost is
    that of the first; beyond the last it is not known, and asked for raises ConfigError.
    """

    points: tuple[tuple[int, float], ...]  # (nodes, cost), ascending in both

    @classmethod
    def of(cls, measured: Mapping[int, float]) -> "CostTable":
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
        before = self.points[0]
        for after in self.points:
            if after[0] >= num_nodes:
                if after == before:  # at the first point or below it
                    return after[1]
                share = (num_nodes - before[0]) / (after[0] - before[0])
                return before[1] + share * (after[1] - before[1])
            before = after
        raise AssertionError("unreachable: num_nodes <= max_nodes")


def check_rates(acceptance: Sequence[float], name: str = "acceptance") -> list[float]:
    """The rates as floats. Raises ConfigError where one is outside [0, 1]."""
    rates = [float(rate) for rate in acceptance]
    if not all(0.0 <= rate <= 1.0 for rate in rates):
        raise ConfigError(f"{name} is a probability in [0, 1]; given {rates}")
    return rates


def check_cost(cost: float, name: str) -> float:
    """The cost itself. Raises ConfigError where it is negative or not finite."""
    if not (math.isfinite(cost) and cost >= 0.0):
        raise ConfigError(f"{name} is finite and not negative; given {cost}")
    return cost
