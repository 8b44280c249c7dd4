"""Kinds of requests, by the tokens of their prompts: an online clustering of sketches, square roots of hashed token counts.

Every prompt begins as a cluster of its own, and where there are too many, those two become one that are cheapest to
join: n m / (n + m) (1 - cosine), Ward's criterion (1963). So whatever came first keeps no more clusters than it deserves:
with a threshold instead, the first requests of one kind took all of them, and every later kind fell into one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Sketch = NDArray[np.float64]
"""[BINS], of length 1."""
BINS = 256
READ = 512
"""Tokens of a prompt that count, the last ones."""
MOST_WEIGHT = 12.0
"""Prompts that a cluster weighs as at most, so that it follows those of late."""


def sketch(prompt: Iterable[int]) -> Sketch:
    """Of token ids."""
    tokens = np.fromiter(prompt, dtype=np.uint64)[-READ:]
    bins = (tokens * np.uint64(0x9E3779B1) >> np.uint64(7)) % np.uint64(BINS)
    found = np.sqrt(np.bincount(bins.astype(np.int64), minlength=BINS))
    length = float(np.linalg.norm(found))
    return found / length if length else found


@dataclass
class Clusters:
    """At most ``most`` of them. Not thread-safe."""

    most: int
    centres: list[Sketch] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, given: Sketch) -> None:
        """Take in a sketch: as a cluster of its own, where two others are joined for it, or into the nearest."""
        if len(self.centres) < self.most:
            self.centres.append(given)
            self.weights.append(1.0)
            return
        count, centres, weights = self.most, [*self.centres, given], [*self.weights, 1.0]
        unit = np.stack([centre / max(float(np.linalg.norm(centre)), 1e-9) for centre in centres])
        apart, n = 1.0 - unit @ unit.T, np.array(weights)
        cost = apart * n[:, None] * n / (n[:, None] + n)
        cost[np.tril_indices(count + 1)] = np.inf
        into, gone = (int(x) for x in np.unravel_index(int(cost.argmin()), cost.shape))  # into < gone
        total = weights[into] + weights[gone]
        self.centres[into] = (weights[into] * centres[into] + weights[gone] * centres[gone]) / total
        self.weights[into] = min(total, MOST_WEIGHT)
        if gone != count:
            self.centres[gone], self.weights[gone] = given, 1.0

    def of(self, sketches: Sequence[Sketch]) -> list[int]:
        """The nearest cluster of each sketch now; 0 where there is none yet."""
        if not sketches or not self.centres:
            return [0] * len(sketches)
        unit = np.stack([centre / max(float(np.linalg.norm(centre)), 1e-9) for centre in self.centres])
        found: list[int] = (np.stack(sketches) @ unit.T).argmax(1).tolist()
        return found
