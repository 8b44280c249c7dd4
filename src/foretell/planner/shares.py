"""How often a method proposes what its light part guesses, and what that brings.

Such steps say nothing of the method's own guesses, and the light part makes them too where it guesses alone. Counted
apart, and from steps of both kinds, they tell what the whole method would bring while only its light part is at work.
Counts fade, and a request's are shrunk towards those of all at its heat, as in ``acceptance.py``.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from foretell.planner.acceptance import (
    HALF_WEIGHT_PROPOSALS,
    MIN_ROW_WEIGHT,
    POOL_MEMORY,
    POOL_WEIGHT,
    ROW_MEMORY,
    Curves,
)

FIRST = (0.2, 0.3, 0.6)
"""Before anything is seen: of ten steps two by the light part, of three guesses each, half of them kept."""
FIRST_WEIGHT = 1.0  # steps


@dataclass
class _Sums:
    """Faded: steps, and in them those by the light part, the guesses kept in those, and their nodes."""

    steps: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def add(self, values: tuple[float, float, float], weight: float, memory: float) -> None:
        keep = math.exp(-weight / memory)
        self.steps = self.steps * keep + weight
        self.sums = [one * keep + weight * value for one, value in zip(self.sums, values, strict=True)]

    def means(self, before: tuple[float, ...], weight: float) -> tuple[float, ...]:
        """Of each, with ``weight`` steps like ``before``."""
        return tuple((one + weight * mean) / (self.steps + weight) for one, mean in zip(self.sums, before, strict=True))


class LightShares:
    """Of rows by request, shrunk to pools by method and heat."""

    def __init__(self) -> None:
        self._rows: dict[str, _Sums] = {}
        self._pools: dict[tuple[str, int], _Sums] = {}

    def observe(self, request_id: str, method: str, heat: int, nodes: int, accepted: int) -> None:
        """A step of which it is known what the whole method proposes: ``nodes`` guesses of its light part, ``accepted``
        kept; 0, where it proposes its own."""
        row = self._rows.setdefault(request_id, _Sums())
        values = (1.0 if nodes else 0.0, float(accepted if nodes else 0), float(nodes))
        weight = max(1.0 / (1.0 + row.steps / HALF_WEIGHT_PROPOSALS), MIN_ROW_WEIGHT)
        self._pools.setdefault((method, heat), _Sums()).add(values, weight, POOL_MEMORY)
        row.add(values, 1.0, ROW_MEMORY)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._rows.pop(request_id, None)

    def of(self, request_id: str, method: str, heat: int) -> tuple[float, ...]:
        """P(the light part's guess is proposed), and expected kept guesses and nodes by such proposals, a step. All 0
        for a method of which nothing was seen."""
        pool = self._pools.get((method, heat))
        if pool is None:
            return 0.0, 0.0, 0.0
        means = pool.means(FIRST, FIRST_WEIGHT)
        row = self._rows.get(request_id)
        return means if row is None else row.means(means, POOL_WEIGHT)


def mixed(curves: Curves, shares: list[tuple[float, ...]]) -> tuple[Curves, list[float]]:
    """What to expect of whole methods' steps: ``curves`` of their own guesses where they make any, and what their light
    parts bring in the other steps, whatever the depth; and the share of steps with guesses of their own. Rows in one
    order."""
    light = np.array(shares)  # [B, 3]
    own = 1.0 - light[:, :1]
    first = np.zeros((1, curves.kept.shape[1]))
    first[0, 0] = 1.0
    kept = light[:, 1:2] * first
    return Curves(
        curves.kept * own + kept,
        curves.drafted * own + light[:, :1] * first,
        curves.optimistic * own + kept,
        curves.nodes * own + light[:, 2:] * first,
    ), own[:, 0].tolist()
