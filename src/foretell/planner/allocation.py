"""Which rows guess how deep: the allocation that brings most tokens a second, for given chances and costs. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
NUM_LIMITS = 6  # depths tried as a common limit of a batch, in a search


@dataclass(frozen=True)
class Problem:
    """One allocation to make. Arrays are [B, L] by row and depth - 1, or [B]."""

    kept: Array  # P(kept to this depth), 0 where the row may not go so deep; falls with depth
    drafted: Array  # P(drafted to this depth)
    nodes: Array  # expected nodes that this depth adds to the pass
    method: Ints  # [B]
    entry: Array  # [B] seconds that a row's first guess costs beside its drafting
    own: Array  # [B, L] seconds that a row's text adds to the drafting of this depth ...
    node: Array  # [B] ... and to the pass for each of its nodes
    draft: Array  # [M, L, B + 1] seconds that the r-th row to reach a depth adds; [..., 0] is unused
    curve: tuple[Array, Array]  # (nodes beyond the roots, seconds) of the pass
    plain: float  # seconds of a plain step
    guess_factor: float = 1.0  # what a guessing pass takes, over what ``curve`` says
    weighed: NDArray[np.bool_] | None = None  # [B] rows that guess as deep as they may or not at all; None: no row does

    @property
    def batch(self) -> int:
        """B."""
        return len(self.kept)

    def deepened(self, caps: Sequence[int]) -> list[int]:
        """The same depths, but as deep as they may where rows are ``weighed``."""
        if self.weighed is None:
            return list(caps)
        most = (self.kept > 0.0).sum(axis=1).tolist()
        return [deep if weighed and cap else cap for cap, deep, weighed in zip(caps, most, self.weighed, strict=True)]


@dataclass(frozen=True)
class Allocation:
    """A depth for each row, and what it is expected to bring and cost."""

    caps: list[int]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def _pass_seconds(problem: Problem, nodes: Array, own: Array, none: Array | None) -> Array:
    """Expected seconds of the pass with so many expected nodes beyond the roots, for which the rows' texts add ``own``
    seconds. none: P(no row drafted at all)."""
    xs, ys = problem.curve
    if none is None:
        return (np.interp(nodes, xs, ys) + own) * problem.guess_factor
    some = np.maximum(1.0 - none, 1e-9)
    guessing = (some * np.interp(nodes / some, xs, ys) + own) * problem.guess_factor
    return none * problem.plain + guessing


def price(problem: Problem, caps: Sequence[int]) -> Allocation:
    """What one choice of depths brings and costs."""
    num_rows, depth = problem.kept.shape
    on = np.arange(depth)[None] < np.asarray(caps)[:, None]
    if not on.any():
        return Allocation(list(caps), float(num_rows), problem.plain)
    added = problem.nodes * on
    nodes, own = np.asarray(added.sum()), np.asarray((added * problem.node[:, None]).sum())
    seconds = float((problem.entry * on[:, 0]).sum() + (problem.own * on).sum())
    for method in range(len(problem.draft)):
        rows = (on & (problem.method == method)[:, None]).sum(axis=0)
        seconds += sum(float(problem.draft[method, level, 1 : count + 1].sum()) for level, count in enumerate(rows))
    none = np.asarray(np.prod(1.0 - problem.drafted[:, 0] * on[:, 0]))
    seconds += float(_pass_seconds(problem, nodes, own, none if none > 1e-12 else None))
    return Allocation(list(caps), num_rows + float((problem.kept * on).sum()), seconds)


def search(problem: Problem) -> Allocation | None:
    """``_search``, with rows that are ``weighed`` as deep as they may."""
    found = _search(problem)
    if found is None or problem.weighed is None:
        return found
    return price(problem, problem.deepened(found.caps))


def _search(problem: Problem) -> Allocation | None:
    """The best choice with at least one guess; None where no row may guess.

    Positions are taken in the order of P(kept | drafted), less what plain decoding writes in the seconds that the row's
    text adds; it falls with depth, so every prefix of the order is a choice of depths. Each prefix is priced, under each of
    several common limits of depth. Of equal numbers of drafting rows, passes and nodes the greedy choice keeps most, so
    with one method, texts of one length, drafting that costs the same for each row at a depth beyond the first, and always
    a proposal, the result is the best there is; else near it (tests/ measure it).
    """
    num_rows, depth = problem.kept.shape
    own = problem.own + problem.nodes * problem.node[:, None] * problem.guess_factor
    gained = np.where(problem.kept > 0.0, problem.kept - own * (num_rows / problem.plain), -np.inf)
    worth = np.minimum.accumulate(gained / np.maximum(problem.drafted, 1e-12), axis=1)
    flat = worth.T.ravel()  # by depth, so that of equals the shallow comes first
    order = np.argsort(-flat, kind="stable")
    order = order[: np.count_nonzero(problem.kept.T.ravel()[order] > 0.0)]
    if not len(order):
        return None
    level, row = np.divmod(order, num_rows)
    method = problem.method[row]
    num_methods = len(problem.draft)
    group = method * depth + level
    rank = _ranks(group, num_methods * depth)
    cost = problem.draft[method, level, rank] + np.where(level == 0, problem.entry[row], 0.0) + problem.own[row, level]
    kept, nodes = problem.kept[row, level], problem.nodes[row, level]
    long = nodes * problem.node[row]
    missing = None
    if (problem.drafted[row, level] < 0.999).any():
        first = np.minimum(problem.drafted[row, 0], 1.0 - 1e-9)
        missing = np.where(level == 0, np.log1p(-first), 0.0)

    def run(limits: Ints) -> tuple[float, Allocation, Ints]:
        """The best prefix under the best of these limits, [C, M] depths by method."""
        mask = level[None] < limits[:, method]
        tokens = num_rows + np.cumsum(np.where(mask, kept, 0.0), axis=1)
        count = np.cumsum(np.where(mask, nodes, 0.0), axis=1)
        none = None if missing is None else np.exp(np.cumsum(np.where(mask, missing, 0.0), axis=1))
        passes = _pass_seconds(problem, count, np.cumsum(np.where(mask, long, 0.0), axis=1), none)
        seconds = np.cumsum(np.where(mask, cost, 0.0), axis=1) + passes
        rate = np.where(mask, tokens / seconds, 0.0)
        combo, last = divmod(int(rate.argmax()), rate.shape[1])
        caps = np.bincount(row[: last + 1][mask[combo, : last + 1]], minlength=num_rows)
        found = Allocation(caps.tolist(), float(tokens[combo, last]), float(seconds[combo, last]))
        return float(rate[combo, last]), found, limits[combo]

    deepest = int(level.max()) + 1
    depths = np.array(_limits(deepest))
    together = np.repeat(depths[:, None], num_methods, axis=1)
    if num_methods == 1:
        return run(together)[1]
    alone = [np.where(np.arange(num_methods) == one, depths[:, None], 0) for one in range(num_methods)]
    best = run(np.concatenate([together, *alone]))
    for _ in range(2):  # then each method's limit in turn, the others' held
        for one in range(num_methods):
            choices = np.tile(best[2], (len(depths) + 1, 1))
            choices[:, one] = [0, *depths]
            best = max(best, run(choices[choices.any(axis=1)]), key=lambda found: found[0])
    return best[1]


def _limits(deepest: int) -> list[int]:
    """A few depths from 1 to the deepest."""
    few = min(NUM_LIMITS, deepest)
    return sorted({1 + round((deepest - 1) * place / max(few - 1, 1)) for place in range(few)})


def _ranks(group: Ints, num_groups: int) -> Ints:
    """1 for the first of each group, 2 for the second, ..."""
    order = np.argsort(group, kind="stable")
    starts = np.cumsum(np.bincount(group, minlength=num_groups))
    rank = np.empty(len(group), dtype=np.int64)
    before = np.concatenate([[0], starts[:-1]])
    rank[order] = np.arange(1, len(group) + 1) - before[group[order]]
    return rank
