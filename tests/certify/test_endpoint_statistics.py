"""The statistics of endpoint checks: against scipy, their false-alarm rate, and the power that they state."""

import math
from collections import Counter

import numpy as np
import pytest

from foretell.certify.endpoint.statistics import (
    Draw,
    along_prefixes,
    at_position,
    calibration,
    chi_square_tail,
    fitted_temperature,
    found_deviation,
    needed_noncentrality,
    noncentral_tail,
    quantile,
    two_samples,
)

SAMPLE = np.random.default_rng


@pytest.mark.parametrize("dof", [1, 4, 37])
def test_tails_are_scipys(dof: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    for value in (0.1, dof, 4.0 * dof, 9.0 * dof):
        assert chi_square_tail(value, dof) == pytest.approx(stats.chi2.sf(value, dof), rel=1e-9)
        for noncentrality in (0.0, 0.5, 30.0, 900.0):
            expected = stats.ncx2.sf(value, dof, noncentrality) if noncentrality else stats.chi2.sf(value, dof)
            assert noncentral_tail(value, dof, noncentrality) == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert chi_square_tail(quantile(dof, 1e-5), dof) == pytest.approx(1e-5, rel=1e-6)
    needed = needed_noncentrality(dof, 1e-4, 0.95)
    assert noncentral_tail(quantile(dof, 1e-4), dof, needed) == pytest.approx(0.95, abs=1e-6)


def test_two_samples_is_the_chi_square_of_a_table() -> None:
    stats = pytest.importorskip("scipy.stats")
    first, second = {"a": 30, "b": 50, "c": 20}, {"a": 60, "b": 70, "c": 70}
    found = two_samples(first, second)
    expected = stats.chi2_contingency([[30, 50, 20], [60, 70, 70]], correction=False)
    assert (found.value, found.dof) == (pytest.approx(expected.statistic), expected.dof)
    assert found.p_value == pytest.approx(expected.pvalue)


def test_rare_cells_are_pooled_and_nothing_is_lost() -> None:
    rare = {f"rare {k}": 1 for k in range(30)}
    found = two_samples({"a": 70, **rare}, {"a": 100})
    assert found.dof == 1
    assert found.p_value < 1e-6  # 30 tokens that the other never writes, each once
    assert two_samples({"a": 98, "b": 2}, {"a": 100}).dof == 0
    assert two_samples({}, {"a": 3}).dof == 0


def test_outcomes_of_unequal_length() -> None:
    found = along_prefixes([("a",)] * 50 + [("a", "b")] * 50, [("a",)] * 52 + [("a", "b")] * 48)
    assert (found.dof, found.p_value > 0.3) == (1, True)
    parted = along_prefixes([("a",)] * 50 + [("a", "b")] * 50, [("a", "b")] * 100)
    assert parted.p_value < 1e-9
    assert at_position([("a", "b")] * 50, [("a", "c")] * 50, 1).p_value < 1e-9


def texts(draw: np.random.Generator, rows: np.ndarray, count: int, depth: int = 4) -> list[tuple[str, ...]]:
    """Texts of a Markov chain."""
    states = draw.integers(1, size=count)
    out = [states]
    edges = rows.cumsum(1)
    for _ in range(depth - 1):
        out.append((draw.random(count)[:, None] > edges[out[-1]]).sum(1))
    return [tuple(map(str, text)) for text in np.stack(out, 1)]


def test_false_alarms_are_as_rare_as_stated() -> None:
    """1500 pairs of samples of 200 equal texts, mostly rare outcomes: p-values below 0.01 in about one of a hundred."""
    draw = SAMPLE(1)
    alarms: Counter[float] = Counter()
    pairs = 1500
    for _ in range(pairs):
        rows = draw.dirichlet(np.full(12, 0.4), 12)
        found = along_prefixes(texts(draw, rows, 200), texts(draw, rows, 200))
        for alpha in (0.1, 0.01):
            alarms[alpha] += found.p_value < alpha
    for alpha in (0.1, 0.01):
        spread = math.sqrt(alpha * (1 - alpha) / pairs)
        assert alpha / 3 < alarms[alpha] / pairs < alpha + 4 * spread, alarms


def test_a_deviation_as_large_as_stated_is_found() -> None:
    """Two cells that differ by the total variation that a test states to find in 95 of 100: it does, at least 90 times."""
    draw, count, alpha = SAMPLE(2), 200, 1e-3
    far = found_deviation(1, count, alpha, two_samples=True)
    assert 0.1 < far < 0.3
    found = 0
    for _ in range(200):
        heads = draw.binomial(count, [0.5, 0.5 + far])
        tables = [{"a": int(n), "b": count - int(n)} for n in heads]
        found += two_samples(*tables).p_value < alpha
    assert found > 180


def reported(draw: np.random.Generator, count: int, temperature: float, kept: int = 20) -> list[Draw]:
    """Draws at a temperature, with the probabilities of the likeliest tokens at temperature 1."""
    logits = draw.normal(size=(count, 40)) * draw.uniform(0.5, 4.0, (count, 1))
    p = -np.sort(-np.exp(logits), axis=1)  # the likeliest first
    p /= p.sum(1, keepdims=True)
    hot = (p ** (1 / temperature)).cumsum(1)
    ranks = (draw.random((count, 1)) * hot[:, -1:] > hot).sum(1).tolist()
    return [
        Draw(tuple(row), rank if rank < kept else None) for row, rank in zip(p[:, :kept].tolist(), ranks, strict=True)
    ]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_calibration_passes_what_is_right_and_finds_what_is_not(temperature: float) -> None:
    draw = SAMPLE(3)
    values = [calibration(reported(draw, 300, temperature), temperature).p_value for _ in range(200)]
    assert 0.02 < sum(value < 0.1 for value in values) / 200 < 0.2
    assert min(values) > 1e-5
    wrong = reported(draw, 1500, temperature * 1.3)
    assert calibration(wrong, temperature).p_value < 1e-6
    fitted = fitted_temperature(wrong)
    assert fitted == pytest.approx(temperature * 1.3, rel=0.07)
    assert fitted is not None
    assert calibration(wrong, fitted).p_value > 1e-3


def test_calibration_without_anything_to_compare() -> None:
    assert calibration([], 1.0).dof == 0
    assert calibration([Draw((1.0, 0.0), 0)] * 50, 1.0).dof == 0
    assert fitted_temperature([Draw((0.5, 0.5), 0)] * 10) is None
