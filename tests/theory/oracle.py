"""Slow and independent: what the theory package is measured against. One row at a time, plain Python and scipy.

A draft distribution is a mapping from sets of drafted tokens to probabilities.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

Row = list[float]
SetDistribution = dict[frozenset[int], float]


def ordered_draws(q: Row, num_drafts: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every sequence of draws without replacement, of min(n, support) tokens, and its probability."""
    support = [x for x, mass in enumerate(q) if mass > 0]
    for drawn in itertools.permutations(support, min(num_drafts, len(support))):
        chance, left = 1.0, list(support)
        for x in drawn:
            chance *= q[x] / sum(q[y] for y in left)  # summed anew: 1 - sum would cancel
            left.remove(x)
        yield drawn, chance


def set_distribution(q: Row, num_drafts: int, probs: str) -> SetDistribution:
    """The distribution of the set of drafted tokens: "iid", "without" or "greedy"."""
    out: SetDistribution = {}
    if probs == "iid":
        support = [x for x, mass in enumerate(q) if mass > 0]
        draws = (
            (drawn, float(np.prod([q[x] for x in drawn]))) for drawn in itertools.product(support, repeat=num_drafts)
        )
    elif probs == "without":
        draws = ordered_draws(q, num_drafts)
    else:
        top = [x for x in sorted(range(len(q)), key=lambda x: (-q[x], x)) if q[x] > 0][: num_drafts - 1]
        rest = [x for x in range(len(q)) if q[x] > 0 and x not in top]
        mass = sum(q[x] for x in rest)
        draws = (((*top, x), q[x] / mass) for x in rest) if rest else iter([(tuple(top), 1.0)])
    for drawn, chance in draws:
        out[frozenset(drawn)] = out.get(frozenset(drawn), 0.0) + chance
    return out


def linear_program(p: Row, sets: SetDistribution) -> float:
    """max over couplings of p and the set distribution of Pr[token in set]: the definition of the optimum."""
    names = sorted(sets, key=sorted)
    size = len(p)
    inside = np.array([[float(y in drawn) for y in range(size)] for drawn in names])
    per_set = np.kron(np.eye(len(names)), np.ones(size))
    per_token = np.kron(np.ones(len(names)), np.eye(size))
    # What a coupling leaves unmatched can be coupled in any way, so <= is enough (and feasible in floating point).
    found = linprog(
        -inside.flatten(),
        A_ub=np.vstack([per_set, per_token]),
        b_ub=np.concatenate([[sets[name] for name in names], p]),
        method="highs",
    )
    assert found.status == 0, found.message
    return -float(found.fun)


def min_cut(p: Row, sets: SetDistribution) -> float:
    """1 + min of P(H) - Q(H) over all 2^V sets H of tokens."""
    best = 0.0
    for size in range(len(p) + 1):
        for kept in itertools.combinations(range(len(p)), size):
            inside = frozenset(kept)
            best = min(best, sum(p[x] for x in kept) - sum(c for drawn, c in sets.items() if drawn <= inside))
    return 1.0 + best


def slow_scan(p: Row, q: Row, num_drafts: int) -> float:
    """The optimum without replacement by every prefix: tokens join one by one in the n lowest coefficients of N(t)'s
    distribution, and the integral is a trapezoid in log t (step .05) over e^-30 .. e^30. q > 0."""
    order = np.argsort(np.array(p) / np.array(q))
    p_sorted, q_sorted = np.array(p)[order], np.array(q)[order]
    rest = np.concatenate((np.cumsum(q_sorted[::-1])[::-1], [0.0]))
    time = np.exp(np.arange(-30.0, 30.0, 0.05))
    probs = np.zeros((num_drafts, time.size))
    probs[0] = 1.0
    best, mass = 0.0, 0.0
    for k in range(len(p)):
        arrived = -np.expm1(-q_sorted[k] * time)
        gain = probs[:-1] * arrived
        probs *= 1.0 - arrived
        probs[1:] += gain
        mass += p_sorted[k]
        slope = rest[k + 1] * time
        inside = float((0.05 * slope * np.exp(-slope) * (1.0 - probs.sum(0))).sum()) if k + 1 < len(p) else 1.0
        best = min(best, mass - inside)
    return 1.0 + best


def random_labels(size: int, num: int, seed: int) -> Tensor:
    """[num, V] float64: flat, ordinary, peaked and extreme distributions, some with zeros."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(num):
        weight = generator.exponential(size=size) ** generator.choice([0.3, 1.0, 4.0, 20.0])
        if generator.random() < 0.3:
            weight[generator.random(size) < 0.4] = 0.0
        if weight.sum() == 0:
            weight[generator.integers(size)] = 1.0
        rows.append(weight / weight.sum())
    return torch.tensor(np.array(rows), dtype=torch.float64)


def hard_pairs() -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs p, q [1, V] at the edges: one-hot, near one-hot, fewer tokens than drafts, disjoint, equal, ties, tiny mass."""
    probs = [
        [1.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 1.0],
        [0.2, 0.2, 0.2, 0.2, 0.2],
        [0.5, 0.5, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.3, 0.3, 0.4],
        [1 - 1e-9, 1e-9, 0.0, 0.0, 0.0],
        [1 - 3e-12, 1e-12, 1e-12, 1e-12, 0.0],
        [1e-30, 1e-60, 1.0, 1e-90, 3e-30],
        [1 - 1e-3 - 1e-6, 1e-3, 0.0, 1e-6 - 1e-15, 1e-15],
        [0.4, 0.3, 0.2, 0.1, 0.0],
        [0.9, 0.05, 0.02, 0.02, 0.01],
        [0.3, 0.02, 0.26, 0.22, 0.2],
    ]
    for p, q in itertools.product(probs, repeat=2):
        yield torch.tensor([p], dtype=torch.float64), torch.tensor([q], dtype=torch.float64)
