"""The optimum: linear program = least over all subsets = what the package computes, and the certified interval holds."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from benchmarks.theory import optimum
from benchmarks.theory.prefix import Prefixes
from benchmarks.theory.rows import Bounds
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.theory.acceptance import by_ratio, check_distributions
from tests.theory.oracle import (
    hard_pairs,
    linear_program,
    min_cut,
    ordered_draws,
    random_labels,
    set_distribution,
    slow_scan,
)

EXACT = 1e-12
RULES: dict[str, Callable[[Tensor, Tensor, int], Tensor | Bounds]] = {
    "iid": optimum.with_replacement,
    "without": optimum.without_replacement,
    "greedy": optimum.greedy,
}


def near(got: Tensor | Bounds, truth: float) -> bool:
    """The truth is within EXACT; an interval holds it besides (to the truth's own rounding)."""
    if isinstance(got, Bounds):
        inside = bool(got.lower <= truth + 1e-14) and bool(truth - 1e-14 <= got.upper)
        return inside and abs(float(got.middle) - truth) < EXACT and float(got.upper - got.lower) < EXACT
    return abs(float(got) - truth) < EXACT


def exact(rule: str, p: Tensor, q: Tensor, num_drafts: int) -> Tensor | Bounds:
    if rule == "without":
        return optimum.without_replacement(p, q, num_drafts, tolerance=0.0)
    return RULES[rule](p, q, num_drafts)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_linear_program_is_the_least_cut_is_the_scan(rule: str, num_drafts: int) -> None:
    for size in (2, 4, 5):
        for p, q in zip(random_labels(size, 8, size), random_labels(size, 8, 100 + size), strict=True):
            sets = set_distribution(q.tolist(), num_drafts, rule)
            cut = min_cut(p.tolist(), sets)
            assert abs(linear_program(p.tolist(), sets) - cut) < 1e-8
            assert near(exact(rule, p[None], q[None], num_drafts), cut)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("size", "num_drafts", "num"), [(6, 2, 60), (6, 4, 12), (7, 3, 8), (8, 2, 12)])
def test_scan_is_the_least_cut(rule: str, size: int, num_drafts: int, num: int) -> None:
    if rule == "iid" and size**num_drafts > 500:
        num //= 4
    for p, q in zip(random_labels(size, num, size), random_labels(size, num, 100 + size), strict=True):
        assert near(
            exact(rule, p[None], q[None], num_drafts),
            min_cut(p.tolist(), set_distribution(q.tolist(), num_drafts, rule)),
        )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
def test_edges(rule: str, num_drafts: int) -> None:
    for p, q in hard_pairs():
        truth = min_cut(p[0].tolist(), set_distribution(q[0].tolist(), num_drafts, rule))
        assert near(exact(rule, p, q, num_drafts), truth), (p, q, truth)


def test_all_inside_each_prefix() -> None:
    for size, num_drafts in itertools.product((2, 4, 6), (1, 2, 3, 4)):
        for q in random_labels(size, 10, size + num_drafts):
            probs = q[q > 0].numpy()
            prefixes = Prefixes(probs, probs, num_drafts)
            truth = np.zeros(probs.size + 1)
            for drawn, chance in ordered_draws(probs.tolist(), num_drafts):
                truth[max(drawn) + 1 :] += chance
            truth[-1] = 1.0
            assert np.abs(prefixes.all_inside(np.arange(probs.size + 1)) - truth).max() < EXACT


def test_without_replacement_is_q_convex() -> None:
    """The theorem in ``prefix``, by enumeration: dQ / dq grows along every order of tokens."""
    for size, num_drafts in ((3, 2), (4, 2), (5, 3)):
        for q in random_labels(size, 12, 7 * size):
            if int((q > 0).sum()) <= num_drafts:
                continue
            sets = set_distribution(q.tolist(), num_drafts, "without")
            kept = [x for x in range(size) if q[x] > 0]
            for length in range(len(kept) - 1):
                for chosen in itertools.permutations(kept, length + 2):
                    inside = [
                        sum(c for drawn, c in sets.items() if drawn <= set(chosen[:k]))
                        for k in (length, length + 1, length + 2)
                    ]
                    a, b = float(q[chosen[-2]]), float(q[chosen[-1]])
                    assert (inside[1] - inside[0]) * b <= (inside[2] - inside[1]) * a + 1e-14


@pytest.mark.parametrize("num_drafts", [2, 8, 16])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_wide_vocabularies_against_a_slow_scan(num_drafts: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(int(10 * temperature) + num_drafts)
    logits = 2 * torch.randn(1, 600, generator=generator, dtype=torch.float64)
    p, q = (torch.softmax((logits + torch.randn(1, 600, generator=generator)) / temperature, -1) for _ in range(2))
    truth = slow_scan(p[0].tolist(), q[0].tolist(), num_drafts)
    loose, tight = (optimum.without_replacement(p, q, num_drafts, tolerance=t) for t in (1e-6, 0.0))
    for bounds in (loose, tight):
        assert float(bounds.lower) <= truth + 1e-13
        assert truth - 1e-13 <= float(bounds.upper)
    assert float(loose.upper - loose.lower) < 1e-6 + 1e-11
    assert float(tight.upper - tight.lower) < 2e-12
    assert abs(float(tight.middle) - truth) < EXACT


def test_control_a_narrow_interval_can_miss() -> None:
    """The oracle tells neighbours apart: the interval for one draft more does not hold the truth for n."""
    p, q = random_labels(6, 1, 5), random_labels(6, 1, 6)
    truth = min_cut(p[0].tolist(), set_distribution(q[0].tolist(), 2, "without"))
    assert not near(optimum.without_replacement(p, q, 3, tolerance=0.0), truth)


def test_the_scan_is_wrong_for_the_greedy_law() -> None:
    """Where q is flat the least prefix says 1, the truth is .9786."""
    p, q = [0.9, 0.05, 0.02, 0.02, 0.01], [0.3, 0.02, 0.26, 0.22, 0.2]
    sets = set_distribution(q, 2, "greedy")
    order = sorted(range(5), key=lambda x: p[x] / q[x])
    scan = 1.0 + min(
        sum(p[x] for x in order[:k]) - sum(c for drawn, c in sets.items() if drawn <= set(order[:k])) for k in range(6)
    )
    assert abs(scan - 1.0) < EXACT
    got = float(optimum.greedy(torch.tensor([p]).double(), torch.tensor([q]).double(), 2))
    assert abs(got - linear_program(p, sets)) < 1e-8
    assert round(got, 4) == 0.9786


def test_orders() -> None:
    p, q = random_labels(30, 40, 1), random_labels(30, 40, 2)
    single = torch.minimum(p, q).sum(-1)
    iid = [optimum.with_replacement(p, q, n) for n in range(1, 9)]
    without = [optimum.without_replacement(p, q, n, tolerance=1e-9) for n in range(1, 9)]
    for n in range(8):
        assert bool((iid[n] <= without[n].upper + EXACT).all())  # each draw is likelier to leave a set
    for n in range(7):
        assert bool((iid[n] <= iid[n + 1] + EXACT).all())
        assert bool((without[n].lower <= without[n + 1].upper).all())
    for first in (iid[0], without[0].middle, optimum.greedy(p, q, 1)):
        assert torch.allclose(first, single, rtol=0, atol=1e-8)


def test_equal_and_disjoint() -> None:
    p = random_labels(12, 6, 3)
    one, zero = torch.zeros(1, 6).double(), torch.zeros(1, 6).double()
    one[0, 2], zero[0, 4] = 1.0, 1.0
    for rule in RULES:
        for num_drafts in (1, 2, 5):
            for probs, value in (((p, p), 1.0), ((one, zero), 0.0)):
                got = exact(rule, *probs, num_drafts)
                middle = got.middle if isinstance(got, Bounds) else got
                # p = q: greedy drafts lose what leaves Top uncovered, never the other two.
                if rule != "greedy" or value == 0.0 or num_drafts == 1:
                    assert torch.allclose(middle, torch.full_like(middle, value), rtol=0, atol=EXACT)


def test_padding_order_dtype_and_rows_do_not_matter() -> None:
    p, q = random_labels(9, 5, 8), random_labels(9, 5, 9)
    shuffle = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    wide = [torch.nn.functional.pad(x, (0, 3))[:, shuffle] for x in (p, q)]
    for rule in RULES:
        for num_drafts in (1, 2, 4):
            got, padded = exact(rule, p, q, num_drafts), exact(rule, wide[0], wide[1], num_drafts)
            single = [exact(rule, p[i : i + 1], q[i : i + 1], num_drafts) for i in range(5)]
            rough = exact(rule, p.float(), q.float(), num_drafts)
            a, b, c = (x.middle if isinstance(x, Bounds) else x for x in (got, padded, rough))
            d = torch.cat([x.middle if isinstance(x, Bounds) else x for x in single])
            assert torch.allclose(a, b, rtol=0, atol=EXACT)
            assert torch.allclose(a, d, rtol=0, atol=EXACT)
            assert torch.allclose(a, c, rtol=0, atol=1e-5)


def test_prefixes_sorted_by_ratio() -> None:
    p, q = by_ratio(*check_distributions(random_labels(9, 5, 8), random_labels(9, 5, 9)))
    ratio = torch.where(q > 0, p / q, torch.inf)
    assert bool((ratio[:, 1:] >= ratio[:, :-1]).all())


def test_large_vocabulary_is_certified() -> None:
    """V = 151,936, n = 8."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, 151_936, generator=generator)
    p = torch.softmax(logits, -1)
    q = torch.softmax(logits + torch.randn(1, 151_936, generator=generator), -1)
    iid = optimum.with_replacement(p, q, 8)
    without = optimum.without_replacement(p, q, 8)
    assert float(without.upper - without.lower) < 1e-6 + 1e-9
    assert float(iid) <= float(without.upper) <= 1.0


BAD = [
    (torch.ones(3) / 3, torch.ones(3) / 3, 1),
    (torch.ones(1, 3) / 3, torch.ones(1, 4) / 4, 1),
    (torch.ones(1, 0), torch.ones(1, 0), 1),
    (torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2) / 2, 1),
    (torch.tensor([[0.5, 0.6]]), torch.ones(1, 2) / 2, 1),
    (torch.tensor([[1.5, -0.5]]), torch.ones(1, 2) / 2, 1),
    (torch.tensor([[float("nan"), 1.0]]), torch.ones(1, 2) / 2, 1),
    (torch.ones(1, 2) / 2, torch.ones(1, 2) / 2, 0),
    (torch.ones(1, 2) / 2, torch.ones(1, 2) / 2, 17),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("p", "q", "num_drafts"), BAD)
def test_what_is_no_law_is_refused(rule: str, p: Tensor, q: Tensor, num_drafts: int) -> None:
    with pytest.raises(ConfigError, match="given"):
        RULES[rule](p, q, num_drafts)
