"""The arithmetic of the figures: pure functions of numbers, without models or clocks."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

LOOP_NGRAM, LOOP_TIMES = 16, 3
FEW = 5


def first_loop(token_ids: Sequence[int], *, ngram: int = LOOP_NGRAM, times: int = LOOP_TIMES) -> int | None:
    """Where a text begins to loop: the number of tokens before it does, or None.

    A text loops once some n-gram was seen ``times`` times (occurrences may overlap); the loop begins where the second
    occurrence of the first such n-gram begins. Looping text is easy to guess and would inflate every method's figures.
    """
    starts: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(token_ids) - ngram + 1):
        seen = starts.setdefault(tuple(token_ids[start : start + ngram]), [])
        seen.append(start)
        if len(seen) == times:
            return seen[1]
    return None


def median(values: Iterable[float]) -> float | None:
    """The median; None of nothing."""
    known = list(values)
    return statistics.median(known) if known else None


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """numerator / denominator; None where there is none."""
    return numerator / denominator if numerator is not None and denominator else None


def conditional_rates(steps: Iterable[tuple[int, int]]) -> list[float]:
    """Per-position acceptance, conditional on the position before it, from (guessed, accepted) of each step.

    Entry k is the share of steps that accepted guess k + 1 among those that made it and accepted all k before it.
    """
    reached: list[int] = []
    passed: list[int] = []
    for guessed, accepted in steps:
        while len(reached) < guessed:
            reached.append(0)
            passed.append(0)
        for position in range(min(accepted + 1, guessed)):
            reached[position] += 1
            passed[position] += position < accepted
    return [hit / all_ for hit, all_ in zip(passed, reached, strict=True) if all_]


@dataclass(frozen=True)
class PairedRuns:
    """One prompt decoded both ways."""

    plain_tokens: int
    plain_seconds: float
    tokens: int
    seconds: float

    def __add__(self, other: "PairedRuns") -> "PairedRuns":
        """Both together."""
        return PairedRuns(
            self.plain_tokens + other.plain_tokens,
            self.plain_seconds + other.plain_seconds,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def is_point(self) -> bool:
        """Whether nothing is known of its spread: a figure of one prompt. It then decides nothing."""
        return self.low == self.high

    def __str__(self) -> str:
        bounds = "" if self.is_point else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.2f}{bounds}"


def best_of(found: Interval, count: int, prompts: int, level: float = 0.95) -> Interval:
    """The interval of a speedup that was the largest of ``count``, each measured on so many prompts (those that follow each
    other in a conversation are one): wide enough for all of
    them together to hold the truth as often as one would alone (Bonferroni). Of eight methods that are as fast as plain
    decoding the best one's own interval is above 1 in 18 of 100 runs with five prompts and in 9 with ten; this one in 2.
    """
    if found.is_point or count < 2 or prompts < 2 or not 0 < found.low <= found.value:
        return found
    wider = student(prompts - 1, 1 - (1 - level) / count) / student(prompts - 1, level)
    low, high = ((bound / found.value) ** wider * found.value for bound in (found.low, found.high))
    return Interval(found.value, low, high)


def speedup(pairs: Sequence[PairedRuns]) -> float:
    """Tokens per second of the method over those of plain decoding, each summed over prompts first.

    Where both sides emit the same tokens this is the ratio of the summed times.
    """
    tokens, seconds = sum(pair.tokens for pair in pairs), sum(pair.seconds for pair in pairs)
    plain_tokens, plain_seconds = sum(pair.plain_tokens for pair in pairs), sum(pair.plain_seconds for pair in pairs)
    if not seconds or not plain_tokens:
        return math.nan
    return (tokens / seconds) * (plain_seconds / plain_tokens)


def bootstrap(pairs: Sequence[PairedRuns], *, seed: int = 0, resamples: int = 2000, level: float = 0.95) -> Interval:
    """The speedup with a bootstrap interval: whole prompts are drawn anew, both sides of each together (``tails``).

    It shows how the figure varies with other prompts of the same kind, not with another machine. With fewer than two
    prompts it is the value alone (``Interval.is_point``).
    """
    value = speedup(pairs)
    if len(pairs) < 2:
        return Interval(value, value, value)
    return interval_of(value, _resampled(pairs, _generator(seed), resamples), len(pairs), level)


def interval_of(
    value: float, resampled: Sequence[float] | np.ndarray[Any, Any], count: int, level: float = 0.95
) -> Interval:
    """The interval of a speedup whose values for ``count`` texts drawn anew are these.

    From FEW texts on their quantiles (``tails``). No quantile is beyond the texts that there are, so of two the interval
    would be their two speeds, and one pair in two leaves the truth outside: for fewer, Student's t of the logarithms,
    which are spread by what drawing anew lacks (Rao and Wu 1988)."""
    values = np.asarray(resampled, dtype=np.float64)
    if count >= FEW or not (values > 0).all() or not value > 0:
        low, high = np.quantile(values, tails(count, level))
        return Interval(value, float(low), float(high))
    spread = float(np.log(values).std()) * math.sqrt(count / (count - 1)) * student(count - 1, level)
    return Interval(value, value * math.exp(-spread), value * math.exp(min(spread, 700.0)))


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed & (1 << 64) - 1)  # it takes no negative one


def tails(count: int, level: float = 0.95) -> tuple[float, float]:
    """Which quantiles of ``count`` prompts drawn anew bound an interval of this level: those of the plain percentile
    interval for many prompts, further out for few, where it is too narrow: of five it holds the truth 82 times in 100
    (Hesterberg 2015, "What teachers should know about the bootstrap": the expanded percentile interval). One prompt
    has no spread to widen."""
    if count < 2:
        return (1 - level) / 2, (1 + level) / 2
    tail = NormalDist().cdf(-student(count - 1, level) * math.sqrt(count / (count - 1)))
    return tail, 1.0 - tail


def student(freedom: float, level: float = 0.95) -> float:
    """What Student's t lies within, on both sides, with this probability."""
    return math.sqrt(f_quantile(level, 1, freedom))


def _resampled(pairs: Sequence[PairedRuns], generator: np.random.Generator, resamples: int) -> np.ndarray[Any, Any]:
    """The speedup of every resample. [resamples], float64."""
    table = np.array([[p.tokens, p.seconds, p.plain_tokens, p.plain_seconds] for p in pairs], dtype=np.float64)
    drawn = generator.integers(len(pairs), size=(resamples, len(pairs)))
    tokens, seconds, plain_tokens, plain_seconds = table[drawn].sum(1).T
    values: np.ndarray[Any, Any] = (tokens / seconds) * (plain_seconds / plain_tokens)
    return values


def macro(
    groups: Sequence[Sequence[PairedRuns]], *, seed: int = 0, resamples: int = 2000, level: float = 0.95
) -> Interval:
    """The mean of the groups' speedups, each counting alike, with an interval: prompts are drawn anew within each group.
    Groups without prompts are left out; NaN where there is none. With a group of one prompt it is the value alone.

    Drawing n prompts of n anew spreads less than n other ones would, by n / (n - 1) in variance, and with many small
    groups nothing makes up for it (six of two prompts: the truth was held 63 times in 100). So each group's values are
    spread by that (Rao and Wu 1988), as logarithms, and Student's t has Satterthwaite's degrees of freedom.
    """
    kept = [group for group in groups if group]
    value = sum(map(speedup, kept)) / len(kept) if kept else math.nan
    if not kept or any(len(group) < 2 for group in kept):
        return Interval(value, value, value)
    generator, total = _generator(seed), np.zeros(resamples)
    whole = parts = 0.0
    for group in kept:
        center, freedom = speedup(group), len(group) - 1
        values = center * (_resampled(group, generator, resamples) / center) ** math.sqrt(len(group) / freedom)
        total += values
        variance = float(values.var())
        whole, parts = whole + variance, parts + variance * variance / freedom
    tail = NormalDist().cdf(-student(whole * whole / parts, level)) if parts else (1 - level) / 2
    low, high = np.quantile(total / len(kept), [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def wilson(hits: int, count: int, *, z: float = 1.959963984540054) -> Interval:
    """A share and its 95 % interval (Wilson 1927). NaN, between 0 and 1, of nothing."""
    if not count:
        return Interval(math.nan, 0.0, 1.0)
    share = hits / count
    middle, scale = share + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return Interval(share, max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


def mcnemar(one: int, other: int) -> float:
    """Two-sided p-value of discordant pairs, ``one`` on one side and ``other`` on the other, if each side were as likely
    (McNemar 1947, exact: binomial with 1/2). 1 without any."""
    count, few = one + other, min(one, other)
    tail: int = sum(math.comb(count, k) for k in range(few + 1))
    return min(1.0, 2 * tail / (1 << count))


def f_quantile(share: float, d1: float, d2: float) -> float:
    """Where Fisher's F distribution with d1 and d2 degrees of freedom has this share below; by bisection."""
    low, high = 0.0, 1.0  # of x = d1 F / (d1 F + d2), which has a beta distribution
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _beta(middle, d1 / 2, d2 / 2) < share else (low, middle)
    x = (low + high) / 2
    return d2 * x / (d1 * (1 - x))


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _beta(1 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    tiny, c = 1e-300, 1.0
    d = 1 / (1 - (a + b) * x / (a + 1) or tiny)
    total = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            total *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return front * total
