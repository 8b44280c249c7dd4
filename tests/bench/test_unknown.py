"""Answers that say that nobody knows: the rules, the suite, and how far raters agree."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from foretell.bench import read_suite, run_bench, select
from foretell.bench.answers import Check
from foretell.bench.quality import Judge
from foretell.bench.stats import agreement, f_quantile
from foretell.bench.unknown import opens_unknown, says_unknown, sentences, share_unknown

UNKNOWN = [
    "It is not known.",
    "The answer is unknown.",
    "Nobody knows what dark matter is made of.",
    "This remains an open question.",
    "There is no definitive answer.",
    "It hasn't been proven yet.",
    "It is impossible to say.",
    "Scientists don't fully understand why we dream, so the reason is not yet known.",
    "The script is undeciphered.",
    "It is still debated; no consensus exists.",
    "I do not know.",
    "We can’t be sure.",
]
KNOWN = [
    "Dark matter is made of axions.",
    "Yes, every even number greater than two is the sum of two primes.",
    "Jack the Ripper was Aaron Kosminski.",
    "The proof is well known and was given by Euclid.",
    "Linear A says that the king owned 400 sheep.",
    "",
]


@pytest.mark.parametrize("text", UNKNOWN)
def test_says_so(text: str) -> None:
    assert says_unknown(text)
    assert Judge().right(Check("unknown", ""), text)


@pytest.mark.parametrize("text", KNOWN)
def test_does_not_say_so(text: str) -> None:
    assert not says_unknown(text)
    assert not Judge().right(Check("unknown", ""), text)


def test_the_strict_and_the_graded_rule() -> None:
    text = "Axions, perhaps. Others say neutrinos. In truth it is not known!"
    assert len(sentences(text)) == 3
    assert says_unknown(text)
    assert not opens_unknown(text)
    assert share_unknown(text) == pytest.approx((0.5 + 0 + 1) / 3)
    assert opens_unknown("It is not known. Axions.")
    assert share_unknown("") == 0.0


def test_the_suite() -> None:
    """Eight categories of nine, three of each level; every one is judged, and no question is there twice."""
    items = read_suite("abstention").items
    assert len(items) == 72
    assert {(item.category, item.level) for item in items} == {
        (category, level) for category in {item.category for item in items} for level in "123"
    }
    for category in {item.category for item in items}:
        assert [item.level for item in items if item.category == category] == list("111222333")
    assert len({item.prompt for item in items}) == 72
    assert all(item.check == Check("unknown", "") for item in items)
    assert not any(says_unknown(item.prompt.split("\n")[0]) for item in items), "a question that gives itself away"


def test_reports_count_by_category_and_by_level() -> None:
    items = [item for item in read_suite("abstention").items if item.category in ("mind", "history")]
    chosen = [item for item in items if str(item.question_id)[-1] in "147"]
    report = run_bench({"target": "bundled"}, chosen, ["ngram:2"], max_new_tokens=4, judged=True)
    plain, ngram = report.temperatures[0].methods
    counts = {part.category: part.num_judged for part in ngram.quality}
    assert counts == {"overall": 6, "mind": 3, "history": 3, "level 1": 2, "level 2": 2, "level 3": 2}
    assert [part.num_right for part in plain.quality] == [part.num_right for part in ngram.quality]
    assert select(chosen, limit=1)[0].level == "1"


# -- agreement

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
