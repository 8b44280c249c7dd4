"""The distributions that lossy rules emit, exactly and by chi-square: their bounds hold, their defaults are not exact.

Enumerated are all drafts times all draws of the target; chi-square goes through several steps
with the real noise.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.tree import DrawnBy
from foretell.verify import Evidence, Verifier, draw
from foretell.verify.lossy import base as lossy
from foretell.verify.lossy.lenience import Lenience
from foretell.verify.lossy.top_n import TopN
from foretell.verify.lossy.typical import Typical
from tests.verify import enumerate as exact, test_statistics as statistics
from tests.verify.enumerate import Case, Drafts, Tables
from tests.verify.test_exact import given_noise

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
__all__ = ["given_noise"]  # a fixture

# Laws, exactly: all drafts times all draws of the target, which are independent of drafts that do not read COUPLED.


def all_draws(out: Drafts, monkeypatch: pytest.MonkeyPatch) -> tuple[Drafts, Evidence]:
    """Every row once for each combination of draws at its nodes, weighted; verifiers are handed these draws."""
    num_rows, num_nodes, size = out.p.shape
    index = torch.cartesian_prod(*[torch.arange(size)] * num_nodes).view(-1, num_nodes)
    row = torch.arange(num_rows).repeat_interleave(len(index))
    drawn = index.repeat(num_rows, 1)
    weight = out.weight[row] * out.p[row].gather(2, drawn[..., None])[..., 0].prod(1)
    row, drawn, weight = row[weight > 0], drawn[weight > 0], weight[weight > 0]
    tree = out.tree
    tree = replace(
        tree,
        tokens=tree.tokens[row],
        parent=tree.parent[row],
        drawn_by=tree.drawn_by[row],
        q=None if tree.q is None else tree.q[row],
    )
    monkeypatch.setattr(lossy, "target_draws", lambda evidence: drawn)
    noise = Noise(torch.zeros_like(row), torch.zeros_like(row))
    every = Drafts(tree, out.p[row], out.code[row], out.depth, weight)
    return every, Evidence(tree, every.p, noise)


def emitted(
    rule: Verifier, case: Case, distributions: Tables, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """(emitted, target) joint distributions [V ** horizon]."""
    every, evidence = all_draws(exact.drafts(case, distributions), monkeypatch)
    return exact.emitted_joint(rule, every, distributions, evidence), exact.target_joint(
        distributions, max(every.depth) + 1
    )


CASES = [
    Case((-1, 0), (F, I)),
    Case((-1, 0, 1), (F, I, I)),
    Case((-1, 0, 0), (F, I, F)),
    Case((-1, 0, 0, 1), (F, W, W, I)),
]


@pytest.mark.parametrize("case", CASES)
def test_enumerated_laws_and_their_bounds(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """coupled is exact; a rule with p(x) > t for what it tolerates emits a text with at most t^-n of its probability."""
    depth, worst = max(case.depths), dict.fromkeys(["coupled", "typical", "top_n"], 0.0)
    for seed in range(4):
        distributions = exact.tables(3, depth + 1, seed, sparse_p=0.2)
        entropy = [torch.special.entr(p).sum(-1) for p in distributions.p]
        floor = float(min((0.3 * (-h).exp()).clamp(max=0.09).min() for h in entropy))
        for name, rule, least in (
            ("coupled", Typical(epsilon=1.0, delta=math.inf), 1.0),
            ("typical", Typical(), floor),
            ("top_n", TopN(), 0.0),
        ):
            probs, target = emitted(rule, case, distributions, monkeypatch)
            assert least == 0.0 or bool((probs <= target * least**-depth + 1e-12).all())
            worst[name] = max(worst[name], float((probs - target).abs().max()))
    assert worst.pop("coupled") < 1e-12
    assert min(worst.values()) > 1e-2


# Lenience: reads no noise, so production code is enumerated as it stands.


@pytest.mark.parametrize("parent", [(-1, 0), (-1, 0, 1), (-1, 0, 0), (-1, 0, 0, 0), (-1, 0, 0, 1), (-1, 0, 0, 1, 1)])
def test_lenience_is_lossy_within_its_bound(parent: tuple[int, ...]) -> None:
    worst = 0.0
    for seed in range(2):
        for case in exact.labelled(parent, 3, 4, seed):
            depth = max(case.depths)
            labels = exact.tables(3, depth + 1, seed, sparse_p=0.2, sparse_q=0.0 if W in case.labels else 0.2)
            out = exact.drafts(case, labels)
            target = exact.target_joint(labels, depth + 1)
            for lenience in (0.8, 0.5, 0.2):
                probs = exact.emitted_joint(Lenience(lenience), out, labels)
                assert abs(float(probs.sum()) - 1.0) < 1e-12
                assert bool((probs <= target * lenience**-depth + 1e-12).all())
                worst = max(worst, float((probs - target).abs().max()))
            assert exact.error(Lenience(1.0), case, labels) < 1e-12
    assert worst > 1e-2


def test_lenience_bound_is_tight_on_one_guess() -> None:
    """Emitted p / l where p < l q, never more; enumerated for chains of one at the issue's tolerance."""
    for seed in range(20):
        distributions = exact.tables(4, 2, seed)
        label = (
            exact.emitted_joint(Lenience(0.5), exact.drafts(Case((-1, 0), (F, I)), distributions), distributions)
            .view(4, 4)
            .sum(1)
        )
        p, q = distributions.p[0][0], distributions.q[0][0]
        assert bool((label <= p / 0.5 + 1e-12).all())
        below = p < 0.5 * q
        assert torch.allclose(label[below], p[below] / 0.5, atol=1e-12, rtol=0)
    assert exact.error(Lenience(), Case((-1, 0), (F, I)), exact.tables(4, 2, 0)) > 1e-3


def test_lenience_in_ragged_batches_its_slow_twin_and_broken_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case((-1, 0, 0, 1), (F, W, W, I)), Case((-1, 0, 0), (F, I, F)), Case((-1, 0), (F, F))]
    probs, rule = exact.tables(3, 3, 0), Lenience(0.6)
    parts = [exact.drafts(case, probs) for case in cases]
    tree, p = exact.batch(parts, 6)
    evidence = Evidence(tree, p)
    stops, start = rule.stops(evidence).stops, 0
    for part in parts:
        alone = rule.stops(Evidence(part.tree, part.p)).stops
        rows = slice(start, start + len(alone))
        assert torch.allclose(stops[rows, : alone.shape[1]], alone, atol=1e-14)
        assert not bool(stops[rows, alone.shape[1] :].any())
        start += len(alone)
    broken = p.clone()
    broken[:, 0] = math.nan
    assert torch.equal(rule.stops(Evidence(tree, broken)).stops[:, 0], torch.ones(len(p), dtype=torch.float64))
    noise = Noise(torch.arange(len(p)), torch.zeros(len(p), dtype=torch.int64))
    assert not bool(draw(rule, Evidence(tree, broken, noise)).sound.any())
    monkeypatch.setattr("foretell.verify.rejection.try_tree", lambda *args, **options: None)
    slow = rule.stops(evidence)
    assert isinstance(slow.carry, Tensor), "the twin in torch ran"
    assert torch.allclose(slow.stops, stops, atol=1e-12)


# Through several steps with the real noise. False-alarm rate of each that passes: statistics.FALSE_ALARM = 1e-6.

CHAIN, FORK = (-1, 0, 1), (-1, 0, 0, 1)


@pytest.mark.parametrize(
    ("rule", "label", "parent"),
    [
        (Typical(), C, CHAIN),
        (TopN(), C, CHAIN),
        (Lenience(), I, CHAIN),
    ],
)
def test_defaults_are_not_exact(rule: Verifier, label: DrawnBy, parent: tuple[int, ...]) -> None:
    case = Case(parent, (F, *[label] * (len(parent) - 1)))
    assert statistics.p_value(statistics.decode(case, rule)) < statistics.FALSE_ALARM


@pytest.mark.parametrize(("rule", "label"), [(TopN(n=0), C), (Lenience(1.0), I)])
def test_strictest_settings_are_exact(rule: Verifier, label: DrawnBy) -> None:
    case = Case(CHAIN, (F, label, label))
    assert statistics.p_value(statistics.decode(case, rule)) > statistics.FALSE_ALARM
