"""Rejection sampling (Leviathan et al. 2211.17192; Chen et al. 2302.01318), on any tree, by recursive rejection.

At a node the children are tried in order against what is left of p. A child x drawn from q is accepted with
min(1, r(x) / q(x)), where r is the normalised rest of p; a rejected one takes its share out: r <- (r - q)+. A FIXED
child is the case q = one-hot: accepted with r(x), then x is struck out of r. Children WITHOUT_REPLACEMENT are drawn from
q without the siblings before them (SpecInfer 2305.09781 for iid; Jeon et al. 2402.14160 without replacement).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.core.tree import DrawMode, DrawnBy, TokenTree
from foretell.kernels.residual import Tried, is_distribution, rest_at, try_tree
from foretell.verify.base import Evidence, RatioVerifier, Walk, row_at, stops_from_edges


def children_of(tree: TokenTree) -> Tensor:
    """[B, N, C] int64: node indices of the children of each node in verification order, -1 after the last; C >= 1."""
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


def by_node(tree: TokenTree, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the table of ``children_of``, [B, N * C] node indices, 0 for none, and [B * N, C] tokens, labels, and which are
    real."""
    num_rows, _, width = table.shape
    flat = table.clamp(min=0).reshape(num_rows, -1)
    tokens, labels = (x.gather(1, flat).reshape(-1, width) for x in (tree.tokens, tree.drawn_by))
    return flat, tokens, labels, (table >= 0).reshape(-1, width)


def try_children(
    rest: Tensor, q: Tensor | None, tokens: Tensor, labels: Tensor, real: Tensor, *, start: Tensor | None = None,
    left: Tensor | None = None, asks_rest: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Recursive rejection at R nodes at once. Pure.

    rest [R, V]: p, or what is left of it, at any scale; q [R, V] or None; tokens, labels, real [R, C]: the children in
    order, of which those before start [R] were rejected already, left [R] being the chance of that. Returns edges [R, C],
    the probability that the walk goes to each child, and, where that is asked for, what is left of rest after all were
    rejected: it is needed of the row alone where the walk stops.
    """
    drawn = drawn_from(q, labels, real)  # [R, C]
    unseen, is_whole = q, start is None  # rest and q sum to 1
    left = torch.ones_like(rest[:, 0]) if left is None else left  # [R] chance that all before were rejected
    edges = torch.zeros(tokens.shape, dtype=rest.dtype, device=rest.device)
    for c in range(tokens.shape[1]):
        token, here = tokens[:, c : c + 1], real[:, c] if start is None else real[:, c] & (start <= c)
        source = source_of(q, unseen, labels[:, c], first=c == 0)
        from_q = believed(source, token, drawn[:, c])
        if start is None or not rest.is_cpu or bool(here.any()):
            total = torch.ones_like(left) if is_whole else rest.sum(-1)
            chance = rest.gather(1, token)[:, 0] / torch.where(total > 0, total, 1.0)
            if source is not None:
                mass = torch.ones_like(left) if is_whole else source.sum(-1)
                ratio = chance * mass / torch.where(from_q, source.gather(1, token)[:, 0], 1.0)
                chance = torch.where(from_q, ratio.clamp(max=1.0), chance)
            chance = torch.where(here, chance, 0.0)
            edges[:, c] = left * chance
            left = left * (1.0 - chance)
            if asks_rest or c < tokens.shape[1] - 1:
                rest = reject_child(rest, source, token, from_q, here)
        unseen, is_whole = strike(unseen, token, from_q), False
    return edges, rest


def drawn_from(q: Tensor | None, labels: Tensor, real: Tensor) -> Tensor:
    """[R, C] bool: the children that were drawn from q [R, V]; those of a row that is no distribution count as FIXED."""
    drawn = real & ((labels == DrawnBy.IID) | (labels == DrawnBy.WITHOUT_REPLACEMENT))
    return drawn if q is None else drawn & is_distribution(q)[:, None]


def source_of(q: Tensor | None, unseen: Tensor | None, label: Tensor, *, first: bool) -> Tensor | None:
    """[R, V] what a child was drawn from, at any scale: q, or for WITHOUT_REPLACEMENT q without the siblings before."""
    if q is None or unseen is None or first:
        return q
    return torch.where((label == DrawnBy.WITHOUT_REPLACEMENT)[:, None], unseen, q)


def believed(source: Tensor | None, token: Tensor, drawn: Tensor) -> Tensor:
    """[R] bool: drawn from q, and not a token that its source excludes: such a child counts as FIXED, which is sound for
    any way of drawing."""
    if source is None:
        return torch.zeros_like(drawn)
    return drawn & (source.gather(1, token)[:, 0] > 0)


def strike(unseen: Tensor | None, token: Tensor, from_q: Tensor) -> Tensor | None:
    """q without one more child, where that was drawn from it. Pure."""
    return None if unseen is None else torch.where(from_q[:, None], unseen.scatter(1, token, 0.0), unseen)


def reject_child(rest: Tensor, source: Tensor | None, token: Tensor, from_q: Tensor, here: Tensor) -> Tensor:
    """The rest of p after one child, drawn from source, was rejected; rows with here False are unchanged. Pure."""
    reduced = rest.scatter(1, token, 0.0)
    if source is not None:
        mass, total = source.sum(-1, keepdim=True), rest.sum(-1, keepdim=True)
        scaled = source * (total / torch.where(mass > 0, mass, 1.0))
        reduced = torch.where(from_q[:, None], (rest - scaled).clamp(min=0.0), reduced)
    return torch.where(here[:, None], reduced, rest)


@dataclass(frozen=True)
class Rejection(RatioVerifier):
    """Accept with min(1, p/q); optimal for one draft (1 - TV), recursive for several. Reads four independent streams."""

    name = "rejection"
    draws = DrawMode.WITHOUT_REPLACEMENT
    summary = (
        "accept with min(1, p/q), else draw from what is left of p; the target's distribution, another text per drafter"
    )

    def stops(self, evidence: Evidence) -> Walk:
        """Stops of the walk; carry is what ``residual.try_tree`` found, or the table of children [B, N, C] in torch."""
        tried = try_tree(evidence.tree, evidence.p, ahead=False)
        return self.slow_stops(evidence) if tried is None else Walk(*tried)

    def slow_stops(self, evidence: Evidence) -> Walk:
        """The torch reference: all nodes at once, child by child. Nodes without children are left out where that needs
        no device read; a chain needs no [N, V] temporary, other trees a few of the nodes left."""
        tree, p = evidence.tree, evidence.p
        table = children_of(tree)
        num_rows, num_nodes, width = table.shape
        flat, tokens, labels, real = by_node(tree, table)
        p_rows, q_rows = p.flatten(0, 1), None if tree.q is None else tree.q.flatten(0, 1)
        if p.device.type == "cpu" and width > 1:
            rows = real[:, 0].nonzero()[:, 0]  # [R]
            q_here = None if q_rows is None else q_rows[rows]
            edges = torch.zeros(real.shape, dtype=p.dtype)
            edges[rows] = try_children(p_rows[rows], q_here, tokens[rows], labels[rows], real[rows])[0]
        else:
            edges, _ = try_children(p_rows, q_rows, tokens, labels, real)
        out = torch.zeros_like(p[..., 0])  # [B, N]
        edges = edges.reshape(num_rows, num_nodes * width) * (table >= 0).reshape(num_rows, -1)
        out.scatter_add_(1, flat, edges.to(out.dtype))
        return Walk(stops_from_edges(tree.parent, out), table)

    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        """What is left of p at the node where the walk stopped; p itself at a leaf, or where rounding left nothing."""
        if isinstance(walk.carry, Tried):
            return rest_at(evidence.tree, evidence.p, walk.carry, at)
        tree = evidence.tree
        assert walk.carry is not None
        children = row_at(walk.carry, at)  # [B, C]
        safe = children.clamp(min=0)
        p = row_at(evidence.p, at)  # [B, V]
        q = None if tree.q is None else row_at(tree.q, at)
        tokens, labels, real = tree.tokens.gather(1, safe), tree.drawn_by.gather(1, safe), children >= 0
        rest = try_children(p, q, tokens, labels, real, asks_rest=True)[1]
        return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
