"""Tests of samples from outside: two samples of short texts, and tokens against reported distributions.

Both give chi-square statistics. Cells are pooled until each expects at least ``EXPECTED`` counts in both samples, which
is what the chi-square approximation needs (Cochran 1954). ``found_deviation`` says what such a test finds.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

EXPECTED = 5.0
Outcome = tuple[str, ...]
"""The tokens of one sampled text, or the text alone."""


@dataclass(frozen=True)
class Statistic:
    """A chi-square statistic."""

    value: float
    dof: int
    count: int  # outcomes that were compared: of one sample where there are two

    def __add__(self, other: "Statistic") -> "Statistic":
        """Of independent parts."""
        return Statistic(self.value + other.value, self.dof + other.dof, self.count + other.count)

    @property
    def p_value(self) -> float:
        """Probability of a statistic at least as large where nothing is wrong; 1 without degrees of freedom."""
        return chi_square_tail(self.value, self.dof) if self.dof else 1.0


NONE = Statistic(0.0, 0, 0)


def chi_square_tail(value: float, dof: int) -> float:
    """P(X >= value) of a chi-square variable."""
    if value <= 0:
        return 1.0
    half = torch.tensor([dof / 2, value / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def noncentral_tail(value: float, dof: int, noncentrality: float) -> float:
    """P(X >= value) of a noncentral chi-square variable: the Poisson mixture of central ones."""
    mean = noncentrality / 2
    spread = 12 * math.sqrt(mean) + 30
    count = torch.arange(max(0, int(mean - spread)), int(mean + spread) + 1, dtype=torch.float64)
    weight = torch.exp(count * math.log(mean) - mean - torch.lgamma(count + 1)) if mean > 0 else (count == 0).double()
    tails = torch.special.gammaincc(dof / 2 + count, torch.full_like(count, value / 2))
    return float((weight * tails).sum())


def quantile(dof: int, alpha: float) -> float:
    """The value that a chi-square variable exceeds with probability alpha."""
    return _first(lambda value: chi_square_tail(value, dof) <= alpha, dof + 10.0)


@lru_cache(maxsize=256)
def needed_noncentrality(dof: int, alpha: float, power: float) -> float:
    """The noncentrality at which a test of size alpha has this power."""
    value = quantile(dof, alpha)
    return _first(lambda noncentrality: noncentral_tail(value, dof, noncentrality) >= power, 10.0)


def _first(holds: Callable[[float], bool], high: float) -> float:
    """The least positive number for which what holds from it on does, by bisection; high: a first guess."""
    low = 0.0
    while not holds(high):
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def found_deviation(dof: int, count: int, alpha: float, *, two_samples: bool, power: float = 0.95) -> float:
    """The total variation distance from which on a test finds any deviation of its cells with this power.

    By Cauchy and Schwarz the sum of d^2 / p is at least (sum of \\|d\\|)^2 = (2 TV)^2, so the noncentrality is at least
    4 TV^2 times the count, or times half of it with two samples of that size. Most deviations are found from less on.
    """
    if not dof or not count:
        return 1.0
    factor = 2.0 if two_samples else 4.0
    return min(1.0, math.sqrt(needed_noncentrality(dof, alpha, power) / (factor * count)))


# -- two samples ---------------------------------------------------------------------------------------------------


def two_samples(first: Mapping[str, int], second: Mapping[str, int]) -> Statistic:
    """Homogeneity of two tables of counts. Rare cells are pooled into one; that one into the rarest other where it too is
    rare."""
    sizes = sum(first.values()), sum(second.values())
    if not sizes[0] or not sizes[1]:
        return NONE
    smallest = EXPECTED * sum(sizes) / min(sizes)  # total of a cell that expects EXPECTED in the smaller sample
    cells: list[tuple[int, int]] = []
    rest = (0, 0)
    for key in sorted(first.keys() | second.keys()):
        cell = first.get(key, 0), second.get(key, 0)
        if sum(cell) >= smallest:
            cells.append(cell)
        else:
            rest = rest[0] + cell[0], rest[1] + cell[1]
    if sum(rest) >= smallest or not cells:
        cells.append(rest)
    elif sum(rest):
        at = min(range(len(cells)), key=lambda index: sum(cells[index]))
        cells[at] = cells[at][0] + rest[0], cells[at][1] + rest[1]
    if len(cells) < 2:
        return NONE
    share = sizes[0] / sum(sizes)
    value = sum((a - (a + b) * share) ** 2 / ((a + b) * share * (1 - share)) for a, b in cells)
    return Statistic(value, len(cells) - 1, min(sizes))


def along_prefixes(first: Sequence[Outcome], second: Sequence[Outcome]) -> Statistic:
    """The next token after every prefix that both samples have often enough, summed: parts are independent given how
    often each prefix occurred."""
    total = NONE
    depth = max((len(outcome) for outcome in (*first, *second)), default=0)
    for length in range(depth):
        tables: tuple[dict[Outcome, Counter[str]], dict[Outcome, Counter[str]]] = {}, {}
        for sample, table in zip((first, second), tables, strict=True):
            for outcome in sample:
                if len(outcome) >= length:
                    table.setdefault(outcome[:length], Counter())[_token(outcome, length)] += 1
        for prefix in sorted(tables[0].keys() & tables[1].keys()):
            part = two_samples(tables[0][prefix], tables[1][prefix])
            total = Statistic(total.value + part.value, total.dof + part.dof, len(first))
    return total


def at_position(first: Sequence[Outcome], second: Sequence[Outcome], position: int) -> Statistic:
    """The token at one position, whatever came before it."""
    return two_samples(*(Counter(_token(outcome, position) for outcome in sample) for sample in (first, second)))


def _token(outcome: Outcome, position: int) -> str:
    return outcome[position] if position < len(outcome) else "<end>"


def total_variation(first: Sequence[Outcome], second: Sequence[Outcome], position: int) -> float:
    """Half the L1 distance of two samples' shares at one position: an estimate, too high by sampling noise."""
    a, b = (Counter(_token(outcome, position) for outcome in sample) for sample in (first, second))
    return 0.5 * sum(abs(a[key] / len(first) - b[key] / len(second)) for key in a.keys() | b.keys())


# -- sampled tokens against reported distributions -----------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """A sampled token and the distribution that was reported for it."""

    probs: tuple[float, ...]  # of the likeliest tokens, descending, before temperature
    rank: int | None  # of the token that was drawn; None: not among them


CLASSES = ((0, 1), (1, 2), (2, 5), (5, 1000))
"""Ranks [begin, end) whose draws are counted together; what is not among the likeliest is one more class."""


def calibration(draws: Sequence[Draw], temperature: float) -> Statistic:
    """Draws by rank against the probabilities that the ranks have at this temperature.

    At temperature 1 the tokens that were not reported are a class too; elsewhere their mass is unknown, so draws are
    taken given that they are reported ones, which leaves the ratios exact. Sums of differences are a martingale, so they
    are normal in the limit though each draw depends on those before it.
    """
    whole = temperature == 1.0
    classes = len(CLASSES) + whole
    mean = torch.zeros(classes, dtype=torch.float64)
    seen = torch.zeros(classes, dtype=torch.float64)
    cov = torch.zeros(classes, classes, dtype=torch.float64)
    count = 0
    rows = []
    for draw in draws:
        if not whole and draw.rank is None:
            continue
        p = tempered(draw, temperature)
        row = [sum(p[begin:end]) for begin, end in CLASSES]
        if whole:
            row.append(max(0.0, 1.0 - sum(p)))
        rows.append(row)
        where = len(CLASSES) if draw.rank is None else _class(draw.rank)
        seen[where] += 1
        count += 1
    if not rows:
        return NONE
    probs = torch.tensor(rows, dtype=torch.float64)
    mean = probs.sum(0)
    cov = torch.diag(mean) - probs.T @ probs
    merge = _merged(mean, cov)
    difference, cov = merge @ (seen - mean), merge @ cov @ merge.T
    if len(difference) < 2:
        return NONE
    kept = difference[:-1]  # the last one follows from the others
    value = float(kept @ torch.linalg.solve(cov[:-1, :-1], kept))
    return Statistic(value, len(kept), count)


def tempered(draw: Draw, temperature: float) -> list[float]:
    """The reported probabilities at another temperature: at 1 as they are, elsewhere given that one of them is drawn."""
    if temperature == 1.0:
        return list(draw.probs)
    highest = draw.probs[0]
    weights = [(p / highest) ** (1 / temperature) if p > 0 else 0.0 for p in draw.probs]
    total = sum(weights)
    return [weight / total for weight in weights]


def fitted_temperature(draws: Sequence[Draw]) -> float | None:
    """The temperature that makes the draws most probable, given that each is one of the reported tokens; None where too
    few say anything."""
    used = [draw for draw in draws if draw.rank is not None and len(draw.probs) > 1 and min(draw.probs) > 0]
    if len(used) < 50:
        return None
    width = max(len(draw.probs) for draw in used)
    logs = torch.full((len(used), width), -math.inf, dtype=torch.float64)
    for row, draw in enumerate(used):
        logs[row, : len(draw.probs)] = torch.tensor(draw.probs, dtype=torch.float64).log()
    ranks = torch.tensor([draw.rank for draw in used])
    grid = torch.logspace(math.log10(0.1), math.log10(4.0), 120, dtype=torch.float64)
    likelihood = torch.stack([(logs / t).log_softmax(1).gather(1, ranks[:, None]).sum() for t in grid])
    return float(grid[int(likelihood.argmax())])


def _class(rank: int) -> int:
    return next(index for index, (begin, end) in enumerate(CLASSES) if begin <= rank < end)


def _merged(mean: torch.Tensor, cov: torch.Tensor) -> torch.Tensor:
    """[kept, classes] zeros and ones: classes joined with their neighbour until each varies enough to be normal."""
    groups = [[index] for index in range(len(mean))]

    def variance(group: list[int]) -> float:
        return float(cov[group][:, group].sum())

    while len(groups) > 1:
        weak = min(range(len(groups)), key=lambda index: variance(groups[index]))
        if variance(groups[weak]) >= EXPECTED:
            break
        other = weak - 1 if weak else 1
        groups[min(weak, other)] += groups[max(weak, other)]
        del groups[max(weak, other)]
    out = torch.zeros(len(groups), len(mean), dtype=mean.dtype)
    for row, group in enumerate(groups):
        out[row, group] = 1.0
    return out
