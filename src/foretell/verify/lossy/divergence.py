"""The divergence judge (2601.04766): a mismatch is accepted where the distributions of target and draft are close."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.core.tree import DrawMode, DrawnBy
from foretell.kernels.residual import is_distribution
from foretell.verify.lossy.base import Lossy, Mismatch, require


def kl(a: Tensor, b: Tensor) -> Tensor:
    """[R] KL(a || b) in nats of distributions [R, V]; inf where b misses a token that a has."""
    # 0 * log(0 / b) is NaN or 0 here, and counts as 0; a * log(a / 0) is inf and stays.
    return (a * (a.log() - b.log())).nan_to_num(nan=0.0, posinf=torch.inf).sum(-1)


def js(a: Tensor, b: Tensor) -> Tensor:
    """[R] Jensen-Shannon divergence in nats of distributions [R, V], at most log 2."""
    middle = (a + b) / 2
    return (kl(a, middle) + kl(b, middle)) / 2


MEASURES = {"kl": lambda p, q: kl(q, p), "reverse_kl": kl, "js": js}


@dataclass(frozen=True)
class Divergence(Lossy):
    """Tolerate a mismatch iff a divergence of p and q at the node is below ``threshold``, in nats.

    measure "kl": KL(q || p). "reverse_kl": KL(p || q). "js": Jensen-Shannon. 2601.04766 shows that trained linear judges
    follow the divergence of draft and target and that a threshold on it needs no training; its exact statistic and its
    thresholds were not available, so measure and default were chosen here. KL(q || p) is inf where top-k, top-p or
    min-p cut from p what q keeps; "js" never is.

    Only children drawn from q are tolerated: a FIXED or COUPLED one comes with no distribution to compare. So this rule
    requests independent draws, which match the target's less often than coupled ones. threshold = 0 tolerates nothing.
    """

    name = "divergence"
    summary = "lossy: also accept a guess where the draft's distribution is close to the target's"
    distance = "on chains at most sqrt(threshold / 2) in total variation a token (Pinsker; js: sqrt(2 threshold))"
    reads = frozenset({"noise", "q"})
    draws = DrawMode.WITHOUT_REPLACEMENT

    threshold: float = 0.1
    measure: str = "kl"

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        require(self.threshold >= 0, "threshold", self.threshold, "at least 0 nats (0: tolerate nothing)")
        require(self.measure in MEASURES, "measure", self.measure, " or ".join(MEASURES))

    def tolerated(self, mismatch: Mismatch) -> Tensor:
        """By the divergence at the parent, for children that came from its q."""
        tree = mismatch.evidence.tree
        if tree.q is None:
            return torch.zeros_like(mismatch.asked)
        measure = MEASURES[self.measure]

        def close(p: Tensor, q: Tensor) -> Tensor:
            return (is_distribution(q) & (measure(p, q) < self.threshold)).to(p.dtype)

        rows = torch.arange(tree.parent.shape[0], device=tree.parent.device)[:, None]
        from_q = tree.q[rows, mismatch.above, tree.tokens.masked_fill(~mismatch.asked, 0)] > 0
        drawn = (tree.drawn_by == DrawnBy.IID) | (tree.drawn_by == DrawnBy.WITHOUT_REPLACEMENT)
        return drawn & from_q & (mismatch.of_parent(mismatch.at_open(close, mismatch.evidence.p, tree.q)) > 0)
