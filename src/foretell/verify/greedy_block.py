"""Greedy multi-path block verification (Thomas and Pal 2602.16961): the best of all drafted paths, verified as a block.

Tokens of a context have a strict order that depends on p and q alone, by p / q (``residual.rank``, ties to the higher id).
Where a node has several draws from q, the path through the best of them is selected; of equal tokens all nodes stay
alive, and their children together are the draws of the next depth. The selected token then has the distribution q~ of a
maximum of independent draws, known exactly from the cumulative mass F of q in that order, and block verification of the
selected path with q~ in place of q keeps the target's distribution. Two forms of q~, chosen row by row:

* Where the number of children depends on the depth alone and all are draws from q: the marginal distribution, by nested
  composition. With F and q of the selected tokens above, ``T(u) = (F + q u^k)^k'`` and so on outwards, and
  ``q~(x) = (T(F(<= x)) - T(F(< x))) / (T(1) - T(0))``.
* Elsewhere, given how many draws m are alive at each depth: ``q~(x) = F(<= x)^m - F(< x)^m``. Sound, as m depends on
the depths above and on no token of this one; it accepts no more than the marginal distribution does (Jensen).

What counts as a draw from q: IID children before any other, the first child also WITHOUT_REPLACEMENT. The number of a
node's children must not depend on their tokens. A node without such draws takes the child with the largest p, q~ one-hot.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.core.tree import DrawMode, DrawnBy, TokenTree, depths
from foretell.kernels.bounds import check_nodes, check_shape
from foretell.kernels.residual import below, call, excess, is_distribution, kernel_of, rank, subtract
from foretell.verify.base import Evidence, RatioVerifier, Walk, row_at


@dataclass(frozen=True)
class Level:
    """One depth of the selected path; B rows."""

    node: Tensor  # [B] int64 the node that represents all alive ones; -1 where the path is shorter
    ratio: Tensor  # [B] float64 P, of target to selected distribution of the path down to here
    drawn: Tensor  # [B] bool: the next token is the best of some draws from q ...
    fixed: Tensor  # [B] bool: ... or chosen from FIXED children; neither at the path's end
    token: Tensor  # [B] the next token
    power: Tensor  # [B] int64 how many draws its distribution is the maximum of
    outer: tuple["Outer", ...]  # the levels above, from the nearest


@dataclass(frozen=True)
class Outer:
    """A level above, as the marginal distribution needs it: u -> (under + likely u) ** power."""

    under: Tensor  # [B] float64 mass of q before the selected token
    likely: Tensor  # [B] float64 its own
    power: Tensor  # [B] int64

    def only(self, rows: Tensor) -> "Outer":
        """The same in rows [B] bool; u -> u elsewhere."""
        under, likely = torch.where(rows, self.under, 0.0), torch.where(rows, self.likely, 1.0)
        return Outer(under, likely, torch.where(rows, self.power, 1))


@dataclass(frozen=True)
class Selected:
    """The levels as the C kernel writes them, entry d being that of depth d; see ``foretell_select``."""

    whole: Tensor  # [5, B, N] int64: node, kind, token, power, power as an outer level
    real: Tensor  # [3, B, N] float64: ratio, and under, likely as an outer level


@dataclass(frozen=True)
class GreedyBlock(RatioVerifier):
    """The best of several drafted paths, verified as a block."""

    name = "greedy_block"
    draws = DrawMode.IID
    counts_children = frozenset({DrawMode.IID})
    waits = True
    summary = (
        "select the best drafted path by p/q, then verify it as a block under the distribution of a best one; exact"
    )

    def stops(self, evidence: Evidence) -> Walk:
        """Stops of the walk, on the selected path alone; carry is its levels. Temporaries: [B, N] in C, a few [B, V] in
        torch."""
        tree, p = evidence.tree, evidence.p
        chosen = select_in_c(tree, p)
        if chosen is not None:
            return Walk(chosen[0].to(p.dtype), chosen[1])
        levels, succeed = select(tree, p)
        stops = torch.zeros(p.shape[:2], dtype=torch.float64, device=p.device)
        none_behind = torch.ones(p.shape[0], dtype=torch.float64, device=p.device)
        for level, chance in zip(reversed(levels), reversed(succeed), strict=True):
            here = level.node >= 0
            stops.scatter_add_(
                1, level.node.clamp(min=0)[:, None], torch.where(here, chance * none_behind, 0.0)[:, None]
            )
            none_behind = torch.where(here, none_behind * (1.0 - chance), none_behind)
        return Walk(stops.to(p.dtype), levels)

    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        """``(P p - q~)+`` at the node where the walk stopped; p at the path's end, or where nothing was left."""
        if isinstance(walk.carry, Selected):
            return rest_in_c(evidence.tree, evidence.p, walk.carry, at)
        tree, p = evidence.tree, row_at(evidence.p, at)
        left, on_cpu = p, p.device.type == "cpu"
        for level in walk.carry:
            fixed, drawn = (level.node == at) & level.fixed, (level.node == at) & level.drawn
            if not on_cpu or bool(fixed.any()):
                left = torch.where(fixed[:, None], p.scatter(1, level.token[:, None], 0.0), left)
            if tree.q is not None and (not on_cpu or bool(drawn.any())):
                best = best_distribution(p, row_at(tree.q, at), level)[0]
                rest = subtract(p, best, level.ratio, torch.ones_like(level.ratio))
                left = torch.where(drawn[:, None], rest, left)
        return torch.where(left.sum(-1, keepdim=True) <= 0, p, left)


def select_in_c(tree: TokenTree, p: Tensor) -> tuple[Tensor, Selected] | None:
    """(stops [B, N] float64, what residual needs); None where the kernel cannot serve. ``select`` is its reference.

    Raises VocabularyMismatchError or ModelError for a tree whose tokens or parents are out of range.
    """
    check_shape(tree, p.shape)
    kernel = kernel_of("select", p, tree.q)
    if kernel is None:
        return None
    whole = torch.empty(5, *p.shape[:2], dtype=torch.int64)
    real = torch.empty(3, *p.shape[:2], dtype=torch.float64)
    stops = torch.empty(p.shape[:2], dtype=torch.float64)
    failed = call(kernel, *p.shape, tree.tokens, tree.parent, tree.drawn_by, p, tree.q, whole, real, stops)
    return None if failed else (stops, Selected(whole, real))


def rest_in_c(tree: TokenTree, p: Tensor, selected: Selected, at: Tensor) -> Tensor:
    """[B, V] the residual at node at[b]. Only after ``select_in_c`` with the same tree and p.

    Raises as ``select_in_c`` does, and for a node that the tree does not have.
    """
    kernel = kernel_of("selected_rest", p, tree.q)
    assert kernel is not None, "select_in_c ran"
    check_shape(tree, p.shape)
    check_nodes(at, *tree.tokens.shape)
    assert selected.whole.shape[1:] == tree.tokens.shape, "selected is of another tree"
    out = torch.empty(p.shape[0], p.shape[2], dtype=p.dtype)
    failed = call(kernel, *p.shape, p, tree.q, selected.whole, selected.real, at, out)
    assert failed != 2, "selected is of another vocabulary"
    if failed:
        raise MemoryError("no memory for the distribution left of a selected path")
    return out


def select(tree: TokenTree, p: Tensor) -> tuple[list[Level], list[Tensor]]:
    """The selected path, level by level, and [B] float64 the chance h with which each level's test succeeds."""
    num_rows, num_nodes, _ = p.shape
    rows = torch.arange(num_rows, device=p.device)
    index = torch.arange(num_nodes, device=p.device)
    real, above = tree.parent >= 0, tree.parent.clamp(min=0)
    run, uniform = draws_of(tree)
    alive = (index == 0).expand(num_rows, -1)  # [B, N] the nodes that carry the path selected so far
    ratio = torch.ones(num_rows, dtype=torch.float64, device=p.device)
    on_path = torch.ones(num_rows, dtype=torch.bool, device=p.device)
    levels: list[Level] = []
    succeed: list[Tensor] = []
    outer: tuple[Outer, ...] = ()
    for _ in range(num_nodes):
        kids = real & alive.gather(1, above)  # [B, N] children of alive nodes
        pool = kids & run
        worth = alive.long() + (alive & _any_child(above, kids)).long() + (alive & _any_child(above, pool)).long()
        node = (worth * num_nodes - index).argmax(1)  # the first alive one with draws, else with children
        drawn = pool.any(1)
        if tree.q is not None:
            drawn = drawn & is_distribution(tree.q[rows, node])
        fixed = kids.any(1) & ~drawn
        if outer:
            # A distribution of draws that turned out broken: its children count as FIXED, and the composition ends.
            uniform = uniform & ~fixed
            outer = tuple(step.only(uniform) for step in outer)
        token, chosen = _choose(tree, p, node, pool, kids, drawn)
        siblings = pool & (tree.parent == node[:, None])
        power = torch.where(uniform, siblings.sum(1), pool.sum(1)).clamp(min=1)
        level = Level(torch.where(on_path, node, -1), ratio, drawn, fixed, token, power, outer)
        levels.append(level)
        p_token = p[rows, node, token].double()
        p_token = torch.where(torch.isfinite(p_token), p_token, 0.0)
        residual = ratio * (1.0 - p_token)
        likely = torch.ones_like(p_token)
        if tree.q is not None:
            best, under = best_distribution(p[rows, node], tree.q[rows, node], level)
            sums = excess(p[rows, node], best, ratio, torch.ones_like(ratio))
            residual = torch.where(drawn, sums, residual)
            likely = torch.where(drawn, best.gather(1, token[:, None])[:, 0].double(), 1.0)
            own = tree.q[rows, node, token].double()
            outer = (Outer(under, own, power).only(uniform), *outer)
        slack = residual + (1.0 - ratio)
        # 0/0, or no distribution: P
        inner = torch.where(slack > 0, residual / torch.where(slack > 0, slack, 1.0), ratio)
        succeed.append(torch.where(drawn | fixed, inner, ratio))
        after = torch.where(likely > 0, (ratio * p_token / torch.where(likely > 0, likely, 1.0)).clamp(max=1.0), 0.0)
        on_path = on_path & (drawn | fixed)
        ratio = torch.where(on_path, after, ratio)
        alive = chosen & on_path[:, None]
        if p.device.type == "cpu" and not bool(on_path.any()):
            break
    return levels, succeed


def _any_child(above: Tensor, kids: Tensor) -> Tensor:
    """[B, N] bool: nodes with a child among kids."""
    return torch.zeros(above.shape, dtype=torch.int64, device=above.device).scatter_add_(1, above, kids.long()) > 0


def draws_of(tree: TokenTree) -> tuple[Tensor, Tensor]:
    """(run [B, N], uniform [B]), both bool: the nodes that are draws from q before any other of their siblings, and the
    rows where the number of children depends on the depth alone and all are such draws."""
    parent, real = tree.parent, tree.parent >= 0
    if tree.q is None:
        return torch.zeros_like(real), torch.zeros_like(real[:, 0])
    above = parent.clamp(min=0)
    before = (parent[:, :, None] == parent[:, None, :]).tril(-1) & real[:, :, None]  # [B, N, N] earlier siblings
    likely = tree.q[torch.arange(parent.shape[0], device=parent.device)[:, None], above, tree.tokens]  # [B, N]
    first = ~before.any(-1)
    fresh = real & ((tree.drawn_by == DrawnBy.IID) | ((tree.drawn_by == DrawnBy.WITHOUT_REPLACEMENT) & first))
    fresh = fresh & torch.isfinite(likely) & (likely > 0)
    run = fresh & ~(before & ~fresh[:, None, :]).any(-1)
    count = torch.zeros_like(parent).scatter_add_(1, above, real.long())  # children of each node
    depth = depths(parent)
    node = tree.valid
    alike = (depth[:, :, None] == depth[:, None, :]) & node[:, :, None] & node[:, None, :]
    differs = (alike & (count[:, :, None] != count[:, None, :])).any(-1).any(-1)
    return run, ~differs & (run == real).all(1)


def _choose(
    tree: TokenTree, p: Tensor, node: Tensor, pool: Tensor, kids: Tensor, drawn: Tensor
) -> tuple[Tensor, Tensor]:
    """(token [B], the nodes that carry it [B, N]): the best draw of the pool, or where there is none the FIXED child
    with the largest p."""
    tokens = tree.tokens
    at = torch.arange(len(node), device=node.device)[:, None], node[:, None], tokens
    chance = p[at]  # [B, N]
    chosen = torch.where(kids & torch.isfinite(chance), chance, -1.0).argmax(1, keepdim=True)
    able = kids
    if tree.q is not None:
        order = rank(chance, tree.q[at]).long() * p.shape[2] + tokens
        best = torch.where(pool, order, -1).argmax(1, keepdim=True)
        chosen = torch.where(drawn[:, None], best, chosen)
        able = torch.where(drawn[:, None], pool, kids)
    token = tokens.gather(1, chosen)
    return token[:, 0], able & (tokens == token)


def best_distribution(p: Tensor, q: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """(q~ [B, V] in the dtype of p, F(< token) [B] float64): the distribution of the selected token of a level.

    ``q~(x) = q(x) w(x)``: each power k on the way out contributes ``sum_j hi^j lo^(k-1-j)``, so that no difference of
    nearly equal powers is ever taken.
    """
    powers = (level.power, *(step.power for step in level.outer))
    if p.device.type == "cpu" and all(bool((power == 1).all()) for power in powers):
        return q, torch.zeros(p.shape[0], dtype=torch.float64)
    lower = below(p, q)  # [B, V] float64
    under = lower.gather(1, level.token[:, None])[:, 0]
    upper = lower + q
    weight, lower, upper = _raise(torch.ones_like(lower), lower, upper, level.power[:, None])
    zero, one = torch.zeros_like(under)[:, None], torch.ones_like(under)[:, None]
    whole, low, high = _raise(one, zero, one, level.power[:, None])
    for step in level.outer:
        mass, share, power = step.under[:, None], step.likely[:, None], step.power[:, None]
        lower, upper, low, high = (mass + share * x for x in (lower, upper, low, high))
        weight, lower, upper = _raise(weight, lower, upper, power)
        whole, low, high = _raise(whole, low, high, power)
    return (q * (weight / whole)).to(p.dtype), under


def _raise(weight: Tensor, lower: Tensor, upper: Tensor, power: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight times (upper^k - lower^k) / (upper - lower), lower^k and upper^k; k = power [B, 1] >= 1, the rest [B, .]."""
    most = int(power.max())
    total, low, high = torch.ones_like(upper), lower, upper
    for k in range(2, most + 1):
        more = power >= k
        total = torch.where(more, total * lower + high, total)
        low, high = torch.where(more, low * lower, low), torch.where(more, high * upper, high)
    return weight * total, low, high
