"""TensorRT-LLM's relaxed acceptance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.verify.lossy.base import Lossy, Mismatch, largest, require


@dataclass(frozen=True)
class TopN(Lossy):
    """TensorRT-LLM's relaxed acceptance: tolerate x iff it is among the n most probable and p(x) >= max p - delta.

    n = 10 and delta = 0.6 are those of the DeepSeek-R1 article (TensorRT-LLM, tech blog 2), which relaxes only inside
    the model's thinking; this rule relaxes everywhere. Tokens that tie with the n-th count as among them. delta = 1
    leaves the rank alone (AutoJudge's "top-K" baseline, 2504.20039); n = 0 tolerates nothing.
    """

    name = "top_n"
    summary = "lossy: also accept guesses among the target's n most probable, within delta of the best"
    distance = "measured, not bounded (p at least max p - delta for every token that comes by tolerance)"

    n: int = 10
    delta: float = 0.6

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        require(0 <= self.n <= 64, "n", self.n, "between 0 (tolerate nothing) and 64")
        require(0 <= self.delta <= 1, "delta", self.delta, "between 0 and 1")

    def tolerated(self, mismatch: Mismatch) -> Tensor:
        """By a floor on p: the n-th largest, and the largest less delta."""
        if self.n == 0:
            return torch.zeros_like(mismatch.asked)

        def floor(probs: Tensor) -> Tensor:
            best = largest(probs, self.n)
            return torch.maximum(best[:, -1], best[:, 0] - self.delta)

        return mismatch.chance >= mismatch.of_parent(mismatch.at_open(floor, mismatch.evidence.p))
