"""Least of P(H) - Q(H) over the prefixes of sorted tokens, drafts without replacement, by evaluating few of them.

Q(H) = Pr[n draws without replacement from q all lie in H] is 1 - ``race.miss``. It is q-convex: along any order of
tokens, dQ / dq grows. Proof. In the race of H let T_n be the n-th arrival, and let a join with rate q_a, taken from the
rest. Then Q(H + a) - Q(H) = q_a g(H, a) with

    g(H, a) = E integral over 0 < s < T_n of e^(-q_a s) e^(-c max(T_{n-1}, s)) ds,   c = 1 - q(H) - q_a,

which grows with q_a where H is fixed. For a further token b of rate 0+ after a, g(H + a, b) is the expectation of
1{s < T'_n} e^(-c max(T'_{n-1}, s)) with a, arriving at E_a, in the race. Count the event E_a > s alone: its chance is
e^(-q_a s); T'_{n-1} <= T_{n-1}; and s < T_n implies s < T'_n, which is T_n or max(T_{n-1}, E_a). So g(H + a, b) >= g(H, a).

Hence between two evaluated prefixes Q lies below its chord in q(H), and P less the chord, known at every prefix, bounds
what has not been evaluated. The prefix at which that bound is least is evaluated next: some twenty evaluations a row.
"""

from itertools import pairwise

import numpy as np
from benchmarks.theory import race
from benchmarks.theory.race import Array, Integers

QUANTILES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)


class Prefixes:
    """The prefixes of one row: p [S] and q [S] > 0 sorted by p / q ascending, q summing to 1."""

    def __init__(self, p: Array, q: Array, num_drafts: int) -> None:
        self.p, self.q = p, q
        self.size = q.size
        self.n = min(num_drafts, q.size)
        self.target = np.concatenate(([0.0], np.cumsum(p)))  # [S + 1] P of each prefix
        self.rest = np.concatenate((np.cumsum(q[::-1])[::-1], [0.0]))  # [S + 1] 1 - q(H), to full relative precision
        self.rounding = 1e-14 + 4 * np.finfo(np.float64).eps * q.size
        scaled, octave = race.octaves(q)
        self.first = race.first_octave(self.n)
        num_bins = int(race.octave_of_rest(self.rest[-2:-1])[0]) - self.first
        count = np.bincount(np.minimum(octave - self.first, num_bins) - 1, minlength=num_bins)[None].astype(np.float64)
        self.last = int(race.octave_of_arrivals(count, np.zeros(1), self.first, self.n)[0])
        self.num_bins = self.last - self.first
        self.bin = np.minimum(octave, self.last) - self.first - 1  # [S]
        self.scaled = np.ldexp(scaled, np.minimum(self.last - octave, 0))
        self.heads = np.flatnonzero(octave < self.last)

    def all_inside(self, prefixes: Integers) -> Array:
        """Q of each prefix, given by its number of tokens, ascending."""
        value: Array = (prefixes == self.size).astype(np.float64)
        inner = np.flatnonzero((prefixes >= self.n) & (prefixes < self.size))
        if inner.size == 0:
            return value
        ends = prefixes[inner]
        segment = np.repeat(np.arange(inner.size), np.diff(ends, prepend=0))
        cell = segment * self.num_bins + self.bin[: ends[-1]]
        scaled = self.scaled[: ends[-1]]
        moments = np.empty((inner.size, self.num_bins, race.num_moments(self.n)))
        power = np.ones_like(scaled)
        for j in range(moments.shape[2]):
            power *= scaled
            total = np.bincount(cell, power, inner.size * self.num_bins).reshape(inner.size, -1)
            moments[:, :, j] = np.cumsum(total, axis=0)
        heads = self.heads[self.heads < ends[-1]]
        rates = np.where(heads < ends[:, None], self.q[heads], 0.0)
        rest = self.rest[ends]
        last = np.minimum(race.octave_of_rest(rest), self.last)
        value[inner] = 1.0 - race.miss(moments, rates, rest, last, self.first, self.n)
        return value

    def chord_bound(self, start: int, stop: int, inside: tuple[float, float]) -> tuple[float, int]:
        """(bound, prefix): no prefix strictly between has P - Q below the bound, which is reached if Q is on the chord."""
        if stop - start < 2:
            return np.inf, start
        mass = np.cumsum(self.q[start:stop])  # locally: differences of global sums would lose tiny tokens
        chord = inside[0] + (inside[1] - inside[0]) * (mass[:-1] / mass[-1])
        gap = self.target[start + 1 : stop] - chord
        at = int(gap.argmin())
        return float(gap[at]), start + 1 + at

    def least_gap(self, tolerance: float) -> tuple[float, float]:
        """(lower, upper) of min P(H) - Q(H), at most tolerance + 2 rounding apart."""
        inner = np.searchsorted(1.0 - self.rest, QUANTILES)
        new = np.unique(np.concatenate((inner, [0, self.n - 1, self.size]))).astype(np.int64)
        inside: dict[int, float] = {}
        bounds: dict[tuple[int, int], tuple[float, int]] = {}
        while True:
            inside.update(zip(new.tolist(), self.all_inside(new).tolist(), strict=True))
            points = sorted(inside)
            pairs = list(pairwise(points))
            bounds = {
                pair: bounds[pair] if pair in bounds else self.chord_bound(*pair, (inside[pair[0]], inside[pair[1]]))
                for pair in pairs
            }
            upper = min(float(self.target[i]) - inside[i] for i in points)
            open_bounds = [(bound, at) for bound, at in bounds.values() if bound < upper - tolerance]
            if not open_bounds:
                lower = min(upper, *(bound for bound, _ in bounds.values()))
                return lower - self.rounding, upper + self.rounding
            new = np.array(sorted(at for _, at in open_bounds), dtype=np.int64)
