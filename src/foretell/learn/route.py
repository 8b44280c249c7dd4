"""Which of several adapters guesses for a request: clusters of texts by their prompts, and a bandit over adapters for each.

The paper (2310.07177, section 5.2) keeps a drafter a topic and is given the topics. Here a cluster is made of
prompts (``clusters``), and what an adapter is worth to one is what was accepted of late, so a wrong cluster costs little.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretell.learn.clusters import Clusters, sketch

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
    arms: list[list[Arm]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clusters = Clusters(self.num_adapters)

    def cluster(self, prompt: Sequence[int], *, store: bool = True) -> int:
        """The cluster of a prompt, perhaps a new one; without ``store`` the nearest, and nothing is kept of the prompt."""
        found, into = 0, None
        if self.num_adapters > 1 and (store or not self.arms):
            # The very first is one in any case: an empty sketch, which the next prompts join or leave behind.
            found, into = self.clusters.add(sketch(prompt if store else ()))
        elif self.num_adapters > 1:
            (found,) = self.clusters.of([sketch(prompt)])
        fresh = [Arm() for _ in range(self.num_adapters)]
        if found == len(self.arms):
            self.arms.append(fresh)
        elif into is not None:  # two were one kind
            for arm, other in zip(self.arms[into], self.arms[found], strict=True):
                arm.weight += other.weight
                arm.total += other.total
            self.arms[found] = fresh
        return found

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
