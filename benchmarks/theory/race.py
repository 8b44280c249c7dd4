"""Exponential races: the chance that fewer than n tokens arrive before the rest.

Token x arrives at an exponential time of rate a_x; the rest of the field, at rate b. Drawing without replacement from
the distribution (a, b) is the order of arrivals, so what is computed here,

    miss = Pr[fewer than n tokens arrive before the rest] = integral over t of b e^{-bt} Pr[N(t) < n],

is 1 - Pr[n draws without replacement all are tokens]. N(t) is a sum of independent coins with chance 1 - e^{-a_x t}.
Rates are scaled to sum(a) + b = 1, which changes nothing.

*Integral.* Trapezoid in log t with step h = log(2) / 5. For t turned by an angle w in the complex plane each coin's
generating function is at most 1 on the circle |z| = cos w, so |Pr[N < n]| <= sum of cos(w)^-k, k < n, and the error of
the trapezoid is at most 2 sum over k < n of cos(w)^(-k-1) / (e^(2 pi w / h) - 1) for every w < pi / 2: with w = 1.25
below 1e-15 for every n <= 16.

*Many tokens.* Octave l of t is (2^(l-1), 2^l]. There the tokens with a_x < 2^-l / 4 (the tail) enter through the power
sums of e^(a_x t) - 1, hence through moments of their rates, by Newton's identities; the others (the heads) one at a
time, by a recursion of positive terms. Octaves end where e^{-bt} Pr[N(t) < n] is below 1e-17 for certain, and until
then a few hundred tokens at most are heads, whatever the vocabulary.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

NODES_PER_OCTAVE = 5
DELTA = 0.25  # tail: rate * time < DELTA
TINY = 1e-17  # what is left out


def first_octave(n: int) -> int:
    """Up to t = 2^first_octave, N(t) >= n has a chance below TINY: it is at most t^n / n!. No rate is a head there."""
    return min(-4, math.floor(math.log2(TINY * math.factorial(n)) / n))


@lru_cache
def enough_arrivals(n: int) -> float:
    """A with e^{-A} (e A / (n - 1))^(n - 1) <= TINY: Chernoff's bound of e^{-bt} Pr[N(t) < n] where A arrivals, those
    of the rest counted as bt, are expected by time t."""
    arrivals = float(max(n - 1, 1))
    while -arrivals + (n - 1) * (1 + math.log(arrivals / max(n - 1, 1))) > math.log(TINY):
        arrivals += 1.0
    return arrivals


def octaves(rates: Array) -> tuple[Array, Integers]:
    """(scaled, octave), shaped like rates: rate = scaled * DELTA / 2^octave, scaled in [1/2, 1), or 0 with rate 0.

    A token is in the tail of octave l iff its own octave is at least l.
    """
    scaled, exponent = np.frexp(rates / DELTA)
    return scaled, -exponent.astype(np.int64)


def octave_of_rest(rest: Array) -> Integers:
    """The octave after which e^{-bt} is below TINY, for rates b > 0 of the rest."""
    return np.ceil(math.log2(-math.log(TINY)) - np.log2(rest)).astype(np.int64)


def octave_of_arrivals(count: Array, rest: Array, first: int, n: int) -> Integers:
    """[E] the octave after which enough_arrivals are expected, or first + B where they never are.

    count [E, B]: how many tokens have the octaves first + 1 .. first + B (smaller rates in the last, which is not
    counted); rest [E] is the rate of what else arrives.
    """
    num_bins = count.shape[1]
    last = np.full(len(count), first + num_bins)
    bins = np.arange(1, num_bins)
    for level in range(1, num_bins):
        arrivals = -np.expm1(-(DELTA / 2) * np.exp2(np.minimum(level - bins, 60.0)))  # of the octave's least rate
        done = count[:, :-1] @ arrivals + rest * 2.0 ** (first + level) >= enough_arrivals(n)
        last = np.where(done, np.minimum(last, first + level), last)
        if done.all():
            break
    return last


def num_moments(n: int) -> int:
    """Moments of the tail's rates that are kept: the truncated part of the power sums is below 1e-16."""
    return n + 12


@lru_cache
def _power_sum_table(n: int) -> Array:
    """[J, 5, n - 1]: power sum k = 1 .. n - 1 of e^y - 1 at each node of an octave, from the scaled moments j = 1 .. J:
    (e^y - 1)^k = sum over j of k! S(j, k) y^j / j!, S the Stirling numbers of the second kind."""
    num = num_moments(n)
    stirling = np.zeros((num + 1, n + 1))
    stirling[0, 0] = 1.0
    for j in range(1, num + 1):
        for k in range(1, n + 1):
            stirling[j, k] = k * stirling[j - 1, k] + stirling[j - 1, k - 1]
    table = np.zeros((num, NODES_PER_OCTAVE, n - 1))
    for j in range(1, num + 1):
        for i in range(NODES_PER_OCTAVE):
            y = DELTA * 2.0 ** ((i + 1) / NODES_PER_OCTAVE - 1)
            for k in range(1, n):
                table[j - 1, i, k - 1] = math.factorial(k) * stirling[j, k] * y**j / math.factorial(j)
    return table


def _tail_distribution(moments: Array, n: int) -> Array:
    """[n, E, L * 5] chances that k < n tail tokens have arrived, from the tail's scaled moments [E, L, J] an octave."""
    num_rows, num_levels, num = moments.shape
    power = moments.reshape(-1, num) @ _power_sum_table(n).reshape(num, -1)
    power = power.reshape(num_rows, num_levels * NODES_PER_OCTAVE, n - 1)
    step = DELTA * np.exp2(np.arange(1, NODES_PER_OCTAVE + 1) / NODES_PER_OCTAVE - 1)
    probs = np.empty((n, num_rows, num_levels * NODES_PER_OCTAVE))
    probs[0] = np.exp(-(moments[:, :, :1] * step).reshape(num_rows, -1))
    for k in range(1, n):
        probs[k] = sum((-1) ** (i - 1) * probs[k - i] * power[..., i - 1] for i in range(1, k + 1)) / k
    return probs


def miss(moments: Array, heads: Array, rest: Array, last: Integers, first: int, n: int) -> Array:
    """[E] the chance that fewer than n tokens arrive before the rest, rates and rest summing to 1.

    moments [E, B, J]: sums of scaled^j over the tokens of each octave first + 1 .. first + B; tokens of later octaves are
    in the last, scaled to it. heads [E, M]: every rate that is a head in some octave up to last, any order, 0 where there
    is none. rest [E] > 0. last [E]: the octave at which each evaluation may end, at most first + B.
    """
    _, num_levels, num = moments.shape
    tail = moments.copy()
    shrink = np.exp2(-np.arange(1.0, num + 1))
    for level in range(num_levels - 2, -1, -1):
        tail[:, level] += shrink * tail[:, level + 1]
    probs = _tail_distribution(tail, n)
    exponent = first + np.arange(1, num_levels * NODES_PER_OCTAVE + 1) / NODES_PER_OCTAVE
    time = np.exp2(exponent)  # [X]
    level_of = first + 1 + np.arange(time.size) // NODES_PER_OCTAVE  # [X]
    least = DELTA / np.exp2(level_of)  # [X] the least rate that is a head
    for m in range(heads.shape[1]):
        rate = heads[:, m : m + 1]
        start = int(np.searchsorted(-least, -rate.max()))  # before it the token is in every tail
        arrived = np.where(rate >= least[start:], -np.expm1(-rate * time[start:]), 0.0)  # [E, X']
        part = probs[:, :, start:]
        gain = part[:-1] * arrived
        part *= 1.0 - arrived
        part[1:] += gain
    fewer = np.where(level_of <= last[:, None], probs.sum(0), 0.0)  # [E, X]
    early = np.exp2(first - np.arange(60 * NODES_PER_OCTAVE) / NODES_PER_OCTAVE)
    density = rest[:, None] * np.concatenate((early, time))
    density *= np.exp(-density) * (math.log(2.0) / NODES_PER_OCTAVE)
    total: Array = density[:, : early.size].sum(1) + (density[:, early.size :] * fewer).sum(1)
    return total
