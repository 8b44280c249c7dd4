"""Entropy-gated look-ahead (FLy, 2511.22972): a mismatch is accepted where the target was unsure and then agrees
again."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.verify.lossy.base import Lossy, Mismatch, largest, require


def entropy_of_best(probs: Tensor, count: int = 3) -> Tensor:
    """[R] the part of the entropy, in nats, that the ``count`` most probable tokens of distributions [R, V] contribute."""
    best = largest(probs, count)
    return -(best * best.clamp(min=torch.finfo(probs.dtype).tiny).log()).sum(-1)


@dataclass(frozen=True)
class EntropyGated(Lossy):
    """Tolerate a mismatch iff the target's entropy there is at least ``threshold`` and it then agrees for a while.

    The entropy is that of FLy's code: of the three most probable tokens, not renormalised, in nats; here of p after all
    processors. "For a while": the ``window`` - 1 guesses after the mismatched one are each the target's draw given the
    guesses before, the mismatched one included, and one more guess stands after them. So none of the last ``window``
    guesses of a line is tolerated, and only long drafts profit. In a tree the later guesses are those on the way
    through first matching children. Defaults are those of FLy's scripts: 0.3 and 6.

    FLy is greedy and takes the entropy before the temperature; this rule sees p alone, so that at temperature 0 it is
    greedy decoding. threshold = inf tolerates nothing.
    """

    name = "entropy_gated"
    summary = "lossy: also accept a guess where the target is unsure and agrees with the guesses that follow"
    distance = "measured, not bounded"

    threshold: float = 0.3
    window: int = 6

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        require(self.threshold >= 0, "threshold", self.threshold, "at least 0 nats (inf: tolerate nothing)")
        require(1 <= self.window <= 64, "window", self.window, "between 1 and 64")

    def tolerated(self, mismatch: Mismatch) -> Tensor:
        """By the entropy at the parent and the target's agreement after the child."""
        tree, forward = mismatch.evidence.tree, mismatch.forward
        if self.window > tree.num_nodes:
            return torch.zeros_like(mismatch.asked)
        unsure = mismatch.at_open(entropy_of_best, mismatch.evidence.p) >= self.threshold
        at = torch.arange(tree.num_nodes, device=forward.device).expand_as(forward)
        agrees = torch.ones_like(unsure)
        for _ in range(self.window - 1):
            step = forward.gather(1, at)
            agrees, at = agrees & (step != at), step
        has_child = torch.zeros_like(tree.parent).scatter_add_(1, mismatch.above, (tree.parent >= 0).long()) > 0
        return mismatch.of_parent(unsure) & agrees & has_child.gather(1, at)
