"""How far raters agree, and how far two sides differ on the same questions: statistics of the science page."""

import math

import numpy as np
import pytest
from benchmarks.papers.agreement import agreement, opens_unknown, sentences, share_unknown
from benchmarks.papers.judge import paired_difference
from scipy import stats as scipy_stats

from foretell.bench.quality import says_unknown
from foretell.bench.stats import f_quantile


def test_the_strict_and_the_graded_rule() -> None:
    text = "Axions, perhaps. Others say neutrinos. In truth it is not known!"
    assert len(sentences(text)) == 3
    assert says_unknown(text)
    assert not opens_unknown(text)
    assert share_unknown(text) == pytest.approx((0.5 + 0 + 1) / 3)
    assert opens_unknown("It is not known. Axions.")
    assert share_unknown("") == 0.0


SHROUT_FLEISS = [[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9], [6, 2, 4, 7]]
"""Table 2 of Shrout and Fleiss 1979: six subjects, four judges."""


def test_agreement_of_the_papers_example() -> None:
    """ICC(2,1) = .29 and ICC(3,1) = .71 there; mean squares 11.24, 32.49, 1.02."""
    found = agreement(SHROUT_FLEISS)
    assert (found.num_subjects, found.num_raters) == (6, 4)
    rows, columns, error = 56.2083 / 5, 97.4583 / 3, 15.2917 / 15
    assert found.consistent.value == pytest.approx((rows - error) / (rows + 3 * error), abs=1e-4)
    assert found.absolute.value == pytest.approx(
        (rows - error) / (rows + 3 * error + 4 * (columns - error) / 6), abs=1e-4
    )
    assert round(found.absolute.value, 2) == 0.29
    assert round(found.consistent.value, 2) == 0.71
    low, high = (float(scipy_stats.f.ppf(0.975, a, b)) for a, b in ((5, 15), (15, 5)))
    ratio = rows / error
    assert found.consistent.low == pytest.approx((ratio / low - 1) / (ratio / low + 3), abs=1e-4)
    assert found.consistent.high == pytest.approx((ratio * high - 1) / (ratio * high + 3), abs=1e-4)
    assert (round(found.absolute.low, 3), round(found.absolute.high, 3)) == (0.019, 0.761)


def test_a_stricter_judge_agrees_in_order_alone() -> None:
    first = [[float(x)] * 2 for x in range(12)]
    assert agreement(first).absolute.value == 1.0
    shifted = [[a, b + 5.0] for a, b in first]
    found = agreement(shifted)
    assert found.consistent.value == pytest.approx(1.0)
    assert found.absolute.value < 0.6


def test_agreement_by_chance_is_near_zero_and_its_interval_holds() -> None:
    """Of 60 tables of noise about one in twenty has an interval without 0; a control of real agreement has nearly none."""
    r = np.random.default_rng(0)
    missed = hit = 0
    for _ in range(60):
        noise = r.normal(size=(25, 3))
        one = agreement(noise.tolist()).consistent
        missed += not one.low <= 0 <= one.high
        real = agreement((noise + 2 * r.normal(size=(25, 1))).tolist()).absolute
        hit += real.low <= 0 <= real.high
    assert missed <= 9  # 3 expected; more than 9 has probability 0.0007
    assert hit == 0


def test_agreement_of_nothing() -> None:
    found = agreement([[1.0, 1.0], [1.0, 1.0]])
    assert math.isnan(found.absolute.value)
    assert (found.consistent.low, found.consistent.high) == (-1.0, 1.0)
    for wrong in ([], [[1.0, 2.0]], [[1.0], [2.0]]):
        with pytest.raises(ValueError, match="at least 2 subjects by at least 2 raters"):
            agreement(wrong)


@pytest.mark.parametrize(
    ("share", "d1", "d2"), [(0.975, 5, 15), (0.975, 15, 5), (0.5, 3, 2), (0.975, 1.7, 5), (0.99, 200, 4000)]
)
def test_f_quantile(share: float, d1: float, d2: float) -> None:
    assert f_quantile(share, d1, d2) == pytest.approx(float(scipy_stats.f.ppf(share, d1, d2)), rel=1e-9)


def test_the_interval_of_a_paired_difference_is_newcombes() -> None:
    """His example: of 50 pairs both are positive in 36, the first alone in 12, the second alone in 2."""
    found = paired_difference(12, 2, 48, 50)
    assert (round(found.value, 4), round(found.low, 4), round(found.high, 4)) == (0.2, 0.0569, 0.3404)
    turned = paired_difference(2, 12, 38, 50)
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low))
    assert math.isnan(paired_difference(0, 0, 0, 0).value)
    alike = paired_difference(0, 0, 20, 35)
    assert alike.low < 0 == alike.value < alike.high  # equal answers prove no equality


def test_the_interval_of_a_paired_difference_covers_the_truth() -> None:
    """By enumeration of all outcomes of 16 questions: sides that agree on three quarters, the first 15 points worse."""
    law = (0.45, 0.05, 0.20, 0.30)  # both, first alone, second alone, neither
    covered = total = 0.0
    n = 16
    for both in range(n + 1):
        for one in range(n + 1 - both):
            for other in range(n + 1 - both - one):
                counts = (both, one, other, n - both - one - other)
                chance = math.factorial(n) * math.prod(
                    p**k / math.factorial(k) for p, k in zip(law, counts, strict=True)
                )
                found = paired_difference(one, other, both + one, n)
                total += chance
                covered += chance * (found.low <= law[1] - law[2] <= found.high)
    assert total == pytest.approx(1)
    assert 0.93 < covered < 0.99
