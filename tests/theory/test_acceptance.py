"""Each rule's acceptance: against enumeration, against the verifiers themselves, and below its optimum.

Monte Carlo is compared in units of its standard error; FALSE_ALARM is the chance that a right formula fails one
comparison. Seeds are fixed, so a test that passed once always passes.
"""

import itertools
import math

import pytest
import torch
from benchmarks.theory import acceptance, optimum
from scipy import stats
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.tree import DrawnBy
from foretell.verify import Evidence, Rejection, Verifier
from tests.theory.oracle import hard_pairs, ordered_draws, random_labels
from tests.verify.enumerate import Case, Tables, drafts

EXACT = 1e-12
FALSE_ALARM = 1e-6
LIMIT = float(stats.norm.isf(FALSE_ALARM / 2))
ROWS = 200_000
P, Q = random_labels(5, 30, 11), random_labels(5, 30, 12)


def close(a: Tensor | float, b: Tensor | float) -> bool:
    return bool((torch.as_tensor(a, dtype=torch.float64) - torch.as_tensor(b, dtype=torch.float64)).abs().max() < EXACT)


def by_verifier(verifier: Verifier, p: Tensor, q: Tensor, labels: tuple[DrawnBy, ...]) -> float:
    """1 - Pr[walk stops at the root], every draft of one node enumerated: what the library's verifier really accepts."""
    out = drafts(
        Case((-1, *[0] * len(labels)), (DrawnBy.FIXED, *labels)),
        Tables(len(p), [p[None], p.expand(len(p), -1)], [q[None]]),
    )
    walk = verifier.stops(Evidence(out.tree, out.p))
    return 1.0 - float((out.weight * walk.stops[:, 0]).sum())


def z_score(hits: Tensor, value: float) -> float:
    deviation = math.sqrt(max(value * (1 - value), 1e-12) / hits.numel())
    return abs(float(hits.double().mean()) - value) / deviation


def exponentials(shape: tuple[int, ...], seed: int) -> Tensor:
    return -torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log()


def first_of_race(probs: Tensor, noise: Tensor, count: int) -> Tensor:
    """[rows, count] tokens of probs [V] in order of arrival E / distribution."""
    return (noise / probs).topk(count, -1, largest=False).indices


def test_one_draft() -> None:
    tv = acceptance.total_variation(P, Q)
    assert close(tv, (P - Q).clamp(min=0).sum(-1))
    assert close(acceptance.single_draft(P, Q), 1 - tv)
    assert close(acceptance.exact_match_independent(P, Q), torch.einsum("rv,rv->r", P, Q))
    for i in range(10):
        assert close(
            acceptance.single_draft(P[i : i + 1], Q[i : i + 1]), by_verifier(Rejection(), P[i], Q[i], (DrawnBy.IID,))
        )


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_recursive_rejection_is_what_the_verifier_accepts(num_drafts: int) -> None:
    iid = acceptance.recursive_rejection_iid(P, Q, num_drafts)
    without = acceptance.recursive_rejection_without_replacement(P, Q, num_drafts)
    assert bool((without.standard_error == 0).all())
    compared = 0
    for i in range(len(P)):
        assert close(iid[i], by_verifier(Rejection(), P[i], Q[i], (DrawnBy.IID,) * num_drafts))
        if int((Q[i] > 0).sum()) >= num_drafts:
            compared += 1
            assert close(
                without.mean[i], by_verifier(Rejection(), P[i], Q[i], (DrawnBy.WITHOUT_REPLACEMENT,) * num_drafts)
            )
    assert compared > 20


def test_fewer_tokens_than_drafts() -> None:
    p, q = (torch.tensor([row], dtype=torch.float64) for row in ([0.2, 0.3, 0.5], [0.6, 0.4, 0.0]))
    for num_drafts in (2, 3, 4):
        exact = acceptance.recursive_rejection_without_replacement(p, q, num_drafts).mean
        assert float(exact) <= 0.5 + EXACT  # nothing drafts the third token
        assert close(exact, acceptance.recursive_rejection_without_replacement(p, q, 2).mean)
        assert close(acceptance.top_n(p, q, num_drafts), 0.5)


@pytest.mark.parametrize("num_drafts", [3, 4])
def test_sampled_recursive_rejection_is_unbiased(num_drafts: int) -> None:
    p, q = random_labels(7, 12, 3), random_labels(7, 12, 4)
    exact = acceptance.recursive_rejection_without_replacement(p, q, num_drafts).mean
    generator = torch.Generator().manual_seed(1)
    got = acceptance.recursive_rejection_without_replacement(p, q, num_drafts, num_samples=4000, generator=generator)
    error = (got.mean - exact).abs()
    assert bool((error <= LIMIT * got.standard_error + EXACT).all())
    assert float(got.standard_error.max()) < 0.01
    # Control: the acceptance of iid drafts is told from it.
    iid = acceptance.recursive_rejection_iid(p, q, num_drafts)
    assert bool(((got.mean - iid).abs() > LIMIT * got.standard_error + 1e-3).any())


def test_sampling_is_keyed_and_enumeration_has_a_limit() -> None:
    noise = exponentials((2, 400), 3)
    p, q = (noise / noise.sum(1, keepdim=True)).split(1)
    runs = [
        acceptance.recursive_rejection_without_replacement(p, q, 3, generator=torch.Generator().manual_seed(5)).mean
        for _ in range(2)
    ]
    assert torch.equal(runs[0], runs[1])
    with pytest.raises(ConfigError, match="give a generator"):
        acceptance.recursive_rejection_without_replacement(p, q, 3)
    with pytest.raises(ConfigError, match="given 1"):
        acceptance.recursive_rejection_without_replacement(p, q, 3, num_samples=1)


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_k_seq(num_drafts: int) -> None:
    """Against enumeration of the rule at the least r that leaves a residual, found anew by a fine scan."""
    got = acceptance.k_seq(P, Q, num_drafts)
    for i in range(len(P)):
        low, high = 1.0, float(num_drafts)
        for _ in range(200):
            r = (low + high) / 2
            beta = float(torch.minimum(Q[i], P[i] / r).sum())
            low, high = (low, r) if 1 - (1 - beta) ** num_drafts <= r * beta else (r, high)
        chance = torch.where(Q[i] > 0, (P[i] / (high * Q[i])).clamp(max=1.0), 0.0)
        total, emitted = 0.0, torch.zeros_like(P[i])
        for drawn in itertools.product(range(P.shape[1]), repeat=num_drafts):
            weight = math.prod(float(Q[i, x]) for x in drawn)
            for x in drawn:
                total += weight * float(chance[x])
                emitted[x] += weight * float(chance[x])
                weight *= 1 - float(chance[x])
        assert abs(float(got[i]) - total) < 1e-11
        assert bool((emitted <= P[i] + 1e-9).all())  # a residual exists: the rule is lossless


def test_top_n_and_greedy() -> None:
    for num_drafts in (1, 2, 4):
        for i in range(len(P)):
            order = sorted(range(5), key=lambda x: (-float(Q[i, x]), x))[:num_drafts]
            value = sum(float(P[i, x]) for x in order if Q[i, x] > 0)
            assert close(acceptance.top_n(P[i : i + 1], Q[i : i + 1], num_drafts), value)
    assert close(acceptance.greedy_construction(P, Q, 3), optimum.greedy(P, Q, 3))
    assert close(acceptance.greedy_construction(P, Q, 1), acceptance.single_draft(P, Q))


def gumbel_directly(p: Tensor, q: Tensor) -> float:
    """The formula, O(V^2)."""
    total = 0.0
    for j in range(len(p)):
        if p[j] > 0 and q[j] > 0:
            total += 1 / float(torch.maximum(p / p[j], q / q[j]).sum())
    return total


def top_k_by_permutations(p: Tensor, q: Tensor, num_drafts: int) -> float:
    """sum of p_j g(r_j): g is the chance that the rest is among the first K draws from (a, 1) without replacement."""
    total = 0.0
    for j in range(len(p)):
        if p[j] == 0 or q[j] == 0:
            continue
        rates = (q * (p[j] / q[j]) - p).clamp(min=0.0)
        rates[j] = 0.0
        field = [*rates.tolist(), 1.0]
        scale = sum(field)
        for drawn, chance in ordered_draws([x / scale for x in field], num_drafts):
            total += float(p[j]) * chance * (len(p) in drawn)
    return total


def test_gumbel() -> None:
    got = acceptance.gumbel(P, Q)
    tv = acceptance.total_variation(P, Q)
    for i in range(len(P)):
        assert close(got[i], gumbel_directly(P[i], Q[i]))
    assert bool((got <= 1 - tv + EXACT).all())
    assert bool((got >= (1 - tv) / (1 + tv) - EXACT).all())


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
def test_gumbel_top_k_by_permutations(num_drafts: int) -> None:
    got = acceptance.gumbel_top_k(P, Q, num_drafts, tolerance=0.0)
    assert float((got.upper - got.lower).max()) < EXACT
    for i in range(len(P)):
        assert close(got.middle[i], top_k_by_permutations(P[i], Q[i], num_drafts))
    for p, q in hard_pairs():
        assert close(acceptance.gumbel_top_k(p, q, num_drafts).middle, top_k_by_permutations(p[0], q[0], num_drafts))


def test_gumbel_top_k_interval() -> None:
    """A loose interval holds the value at every token, and keeps its width; K = 1 is ``gumbel`` by another way."""
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(2, 500, generator=generator, dtype=torch.float64)
    p = torch.softmax(logits, -1)
    q = torch.softmax(logits + torch.randn(2, 500, generator=generator), -1)
    for num_drafts in (2, 8):
        exact = acceptance.gumbel_top_k(p, q, num_drafts, tolerance=0.0)
        loose = acceptance.gumbel_top_k(p, q, num_drafts, tolerance=1e-3)
        assert bool((loose.lower <= exact.middle).all() and (exact.middle <= loose.upper).all())
        assert float((loose.upper - loose.lower).max()) <= 1e-3 + 1e-9
    assert close(acceptance.gumbel_top_k(p, q, 1).middle, acceptance.gumbel(p, q))


@pytest.mark.parametrize("num_drafts", [1, 2, 4])
def test_shared_noise_by_monte_carlo(num_drafts: int) -> None:
    """The race itself, false-alarm rate FALSE_ALARM. Controls that fail: noise of the drafter's own, one draft more."""
    p, q = random_labels(8, 1, 21)[0].clamp(min=0.01), random_labels(8, 1, 22)[0].clamp(min=0.01)
    p, q = p / p.sum(), q / q.sum()
    noise, other = exponentials((ROWS, 8), 1), exponentials((ROWS, 8), 2)
    target = first_of_race(p, noise, 1)
    value = float(acceptance.gumbel_top_k(p[None], q[None], num_drafts, tolerance=0.0).middle)
    assert z_score((first_of_race(q, noise, num_drafts) == target).any(1), value) < LIMIT
    assert z_score((first_of_race(q, other, num_drafts) == target).any(1), value) > LIMIT
    assert z_score((first_of_race(q, noise, num_drafts + 1) == target).any(1), value) > LIMIT


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 6])
def test_no_rule_beats_its_optimum(num_drafts: int) -> None:
    p, q = random_labels(8, 60, 41), random_labels(8, 60, 42)
    iid = optimum.with_replacement(p, q, num_drafts)
    without = optimum.without_replacement(p, q, num_drafts, tolerance=0.0).upper
    recursive = acceptance.recursive_rejection_without_replacement(p, q, num_drafts).mean
    assert bool((acceptance.recursive_rejection_iid(p, q, num_drafts) <= iid + EXACT).all())
    assert bool((acceptance.k_seq(p, q, num_drafts) <= iid + EXACT).all())
    assert bool((acceptance.k_seq(p, q, num_drafts) >= (1 - 1 / math.e) * iid - EXACT).all())
    assert bool((recursive <= without + EXACT).all())
    shared = acceptance.gumbel_top_k(p, q, num_drafts)
    assert bool((shared.lower <= without + EXACT).all())
    # With one draft every optimum is 1 - TV, and rejection reaches it.
    if num_drafts == 1:
        assert close(iid, acceptance.single_draft(p, q))
        assert close(acceptance.k_seq(p, q, 1), iid)
        assert close(recursive, iid)


def test_equal_and_disjoint() -> None:
    p = random_labels(6, 10, 51)
    a, b = torch.zeros(1, 4).double(), torch.zeros(1, 4).double()
    a[0, :2], b[0, 2:] = 0.5, 0.5
    rules = {
        "recursive_rejection_iid": acceptance.recursive_rejection_iid,
        "recursive_rejection_without": lambda p, q, n: acceptance.recursive_rejection_without_replacement(p, q, n).mean,
        "gumbel_top_k": lambda p, q, n: acceptance.gumbel_top_k(p, q, n).middle,
    }
    for rule in rules.values():
        for num_drafts in (1, 2, 3):
            assert close(rule(p, p, num_drafts), 1.0)
            assert close(rule(a, b, num_drafts), 0.0)
    for num_drafts in (1, 2, 3):
        assert close(acceptance.k_seq(p, p, num_drafts), 1.0)
        assert close(acceptance.k_seq(a, b, num_drafts), 0.0)
        assert close(acceptance.top_n(a, b, num_drafts), 0.0)
    assert close(acceptance.gumbel(p, p), 1.0)
    assert close(acceptance.gumbel(a, b), 0.0)
    assert close(acceptance.gumbel_top_k(P, torch.full_like(P, 0.2), 5).middle, 1.0)  # every token is drafted


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="given"):
        acceptance.single_draft(P, Q[:3])
    with pytest.raises(ConfigError, match="given"):
        acceptance.gumbel(P, 2 * Q)
    for rule in (acceptance.gumbel_top_k, acceptance.k_seq, acceptance.top_n):
        with pytest.raises(ConfigError, match="given 0"):
            rule(P, Q, 0)
    for tolerance in (-1.0, math.nan):
        for bounded in (acceptance.gumbel_top_k, optimum.without_replacement):
            with pytest.raises(ConfigError, match="tolerance"):
                bounded(P, Q, 2, tolerance=tolerance)
