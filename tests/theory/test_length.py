"""Tokens a step and the best draft length, against simulation of the definition, closed forms and brute force."""

import itertools
import math

import pytest
from benchmarks.theory.length import best_length, expected_tokens, operations_factor, walltime_factor
from benchmarks.theory.pass_costs import PassCosts

from foretell.core.errors import ConfigError

RATES = [0.0, 0.1, 0.5, 0.73, 0.9, 0.999999, 1.0]


def by_outcomes(rates: list[float]) -> float:
    """E[tokens] from all 2^g outcomes of g coins: a step emits the leading accepted drafts and one token more."""
    total = 0.0
    for coins in itertools.product((True, False), repeat=len(rates)):
        chance = math.prod(rate if coin else 1 - rate for rate, coin in zip(rates, coins, strict=True))
        total += chance * (1 + sum(1 for _ in itertools.takewhile(bool, coins)))
    return total


@pytest.mark.parametrize("acceptance", RATES)
@pytest.mark.parametrize("length", range(8))
def test_expected_tokens(acceptance: float, length: int) -> None:
    got = expected_tokens(acceptance, length)
    assert got == pytest.approx(by_outcomes([acceptance] * length), abs=1e-12)
    closed = length + 1 if acceptance == 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)
    assert got == pytest.approx(closed, abs=1e-9)  # the closed form itself loses digits near 1
    assert got == expected_tokens([acceptance] * length, length)


def test_expected_tokens_from_rates() -> None:
    rates = [0.9, 0.2, 1.0, 0.7, 0.0, 0.3]
    for length in range(7):
        assert expected_tokens(rates, length) == pytest.approx(by_outcomes(rates[:length]), abs=1e-12)


def test_best_length_is_the_brute_force_best_and_stationary() -> None:
    for a in (0.05, 0.3, 0.6, 0.8, 0.95):
        for c in (0.01, 0.05, 0.2, 0.5, 0.9):
            best = best_length(a, c)
            speed = [walltime_factor(a, length, c) for length in range(33)]
            assert speed[best] == max(speed)
            assert speed[0] == 1.0
            # Leviathan et al.: something is gained iff a > c, and then at least (1 + a) / (1 + c).
            assert (best > 0) == (a > c)
            assert speed[best] >= (1 + a) / (1 + c) or a <= c

            def grows(k: int, a: float = a, c: float = c) -> bool:
                return a ** (k + 1) * (1 - a) * (k * c + 1) > c * (1 - a ** (k + 1))  # S(k + 1) > S(k)

            assert all(grows(k) for k in range(best))
            assert best == 32 or not grows(best)


def test_costs_of_wide_passes_shorten_the_draft() -> None:
    flat, steep = PassCosts.of({1: 1.0, 33: 1.0}), PassCosts.of({1: 2.0, 4: 2.0, 5: 4.0, 33: 20.0})
    assert best_length(0.9, 0.02, flat) == best_length(0.9, 0.02)
    assert best_length(0.9, 0.02, steep) == 3
    assert walltime_factor(0.9, 3, 0.02, steep) == pytest.approx(expected_tokens(0.9, 3) / (0.06 + 1.0))
    assert best_length(0.9, 0.0, PassCosts.of({1: 1.0, 3: 1.0})) == 2  # never beyond what was measured
    assert best_length([0.9, 0.9], 0.0) == 2  # nor beyond known rates
    assert best_length(0.0, 0.0) == 0  # of equals the least
    assert best_length(0.9, 0.02, max_length=1) == 1


def test_operations_factor() -> None:
    assert operations_factor(0.8, 4, 0.1) == pytest.approx((1 - 0.8) * (4 * 0.1 + 5) / (1 - 0.8**5))
    assert operations_factor(1.0, 4, 0.0) == 1.0
    assert operations_factor(0.5, 0, 0.3) == 1.0
    assert all(operations_factor(a, g, 0.05) >= 1.0 for a in RATES for g in range(9))


def test_cost_table() -> None:
    table = PassCosts.of({8: 1.5, 1: 1.0, 4: 0.9, 16: 3.1})
    assert [table(n) for n in (1, 2, 4, 6, 8, 12, 16)] == pytest.approx([1.0, 1.0, 1.0, 1.25, 1.5, 2.3, 3.1])
    assert PassCosts.of({4: 2.0})(1) == 2.0
    with pytest.raises(ConfigError, match="measured up to 16 nodes; asked for 17"):
        table(17)


@pytest.mark.parametrize("measured", [{}, {0: 1.0}, {1: 0.0}, {1: math.nan}, {1: math.inf}])
def test_bad_tables(measured: dict[int, float]) -> None:
    with pytest.raises(ConfigError, match="given"):
        PassCosts.of(measured)


def test_bad_input() -> None:
    for call in (
        lambda: expected_tokens(1.1, 3),
        lambda: expected_tokens(math.nan, 3),
        lambda: expected_tokens(0.5, -1),
        lambda: expected_tokens([0.5], 2),
        lambda: walltime_factor(0.5, 1, -0.1),
        lambda: best_length(0.5, math.inf),
        lambda: best_length(0.5, 0.1, max_length=-1),
        lambda: operations_factor(0.5, 1, -1.0),
    ):
        with pytest.raises(ConfigError, match="given"):
            call()


def test_sizes_that_would_take_for_ever() -> None:
    for compute in (lambda: best_length(0.5, 0.1, max_length=10**9), lambda: expected_tokens(0.5, 10**12)):
        with pytest.raises(ConfigError, match="is 1000 at most"):
            compute()
