"""The distributions that lossy rules emit, exactly and by chi-square: their bounds hold, their defaults are not exact.

Enumerated are all drafts times all draws of the target (and coins, on a grid); chi-square goes through several steps
with the real noise.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.tree import DrawnBy, TokenTree
from foretell.verify import Evidence, Verifier, draw
from foretell.verify.lossy import base as lossy
from foretell.verify.lossy.divergence import Divergence
from foretell.verify.lossy.lenience import Lenience
from foretell.verify.lossy.lookahead import EntropyGated
from foretell.verify.lossy.threshold import Threshold
from foretell.verify.lossy.top_n import TopN
from foretell.verify.lossy.typical import Typical
from tests.verify import enumerate as exact, test_statistics as statistics
from tests.verify.enumerate import Case, Drafts, Tables
from tests.verify.random_trees import decided
from tests.verify.test_exact import GivenNoise, all_noise, coupled_tree, given_noise

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
    depth, worst = max(case.depths), dict.fromkeys(["coupled", "single", "typical", "top_n"], 0.0)
    for seed in range(4):
        distributions = exact.tables(3, depth + 1, seed, sparse_p=0.2)
        entropy = [torch.special.entr(p).sum(-1) for p in distributions.p]
        floor = float(min((0.3 * (-h).exp()).clamp(max=0.09).min() for h in entropy))
        for name, rule, least in (
            ("coupled", Threshold(accumulated=1.0), 1.0),
            ("single", Threshold(single=0.6, accumulated=1.0), 0.6),
            ("single", Threshold(single=0.3, accumulated=1.0), 0.3),
            ("typical", Typical(), floor),
            ("top_n", TopN(), 0.0),
        ):
            probs, target = emitted(rule, case, distributions, monkeypatch)
            assert least == 0.0 or bool((probs <= target * least**-depth + 1e-12).all())
            worst[name] = max(worst[name], float((probs - target).abs().max()))
    assert worst.pop("coupled") < 1e-12
    assert min(worst.values()) > 1e-2


def test_divergence_is_within_pinskers_bound_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    num_lossy = 0
    for seed in range(40):
        distributions = exact.tables(3, 2, seed)
        for rule, bound in (
            (Divergence(threshold=0.2), math.sqrt(0.2 / 2)),
            (Divergence(threshold=0.2, measure="reverse_kl"), math.sqrt(0.2 / 2)),
            (Divergence(threshold=0.05, measure="js"), math.sqrt(2 * 0.05)),
        ):
            probs, target = emitted(rule, CASES[0], distributions, monkeypatch)
            first, wanted = probs.view(3, 3).sum(1), target.view(3, 3).sum(1)
            distance = float((first - wanted).abs().sum()) / 2
            assert distance <= bound
            num_lossy += distance > 1e-3
            if distance > 1e-12:
                assert torch.allclose(first, distributions.q[0][0]), "a tolerated chain has the draft's distribution"
    assert num_lossy > 10


class GridCoins(Noise):
    """Coins in the middles of M equal intervals, one a row: exact where all breakpoints lie between them."""

    def coins(self, count: int) -> Tensor:
        num_rows = len(self.seeds)
        return ((torch.arange(num_rows) % M + 0.5) / M)[:, None].expand(-1, count).double()


M = 6


@pytest.mark.parametrize(
    ("tokens", "accumulated", "wanted"),
    [
        ([0], 0.5, [1 / 2, 1 / 6, 1 / 3]),
        ([2], 0.5, [0, 0, 1]),
        ([0, 1], 0.5, [1 / 2, 1 / 2, 0]),
        ([2, 0], 0.5, [1 / 4, 0, 3 / 4]),  # the first child gains until nothing is left; the second keeps its own
        ([0, 0], 0.5, [1 / 2, 1 / 6, 1 / 3]),
        ([0, 1], 1.0, [1 / 4, 1 / 4, 1 / 2]),
    ],
)
def test_law_of_accumulated_thresholds(
    tokens: list[int], accumulated: float, wanted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """p = (1/4, 1/4, 1/2), enumerated over the target's draw and the coin; ends at min(1, S / accumulated)."""
    p = torch.tensor([1 / 4, 1 / 4, 1 / 2], dtype=torch.float64)
    num_nodes = 1 + len(tokens)
    drawn = torch.arange(3).repeat_interleave(M)
    monkeypatch.setattr(lossy, "target_draws", lambda evidence: drawn[:, None].expand(-1, num_nodes))
    rows = 3 * M
    tree = TokenTree(
        torch.tensor([0, *tokens]).expand(rows, -1),
        torch.tensor([-1] + [0] * len(tokens)).expand(rows, -1),
        torch.zeros(rows, num_nodes, dtype=torch.int64),
    )
    zeros = torch.zeros(rows, dtype=torch.int64)
    evidence = Evidence(tree, p.expand(rows, num_nodes, -1), GridCoins(zeros, zeros))
    result = Threshold(accumulated=accumulated).decide(evidence)
    first = torch.where(result[0] > 0, tree.tokens.gather(1, result[0][:, None])[:, 0], drawn)
    probs = torch.zeros(3, dtype=torch.float64).index_add_(0, first, p[drawn] / M)
    assert torch.allclose(probs, torch.tensor(wanted, dtype=torch.float64), atol=1e-12)
    assert bool((probs <= p / accumulated + 1e-12).all())


class GivenCoins(GivenNoise):
    """Given exponentials, and coins on a grid."""

    def coins(self, count: int) -> Tensor:
        return ((torch.arange(len(self.seeds)) % GRID + 0.5) / GRID)[:, None].expand(-1, count).double()


GRID = 50


@pytest.mark.usefixtures("given_noise")
@pytest.mark.parametrize("parent", [(-1, 0), (-1, 0, 0)])
def test_accumulated_threshold_keeps_its_bound_with_coupled_children(parent: tuple[int, ...]) -> None:
    """Exact over the noise of V = 3 (polygons of test_exact), the coin on a grid: off by at most 1 / GRID a draw."""
    worst = 0.0
    for seed in range(4):
        distributions = exact.tables(3, 2, seed)
        rows, weight = all_noise(distributions, 2)
        rows, weight = rows.repeat_interleave(GRID, 0), weight.repeat_interleave(GRID) / GRID
        tree, p = coupled_tree(parent, distributions, rows)
        noise = GivenCoins(rows)
        at, bonus = decided(Threshold(accumulated=0.6), Evidence(tree, p, noise))
        second = tree.tokens.gather(1, at[:, None])[:, 0]
        first = torch.where(at > 0, second, bonus)
        probs = torch.zeros(3, dtype=torch.float64).index_add_(0, first, weight)
        assert bool((probs <= distributions.p[0][0] / 0.6 + 1 / GRID).all())
        worst = max(worst, float((probs - distributions.p[0][0]).abs().max()))
    assert worst > 0.05


def test_coins_are_a_stream_of_their_own() -> None:
    noise = Noise(torch.arange(1000), torch.full((1000,), 9))
    coins = noise.coins(3)
    assert coins.shape == (1000, 3)
    assert (
        len(torch.cat([coins.flatten(), noise.stop(), noise.bonus(), noise.draft_nodes(0, 3).flatten()]).unique())
        == 8000
    )
    assert torch.equal(noise.coins(5)[:, :3], coins)


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
        (Threshold(), C, FORK),
        (TopN(), C, CHAIN),
        (EntropyGated(), C, tuple(range(-1, 8))),
        (Divergence(), I, CHAIN),
        (Lenience(), I, CHAIN),
    ],
)
def test_defaults_are_not_exact(rule: Verifier, label: DrawnBy, parent: tuple[int, ...]) -> None:
    case = Case(parent, (F, *[label] * (len(parent) - 1)))
    assert statistics.p_value(statistics.decode(case, rule)) < statistics.FALSE_ALARM


@pytest.mark.parametrize(
    ("rule", "label"), [(Threshold(1.0, 1.0), C), (Divergence(threshold=0.0), I), (Lenience(1.0), I)]
)
def test_strictest_settings_are_exact(rule: Verifier, label: DrawnBy) -> None:
    case = Case(CHAIN, (F, label, label))
    assert statistics.p_value(statistics.decode(case, rule)) > statistics.FALSE_ALARM
