"""The arithmetic, against values worked out by hand; the bootstrap against draws whose truth is known."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from foretell.bench import stats
from foretell.bench.stats import PairedRuns


def test_loop_begins_at_the_second_occurrence_of_a_16_gram_seen_three_times() -> None:
    block = list(range(100, 116))  # 16 tokens
    text = [1, 2, 3, *block, 4, *block, 5]
    assert stats.first_loop(text) is None  # seen twice
    assert stats.first_loop([*text, *block]) == 3 + 16 + 1
    assert stats.first_loop([*text, *block[:15]]) is None
    # A period of one token: the 16-gram is seen a third time at token 18 of the run.
    assert stats.first_loop([7, *[0] * 17]) is None
    assert stats.first_loop([7, *[0] * 18]) == 2
    # A period of three: occurrences may overlap.
    assert stats.first_loop([9, 9, *[1, 2, 3] * 7, 1]) == 2 + 3
    assert stats.first_loop([]) is None


def test_loop_of_other_sizes() -> None:
    assert stats.first_loop([1, 2, 1, 2], ngram=2, times=2) == 2
    assert stats.first_loop([1, 2, 3, 1, 2], ngram=2, times=2) == 3


def test_median_and_ratio() -> None:
    assert stats.median([3, 1, 2]) == 2
    assert stats.median([4, 1, 2, 3]) == 2.5
    assert stats.median([]) is None
    assert stats.ratio(3, 2) == 1.5
    assert stats.ratio(3, 0) is stats.ratio(None, 2) is stats.ratio(3, None) is None


def test_rates_are_conditional_on_the_position_before() -> None:
    # Guessed, accepted: three steps of three guesses and one of one.
    steps = [(3, 3), (3, 1), (3, 0), (1, 1)]
    assert stats.conditional_rates(steps) == [3 / 4, 1 / 2, 1 / 1]
    # A step that guessed only one says nothing of position two, though its guess was accepted.
    assert stats.conditional_rates([(1, 1), (2, 1)]) == [1.0, 0.0]
    assert stats.conditional_rates([(0, 0)]) == []


def test_speedup_is_the_ratio_of_summed_times_where_tokens_agree() -> None:
    pairs = [PairedRuns(10, 2.0, 10, 1.0), PairedRuns(30, 4.0, 30, 2.0)]
    assert stats.speedup(pairs) == pytest.approx(2.0)
    pairs = [PairedRuns(10, 1.0, 10, 1.0), PairedRuns(10, 9.0, 10, 1.0)]
    assert stats.speedup(pairs) == pytest.approx(10 / 2)  # not the mean of 1 and 9 by luck: (1 + 9) / 2 prompts
    # Other numbers of tokens on both sides: tokens per second over tokens per second.
    assert stats.speedup([PairedRuns(100, 10.0, 50, 2.5)]) == pytest.approx(20 / 10)
    assert math.isnan(stats.speedup([]))


def test_bootstrap_is_deterministic_in_its_seed() -> None:
    pairs = [PairedRuns(10, 1.0 + i % 3, 10, 0.5 + i % 2) for i in range(12)]
    assert stats.bootstrap(pairs, seed=1) == stats.bootstrap(pairs, seed=1)
    assert stats.bootstrap(pairs, seed=1) != stats.bootstrap(pairs, seed=2)


def test_bootstrap_of_equal_ratios_is_a_point_and_of_one_prompt_the_value() -> None:
    # Prompts of very different length, but always twice as fast: drawing pairs together leaves no spread.
    pairs = [PairedRuns(n, n * 0.2, n, n * 0.1) for n in (5, 50, 500)]
    interval = stats.bootstrap(pairs)
    assert interval.low == pytest.approx(interval.high) == pytest.approx(2.0)
    one = stats.bootstrap(pairs[:1])
    assert one.low == one.value == one.high


def sample(random: np.random.Generator, size: int) -> list[PairedRuns]:
    """Prompts of lengths 20 to 200 and speedups of 2 in the mean, 0.5 standard deviation."""
    tokens = random.integers(20, 200, size)
    factor = random.normal(2.0, 0.5, size).clip(0.5)
    return [PairedRuns(int(n), n * 0.01, int(n), n * 0.01 / f) for n, f in zip(tokens, factor, strict=True)]


def covered(random: np.random.Generator, truth: float, size: int = 40, groups: int = 0, trials: int = 200) -> float:
    """Share of intervals that hold the truth: of one sample, or of the mean of several."""
    hits = 0
    for trial in range(trials):
        drawn = [sample(random, size) for _ in range(groups or 1)]
        interval = (
            stats.macro(drawn, seed=trial, resamples=300)
            if groups
            else stats.bootstrap(drawn[0], seed=trial, resamples=300)
        )
        hits += interval.low <= truth <= interval.high
    return hits / trials


def test_bootstrap_intervals_cover_the_truth() -> None:
    """True coverage is a little below 95 %; by the binomial distribution 200 trials at 92 % fall below 86 % once in 500
    times."""
    random = np.random.default_rng(0)
    truth = stats.speedup(sample(random, 40_000))
    assert covered(random, truth) >= 0.86
    # Negative control: an interval around something else must not "cover" it.
    assert covered(random, truth * 1.15) < 0.6


@pytest.mark.parametrize(("size", "groups", "least"), [(5, 0, 0.80), (2, 6, 0.79)])
def test_intervals_of_few_prompts_are_widened(size: int, groups: int, least: float) -> None:
    """They hold the truth in 84 of 100 samples of these sizes, plain percentiles in 75 and 61: of 1,000 trials, either lies
    on the other side of the limit once in 1,000 times."""
    random = np.random.default_rng(1)
    truth = stats.speedup(sample(random, 40_000))
    assert covered(random, truth, size, groups, 1000) >= least


def test_quantiles_of_few_prompts_lie_further_out() -> None:
    """Student's t at 0.975: 2.776 for 4 degrees of freedom, 2.262 for 9, 1.960 for very many."""
    for count, t in ((5, 2.776445), (10, 2.262157), (10**6, 1.959966)):
        low, high = stats.tails(count)
        assert low == pytest.approx(NormalDist().cdf(-t * (count / (count - 1)) ** 0.5), rel=1e-4)
        assert high == pytest.approx(1.0 - low)
    assert stats.tails(5)[0] < stats.tails(10)[0] < 0.01


def test_few_prompts_are_covered_as_often_as_it_says() -> None:
    """300 means of 5 normal numbers: at 95 % fewer than 262 hits is next to impossible; plain percentiles have fewer."""
    generator = np.random.default_rng(0)
    hits = narrow = 0
    for _ in range(300):
        drawn = generator.normal(size=5)
        means = drawn[generator.integers(5, size=(400, 5))].mean(1)
        low, high = np.quantile(means, stats.tails(5))
        hits += low <= 0.0 <= high
        low, high = np.quantile(means, [0.025, 0.975])
        narrow += low <= 0.0 <= high
    assert hits >= 262
    assert narrow < 262


def test_the_mean_over_small_tasks_spreads_by_what_drawing_anew_lacks() -> None:
    """40 tasks of two prompts: drawing two of two anew has half the variance of the mean over other prompts."""
    random = np.random.default_rng(2)
    tasks = [sample(random, 2) for _ in range(40)]
    found = stats.macro(tasks)
    widths = [abs(stats.speedup([one]) - stats.speedup([other])) for one, other in tasks]
    error = math.sqrt(sum(width * width / 4 for width in widths)) / len(
        tasks
    )  # of a mean of two: half their difference
    assert 1.0 < (found.high - found.low) / (2 * 2.02 * error) < 1.3  # Student's t adds; without making up for it: 0.8


@pytest.mark.parametrize(("prompts", "count", "alone"), [(5, 8, 0.1), (10, 8, 0.03)])
def test_the_best_of_several_that_bring_nothing_is_seldom_called_faster(prompts: int, count: int, alone: float) -> None:
    """120 reports each: the best one's own interval is above 1 in 18 and 9 of 100, the wider one in 2."""
    random = np.random.default_rng(5)
    own = together = 0
    for _ in range(120):
        speeds = np.exp(random.normal(0, 0.25, (count, prompts)) - 0.25**2 / 2)
        intervals = [
            stats.bootstrap([PairedRuns(100, 1.0, 100, 1 / float(speed)) for speed in row], resamples=300)
            for row in speeds
        ]
        best = max(intervals, key=lambda one: one.value)
        own += best.low > 1.0
        together += stats.best_of(best, count, prompts).low > 1.0
    assert own / 120 > alone
    assert together / 120 < 0.045


@pytest.mark.parametrize("prompts", [2, 3, 4])
def test_the_interval_of_very_few_prompts_holds_the_truth(prompts: int) -> None:
    """200 reports each: between the speeds of two prompts the truth is in one report of two."""
    random = np.random.default_rng(9)
    held = 0
    for _ in range(200):
        pairs = [PairedRuns(100, 1.0, 100, math.exp(wait)) for wait in random.normal(0, 0.25, prompts)]
        found = stats.bootstrap(pairs, resamples=300, seed=-5)
        held += found.low <= math.exp(-(0.25**2) / 2) <= found.high
    assert held >= 178


def test_an_interval_of_one_method_is_left_as_it_is() -> None:
    one = stats.Interval(1.5, 1.25, 1.75)
    assert stats.best_of(one, 1, 10) == one
    point = stats.Interval(1.5, 1.5, 1.5)
    assert stats.best_of(point, 8, 1) == point
    wider = stats.best_of(one, 8, 10)
    assert wider.value == 1.5
    assert wider.low < 1.25 < 1.75 < wider.high


def test_a_figure_of_one_prompt_has_no_interval() -> None:
    assert stats.bootstrap([PairedRuns(10, 2.0, 10, 1.0)]).is_point
    assert str(stats.Interval(1.5, 1.5, 1.5)) == "1.50"
    assert str(stats.Interval(1.5, 1.25, 1.75)) == "1.50 [1.25, 1.75]"
