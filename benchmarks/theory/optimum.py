"""The optimal multi-draft acceptance rate: what no exact rule can exceed, for three distributions of n drafts.

Hu et al., "Towards Optimal Multi-draft Speculative Decoding" (2502.18779), by max-flow and min-cut:

    alpha* = 1 + min over sets H of tokens of P(H) - Q(H),   P(H) = p(H),   Q(H) = Pr[all n drafts lie in H].

For drafts with and without replacement Q is q-convex and a minimiser is a prefix of the tokens sorted by p / q, so
V + 1 sets are enough. For the greedy draft distribution it is not (the scan may say 1 where .9786 is true): it has a
closed form. With n = 1 all three are 1 - TV.
"""

import torch
from benchmarks.theory.prefix import Prefixes
from benchmarks.theory.rows import Bounds, check_num_drafts, check_tolerance
from torch import Tensor

from foretell.theory.acceptance import by_ratio, check_distributions

TOLERANCE = 1e-6


def with_replacement(p: Tensor, q: Tensor, num_drafts: int) -> Tensor:
    """[R] float64: the optimum for n drafts drawn independently from q; p, q [R, V]. Q(H) = q(H)^n, O(V log V)."""
    p, q = by_ratio(*check_distributions(p, q))
    gap = p.cumsum(-1) - q.cumsum(-1).clamp(max=1.0) ** check_num_drafts(num_drafts)
    return (1.0 + gap.amin(-1)).clamp(0.0, 1.0)  # the empty prefix has gap 0


def without_replacement(p: Tensor, q: Tensor, num_drafts: int, *, tolerance: float = TOLERANCE) -> Bounds:
    """Bounds [R] of the optimum for n drafts drawn from q without replacement; p, q [R, V].

    The interval is at most ``tolerance`` wide, and 2 ``Prefixes.rounding`` on top: 3e-10 at V = 150,000. With 0 the least
    prefix itself is found. Where fewer than n tokens have q > 0 the drafts are all of them. A row of V = 150,000 and n = 8
    takes 40 to 110 ms on one core at any tolerance (``python -m benchmarks.theory``); the method is in ``prefix``.
    """
    p, q = by_ratio(*check_distributions(p, q))
    check_num_drafts(num_drafts)
    check_tolerance(tolerance)
    bounds = [
        Prefixes(p_row[q_row > 0].numpy(), q_row[q_row > 0].numpy(), num_drafts).least_gap(tolerance)
        for p_row, q_row in zip(p.cpu(), q.cpu(), strict=True)
    ]
    table = 1.0 + torch.tensor(bounds, dtype=torch.float64, device=p.device).reshape(-1, 2)
    return Bounds(*table.clamp(0.0, 1.0).unbind(1))


def greedy(p: Tensor, q: Tensor, num_drafts: int) -> Tensor:
    """[R] float64: the optimum where the n - 1 largest of q are drafted for certain and the last is drawn from the rest.

    Sum over Top of p + sum off Top of min(p, q'), q' = q off Top, renormalised (Hu et al., section 5). Of equals the
    lowest id is in Top; tokens with q = 0 are never drafted.
    """
    p, q = check_distributions(p, q)
    top = top_tokens(q, check_num_drafts(num_drafts) - 1)
    rest = q.masked_fill(top, 0.0)
    mass = rest.sum(-1, keepdim=True)
    rest = rest / torch.where(mass > 0, mass, 1.0)
    return torch.where(top, p, torch.minimum(p, rest)).sum(-1).clamp(max=1.0)


def top_tokens(q: Tensor, count: int) -> Tensor:
    """[R, V] bool: the ``count`` largest of q > 0, of equals the lowest ids."""
    order = q.argsort(dim=-1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(q, dtype=torch.bool).scatter_(1, order, True) & (q > 0)
