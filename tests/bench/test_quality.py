"""Shares of right answers and their comparison; figures by hand, or from the tables of the sources."""

import math
from typing import Any

import pytest

from foretell.bench import quality as quality_module
from foretell.bench.answers import number_check, python_check
from foretell.bench.quality import Judge, quality
from foretell.bench.stats import PairedRuns, macro, mcnemar, wilson


def test_wilson() -> None:
    found = wilson(8, 10)
    assert (found.value, round(found.low, 4), round(found.high, 4)) == (0.8, 0.4902, 0.9433)
    assert (wilson(0, 10).low, wilson(10, 10).high) == (0.0, pytest.approx(1.0))
    assert wilson(0, 10).high == pytest.approx(1 - wilson(10, 10).low)
    assert math.isnan(wilson(0, 0).value)


def test_mcnemar() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 5) == 1.0
    assert mcnemar(0, 5) == mcnemar(5, 0) == 2 / 32
    assert mcnemar(1, 9) == pytest.approx(2 * 11 / 1024)
    assert mcnemar(0, 2000) == 0.0


def test_mcnemar_false_alarms() -> None:
    """Of all outcomes of n fair pairs, those below 0.05 have at most that probability; and it does reject (control)."""
    for count in (5, 12, 40):
        below = sum(math.comb(count, k) for k in range(count + 1) if mcnemar(k, count - k) < 0.05) / 2**count
        assert below <= 0.05
    assert mcnemar(2, 20) < 0.001


def test_macro_counts_groups_alike() -> None:
    fast = [PairedRuns(10, 10.0, 10, 2.0)] * 4
    slow = [PairedRuns(1000, 10.0, 1000, 10.0)] * 2
    found = macro([fast, slow, []])
    assert (found.value, found.low, found.high) == (3.0, 3.0, 3.0)
    mixed = macro([[PairedRuns(1, 1.0, 1, 0.5), PairedRuns(1, 1.0, 1, 0.25)], slow])
    assert mixed.low < mixed.value < mixed.high
    assert math.isnan(macro([[]]).value)


def test_quality_by_task_and_overall() -> None:
    groups = {0: "a", 1: "a", 2: "b", 3: "b"}
    method = {0: True, 1: False, 2: True, 3: True}
    plain = {0: True, 1: True, 2: False}
    overall, a, b = quality(groups, method, plain)  # 3 has no plain answer
    assert [part.category for part in (overall, a, b)] == ["overall", "a", "b"]
    assert (overall.num_judged, overall.num_right, overall.num_right_plain) == (3, 2, 2)
    assert (overall.num_plain_only, overall.num_method_only, overall.p_value) == (1, 1, 1.0)
    assert (a.num_judged, a.num_plain_only, b.num_method_only) == (2, 1, 1)
    assert [part.category for part in quality({0: "a"}, method, plain)] == ["a"]
    assert quality(groups, {}, plain) == []


def test_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge()
    number = number_check("#### 7")
    assert number is not None
    assert judge.right(number, "#### 7.0")
    assert not judge.right(number, "8")
    code = python_check("def check(f):\n    assert f(2) == 4\n", "square", "def square(x):\n")
    assert judge.right(code, "    return x * x\n")
    assert not judge.right(code, "    return x + x + 1\n")
    ran: list[Any] = []
    monkeypatch.setattr(quality_module.sandbox, "run", ran.append)
    assert judge.right(code, "    return x * x\n")  # known: the same program is not run again
    assert ran == []
