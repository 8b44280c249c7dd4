"""Exact enumeration: the distribution of the emitted text, without drawing a single sample.

Drafts are enumerated as the batch axis: each row is one outcome of all draws, weighted by its probability. Production
``stops`` and ``residual`` then say where the walk ends and what follows, and the exact continuation by p fills the
text up to a common length. What comes out must be the target's own joint distribution, to rounding.

A context is the path below the root, as a number in base V: ``code``. Tables hold a distribution for each: p[d] is [V
** d, V].
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.core.tree import DrawnBy, TokenTree
from foretell.verify.base import Evidence, Verifier

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
DRAWN = (I, W)


@dataclass(frozen=True)
class Tables:
    """Target and draft distributions of every context up to some depth."""

    vocab_size: int
    p: list[Tensor]  # [V ** d, V] float64
    q: list[Tensor]


def tables(vocab_size: int, depth: int, seed: int, *, sparse_p: float = 0.0, sparse_q: float = 0.0) -> Tables:
    """Random distributions, uniform on the simplex; a share of entries is zero (at least one of each row is not)."""
    generator = torch.Generator().manual_seed(seed)

    def probs(sparse: float) -> list[Tensor]:
        out = []
        for d in range(depth):
            weight = -torch.rand(vocab_size**d, vocab_size, generator=generator, dtype=torch.float64).log()
            zero = torch.rand(weight.shape, generator=generator) < sparse
            zero[torch.arange(len(zero)), weight.argmax(-1)] = False
            weight = weight.masked_fill(zero, 0.0)
            out.append(weight / weight.sum(-1, keepdim=True))
        return out

    return Tables(vocab_size, probs(sparse_p), probs(sparse_q))


@dataclass(frozen=True)
class Case:
    """A shape and how each of its nodes is drawn; node 0 is the root."""

    parent: tuple[int, ...]
    labels: tuple[DrawnBy, ...]

    @property
    def depths(self) -> list[int]:
        """Steps from the root of each node."""
        depth = [0]
        for parent in self.parent[1:]:
            depth.append(depth[parent] + 1)
        return depth

    def siblings_before(self, node: int) -> list[int]:
        """Earlier nodes with the same parent."""
        return [other for other in range(1, node) if self.parent[other] == self.parent[node]]


@dataclass(frozen=True)
class Drafts:
    """All outcomes of all draws of a case: R rows."""

    tree: TokenTree
    p: Tensor  # [R, N, V]
    code: Tensor  # [R, N] the context that each node ends
    depth: list[int]  # [N]
    weight: Tensor  # [R] sums to 1


def draw_probs(case: Case, node: int, how: DrawnBy, q: Tensor, tokens: Tensor) -> Tensor:
    """[R, V] the distribution of one node's token, given the context and the siblings before it: what DrawnBy's
    docstring says."""
    before = case.siblings_before(node)
    if how == F:  # the next largest of q that no FIXED sibling has: any rule without chance would do
        rank = sum(case.labels[other] == F for other in before) % q.shape[1]
        return torch.zeros_like(q).scatter_(1, q.argsort(1, descending=True)[:, rank : rank + 1], 1.0)
    if how == I:
        return q
    struck = [other for other in before if (case.labels[other] in DRAWN if how == W else case.labels[other] == C)]
    left = q.clone()
    for other in struck:
        left.scatter_(1, tokens[:, other : other + 1], 0.0)
    if (
        how == C
    ):  # any distribution that depends on no other stream: here without replacement, and q again once exhausted
        left = torch.where(left.sum(1, keepdim=True) > 0, left, q)
    return left / left.sum(1, keepdim=True)


def drafts(case: Case, distributions: Tables) -> Drafts:
    """Enumerate every draw, node by node."""
    num_nodes, depth, size = len(case.parent), case.depths, distributions.vocab_size
    tokens = torch.zeros(1, num_nodes, dtype=torch.int64)
    code = torch.zeros(1, num_nodes, dtype=torch.int64)
    weight = torch.ones(1, dtype=torch.float64)
    for node in range(1, num_nodes):
        parent = case.parent[node]
        label = draw_probs(
            case, node, case.labels[node], distributions.q[depth[parent]][code[:, parent]], tokens
        )  # [R, V]
        assert bool(torch.isfinite(label).all()), "drawn without replacement from nothing: no legal case"
        row, token = torch.nonzero(label, as_tuple=True)
        tokens, code, weight = tokens[row], code[row], weight[row] * label[row, token]
        tokens[:, node] = token
        code[:, node] = code[:, parent] * size + token
    num_rows = len(weight)
    p = torch.stack([distributions.p[depth[node]][code[:, node]] for node in range(num_nodes)], 1)
    q = torch.zeros_like(p)
    for node in range(1, num_nodes):
        if case.labels[node] in DRAWN:
            parent = case.parent[node]
            q[:, parent] = distributions.q[depth[parent]][code[:, parent]]
    tree = TokenTree(
        tokens,
        torch.tensor(case.parent).expand(num_rows, -1),
        torch.tensor([int(label) for label in case.labels]).expand(num_rows, -1),
        q if any(label in DRAWN for label in case.labels) else None,
    )
    return Drafts(tree, p, code, depth, weight)


def target_joint(distributions: Tables, horizon: int) -> Tensor:
    """[V ** horizon] the target's distribution of the next tokens."""
    joint = torch.ones(1, dtype=torch.float64)
    for d in range(horizon):
        joint = (joint[:, None] * distributions.p[d]).flatten()
    return joint


def emitted_joint(verifier: Verifier, out: Drafts, distributions: Tables, evidence: Evidence | None = None) -> Tensor:
    """[V ** (depth + 1)] the distribution of what one step emits, continued by p to one token more than the tree is
    deep."""
    size, horizon = distributions.vocab_size, max(out.depth) + 1
    evidence = evidence or Evidence(out.tree, out.p)
    walk = verifier.stops(evidence)
    assert torch.allclose(walk.stops.sum(1), torch.ones_like(out.weight), atol=1e-12, rtol=0), "stops sum to 1"
    assert bool((walk.stops >= 0).all())
    assert bool((walk.stops[~evidence.tree.valid] == 0).all()), "no walk stops at padding"
    ends = [torch.zeros(size ** (d + 1), dtype=torch.float64) for d in range(horizon)]
    for node, depth in enumerate(out.depth):
        reached = out.weight * walk.stops[:, node]
        probs = verifier.residual(evidence, walk, torch.full((len(reached),), node))
        mass = probs.sum(1, keepdim=True)
        assert bool(((mass[:, 0] > 0) | (reached == 0)).all()), "a distribution is left wherever the walk stops"
        probs = probs / torch.where(mass > 0, mass, 1.0)
        index = out.code[:, node, None] * size + torch.arange(size)
        ends[depth].index_add_(0, index.flatten(), (reached[:, None] * probs).flatten())
    joint = torch.ones(1, dtype=torch.float64) * 0
    for d in range(horizon):
        joint = ((joint[:, None] * distributions.p[d]).flatten() if d else 0.0) + ends[d]
    return joint


def error(verifier: Verifier, case: Case, distributions: Tables) -> float:
    """Largest difference between the emitted and the target's joint distribution."""
    out = drafts(case, distributions)
    assert abs(float(out.weight.sum()) - 1.0) < 1e-12
    return float(
        (emitted_joint(verifier, out, distributions) - target_joint(distributions, max(out.depth) + 1)).abs().max()
    )


def shapes(max_drafted: int, *, max_depth: int = 3, max_children: int = 4) -> list[tuple[int, ...]]:
    """Every rooted tree with 1 to max_drafted nodes under the root, once each, in breadth-first order."""
    found: dict[object, tuple[int, ...]] = {}

    def canonical(parent: tuple[int, ...], node: int) -> tuple[object, ...]:
        return tuple(sorted((canonical(parent, i) for i in range(1, len(parent)) if parent[i] == node), key=repr))

    def grow(parent: tuple[int, ...]) -> None:
        case = Case(parent, (F,) * len(parent))
        if max(case.depths) > max_depth or any(parent.count(node) > max_children for node in range(len(parent))):
            return
        if len(parent) > 1:
            found.setdefault(canonical(parent, 0), parent)
        if len(parent) <= max_drafted:
            for new in range(parent[-1] if len(parent) > 1 else 0, len(parent)):
                grow((*parent, new))

    grow((-1,))
    return list(found.values())


def sibling_labels(count: int, vocab_size: int) -> list[tuple[DrawnBy, ...]]:
    """Ways to draw ``count`` siblings: each distribution alone, and mixtures with drawn ones before FIXED ones."""
    ways = [(label,) * count for label in (F, I, C)] + ([(W,) * count] if count <= vocab_size else [])
    for drawn in range(1, count):
        rest = count - drawn
        ways += [(I,) * drawn + (F,) * rest, (I,) * drawn + (C,) * rest, (C,) * drawn + (I,) * rest]
        if drawn <= vocab_size:
            ways += [(W,) * drawn + (F,) * rest]
        if count <= vocab_size:
            ways += [(I,) * drawn + (W,) * rest, (W,) * drawn + (I,) * rest]
    return ways


def labelled(parent: tuple[int, ...], vocab_size: int, num_mixed: int, seed: int = 0) -> Iterator[Case]:
    """Each distribution for the whole tree, then num_mixed trees whose sibling groups are each drawn in a way of their
    own."""
    choose = random.Random(repr((parent, vocab_size, seed)))
    groups = {node: [i for i in range(1, len(parent)) if parent[i] == node] for node in range(len(parent))}
    widest = max(len(children) for children in groups.values())
    for label in (F, I, W, C):
        if label != W or widest <= vocab_size:
            yield Case(parent, (F, *[label] * (len(parent) - 1)))
    for _ in range(num_mixed):
        labels = [F] * len(parent)
        for children in groups.values():
            if children:
                for child, label in zip(
                    children, choose.choice(sibling_labels(len(children), vocab_size)), strict=True
                ):
                    labels[child] = label
        yield Case(parent, tuple(labels))


def renumbered(case: Case, seed: int) -> Case:
    """The same tree with its nodes in another legal order: parents before children, siblings in their order."""
    choose = random.Random(seed)
    order, waiting = [0], [[i for i in range(1, len(case.parent)) if case.parent[i] == 0]]
    while waiting := [queue for queue in waiting if queue]:
        node = choose.choice(waiting).pop(0)
        order.append(node)
        waiting.append([i for i in range(1, len(case.parent)) if case.parent[i] == node])
    new = {old: index for index, old in enumerate(order)}
    return Case(tuple(new[case.parent[old]] if old else -1 for old in order), tuple(case.labels[old] for old in order))


def chains(max_depth: int) -> Iterator[Case]:
    """Chains to a depth, with every label at every node."""
    for depth in range(1, max_depth + 1):
        for labels in itertools.product((F, I, W, C), repeat=depth):
            yield Case(tuple(range(-1, depth)), (F, *labels))


def batch(parts: Sequence[Drafts], num_nodes: int) -> tuple[TokenTree, Tensor]:
    """Several cases as one ragged batch: (tree [R, num_nodes], p [R, num_nodes, V]), padded; q is zero where none is."""

    def pad(x: Tensor, value: float = 0) -> Tensor:
        wide = x.new_full((x.shape[0], num_nodes, *x.shape[2:]), value)
        wide[:, : x.shape[1]] = x
        return wide

    trees = [part.tree for part in parts]
    tree = TokenTree(
        torch.cat([pad(tree.tokens) for tree in trees]),
        torch.cat([pad(tree.parent, -1) for tree in trees]),
        torch.cat([pad(tree.drawn_by) for tree in trees]),
        torch.cat([pad(torch.zeros_like(part.p) if part.tree.q is None else part.tree.q) for part in parts]),
    )
    return tree, torch.cat([pad(part.p, 1.0 / part.p.shape[-1]) for part in parts])
