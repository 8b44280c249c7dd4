"""Gumbel list sampling (Rowan, Phan and Khisti 2506.05632): several independent noises, one for each draft of a node.

Child k of a node is drawn as argmin of E^(k) / q, with independent exponentials E^(0), E^(1), ...; a node with C
children draws its own token as argmin over x of min over k < C of E^(k)_x / p_x. A minimum of C exponentials is
exponential, so that this is a draw from p for every C, and each child may agree with it:

    Pr[the draw is among C drafts of distribution q] >= sum_j C / (sum_i max(q_i / q_j, p_i / p_j) + (C - 1) / p_j)

(their bound, with equality for C = 1). For drafts of one drafter the C best of one shared noise (``coupled`` on a
tree) agree more often; this construction is for drafts that are independent of each other.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foretell.core.noise import exponentials_at, race
from foretell.core.tree import DrawMode, TokenTree, depths, is_chain
from foretell.verify.base import Evidence
from foretell.verify.exact import Exact, target_draws


def num_children(tree: TokenTree) -> Tensor:
    """[B, N] int64: the real children of each node; padding is none and has none."""
    real = (tree.parent >= 0).long()
    return torch.zeros_like(tree.parent).scatter_add_(1, tree.parent.clamp(min=0), real)


def list_draws(evidence: Evidence) -> Tensor:
    """[B, N] int64: the token that the target draws after each node, from as many noises as the node has children.

    One race for each noise; the races' winners then meet by their scores p / E.
    """
    tree, noise = evidence.tree, evidence.noise
    drawn = target_draws(evidence)  # the first noise, which leaves and nodes with one child have alone
    if tree.max_children == 1 or is_chain(tree.parent):
        return drawn
    assert noise is not None
    count = num_children(tree)
    most = int(count.max()) if tree.max_children is None or count.device.type == "cpu" else tree.max_children
    if most < 2:
        return drawn
    depth = depths(tree.parent)
    p, token = evidence.p.flatten(0, 1), drawn.flatten().clone()  # [B * N, V], [B * N]
    best = _score(p, token, noise.list_keys_at(depth, 0).flatten())
    for k in range(1, most):
        index = (count > k).flatten().nonzero()[:, 0]  # [R]
        rows, keys = p[index], noise.list_keys_at(depth, k).flatten()[index]
        winner = race(rows, keys)
        score = _score(rows, winner, keys)
        better = score > best[index]  # of equal scores the first noise counts
        token[index] = torch.where(better, winner, token[index])
        best[index] = torch.where(better, score, best[index])
    return token.view_as(drawn)


def _score(p: Tensor, token: Tensor, keys: Tensor) -> Tensor:
    """[R] p / E of one token a row."""
    return p.gather(1, token[:, None])[:, 0] / exponentials_at(keys, token)


@dataclass(frozen=True)
class GumbelList(Exact):
    """Accept a child iff the target drew its token, from the noises of all the node's children.

    The text has the target's distribution, but it depends on how many drafts stand at each node: unlike ``coupled`` it
    is not the same for every drafter and tree. With chains it is ``coupled``, token for token.

    How many children a node has must not depend on the noise of its own depth. Where children are drawn from it (LIST,
    COUPLED) that means: not on their tokens. Dropping a child because of its token, or of an earlier sibling's, biases
    the draw. Shapes that fix the number of children before drawing them (chain, adaptive, static, delayed, sequoia)
    are fine; rankings after the draw, and placing the next sibling by the token of the last, are not. With other draws
    (FIXED, IID, ...) every shape is fine. ``counts_children`` says so.
    """

    name = "gumbel_list"
    waits = True  # for which nodes of a tree have a list
    draws = DrawMode.LIST
    summary = "exact match with an independent noise for each child; the target's distribution, another text per tree"
    invariant: ClassVar[bool] = False
    counts_children = frozenset({DrawMode.LIST, DrawMode.COUPLED})  # drawn from the very noises that are counted

    def choices(self, evidence: Evidence) -> Tensor:
        """[B, N] int64: the list's draws."""
        return list_draws(evidence)
