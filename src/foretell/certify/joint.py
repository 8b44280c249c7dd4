"""The joint distribution of several tokens: every draw of a small tree is enumerated.

Rules for trees and for blocks decide on several guesses together, so one guess alone does not test them. The user's own
distributions are cut to their ``SIZE`` heaviest tokens and renormalised in float64; then production ``stops`` and
``residual`` are called on every outcome of all draws at once (rows of a batch), and the text is continued by p to a
common length. The result must be the target's joint distribution to 1e-9.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.certify.distribution import VisitedContext
from foretell.certify.report import DEFECT, Check, Finding, Tally
from foretell.core.tree import DrawMode, DrawnBy, TokenTree
from foretell.verify.base import Evidence, Verifier
from foretell.verify.contract import checked

SIZE = 4
TOLERANCE = 1e-9
CHAINS = {"1-1": (-1, 0, 1), "1-1-1": (-1, 0, 1, 2)}
TREES = {"2": (-1, 0, 0), "3": (-1, 0, 0, 0), "2-1": (-1, 0, 0, 1, 2), "1-2": (-1, 0, 1, 1), "2-2": (-1, 0, 0, 1, 1)}
"""Children a depth (the last: only the first child has two) and the parent vector."""
SAMPLED = (DrawMode.IID, DrawMode.WITHOUT_REPLACEMENT, DrawMode.GREEDY)


@dataclass(frozen=True)
class ContextTables:
    """Target and draft distributions of every context up to some depth: entry d is [SIZE ** d, SIZE] float64."""

    p: list[Tensor]
    q: list[Tensor]
    where: str


@dataclass(frozen=True)
class Outcomes:
    """All outcomes of all draws: R rows."""

    tree: TokenTree
    p: Tensor  # [R, N, SIZE]
    code: Tensor  # [R, N] the path to each node as a number in base SIZE
    depth: list[int]  # [N]
    weight: Tensor  # [R] sums to 1


def projected(contexts: Sequence[VisitedContext], depth: int, count: int) -> list[ContextTables]:
    """``count`` sets of distributions, each of visited contexts cut to their heaviest tokens, in an order of its own."""
    rows: list[tuple[Tensor, Tensor, str]] = []
    for context in contexts:
        if len(context.p) < SIZE:
            continue
        p = context.p.double().cpu()
        # Where the drafter draws from no distribution, a flatter p stands in for q: the rule must be right for any.
        q = 0.5 * p + 0.5 / len(p) if context.q is None else context.q.double().cpu()
        heaviest = (p + q).topk(SIZE).indices
        p, q = p[heaviest], q[heaviest]
        if p.sum() > 0 and int((q > 0).sum()) == SIZE:
            rows.append((p / p.sum(), q / q.sum(), context.where))
    sets = []
    for index in range(count if rows else 0):
        begin, distributions = index * len(rows) // count, ContextTables([], [], rows[index * len(rows) // count][2])
        for d in range(depth):
            # Different contexts at every node: distributions that are all alike hide a rule that takes the wrong row.
            chosen = [rows[(begin + d + 7 * code) % len(rows)] for code in range(SIZE**d)]
            distributions.p.append(torch.stack([p for p, _, _ in chosen]))
            distributions.q.append(torch.stack([q for _, q, _ in chosen]))
        sets.append(distributions)
    return sets


def outcomes(parent: tuple[int, ...], how: DrawMode, distributions: ContextTables) -> Outcomes:
    """Enumerate every draw, node by node."""
    num_nodes = len(parent)
    depth = [0] * num_nodes
    tokens, code = torch.zeros(1, num_nodes, dtype=torch.int64), torch.zeros(1, num_nodes, dtype=torch.int64)
    weight, labels = torch.ones(1, dtype=torch.float64), [int(DrawnBy.FIXED)] * num_nodes
    for node in range(1, num_nodes):
        above = parent[node]
        depth[node] = depth[above] + 1
        rank, children = parent[1:node].count(above), parent.count(above)
        q = source(distributions.q[depth[above]][code[:, above]], how, children)
        if how == DrawMode.FIXED or (how == DrawMode.GREEDY and rank):
            full = distributions.q[depth[above]][code[:, above]]
            best = full.argsort(1, descending=True)[:, rank - (how == DrawMode.GREEDY)]
            probs = torch.zeros_like(full).scatter_(1, best[:, None], 1.0)
        else:
            probs = q.clone()
            labels[node] = int(DrawnBy.IID)
            if how == DrawMode.WITHOUT_REPLACEMENT:
                labels[node] = int(DrawnBy.WITHOUT_REPLACEMENT)
                for other in range(1, node):
                    if parent[other] == above:
                        probs.scatter_(1, tokens[:, other : other + 1], 0.0)
            probs = probs / probs.sum(1, keepdim=True)
        row, token = torch.nonzero(probs, as_tuple=True)
        tokens, code, weight = tokens[row], code[row], weight[row] * probs[row, token]
        tokens[:, node], code[:, node] = token, code[:, above] * SIZE + token
    p = torch.stack([distributions.p[depth[node]][code[:, node]] for node in range(num_nodes)], 1)
    q_rows = torch.zeros_like(p)
    for node in range(num_nodes):
        if node in parent and how != DrawMode.FIXED:
            q_rows[:, node] = source(distributions.q[depth[node]][code[:, node]], how, parent.count(node))
    num_rows = len(weight)
    tree = TokenTree(
        tokens, torch.tensor(parent).expand(num_rows, -1), torch.tensor(labels).expand(num_rows, -1),
        None if how == DrawMode.FIXED else q_rows,
    )  # fmt: skip
    return Outcomes(tree, p, code, depth, weight)


def source(q: Tensor, how: DrawMode, children: int) -> Tensor:
    """[R, SIZE] the distribution that the drawn children of a node come from: q, for GREEDY without its most probable
    tokens."""
    if how != DrawMode.GREEDY or children < 2:
        return q
    rest = q.scatter(1, q.argsort(1, descending=True)[:, : children - 1], 0.0)
    return rest / rest.sum(1, keepdim=True)


def joint_error(verifier: Verifier, out: Outcomes, distributions: ContextTables) -> tuple[float, float]:
    """(largest difference of a probability, total variation) of the joint distribution of one step, continued by p."""
    horizon = max(out.depth) + 1
    evidence = Evidence(out.tree, out.p)
    verifier = checked(verifier)
    walk = verifier.stops(evidence)
    ends = [torch.zeros(SIZE ** (d + 1), dtype=torch.float64) for d in range(horizon)]
    for node, depth in enumerate(out.depth):
        reached = out.weight * walk.stops[:, node].double()
        probs = verifier.residual(evidence, walk, torch.full((len(reached),), node)).double()
        mass = probs.sum(1, keepdim=True)
        probs = probs / torch.where(mass > 0, mass, 1.0)
        index = out.code[:, node, None] * SIZE + torch.arange(SIZE)
        ends[depth].index_add_(0, index.flatten(), (reached[:, None] * probs).flatten())
    emitted, target = ends[0], distributions.p[0].flatten()
    for d in range(1, horizon):
        emitted = (emitted[:, None] * distributions.p[d]).flatten() + ends[d]
        target = (target[:, None] * distributions.p[d]).flatten()
    difference = (emitted - target).nan_to_num(nan=float("inf")).abs()
    return float(difference.max()), 0.5 * float(difference.sum())


def check_joint(verifier: Verifier, spec: str, contexts: Sequence[VisitedContext], count: int = 4) -> Check:
    """Every small tree at ``count`` sets of visited distributions, in every way of drawing that the rule may meet (a
    lossy one: in its own)."""
    trees = CHAINS if verifier.chains_only else CHAINS | TREES
    ways = list(dict.fromkeys((verifier.draws, *SAMPLED, DrawMode.FIXED))) if verifier.exact else [verifier.draws]
    tally, worst_tv = Tally(), 0.0
    for probs in projected(contexts, 1 + 3, count):
        for name, parent in trees.items():
            for how in ways:
                gap, variation = joint_error(verifier, outcomes(parent, how, probs), probs)
                here = f"tree {name}, draws {how.value}, distributions of {probs.where}"
                worst_tv = max(worst_tv, variation)
                tally.add(gap, TOLERANCE, here)
                if verifier.exact and not gap <= TOLERANCE:
                    words = f"joint probability {gap:.2e}, total variation {variation:.2e}"
                    figures = {"probability": gap, "total_variation": variation}
                    tally.findings.append(Finding(DEFECT, here, words, figures))
    shape = "chains" if verifier.chains_only else "small trees"
    measure = f"largest difference of a joint probability, distributions cut to {SIZE} tokens"
    told = {"largest_total_variation": worst_tv}
    return tally.check("joint", spec, shape, "joint laws", measure, told, exact=verifier.exact)
