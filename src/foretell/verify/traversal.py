"""Traversal verification (Weng et al. 2505.12398): a node is decided on after its subtree, with all that p and q say.

``visit(node, P)``: P is the ratio of target to draft distribution of the path, at most 1; the root's is 1. Each child x
is visited with ``min(1, P Mp(x) / Mq(x))``; when its subtree ends rejected, ``R = (P Mp - Mq)+``, ``s = sum R``,
``P = s / (s + 1 - P)``, ``Mp = R / s``. After all children the node is taken with P, and the bonus is drawn from Mp.
Mq is the distribution that child was drawn from: q for IID, q without the drawn siblings WITHOUT_REPLACEMENT, one-hot
for FIXED. Given the tree all ratios are known, so the walk's distribution is: node i is where it stops with P_end(i)
times the product of ``1 - P_end(j)`` over all nodes j before i in post-order. On a chain it is block verification; with
P reset to 1 at every node it would be recursive rejection, which it exceeds in expected length.

A subtree must have been drawn without looking at the later siblings of its root.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.core.tree import DrawMode, DrawnBy, TokenTree
from foretell.kernels.residual import Tried, is_distribution, rest_at, try_tree
from foretell.verify.base import Evidence, RatioVerifier, Walk, row_at
from foretell.verify.rejection import believed


@dataclass(frozen=True)
class Traversal(RatioVerifier):
    """Depth first, leaves before their parents; block verification on a chain."""

    name = "traversal"
    draws = DrawMode.WITHOUT_REPLACEMENT
    summary = (
        "decide on a node after its subtree, by the ratio of its whole path; the target's distribution, longer accepted"
    )

    def stops(self, evidence: Evidence) -> Walk:
        """Stops of the walk; carry is what ``residual.try_tree`` found, or the rest of p at all nodes [B, N, V]."""
        tried = try_tree(evidence.tree, evidence.p, ahead=True)
        if tried is not None:
            return Walk(*tried)
        end, rest = slow_ratios(evidence.tree, evidence.p)
        return Walk(stops_in_postorder(evidence.tree.parent, end).to(evidence.p.dtype), rest)

    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        """The node's last Mp; p itself at a leaf, or where nothing was left."""
        if isinstance(walk.carry, Tried):
            return rest_at(evidence.tree, evidence.p, walk.carry, at)
        p, rest = row_at(evidence.p, at), row_at(walk.carry, at)
        return torch.where(rest.sum(-1, keepdim=True) <= 0, p, rest)


def slow_ratios(tree: TokenTree, p: Tensor) -> tuple[Tensor, Tensor]:
    """(P_end [B, N] float64, the rest of p [B, N, V] at any scale): the torch reference of ``try_tree``.

    One node after the other, B rows at once: parents come before their children, siblings in order. Temporaries: two of
    the size of p.
    """
    rows = torch.arange(p.shape[0], device=p.device)
    end = torch.zeros(p.shape[:2], dtype=torch.float64, device=p.device)
    end[:, 0] = 1.0
    rest = p.clone()
    unseen = None if tree.q is None else tree.q.clone()  # q without the drawn children so far
    total = torch.ones_like(end)
    untried = torch.ones_like(end, dtype=torch.bool)  # whose mass counts as 1, as that of a distribution does
    for node in range(1, tree.num_nodes):
        real, at = tree.parent[:, node] >= 0, tree.parent[:, node].clamp(min=0)
        token, label = tree.tokens[:, node : node + 1], tree.drawn_by[:, node]
        here, before = rest[rows, at], end[rows, at]  # [B, V], [B]
        mass = total[rows, at]
        share = finite(here.gather(1, token)[:, 0].double()) / torch.where(mass > 0, mass, 1.0)
        share = share.clamp(max=1.0)
        drawn = real & ((label == DrawnBy.IID) | (label == DrawnBy.WITHOUT_REPLACEMENT))
        source, from_q = None, torch.zeros_like(real)
        if tree.q is not None and unseen is not None:
            without = (label == DrawnBy.WITHOUT_REPLACEMENT) & ~untried[rows, at]
            source = torch.where(without[:, None], unseen[rows, at], tree.q[rows, at])
            from_q = believed(source, token, drawn & is_distribution(tree.q[rows, at]))
            scale = torch.where(without, source.double().sum(-1), 1.0)
            source = source / torch.where(from_q, scale, 1.0).to(p.dtype)[:, None]
        likely = source.gather(1, token)[:, 0].double() if source is not None else torch.ones_like(share)
        start = before * share / torch.where(from_q, likely, 1.0)
        end[:, node] = torch.where(real, start.clamp(max=1.0), 0.0)
        # R = (P Mp - Mq)+, where a FIXED child has a one-hot Mq and P Mp(x) <= 1.
        left = here.scatter(1, token, 0.0) * (before / torch.where(mass > 0, mass, 1.0)).to(p.dtype)[:, None]
        if source is not None:
            scaled = here * (before / torch.where(mass > 0, mass, 1.0)).to(p.dtype)[:, None]
            left = torch.where(from_q[:, None], (scaled - source).clamp(min=0.0), left)
        sum_left = left.double().sum(-1)
        after = sum_left / (sum_left + (1.0 - before))  # 0/0, or no distribution: as it was
        end[rows, at] = torch.where(real & (sum_left + (1.0 - before) > 0), after, before)
        rest[rows, at] = torch.where(real[:, None], left, here)
        total[rows, at] = torch.where(real, sum_left, mass)
        if unseen is not None:
            struck = unseen[rows, at]
            unseen[rows, at] = torch.where(from_q[:, None], struck.scatter(1, token, 0.0), struck)
        untried[rows, at] &= ~from_q
    return end, rest


def finite(x: Tensor) -> Tensor:
    """x where it is a number, else 0."""
    return torch.where(torch.isfinite(x), x, 0.0)


def stops_in_postorder(parent: Tensor, end: Tensor) -> Tensor:
    """[B, N] P(the first node taken in post-order is i), node i being taken with end[i]; 0 on padding."""
    num_rows, num_nodes = parent.shape
    rows = torch.arange(num_rows, device=parent.device)
    above, real = parent.clamp(min=0), parent >= 0
    below = torch.ones_like(end)  # nothing under i is taken
    for node in range(num_nodes - 1, 0, -1):
        none = torch.where(real[:, node], below[:, node] * (1.0 - end[:, node]), 1.0)
        below[rows, above[:, node]] *= none
    enter, passed = torch.zeros_like(end), torch.ones_like(end)
    enter[:, 0] = 1.0
    for node in range(1, num_nodes):
        at = above[:, node]
        enter[:, node] = torch.where(real[:, node], enter[rows, at] * passed[rows, at], 0.0)
        passed[rows, at] *= torch.where(real[:, node], below[:, node] * (1.0 - end[:, node]), 1.0)
    return enter * below * end
