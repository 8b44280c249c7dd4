"""Block verification (Sun et al. 2403.10444): a chain is judged as a whole, and keeps its longest prefix that passes.

``P_0 = 1``, ``P_i = min(1, P_{i-1} p(x_i) / q(x_i))``; ``S_i = sum (P_i p - q)+`` of the distributions after node i and
``h_i = S_i / (S_i + 1 - P_i)``, at the last node ``h = P``. The walk stops at the last node whose test succeeds (h_0 is
1), and the bonus is drawn from ``(P_i p - q)+``, at the last node from p. For a FIXED node q is one-hot, and S_i is
``P_i (1 - p(x))``. Expected length is that of token-wise rejection or more, and the most that one path allows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.core.tree import DrawMode, DrawnBy, chain_parent
from foretell.kernels.residual import Tried, excess, is_distribution, rest_at, subtract, try_tree
from foretell.verify.base import Evidence, RatioVerifier, Walk, row_at
from foretell.verify.rejection import believed


@dataclass(frozen=True)
class Block(RatioVerifier):
    """One chain, verified as a block: at least as long as token by token, for the same drafts."""

    name = "block"
    draws = DrawMode.IID
    chains_only = True
    summary = (
        "a chain judged as a whole: keeps the longest prefix that passes; the target's distribution, longer than "
        "rejection"
    )

    def stops(self, evidence: Evidence) -> Walk:
        """Stops of the walk; carry is what ``residual.try_tree`` found (a chain is the tree of block verification), or
        (P, whether the next node was drawn) [B, N] in torch. Raises RuntimeError on a tree that branches."""
        parent = evidence.tree.parent
        chain = chain_parent(parent.shape[1], parent.device)
        if parent.device.type == "cpu" and bool(((parent >= 0) & (parent != chain)).any()):
            raise RuntimeError("block verification is defined on chains, and this tree branches")
        tried = try_tree(evidence.tree, evidence.p, ahead=True)
        return slow_stops(evidence) if tried is None else Walk(*tried)

    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        """``(P p - q)+`` at the node where the walk stopped; p at the last node, or where nothing was left."""
        if isinstance(walk.carry, Tried):
            return rest_at(evidence.tree, evidence.p, walk.carry, at)
        tree = evidence.tree
        ratio, from_q, has_child = (x.gather(1, at[:, None])[:, 0] for x in walk.carry)
        p = row_at(evidence.p, at)
        token = tree.tokens.gather(1, (at + 1).clamp(max=tree.num_nodes - 1)[:, None])
        left = torch.where(has_child[:, None], p.scatter(1, token, 0.0), p)
        if tree.q is not None:
            drawn = subtract(p, row_at(tree.q, at), ratio, torch.ones_like(ratio))
            left = torch.where(from_q[:, None], drawn, left)
        return torch.where(left.sum(-1, keepdim=True) <= 0, p, left)


def slow_stops(evidence: Evidence) -> Walk:
    """The closed form in torch: S of all nodes at once, [B, N, V] temporaries where nodes were drawn from q."""
    tree, p = evidence.tree, evidence.p
    num_rows, num_nodes = tree.parent.shape
    real = tree.parent[:, 1:] >= 0  # [B, N-1]: node i + 1
    token = tree.tokens[:, 1:, None]
    chance = p[:, :-1].gather(2, token)[..., 0].double()
    chance = torch.where(torch.isfinite(chance) & real, chance, 0.0)
    from_q = torch.zeros_like(real)
    likely = torch.ones_like(chance)
    if tree.q is not None and num_nodes > 1:
        label = tree.drawn_by[:, 1:]
        drawn = (
            real & ((label == DrawnBy.IID) | (label == DrawnBy.WITHOUT_REPLACEMENT)) & is_distribution(tree.q[:, :-1])
        )
        from_q = believed(tree.q[:, :-1].flatten(0, 1), token.flatten(0, 1), drawn.flatten()).view_as(real)
        likely = torch.where(from_q, tree.q[:, :-1].gather(2, token)[..., 0].double(), 1.0)
    ratio = torch.ones(num_rows, num_nodes, dtype=torch.float64, device=p.device)  # P
    for node in range(1, num_nodes):
        ratio[:, node] = (ratio[:, node - 1] * chance[:, node - 1] / likely[:, node - 1]).clamp(max=1.0)
    above = ratio[:, :-1]
    residual = above * (1.0 - chance)
    if tree.q is not None and num_nodes > 1:
        rows = p[:, :-1].flatten(0, 1), tree.q[:, :-1].flatten(0, 1)
        drawn_residual = excess(*rows, above.flatten(), torch.ones_like(above).flatten())
        residual = torch.where(from_q, drawn_residual.view_as(above), residual)
    succeed = ratio.clone()  # h
    inner = residual / (residual + (1.0 - above))
    inner = torch.where(residual + (1.0 - above) > 0, inner, above)  # 0/0, or no distribution: P
    succeed[:, :-1] = torch.where(real, inner, above)
    succeed[:, 1:] *= real
    # The last success: node i succeeds and none after it does.
    none_behind = torch.ones_like(succeed)
    none_behind[:, :-1] = (1.0 - succeed[:, 1:]).flip(1).cumprod(1).flip(1)
    padded = torch.nn.functional.pad
    carry = (ratio, padded(from_q, (0, 1)), padded(real, (0, 1)))
    return Walk((succeed * none_behind).to(p.dtype), carry)
