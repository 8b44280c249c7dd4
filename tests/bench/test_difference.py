"""The paired difference of two mean acceptance lengths, on planted reports."""

from typing import Any

import numpy as np
import pytest
from benchmarks.difference import difference, lengths, tables


def report(accepted: dict[str, list[int]], *, steps: int = 10) -> dict[str, Any]:
    """Prompts of two categories in turn, each decoded in ten steps; all at temperature 0."""
    return {
        "prompts": [
            {"temperature": 0.0, "method": method, "question_id": index, "category": "ab"[index % 2], "num_steps": steps,
             "num_accepted_tokens": count}
            for method, counts in accepted.items()
            for index, count in enumerate(counts)
        ]
    }  # fmt: skip


def test_prompts_are_paired_and_summed() -> None:
    found = list(tables(report({"none": [0] * 4, "x": [10, 20, 30, 40], "y": [15, 25, 35]}), "x", "y"))
    assert [(temperature, category, len(table)) for temperature, category, table in found] == [
        (0.0, "all", 3), (0.0, "a", 2), (0.0, "b", 1)
    ]  # fmt: skip
    x, y = lengths(found[0][2])
    assert (x, y) == (1 + 60 / 30, 1 + 75 / 30)
    # Every prompt gains half a token a step: prompts differ widely, and the difference has no spread.
    assert difference(found[0][2]) == pytest.approx((0.5, 0.5, 0.5))


def test_the_interval_holds_the_truth() -> None:
    """Of 100 intervals of 95 % (a little fewer, by bootstrap of 40 prompts), fewer than 84 hold the truth once in 10^4."""
    random = np.random.default_rng(0)
    hits = wrong = 0
    for _ in range(100):
        base = random.integers(0, 50, 40)
        table = np.stack([np.full(40, 10), base, np.full(40, 10), base + random.normal(2.0, 5.0, 40)], 1)
        _, low, high = difference(table, resamples=1000)
        hits += low <= 0.2 <= high
        wrong += low <= 0.5 <= high  # negative control: not the truth
    assert hits >= 84
    assert wrong < 30
