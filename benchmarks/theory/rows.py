"""Result types of inexact acceptances, and checks of what is asked for."""

from typing import NamedTuple

from torch import Tensor

from foretell.core.errors import ConfigError

MAX_DRAFTS = 16


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
