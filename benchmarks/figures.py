"""Means with intervals, as tables have them."""

import math
import statistics
from collections.abc import Sequence

T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Two-sided 95 % quantiles of Student's t for 1 to 9 degrees of freedom."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of a t interval of the mean; the value itself of one."""
    count = len(values)
    if count < 2:
        return values[0], values[0]
    half = (T_95[count - 2] if count - 2 < len(T_95) else 2.0) * statistics.stdev(values) / math.sqrt(count)
    mean = statistics.mean(values)
    return mean - half, mean + half


def said(values: Sequence[float]) -> str:
    """The mean, and the interval where there are several."""
    low, high = interval(values)
    return f"{statistics.mean(values):.3f}" + (f" ({low:.3f} to {high:.3f})" if len(values) > 1 else "")
