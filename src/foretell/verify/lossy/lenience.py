"""Lenient rejection (Leviathan et al. 2211.17192, appendix A.5): a guess x is accepted with min(1, p(x) / (l q(x))).

Everything else is recursive rejection as in ``verify/rejection.py``: children in order, the rest r <- (r - q)+ after each
refusal, FIXED children as q = one-hot, and what is left of p at the end. l = 1 is plain rejection.

**Bound.** At any node, with any children, a token x comes next with probability at most p(x) / l given the text before
it. *One child.* It is accepted as x with probability min(q, p / l)(x), and refused with probability R = 1 - sum min(q,
p / l) <= 1 - sum min(q, p) = sum (p - q)+. So x comes with at most min(q, p / l)(x) + (p - q)+(x): at most p(x) where
p > q, and at most p(x) / l elsewhere. *More children.* They are tried against the normalised rest r, and by induction
give x at most r(x) / l. With R r <= (p - q)+ the sum is at most min(q, p / l)(x) + (p - q)+(x) / l <= p(x) / l. A FIXED
child is the case q = one-hot, and a child WITHOUT_REPLACEMENT is drawn from another distribution given the refused ones
before it, which the induction allows. A text of n tokens hence has at most l^-n times its probability under the target;
tokens that no guess stood for do not count.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.core.tree import TokenTree, is_chain
from foretell.kernels.residual import Tried
from foretell.verify.base import Evidence, Walk, stops_from_edges
from foretell.verify.lossy.base import require
from foretell.verify.rejection import Rejection, children_of, try_children


def chances(tree: TokenTree, p: Tensor) -> Tensor:
    """[B, N] the probability under rejection that each node is accepted, given its parent was and its siblings before it
    were not, in torch: the slow reference of ``Tried.start``."""
    table = children_of(tree)
    num_rows, _, width = table.shape
    flat, real = table.clamp(min=0).reshape(num_rows, -1), table >= 0
    tokens = tree.tokens.gather(1, flat).reshape(-1, width)
    labels = tree.drawn_by.gather(1, flat).reshape(-1, width)
    q = None if tree.q is None else tree.q.flatten(0, 1)
    edges, _ = try_children(p.flatten(0, 1), q, tokens, labels, real.reshape(-1, width))  # [B * N, C]
    left = 1.0 - (edges.cumsum(-1) - edges)
    given = torch.where(left > 0, edges / left, 0.0).reshape(num_rows, -1)
    out = torch.zeros_like(p[..., 0])
    return out.scatter_add_(1, flat, given * real.reshape(num_rows, -1).to(given.dtype))


@dataclass(frozen=True)
class Lenience(Rejection):
    """Rejection sampling that accepts 1 / ``lenience`` times as readily. Reads four independent streams."""

    name = "lenience"
    exact = False
    summary = "lossy: rejection sampling that accepts with min(1, p / (lenience q))"
    distance = "a token's probability, given the text before it, at most p / lenience"

    lenience: float = 0.8

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        require(0 < self.lenience <= 1, "lenience", self.lenience, "above 0 and at most 1 (1: plain rejection)")

    def stops(self, evidence: Evidence) -> Walk:
        """Stops of the walk; carry is that of Rejection, since what is left after a refusal is the same."""
        tree, p = evidence.tree, evidence.p
        walk = super().stops(evidence)
        chance = walk.carry.start.to(p.dtype) if isinstance(walk.carry, Tried) else chances(tree, p)
        chance = (chance / self.lenience).clamp(max=1.0)  # min(1, r / q) / l, cut at 1, is min(1, r / (l q))
        if tree.max_children != 1 and not is_chain(tree.parent):
            earlier = (tree.parent[:, :, None] == tree.parent[:, None, :]).tril(-1)  # [B, N, N]
            refused = torch.where(chance.isnan(), 1.0, 1.0 - chance)
            chance = chance * torch.where(earlier, refused[:, None, :], 1.0).prod(-1)
        return Walk(stops_from_edges(tree.parent, chance), walk.carry)
