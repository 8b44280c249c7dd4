"""Acceptance under shared noise: target and drafter run one race, E_x / p(x) and E_x / q(x) (2408.07978).

The target takes the winner of its race, the drafter the first K of its own. Given that j wins the target's race at time
t, token i is before j in the drafter's race with chance 1 - e^{-t a_i}, a_i = (r_j q_i - p_i)+ with r = p / q. So

    acceptance = sum over j of p_j g(r_j),   g(r) = integral over t of e^{-t} Pr[fewer than K tokens arrived by t],

a race of rates a_i against a rest of rate 1, which ``race`` solves. Only tokens with a ratio below r_j take part, g falls
in r, and with K = 1 it is 1 / sum of max(p, r q).
"""

import numpy as np
import torch
from benchmarks.theory import race
from benchmarks.theory.race import Array, Integers
from benchmarks.theory.rows import Bounds, check_num_drafts, check_tolerance
from torch import Tensor

from foretell.theory.acceptance import by_ratio, check_distributions, gumbel

TOLERANCE = 1e-4
LARGEST = 64  # tokens of p evaluated exactly before any refinement
ENTRIES = 1 << 20  # rates [E, V] at a time


def gumbel_top_k(p: Tensor, q: Tensor, num_drafts: int, *, tolerance: float = TOLERANCE) -> Bounds:
    """Bounds [R], at most ``tolerance`` wide, of the acceptance with the K = num_drafts first of the drafter's race.

    g is evaluated at the 64 largest tokens of p and then wherever the interval gains most: where tokens between two
    evaluated ratios were left out, g lies between its neighbours, since it falls. An evaluation is O(V K), and flat
    distributions need hundreds: up to a second a row at V = 8192, twenty at 150,000. tolerance = 0 evaluates g at every
    token. K = 1 is exact, by ``gumbel``.
    """
    p, q = by_ratio(*check_distributions(p, q))
    check_num_drafts(num_drafts)
    check_tolerance(tolerance)
    if num_drafts == 1:
        return Bounds(*[gumbel(p, q)] * 2)
    bounds = [
        _top_k(p_row[q_row > 0].numpy(), q_row[q_row > 0].numpy(), num_drafts, tolerance)
        for p_row, q_row in zip(p.cpu(), q.cpu(), strict=True)
    ]
    table = torch.tensor(bounds, dtype=torch.float64, device=p.device).reshape(-1, 2)
    return Bounds(*table.clamp(0.0, 1.0).unbind(1))


def _top_k(p: Array, q: Array, num_drafts: int, tolerance: float) -> tuple[float, float]:
    """(lower, upper) for one row sorted by ratio, q > 0. A token with q = 0 is never drafted and adds nothing."""
    ratio = p / q
    heavy = np.flatnonzero(p > 0)
    if heavy.size == 0:
        return 0.0, 0.0
    value = np.full(p.size, np.nan)
    mass = np.concatenate(([0.0], np.cumsum(p)))
    new = np.unique(np.concatenate((heavy[np.argsort(-p[heavy])[:LARGEST]], heavy[[0, -1]])))
    while True:
        value[new] = _fewer(p, q, ratio[new], num_drafts)
        known = np.flatnonzero(~np.isnan(value))
        exact = float((p[known] * value[known]).sum())
        start, stop = known[:-1], known[1:]
        between = np.maximum(mass[stop] - mass[start + 1], 0.0)
        between = np.where(stop - start > 1, between, 0.0)
        gap = between * (value[start] - value[stop]).clip(0.0)
        if gap.sum() <= tolerance and (tolerance > 0 or not between.any()):
            low = exact + float((between * value[stop]).sum())
            slack = 1e-14 + 4 * np.finfo(np.float64).eps * p.size
            return low - slack, low + float(gap.sum()) + slack
        split = np.flatnonzero((between > 0) & (gap >= min(tolerance / known.size, gap.max()) / 2))
        middle = np.searchsorted(mass, (mass[start[split] + 1] + mass[stop[split]]) / 2) - 1
        new = np.unique(middle.clip(start[split] + 1, stop[split] - 1))


def _fewer(p: Array, q: Array, ratio: Array, num_drafts: int) -> Array:
    """[E] g at each ratio: the chance that fewer than num_drafts tokens arrive before the rest."""
    rows = max(1, ENTRIES // p.size)
    parts = [_fewer_block(p, q, ratio[i : i + rows], num_drafts) for i in range(0, ratio.size, rows)]
    return np.concatenate(parts)


def _fewer_block(p: Array, q: Array, ratio: Array, n: int) -> Array:
    rates = (ratio[:, None] * q - p).clip(0.0)  # [E, V]
    # Equal ratios do not race each other: what rounding leaves of them is no rate.
    rates[rates < 4 * np.finfo(np.float64).eps * p] = 0.0
    total = 1.0 + rates.sum(1)
    rates /= total[:, None]
    rest = 1.0 / total
    scaled, octave = race.octaves(rates)
    first = race.first_octave(n)
    by_rest = race.octave_of_rest(rest)
    num_bins = int(by_rest.max()) - first
    rows = np.arange(len(rates))[:, None]
    cell = rows * num_bins + np.minimum(octave - first, num_bins) - 1
    taking_part = rates > 0
    count = np.bincount(cell[taking_part], minlength=len(rates) * num_bins).reshape(len(rates), -1).astype(np.float64)
    last = np.minimum(by_rest, race.octave_of_arrivals(count, rest, first, n))
    num_bins = int(last.max()) - first
    cell = rows * num_bins + np.minimum(octave - first, num_bins) - 1
    scaled = np.ldexp(scaled, np.minimum(first + num_bins - octave, 0))
    moments = _moments(cell[taking_part], scaled[taking_part], (len(rates), num_bins, race.num_moments(n)))
    num_heads = int((taking_part & (octave < last[:, None])).sum(1).max())
    heads = np.partition(rates, p.size - num_heads, axis=1)[:, p.size - num_heads :] if num_heads else rates[:, :0]
    return race.miss(moments, heads, rest, last, first, n)


def _moments(cell: Integers, scaled: Array, shape: tuple[int, int, int]) -> Array:
    """[E, B, J] sums of scaled^j, j = 1 .. J, over the tokens of each cell e * B + b."""
    power = np.ones_like(scaled)
    out = np.empty(shape)
    for j in range(shape[2]):
        power *= scaled
        out[..., j] = np.bincount(cell, power, shape[0] * shape[1]).reshape(shape[:2])
    return out
