"""Rows of distributions: the input checks of every function of this package, and the result types of inexact ones.

p is the target's distribution, q the draft's: never swapped. Both are [R, V], any floating type, rows summing to 1; all
that follows is float64. Rows are rescaled to sum to 1 in float64, since float32 distributions miss it by 1e-6.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from foretell.core.errors import ConfigError

MAX_DRAFTS = 16
LEAST_MASS = 1e-200
SUM_TOLERANCE = 1e-3


class Bounds(NamedTuple):
    """An interval that holds the true value of each row."""

    lower: Tensor  # [R] float64
    upper: Tensor  # [R] float64

    @property
    def middle(self) -> Tensor:
        """[R] float64: the middle of the interval."""
        return (self.lower + self.upper) / 2


class Estimate(NamedTuple):
    """An unbiased estimate of each row; standard error 0 where the value is exact."""

    mean: Tensor  # [R] float64
    standard_error: Tensor  # [R] float64


def check_distributions(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """p and q [R, V] as float64 rows that sum to 1. Raises ConfigError where they are no probabilities."""
    if p.dim() != 2 or p.shape != q.shape or p.shape[-1] == 0:
        raise ConfigError(
            f"p and q are rows of distributions of one shape [R, V]; given {list(p.shape)} and {list(q.shape)}"
        )
    distributions = []
    for name, probs in (("p", p), ("q", q)):
        if not probs.is_floating_point():
            raise ConfigError(f"{name} is a distribution in floating point; given {probs.dtype}")
        probs = probs.detach().double()
        if not bool(torch.isfinite(probs).all()) or bool((probs < 0).any()):
            raise ConfigError(f"{name} is a distribution: finite and not negative; given a row with {_worst(probs)}")
        total = probs.sum(-1, keepdim=True)
        if bool(((total - 1.0).abs() > SUM_TOLERANCE).any()):
            raise ConfigError(
                f"the rows of {name} sum to 1; given sums from {float(total.min())} to {float(total.max())}"
            )
        probs = torch.where(probs >= LEAST_MASS, probs, 0.0)
        distributions.append(probs / total)
    return distributions[0], distributions[1]


def check_num_drafts(num_drafts: int) -> int:
    """num_drafts itself. Raises ConfigError outside [1, MAX_DRAFTS]."""
    if not 1 <= num_drafts <= MAX_DRAFTS:
        raise ConfigError(f"num_drafts is from 1 to {MAX_DRAFTS}; given {num_drafts}")
    return num_drafts


def check_tolerance(tolerance: float) -> float:
    """tolerance itself. Raises ConfigError where it is negative or NaN."""
    if not tolerance >= 0.0:
        raise ConfigError(f"tolerance is the width of an interval, not negative; given {tolerance}")
    return tolerance


def by_ratio(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Checked p and q [R, V] with the tokens of each row sorted by p / q ascending; q = 0 last."""
    ratio = torch.where(q > 0, p / torch.where(q > 0, q, 1.0), torch.inf)  # p = q = 0 counts as inf: it has no weight
    order = ratio.argsort(-1)
    return p.gather(1, order), q.gather(1, order)


def _worst(probs: Tensor) -> str:
    return "NaN or infinity" if not bool(torch.isfinite(probs).all()) else f"a minimum of {float(probs.min())}"
