"""The exact chance that one step at one node accepts a draft, for each rule, from the distributions alone: no sampling.

p, q [R, V] are distributions of target and draft; n = num_drafts. Rules with long formulas are in ``coupling`` (shared
Gumbel noise) and ``recursive`` (recursive rejection), and are re-exported here. The optimum of any rule for drafts of a
distribution is in ``optimum``.
"""

import torch
from benchmarks.theory.coupling import gumbel_top_k
from benchmarks.theory.optimum import greedy, top_tokens
from benchmarks.theory.recursive import recursive_rejection_iid, recursive_rejection_without_replacement
from benchmarks.theory.rows import check_num_drafts
from torch import Tensor

from foretell.theory.acceptance import check_distributions, gumbel, single_draft

__all__ = [
    "exact_match_independent",
    "greedy_construction",
    "gumbel",
    "gumbel_top_k",
    "k_seq",
    "recursive_rejection_iid",
    "recursive_rejection_without_replacement",
    "single_draft",
    "top_n",
    "total_variation",
]

_BISECTIONS = 60


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """[R] float64: TV = half the sum of |p - q|."""
    p, q = check_distributions(p, q)
    return (p - q).abs().sum(-1) / 2


def exact_match_independent(p: Tensor, q: Tensor) -> Tensor:
    """[R] float64: sum of p q. One draft, accepted iff the target, with noise of its own, draws the same token."""
    p, q = check_distributions(p, q)
    return (p * q).sum(-1)


def top_n(p: Tensor, q: Tensor, num_drafts: int) -> Tensor:
    """[R] float64: p of the n largest of q. Deterministic drafts under exact match, which is their optimum.

    Of equals the lowest ids are drafted; tokens with q = 0 never are.
    """
    p, q = check_distributions(p, q)
    return torch.where(top_tokens(q, check_num_drafts(num_drafts)), p, 0.0).sum(-1)


def greedy_construction(p: Tensor, q: Tensor, num_drafts: int) -> Tensor:
    """[R] float64: n - 1 largest of q and one token drawn from the rest, verified by rejecting that one (2502.18779).

    The rule reaches the optimum of its draft distribution, so this is ``optimum.greedy``.
    """
    return greedy(p, q, num_drafts)


def k_seq(p: Tensor, q: Tensor, num_drafts: int) -> Tensor:
    """[R] float64: K-SEQ of SpecTr (2310.15141), n drafts from q, each accepted with min(1, p / (r q)).

    With beta(r) = sum of min(q, p / r) the acceptance is 1 - (1 - beta)^n at the least r in [1, n] that leaves a residual:
    1 - (1 - beta)^n <= r beta. The left side falls and the right side grows with r, so bisection finds it.
    """
    p, q = check_distributions(p, q)
    check_num_drafts(num_drafts)
    low, high = torch.ones_like(p[:, :1]), torch.full_like(p[:, :1], float(num_drafts))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        accepted = torch.minimum(q, p / middle).sum(-1, keepdim=True)
        lawful = 1.0 - (1.0 - accepted) ** num_drafts <= middle * accepted
        low, high = torch.where(lawful, low, middle), torch.where(lawful, middle, high)
    return 1.0 - (1.0 - torch.minimum(q, p / high).sum(-1).clamp(max=1.0)) ** num_drafts
