"""Which of several adapters guesses for a request: clusters of texts by their prompts, and a bandit over adapters for each.

The paper (2310.07177, section 5.2) keeps a drafter a topic and is given the topics. Here a cluster is a centroid of hashed
token counts, and what an adapter is worth to a cluster is what was accepted of late, so a wrong cluster costs little.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

BINS = 256
NEAR = 0.6
"""Cosine above which a prompt is of a known cluster, while new clusters may still be made."""
DRIFT = 0.05
"""Share by which a centroid moves to a prompt of its cluster."""
FORGET = 0.98
"""Factor of an arm's evidence at each request of its cluster: about the last 50 count."""
CURIOSITY = 0.15
LEAST, SOON = 0.5, 8.0
"""Evidence below which an arm is tried again; requests of a cluster before another adapter than its own is tried."""


@dataclass
class Arm:
    """What one adapter did for one cluster of texts."""

    weight: float = 0.0
    total: float = 0.0

    @property
    def mean(self) -> float:
        """Acceptance of late."""
        return self.total / self.weight if self.weight else 0.0


@dataclass
class Router:
    """Not thread-safe."""

    num_adapters: int
    centroids: list[list[float]] = field(default_factory=list)
    arms: list[list[Arm]] = field(default_factory=list)

    def cluster(self, prompt: Sequence[int]) -> int:
        """The cluster of a prompt: the nearest centroid, which moves towards it, or a new one."""
        if self.num_adapters == 1:
            return self._make([0.0] * BINS) if not self.centroids else 0
        sketch = _sketch(prompt)
        near = [sum(a * b for a, b in zip(sketch, other, strict=True)) for other in self.centroids]
        best = max(range(len(near)), key=near.__getitem__, default=-1)
        if len(near) < self.num_adapters and (best < 0 or near[best] < NEAR):
            return self._make(sketch)
        self.centroids[best] = _unit(
            [(1 - DRIFT) * old + DRIFT * new for old, new in zip(self.centroids[best], sketch, strict=True)]
        )
        return best

    def _make(self, sketch: list[float]) -> int:
        self.centroids.append(sketch)
        self.arms.append([Arm() for _ in range(self.num_adapters)])
        return len(self.centroids) - 1

    def adapter(self, cluster: int) -> int:
        """The adapter to guess with: the best of late, or one of which too little is known (upper confidence bounds with
        forgetting). The cluster's own adapter comes first among equals."""
        arms = self.arms[cluster]
        total = sum(arm.weight for arm in arms)

        def bound(index: int) -> float:
            arm = arms[index]
            if arm.weight < LEAST:
                if index == cluster:
                    return math.inf
                return max(other.mean for other in arms) + CURIOSITY if total > SOON else -1.0
            return arm.mean + CURIOSITY * math.sqrt(math.log(1.0 + total) / arm.weight)

        return max(range(len(arms)), key=lambda index: (bound(index), index == cluster))

    def observe(self, cluster: int, adapter: int, acceptance: float) -> None:
        """A request of this cluster has ended: the share of its guesses that was kept."""
        for index, arm in enumerate(self.arms[cluster]):
            arm.weight *= FORGET
            arm.total *= FORGET
            if index == adapter:
                arm.weight += 1.0
                arm.total += acceptance


def _sketch(prompt: Sequence[int]) -> list[float]:
    """Unit vector [BINS] of the square roots of hashed token counts."""
    counts = Counter((token * 0x9E3779B1 >> 7) % BINS for token in prompt[-512:])
    return _unit([math.sqrt(counts.get(index, 0)) for index in range(BINS)])


def _unit(values: list[float]) -> list[float]:
    norm = math.sqrt(sum(value * value for value in values)) or 1.0
    return [value / norm for value in values]
