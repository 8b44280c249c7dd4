"""Rejection sampling (Leviathan et al. 2211.17192; Chen et al. 2302.01318), on any tree, by recursive rejection.

At a node the children are tried in order against what is left of p. A child x drawn from q is accepted with
min(1, r(x) / q(x)), where r is the normalised rest of p; a rejected one takes its share out: r <- (r - q)+. A FIXED
child is the case q = one-hot: accepted with r(x), then x is struck out of r. Children WITHOUT_REPLACEMENT are drawn from
q without the siblings before them (SpecInfer 2305.09781 for iid; Jeon et al. 2402.14160 without replacement).
"""

import torch
from torch import Tensor

from foretoken.tree import Law, TokenTree
from foretoken.verify.law import Evidence, Verifier, Walk, row_at, stops_from_edges


def children_of(tree: TokenTree) -> Tensor:
    """[B, N, C] int64: node indices of the children of each node in verification order, -1 behind the last; C >= 1."""
    parent = tree.parent
    num_nodes = tree.num_nodes
    sibling = (parent[:, :, None] == parent[:, None, :]) & (parent >= 0)[:, :, None]  # [B, N, N]
    rank = sibling.tril(-1).sum(-1)  # [B, N]
    if tree.max_children is not None:
        width = tree.max_children
    else:
        width = int(rank.max()) + 1 if num_nodes > 1 else 1
    table = torch.full((*parent.shape, width + 1), -1, dtype=torch.int64, device=parent.device)
    rows = torch.arange(parent.shape[0], device=parent.device)[:, None]
    index = torch.arange(num_nodes, device=parent.device).expand_as(parent)
    # Padding and the root write into the spare last column, which is cut off.
    table[rows, parent.clamp(min=0), torch.where(parent >= 0, rank, width)] = index
    return table[..., :width]


def try_children(p: Tensor, q: Tensor | None, tokens: Tensor, laws: Tensor, real: Tensor) -> tuple[Tensor, Tensor | None]:
    """Recursive rejection at R nodes at once.

    p [R, V] laws; q [R, V] or None; tokens, laws, real [R, C]: the children in order. Returns edges [R, C], the
    probability that the walk goes to each child, and the rest of p [R, V] (unnormalised) after all were rejected.
    With one child the rest is not built (None): only the row where the walk stops needs it.
    """
    num_children = tokens.shape[1]
    drawn = real & ((laws == Law.IID) | (laws == Law.WITHOUT_REPLACEMENT))  # [R, C]
    if q is not None:
        # Sound for any way of drawing: a child whose q is broken, or claims it could not be drawn, counts as FIXED.
        claimed = q.gather(1, tokens)
        drawn = drawn & torch.isfinite(q.sum(-1, keepdim=True)) & (claimed > 0)
    rest, left = p, torch.ones_like(p[:, 0])  # [R, V], [R] chance that all before were rejected
    remaining = q
    edges = torch.zeros(tokens.shape, dtype=p.dtype, device=p.device)
    for c in range(num_children):
        token, from_q, here = tokens[:, c : c + 1], drawn[:, c], real[:, c]
        total = rest.sum(-1) if c else torch.ones_like(left)
        chance = rest.gather(1, token)[:, 0] / torch.where(total > 0, total, 1.0)
        if remaining is not None:
            mass = remaining.sum(-1) if c else torch.ones_like(left)
            ratio = chance * mass / torch.where(from_q, remaining.gather(1, token)[:, 0], 1.0)
            chance = torch.where(from_q, ratio.clamp(max=1.0), chance)
        chance = torch.where(here, chance, 0.0)
        edges[:, c] = left * chance
        left = left * (1.0 - chance)
        if num_children == 1:
            return edges, None
        rest, remaining = reject_child(rest, remaining, token, laws[:, c], from_q, here)
    return edges, rest


def reject_child(
    rest: Tensor, remaining: Tensor | None, token: Tensor, law: Tensor, from_q: Tensor, here: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(rest of p, rest of q) after one child was rejected; rows with here False are unchanged. Pure."""
    struck = rest.scatter(1, token, 0.0)
    if remaining is None:
        return torch.where(here[:, None], struck, rest), None
    mass, total = remaining.sum(-1, keepdim=True), rest.sum(-1, keepdim=True)
    scaled = remaining * (total / torch.where(mass > 0, mass, 1.0))
    reduced = torch.where(from_q[:, None], (rest - scaled).clamp(min=0.0), struck)
    without = (law == Law.WITHOUT_REPLACEMENT) & from_q & here
    shrunk = torch.where(without[:, None], remaining.scatter(1, token, 0.0), remaining)
    return torch.where(here[:, None], reduced, rest), shrunk


class Rejection(Verifier):
    """Accept with min(1, p/q); optimal for one draft (1 - TV), recursive for several. Reads four independent streams."""

    name = "rejection"
    exact = True
    reads = frozenset({"q"})
    draws = Law.IID
    summary = "accept with min(1, p/q), else draw from what is left of p; the target's law, another text per drafter"

    def stops(self, evidence: Evidence) -> Walk:
        """Stops of the walk; carry is the table of children [B, N, C]."""
        tree, p = evidence.tree, evidence.p
        table = children_of(tree)
        num_rows, num_nodes, width = table.shape
        flat = table.clamp(min=0).reshape(num_rows, -1)
        tokens = tree.tokens.gather(1, flat).reshape(-1, width)
        laws = tree.law.gather(1, flat).reshape(-1, width)
        real = (table >= 0).reshape(-1, width)
        q = None if tree.q is None else tree.q.flatten(0, 1)
        edges, _ = try_children(p.flatten(0, 1), q, tokens, laws, real)
        out = torch.zeros_like(p[..., 0])  # [B, N]
        edges = edges.reshape(num_rows, num_nodes * width) * (table >= 0).reshape(num_rows, -1)
        out.scatter_add_(1, flat, edges.to(out.dtype))
        return Walk(stops_from_edges(tree.parent, out), table)

    def leftover(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        """What is left of p at the node where the walk stopped; p itself at a leaf, or where rounding left nothing."""
        tree = evidence.tree
        assert walk.carry is not None
        children = row_at(walk.carry, at)  # [B, C]
        safe = children.clamp(min=0)
        p = row_at(evidence.p, at)  # [B, V]
        remaining = None if tree.q is None else row_at(tree.q, at)
        tokens, laws, real = tree.tokens.gather(1, safe), tree.law.gather(1, safe), children >= 0
        drawn = real & ((laws == Law.IID) | (laws == Law.WITHOUT_REPLACEMENT))
        if remaining is not None:
            drawn = drawn & torch.isfinite(remaining.sum(-1, keepdim=True)) & (remaining.gather(1, tokens) > 0)
        rest = p
        for c in range(children.shape[1]):
            rest, remaining = reject_child(rest, remaining, tokens[:, c : c + 1], laws[:, c], drawn[:, c], real[:, c])
        return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
