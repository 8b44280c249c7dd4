"""Medusa's typical acceptance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.verify.lossy.base import Lossy, Mismatch, entropy, require


@dataclass(frozen=True)
class Typical(Lossy):
    """Medusa's typical acceptance (2401.10774, section 3.3): tolerate x iff p(x) > min(epsilon, delta exp(-H(p))).

    H in nats, of p after all processors. Medusa adds 1e-5 inside the logarithm, always accepts the first guess, and at
    a refusal emits the most probable token; here nothing is accepted for free and a refusal emits the target's draw.
    epsilon = 1 with delta = inf tolerates nothing.
    """

    name = "typical"
    summary = "lossy: also accept guesses that are probable for the target where it is sure, less so where it is not"
    distance = (
        "a token's probability, given the text before it, at most p / min(epsilon, delta exp(-H)); no uniform bound"
    )

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        require(0 <= self.epsilon <= 1, "epsilon", self.epsilon, "between 0 and 1 (1 with delta=inf: tolerate nothing)")
        require(self.delta >= 0, "delta", self.delta, "at least 0")

    def tolerated(self, mismatch: Mismatch) -> Tensor:
        """By a floor on p that falls with the entropy at the parent."""

        def floor(probs: Tensor) -> Tensor:
            return (self.delta * torch.exp(-entropy(probs))).clamp(max=self.epsilon)

        return mismatch.chance > mismatch.of_parent(mismatch.at_open(floor, mismatch.evidence.p))
