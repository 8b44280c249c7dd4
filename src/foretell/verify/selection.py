"""Choose one of n drafts first, then accept it as if it were the only one: ``importance`` and ``transport``.

n drafts are drawn from q independently. Whichever of them is chosen has a distribution of its own, p_I, and one-draft
rejection from p_I to p is exact for any way of choosing: accept x with min(1, p(x) / p_I(x)), else the next token has
the distribution (p - p_I)+. This form loses nothing (Khisti et al. 2410.18234): the aim is to bring p_I close to p. The
optimum is
known: alpha* = 1 + min over sets H of p(H) - q(H)^n (Hu et al. 2502.18779).

Both rules use only r = p / q of a token and work on levels of it: small tables in float64, whatever V is. Shapes: R
nodes, C children, V vocabulary, L levels.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from foretell.verify.multidraft import TINY, Fit, MultiDraft

NUM_LEVELS = 128
"""Of importance: weights are constant within a level, so that their distribution is known exactly."""

NUM_OWN = 64
"""Of transport: the tokens that are most probable under q have a level each."""

NUM_SHARED = 64
"""Of transport: all other tokens lie between two of these levels."""

STEP = 0.25
"""Of the trapezoidal rule in log s. The integrand is analytic for |Im log s| < pi / 2, so the error is about
exp(-pi^2 / STEP) = 7e-18."""


class Selection(MultiDraft):
    """A rule that chooses one draft and then accepts or rejects it. Subclasses know the distribution of the chosen one."""

    @abstractmethod
    def distribution_of_choice(self, fit: Fit, p: Tensor, q: Tensor) -> Tensor:
        """[R, V] in the wider of the two dtypes: p_I, the distribution of the chosen draft."""

    @abstractmethod
    def choices(self, fit: Fit, p: Tensor, q: Tensor, tokens: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        """[R, C] float64 twice: the probability that each draft is chosen (zero where inside [R, C] is False), and p_I
        at its token. p, q [R, C] are taken at tokens, in the dtype of the distributions: a token must get the same
        level."""

    def choose(self, fit: Fit, p: Tensor, q: Tensor, tokens: Tensor, count: Tensor) -> Tensor:
        """Chosen, and then accepted with min(1, p / p_I)."""
        inside = torch.arange(tokens.shape[1], device=p.device) < count[:, None]
        p, q = p.gather(1, tokens), q.gather(1, tokens)
        chosen, probs = self.choices(fit, p, q, tokens, inside)
        return chosen * (p.double() / probs.clamp(min=TINY)).clamp_(max=1.0)

    def rest(self, fit: Fit, p: Tensor, q: Tensor, count: Tensor) -> Tensor:
        """(p - p_I)+."""
        return (p - self.distribution_of_choice(fit, p, q)).clamp(min=0.0)


@dataclass(frozen=True)
class Importance(Selection):
    """Choose draft i with probability w_i / sum of w_j, where w grows with p / q (Khisti et al. 2410.18234).

    A draft of weight w beside n - 1 of weight 1 is chosen with w / (w + n - 1), so p_I / q is about n w / (w + n - 1): to
    make that r = p / q, w = (n - 1) r / (n - r). Scaled, w = x / (1 - x) with x = r / n below 1, constant within levels.
    Over Zipf-like distributions (V = 300, 8192; five noises and temperatures) the mean distance from the optimum is
    0.5, 0.6 and 0.8 points of acceptance with 2, 4 and 8 drafts; with the best power of r for each (3, 1.5, 1.25) it is
    0.9, 2.0 and 2.5.
    """

    name = "importance"
    summary = "choose one of several drafts by a weight that grows with p / q, then accept it as the only one"

    def fit(self, p: Tensor, q: Tensor, count: Tensor) -> Fit:
        """(n, total of q, density): p_I = q / total * density of the token's level.

        The n drafts race, x arriving after a time ~ Exp(w_x): p_I(x) = n q_x w_x int exp(-s w_x) phi(s)^(n-1) ds with
        phi(s) = sum_y q_y exp(-s w_y), in log s by the trapezoidal rule.
        """
        n = count.double()[:, None]
        mass = torch.zeros(p.shape[0], NUM_LEVELS, dtype=torch.float64, device=p.device)
        mass.scatter_add_(1, level_of(p, q, n), q.double())
        total = mass.sum(-1, keepdim=True)
        _, survival, arrival = race_table(p.device)
        others = ((mass / total) @ survival).pow(n - 1.0)  # [R, S]
        return n, total, n * (others @ arrival.T)

    def distribution_of_choice(self, fit: Fit, p: Tensor, q: Tensor) -> Tensor:
        """By level."""
        n, total, density = fit
        return q * (density / total).to(p.dtype).gather(1, level_of(p, q, n))

    def choices(self, fit: Fit, p: Tensor, q: Tensor, tokens: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        """In proportion to the weights."""
        n, total, density = fit
        level = level_of(p, q, n)
        weight = torch.where(inside, race_table(p.device)[0][level], 0.0)
        return weight / weight.sum(-1, keepdim=True), q.double() * (density / total).gather(1, level)


def level_of(p: Tensor, q: Tensor, n: Tensor) -> Tensor:
    """Int64, of p's shape: levels of equal width in the root of x = p / (n q). n [R, 1]. Every operation is correctly
    rounded, so that a token has the same level in any batch."""
    scaled = q * n.to(q.dtype)
    root = (p / torch.where(scaled > 0, scaled, 1.0)).clamp_(max=1.0).sqrt_()
    return (root * NUM_LEVELS).long().clamp_(0, NUM_LEVELS - 1)


@lru_cache(maxsize=8)
def race_table(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [L], survival [L, S] = exp(-s w), arrival [L, S] = STEP s w exp(-s w)), float64."""
    x = ((torch.arange(NUM_LEVELS, dtype=torch.float64) + 0.5) / NUM_LEVELS) ** 2
    weights = x / (1.0 - x)
    first, last = -37.0 - math.log(float(weights.max())), 4.0 - math.log(float(weights.min()))
    s = torch.arange(first, last, STEP, dtype=torch.float64).exp()
    hazard = weights[:, None] * s
    survival = (-hazard).exp()
    return weights.to(device), survival.to(device), (STEP * hazard * survival).to(device)


@dataclass(frozen=True)
class Transport(Selection):
    """Choose the draft of the lowest rank, ranks being drawn so that p_I meets p as far as any rule can.

    Each draft x gets a rank t in [0, 1], from a distribution K(x, dt) with sum_x q(x) K(x, dt) = dt: the ranks of n
    drafts are then independent and uniform, the lowest has the density g(t) = n (1 - t)^(n-1), and p_I(x) = q(x) int
    K(x, dt) g(t). Start from the order of r = p / q, descending: level l holds an interval of ranks, and its mean of g
    is what p_I / q is there. Where that is above r (too much), it can be exchanged for later ranks, where it is below r
    (too little): each excess is matched with the first shortages after it, and the two levels exchange ranks in the
    proportion that balances both. A shortage that finds no excess before it is left: these sum to 1 - alpha*, the
    optimum. That the exchanged shares never exceed a level follows from r falling: for y before z, g_y > r_y >= r_z > g_z.
    """

    name = "transport"
    summary = "choose one of several drafts so that acceptance is the highest any rule can have"

    def fit(self, p: Tensor, q: Tensor, count: Tensor) -> Fit:
        """(n [R, 1], total of q [R, 1], own tokens [R, K], order, density, mass, mean, start, end).

        order [R, L] is where a level stands when they are sorted by falling r; density [R, L], unsorted, is p_I / q.
        The others are sorted: mass of q, mean of g, and start, end [R, 2, L] of each level's step in two running sums,
        the excess and the shortage, matched in order.
        """
        n = count.double()[:, None]
        num_own = min(NUM_OWN, p.shape[1])
        heavy, own = q.topk(num_own, dim=1, sorted=False)  # [R, K]
        mass = heavy.double()
        ratio = torch.minimum(p.gather(1, own).double() / mass.clamp(min=TINY), n)
        if num_own < p.shape[1]:
            low, share = between(p, q, n)
            light = q.scatter(1, own, 0.0)
            upper = light.double() * share
            shared = torch.zeros(p.shape[0], NUM_SHARED, dtype=torch.float64, device=p.device)
            shared.scatter_add_(1, low, light - upper).scatter_add_(1, low + 1, upper)
            mass, ratio = torch.cat([shared, mass], 1), torch.cat([shared_ratio(n), ratio], 1)
        total = mass.sum(-1, keepdim=True)
        ratio, sorted_levels = ratio.sort(1, descending=True)
        mass = (mass / total).gather(1, sorted_levels)
        order = torch.argsort(sorted_levels, 1)
        # 1 - t at the start of each interval, and at the end of the last: summed from there, so that it is small exactly.
        after = torch.nn.functional.pad(mass.flip(1).cumsum(1).flip(1), (0, 1))
        power = (after / after[:, :1]).pow(n)
        per_mass = 1.0 / mass.clamp(min=TINY)
        mean = (power[:, :-1] - power[:, 1:]) * per_mass  # [R, L] of g over each interval
        short = mass * (ratio - mean)
        end = torch.stack([(-short).clamp(min=0.0), short.clamp(min=0.0)], 1).cumsum(-1)  # [R, 2, L]
        # What is still short at a level's end for want of excess before it: the running maximum of the difference.
        end[:, 1] -= (end[:, 1] - end[:, 0]).cummax(1).values.clamp(min=0.0)
        start = torch.nn.functional.pad(end[..., :-1], (1, 0))
        decided = (torch.minimum(end, end[:, 1:, -1:]) - torch.minimum(start, end[:, 1:, -1:])).clamp(min=0.0)
        density = torch.minimum((mean + (decided[:, 1] - decided[:, 0]) * per_mass).clamp(min=0.0), n)
        return n, total, own, order, density.gather(1, order), mass, mean, start, end

    def distribution_of_choice(self, fit: Fit, p: Tensor, q: Tensor) -> Tensor:
        """Q times the density between two levels, or of a token's own."""
        n, total, own, _, density = fit[:5]
        density = (density / total).to(torch.promote_types(p.dtype, q.dtype))
        num_own = own.shape[1]
        if num_own == p.shape[1]:
            return q * torch.empty_like(density).scatter_(1, own, density)
        low, share = between(p, q, n)
        factor = torch.lerp(density.gather(1, low), density.gather(1, low + 1), share)
        return q * factor.scatter_(1, own, density[:, -num_own:])

    def choices(self, fit: Fit, p: Tensor, q: Tensor, tokens: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        """The chance of each draft to have the lowest rank: on each interval a polynomial of degree below C."""
        n, total, own, order, density = fit[:5]
        num_shared = order.shape[1] - own.shape[1]
        hit = tokens[:, :, None] == own[:, None, :]  # [R, C, K]
        low = hit.long().argmax(-1) + num_shared
        if num_shared == 0:
            ranks = self.ranks(fit, order.gather(1, low))  # [R, C, L]
            probs = density.gather(1, low)
        else:
            is_own, (node, share) = hit.any(-1), between(p, q, n)
            levels = torch.cat([torch.where(is_own, low, node), torch.where(is_own, low, node + 1)], 1)  # [R, 2 C]
            share, width = share.double(), tokens.shape[1]
            ranks = self.ranks(fit, order.gather(1, levels))
            ranks = torch.lerp(ranks[:, :width], ranks[:, width:], share[:, :, None])
            probs = density.gather(1, levels)
            probs = torch.lerp(probs[:, :width], probs[:, width:], share)
        ranks = ranks * inside[:, :, None]
        points, weights = gauss(tokens.shape[1], p.device)
        # P(rank is after a point of an interval): without a rank (after the run) it is 1.
        behind = (1.0 - ranks.cumsum(-1) + ranks)[..., None] - ranks[..., None] * points  # [R, C, L, G]
        one = torch.ones_like(behind[:, :1])
        before = torch.cat([one, behind[:, :-1]], 1).cumprod(1)
        later = torch.cat([one, behind[:, 1:].flip(1)], 1).cumprod(1).flip(1)
        return (ranks * ((before * later) @ weights)).sum(-1), q.double() * probs / total

    def ranks(self, fit: Fit, at: Tensor) -> Tensor:
        """[R, C, L]: the distribution of the rank, by intervals, of tokens in the level at [R, C] (in order of falling
        r)."""
        mass, mean, start, end = fit[5:]
        here = at[:, None].expand(-1, 2, -1)
        common = torch.minimum(end.gather(2, here)[..., None], end.flip(1)[:, :, None]) - torch.maximum(
            start.gather(2, here)[..., None], start.flip(1)[:, :, None]
        )  # [R, 2, C, L] amounts that a level exchanges with each other one
        weight = (mean.gather(1, at)[:, :, None] - mean[:, None]).abs() * mass.gather(1, at)[:, :, None]
        moved = common.clamp_(min=0.0).sum(1) / weight.clamp(min=TINY)
        moved = moved / moved.sum(-1, keepdim=True).clamp(min=1.0)
        return moved.scatter_add(2, at[:, :, None], 1.0 - moved.sum(-1, keepdim=True))


def shared_ratio(n: Tensor) -> Tensor:
    """[R, NUM_SHARED] float64: r from 0 to n in equal steps of y. No level needs to be above n, the most that p_I / q
    can be."""
    y = torch.linspace(0.0, 1.0, NUM_SHARED, dtype=torch.float64, device=n.device) * (n / (n + 1.0))
    return y / (1.0 - y)


def between(p: Tensor, q: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """(low int64, share) of p's shape: tokens lie in level low + 1 with probability share, else in low, so that the mean
    of r is their own. A function without jumps: rounding cannot make two readings of a token disagree."""
    steps = NUM_SHARED - 1
    top = (n / (n + 1.0)).to(p.dtype)  # [R, 1] y at the highest level
    y = torch.minimum(p / (p + q).clamp_(min=TINY), top)
    low = (y * (steps / top)).floor_().clamp_(max=steps - 1)
    from_low, to_high = y * (steps / top) - low, (low + 1.0) * (top / steps)
    return low.long(), (from_low * ((1.0 - to_high) / (1.0 - y))).clamp_(0.0, 1.0)


@lru_cache(maxsize=64)
def gauss(num_drafts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Points and weights [G] on [0, 1], exact for polynomials of degree num_drafts - 1."""
    points, weights = np.polynomial.legendre.leggauss((num_drafts + 1) // 2)
    return torch.tensor(0.5 + 0.5 * points, device=device), torch.tensor(0.5 * weights, device=device)
