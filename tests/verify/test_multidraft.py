"""K-SEQ, importance and transport: the distribution of the choice, optima, mutants. The proof is in test_matrix.py."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.core.tree import DrawnBy, TokenTree
from foretell.verify import VERIFIERS, Evidence, Rejection, multidraft, selection
from foretell.verify.multidraft import Fit, KSeq, MultiDraft
from foretell.verify.selection import Importance, Selection, Transport
from tests.verify.enumerate import Case, chains, drafts, error, tables

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
TOLERANCE = 1e-12
RULES = [KSeq(), Importance(), Transport()]
SELECTIONS = [Importance(), Transport()]
TRIPLE = Case((-1, 0, 0, 0), (F, I, I, I))
FORK = Case((-1, 0, 0, 1, 1, 2), (F, I, I, I, I, I))
rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
selections = pytest.mark.parametrize("rule", SELECTIONS, ids=lambda rule: rule.name)


def selection_gap(p: Tensor, q: Tensor, num_drafts: int, verifier: MultiDraft) -> Tensor:
    """[R, 2] float64: (alpha*, achieved) acceptance with num_drafts drafts from q [R, V] under p [R, V], distributions.

    alpha* = 1 + min over H of p(H) - q(H)^n; the minimum is at a prefix of the tokens in order of rising p / q
    (Hu et al. 2502.18779).
    """
    p, q = p.double(), q.double()
    order = (p / (p + q).clamp(min=1e-300)).argsort(1)
    inner, outer = p.gather(1, order).cumsum(1), q.gather(1, order).cumsum(1)
    best = 1.0 + (inner - outer.pow(num_drafts)).min(1).values.clamp(max=0.0)
    return torch.stack([best, verifier.acceptance(p, q, num_drafts)], 1)


@pytest.fixture
def shared_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transport as it is on large vocabularies: one token has a level of its own, all others lie between two of 5."""
    monkeypatch.setattr(selection, "NUM_OWN", 1)
    monkeypatch.setattr(selection, "NUM_SHARED", 5)


def random_labels(num_rows: int, vocab_size: int, seed: int, sharp: float = 1.0) -> tuple[Tensor, Tensor]:
    """(p, q) [R, V] float64: q is p with noise."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64)
    noise = torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64)
    return (sharp * 1.5 * base).softmax(1), (sharp * (1.5 * base + noise)).softmax(1)


# The joint distribution of the text


@rules
def test_chains_are_plain_rejection(rule: MultiDraft) -> None:
    probs = tables(3, 4, 0, sparse_p=0.3)
    for case in chains(2):
        out = drafts(case, probs)
        mine, plain = (verifier.stops(Evidence(out.tree, out.p)).stops for verifier in (rule, Rejection()))
        assert torch.equal(mine, plain)
        assert error(rule, case, probs) < TOLERANCE


@pytest.mark.usefixtures("shared_levels")
def test_transport_with_shared_levels() -> None:
    for seed in range(3):
        probs = tables(4, 4, seed, sparse_p=0.2, sparse_q=0.2 * (seed > 1))
        for case in (TRIPLE, FORK, Case((-1, 0, 0, 0, 0), (F, I, I, I, W)), Case((-1, 0, 0, 0, 0), (F, I, I, I, I))):
            if seed < 2 or W not in case.labels:
                assert error(Transport(), case, probs) < TOLERANCE, case


# Degenerate distributions


@rules
def test_equal_laws_accept_everything_and_disjoint_ones_nothing(rule: MultiDraft) -> None:
    p, _ = random_labels(20, 6, 0)
    for num_drafts in (2, 3, 5):
        assert float((1.0 - rule.acceptance(p, p, num_drafts)).abs().max()) < 1e-14
        half = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
        assert float(rule.acceptance(half, half.flip(1), num_drafts).abs()) < 1e-14


def one_node(p: Tensor, q: Tensor, tokens: list[int]) -> Evidence:
    """A root with IID children of these tokens."""
    num_nodes = len(tokens) + 1
    probs = torch.stack([q, *[torch.zeros_like(q)] * (num_nodes - 1)])[None]
    tree = TokenTree(
        torch.tensor([[0, *tokens]]),
        torch.tensor([[-1, *[0] * (num_nodes - 1)]]),
        torch.tensor([[int(F), *[int(I)] * (num_nodes - 1)]]),
        probs,
    )
    return Evidence(tree, p.expand(1, num_nodes, -1))


@rules
def test_children_that_q_excludes_and_broken_q_count_as_fixed(rule: MultiDraft) -> None:
    """So the outcome is that of FIXED children: accepted with what is left of p, and struck out of it."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    for q in (
        torch.tensor([0.5, 0.0, 0.5, 0.0], dtype=torch.float64),
        torch.full((4,), torch.nan, dtype=torch.float64),
        torch.tensor([0.5, torch.inf, 0.5, 0.1], dtype=torch.float64),
    ):
        broken = one_node(p, q, [1, 3, 1])
        walk = rule.stops(broken)
        expected = torch.tensor([[0.4, 0.2, 0.4, 0.0]], dtype=torch.float64)
        assert torch.allclose(walk.stops, expected, atol=1e-12)
        left = rule.residual(broken, walk, torch.zeros(1, dtype=torch.int64))
        assert torch.allclose(left / left.sum(), torch.tensor([0.25, 0.0, 0.75, 0.0], dtype=torch.float64), atol=1e-12)


@rules
def test_a_run_ends_where_q_excludes_a_token(rule: MultiDraft) -> None:
    """Two children q could draw, one that it could not: the third is FIXED, against what the two have left."""
    p = torch.tensor([0.4, 0.1, 0.2, 0.3], dtype=torch.float64)
    q = torch.tensor([0.1, 0.6, 0.3, 0.0], dtype=torch.float64)
    walk = rule.stops(one_node(p, q, [0, 0, 3]))
    count = torch.tensor([2])
    rest = rule.rest(rule.fit(p[None], q[None], count), p[None], q[None], count)[0]
    first = float(walk.stops[0, 1] + walk.stops[0, 2])
    assert abs(float(walk.stops[0, 3]) - (1.0 - first) * float(rest[3] / rest.sum())) < 1e-12
    left = rule.residual(one_node(p, q, [0, 0, 3]), walk, torch.zeros(1, dtype=torch.int64))[0]
    assert torch.allclose(left, torch.cat([rest[:3], rest.new_zeros(1)]), atol=1e-12)


@rules
def test_where_p_is_no_law_the_walk_stops_and_draw_can_tell(rule: MultiDraft) -> None:
    q = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    for p in ([torch.nan] * 3, [0.5, torch.inf, 0.5], [0.0] * 3):
        evidence = one_node(torch.tensor(p, dtype=torch.float64), q, [0, 1])
        walk = rule.stops(evidence)
        assert walk.stops.tolist() == [[1.0, 0.0, 0.0]]
        left = rule.residual(evidence, walk, torch.zeros(1, dtype=torch.int64))
        assert not bool(torch.isfinite(left.sum())) or float(left.sum()) == 0.0


@rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_vocabularies_keep_the_books(rule: MultiDraft, dtype: torch.dtype) -> None:
    """Rest and acceptance add up to one, whatever a float32 distribution sums to; and temperatures make most of p and q
    zero."""
    for sharp in (1.0, 4.0, 40.0):
        p, q = (probs.to(dtype) for probs in random_labels(6, 2000, 1, sharp))
        count = torch.tensor([2, 3, 4, 8, 2, 5])
        fit = rule.fit(p, q, count)
        rest = rule.rest(fit, p, q, count)
        assert rest.dtype == dtype
        assert bool((rest >= 0).all())
        assert bool((rest <= p).all())
        tokens = torch.multinomial(q, 8, replacement=True, generator=torch.Generator().manual_seed(0))
        chances = rule.choose(fit, p, q, tokens, count)
        inside = torch.arange(8) < count[:, None]
        assert bool((chances[inside] >= 0).all())
        assert float((chances * inside).sum(1).max()) < 1.0 + 1e-6


@pytest.mark.parametrize("narrow", ["p", "q"])
@pytest.mark.parametrize("name", ["rejection", "traversal", "greedy_block", "k_seq", "importance", "transport"])
def test_laws_of_two_dtypes_are_judged_in_the_wider(name: str, narrow: str) -> None:
    """Where the narrow distribution is held in float64 too, everything is equal bit for bit."""
    out = drafts(FORK, tables(4, 4, 3))
    assert out.tree.q is not None
    p, q = (probs.float() if which == narrow else probs for which, probs in (("p", out.p), ("q", out.tree.q)))
    mixed = Evidence(replace(out.tree, q=q), p)
    wide = Evidence(replace(out.tree, q=q.double()), p.double())
    rule = VERIFIERS[name]
    mine, true = rule.stops(mixed), rule.stops(wide)
    assert mine.stops.dtype == torch.float64
    assert torch.equal(mine.stops, true.stops)
    for node in range(out.tree.num_nodes):
        at = torch.full((len(p),), node)
        assert torch.equal(rule.residual(mixed, mine, at), rule.residual(wide, true, at))


@selections
@pytest.mark.parametrize("vocab_size", [5, 80])
def test_the_law_of_the_choice_takes_laws_of_two_dtypes(rule: Selection, vocab_size: int) -> None:
    """Within 1e-6 of float64, whichever of p and q is float32."""
    p, q = random_labels(3, vocab_size, 1)
    count = torch.tensor([2, 3, 4])
    expected = rule.distribution_of_choice(rule.fit(p, q, count), p, q)
    for mine in ((p.float(), q), (p, q.float())):
        probs = rule.distribution_of_choice(rule.fit(*mine, count), *mine)
        assert probs.dtype == torch.float64
        assert torch.allclose(probs, expected, atol=1e-6, rtol=0)


# The distribution of the choice


def all_tuples(vocab_size: int, num_drafts: int) -> Tensor:
    """[V ** n, n] every outcome of the draws."""
    return torch.tensor(list(itertools.product(range(vocab_size), repeat=num_drafts)))


def enumerated_choice(rule: Selection, p: Tensor, q: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
    """[V] twice: the distribution of the chosen draft by adding up all outcomes, and what the rule says it is. p, q [V]."""
    tokens = all_tuples(len(p), num_drafts)
    rows = len(tokens)
    fit = rule.fit(p[None], q[None], torch.tensor([num_drafts]))
    said = rule.distribution_of_choice(fit, p[None], q[None])[0]
    wide = tuple(x.expand(rows, *x.shape[1:]) for x in fit)
    chosen, probs = rule.choices(wide, p[tokens], q[tokens], tokens, torch.ones_like(tokens, dtype=torch.bool))
    assert torch.allclose(chosen.sum(1), torch.ones(rows, dtype=torch.float64), atol=1e-13, rtol=0)
    assert torch.allclose(probs, said[tokens], atol=1e-14, rtol=0)
    weight = q[tokens].prod(1)
    return torch.zeros_like(p).index_add_(0, tokens.flatten(), (weight[:, None] * chosen).flatten()), said


@selections
def test_the_law_of_the_choice_is_what_all_outcomes_add_up_to(rule: Selection) -> None:
    for seed, num_drafts in itertools.product(range(4), (1, 2, 3, 5)):
        p, q = (probs[0] for probs in random_labels(1, 4, seed, 1.0 + seed))
        counted, said = enumerated_choice(rule, p, q, num_drafts)
        assert torch.allclose(counted, said, atol=1e-13, rtol=0)
        if num_drafts == 1:
            assert torch.allclose(said, q, atol=1e-13, rtol=0)


@selections
def test_the_law_of_the_choice_of_many_drafts(rule: Selection) -> None:
    """Nine: the polynomials have degree eight."""
    for seed in range(3):
        p, q = (probs[0] for probs in random_labels(1, 2, seed, 0.5))
        counted, said = enumerated_choice(rule, p, q, 9)
        assert torch.allclose(counted, said, atol=1e-13, rtol=0)


@selections
def test_the_law_of_the_choice_among_many_tokens(rule: Selection) -> None:
    """V = 80: more tokens than transport has levels of their own for."""
    assert selection.NUM_OWN < 80
    for seed, sharp in ((0, 0.7), (1, 2.0)):
        p, q = (probs[0] for probs in random_labels(1, 80, seed, sharp))
        counted, said = enumerated_choice(rule, p, q, 2)
        assert torch.allclose(counted, said, atol=1e-13, rtol=0)


@pytest.mark.usefixtures("shared_levels")
def test_the_law_of_the_choice_with_few_levels() -> None:
    for seed, num_drafts in itertools.product(range(4), (2, 3, 4)):
        p, q = (probs[0] for probs in random_labels(1, 5, seed, 1.0 + seed))
        counted, said = enumerated_choice(Transport(), p, q, num_drafts)
        assert torch.allclose(counted, said, atol=1e-13, rtol=0)


def test_importance_between_two_drafts_has_a_closed_form() -> None:
    """p_I(x) = 2 q_x sum_y q_y w_x / (w_x + w_y), over weights whose extremes are 1e9 apart: the integral's error."""
    p, q = random_labels(50, 60, 3, 3.0)
    fit = Importance().fit(p, q, torch.full((50,), 2))
    weights = selection.race_table(p.device)[0]
    assert float(weights.max() / weights.min()) > 1e6
    weight = weights[selection.level_of(p, q, fit[0])]
    pair = weight[:, :, None] / (weight[:, :, None] + weight[:, None, :])
    expected = 2.0 * q * (pair * q[:, None, :]).sum(-1)
    assert torch.allclose(Importance().distribution_of_choice(fit, p, q), expected, atol=1e-14, rtol=1e-13)


def test_the_ranks_of_transport_are_uniform() -> None:
    """sum_x q(x) K(x, dt) = dt: each interval gets, from all levels together, its own length."""
    for num_drafts, vocab_size in ((2, 6), (4, 40), (8, 200)):
        p, q = random_labels(30, vocab_size, num_drafts)
        fit = Transport().fit(p, q, torch.full((30,), num_drafts))
        mass = fit[5]
        ranks = Transport().ranks(fit, torch.arange(mass.shape[1]).expand(30, -1))
        assert bool((ranks >= 0).all())
        assert torch.allclose(ranks.sum(-1), torch.ones_like(mass), atol=1e-13, rtol=0)
        assert torch.allclose((mass[:, :, None] * ranks).sum(1), mass, atol=1e-13, rtol=0)


# Acceptance


def optimum(p: Tensor, q: Tensor, num_drafts: int) -> float:
    """alpha* = 1 + min over all sets H of p(H) - q(H)^n (Hu et al. 2502.18779), by brute force. p, q [V]."""
    inside = torch.tensor(list(itertools.product((0.0, 1.0), repeat=len(p))), dtype=torch.float64)
    return 1.0 + float((inside @ p - (inside @ q).pow(num_drafts)).min())


def test_transport_reaches_the_optimum_and_nothing_passes_it() -> None:
    for seed, num_drafts in itertools.product(range(8), (1, 2, 3, 6)):
        p, q = random_labels(1, 7, seed, 0.5 * (seed + 1))
        best = optimum(p[0], q[0], num_drafts)
        for rule in RULES:
            gap = selection_gap(p, q, num_drafts, rule)[0]
            assert abs(float(gap[0]) - best) < 1e-13
            assert float(gap[1]) <= best + 1e-13
        assert abs(float(Transport().acceptance(p, q, num_drafts)) - best) < 1e-12


def test_transport_reaches_the_optimum_on_every_support_of_64_tokens() -> None:
    p, q = random_labels(200, 64, 0)
    q = torch.where(torch.rand(q.shape, generator=torch.Generator().manual_seed(1)) < 0.3, 0.0, q)
    q = q / q.sum(1, keepdim=True)
    for num_drafts in (2, 4, 16):
        gap = selection_gap(p, q, num_drafts, Transport())
        assert float((gap[:, 0] - gap[:, 1]).abs().max()) < 1e-12


def realistic(vocab_size: int, noise: float, temperature: float) -> tuple[Tensor, Tensor]:
    """(p, q) [16, V]: Zipf-like distributions with logits of their own, and a draft whose logits are off by noise."""
    generator = torch.Generator().manual_seed(0)
    logits = -1.1 * torch.arange(1, vocab_size + 1, dtype=torch.float64).log()
    logits = logits + torch.randn(16, vocab_size, generator=generator, dtype=torch.float64)
    draft = logits + noise * torch.randn(16, vocab_size, generator=generator, dtype=torch.float64)
    return (logits / temperature).softmax(1), (draft / temperature).softmax(1)


def recursive(p: Tensor, q: Tensor, num_drafts: int) -> Tensor:
    """[R] the acceptance of recursive rejection of IID drafts, in closed form."""
    left, rest = torch.ones_like(p[:, 0]), p
    for _ in range(num_drafts):
        left = left * (1.0 - torch.minimum(rest, q).sum(1))
        rest = (rest - q).clamp(min=0.0)
        rest = rest / rest.sum(1, keepdim=True)
    return 1.0 - left


def settings() -> Iterator[tuple[Tensor, Tensor, int]]:
    for vocab_size, (noise, temperature), num_drafts in itertools.product(
        (300, 2000), ((0.5, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 0.6)), (2, 4, 8)
    ):
        yield *realistic(vocab_size, noise, temperature), num_drafts


def test_on_realistic_laws_all_beat_recursive_rejection_and_transport_is_near_the_optimum() -> None:
    for p, q, num_drafts in settings():
        plain = float(recursive(p, q, num_drafts).mean())
        gaps = {rule.name: selection_gap(p, q, num_drafts, rule).mean(0) for rule in RULES}
        assert all(float(gap[1]) > plain for gap in gaps.values())
        assert -1e-12 <= float(gaps["transport"][0] - gaps["transport"][1]) < 5e-4
        assert float(gaps["importance"][0] - gaps["importance"][1]) < 0.04
        assert float(gaps["importance"][1]) > float(gaps["k_seq"][1])


def test_bounds_of_k_seq(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 1 - TV, what one draft has, and (1 - (1 - 1/n)^n) of the optimum (SpecTr, theorem 2), with the best
    factor; the default stays close to that."""
    for seed, num_drafts in itertools.product(range(5), (2, 3, 8)):
        p, q = random_labels(40, 20, seed, 0.5 + seed)
        quick = KSeq().acceptance(p, q, num_drafts)
        with monkeypatch.context() as patch:
            patch.setattr(multidraft, "NUM_EVALUATIONS", 80)
            best, mine = selection_gap(p, q, num_drafts, KSeq()).unbind(1)
        assert bool((mine >= torch.minimum(p, q).sum(1) - 1e-12).all())
        assert bool((mine >= best * (1.0 - (1.0 - 1.0 / num_drafts) ** num_drafts) - 1e-12).all())
        assert float((mine - quick).abs().max()) < 1e-3


@rules
def test_stops_accept_as_often_as_acceptance_says(rule: MultiDraft) -> None:
    distributions = tables(4, 2, 9)
    for num_drafts in (2, 3, 4):
        out = drafts(Case((-1, *[0] * num_drafts), (F, *[I] * num_drafts)), distributions)
        stopped = float((out.weight * rule.stops(Evidence(out.tree, out.p)).stops[:, 0]).sum())
        assert (
            abs(1.0 - stopped - float(rule.acceptance(distributions.p[0], distributions.q[0], num_drafts))) < TOLERANCE
        )


# Mutants: each must be caught by the same enumeration


class WrongCount(Importance):
    """The integral for one draft fewer than were drawn."""

    def fit(self, p: Tensor, q: Tensor, count: Tensor) -> Fit:
        return super().fit(p, q, (count - 1).clamp(min=1))


class Unquantised(Importance):
    """Weights by level, but their distribution as if each token had its own (exact for two drafts but for that)."""

    def distribution_of_choice(self, fit: Fit, p: Tensor, q: Tensor) -> Tensor:
        x = (p / (fit[0] * q)).clamp(max=0.999)
        weight = x / (1.0 - x)
        return 2.0 * q * (weight[:, :, None] / (weight[:, :, None] + weight[:, None, :]) * q[:, None, :]).sum(-1)


class NoGain(KSeq):
    """The rest of one draft, not of n."""

    def rest(self, fit: Fit, p: Tensor, q: Tensor, count: Tensor) -> Tensor:
        return super().rest((fit[0], torch.ones_like(fit[1])), p, q, count)


class SmallFactor(KSeq):
    """A factor below the smallest exact one."""

    def fit(self, p: Tensor, q: Tensor, count: Tensor) -> Fit:
        one = torch.ones_like(count, dtype=torch.float64)
        beta = torch.minimum(p, q).sum(1)
        return one, multidraft.any_passes(beta, count.double()) / beta


class NoExchange(Transport):
    """The density of the exchanged ranks, but ranks by order alone."""

    def ranks(self, fit: Fit, at: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(at, fit[5].shape[1]).double()


class OneSided(Transport):
    """Levels with too much give ranks away, but get none of those of the levels with too little."""

    def ranks(self, fit: Fit, at: Tensor) -> Tensor:
        start, end = fit[-2:]
        gives = (end - start)[:, 0].gather(1, at) > 0
        in_order = torch.nn.functional.one_hot(at, end.shape[-1]).double()
        return torch.where(gives[:, :, None], super().ranks(fit, at), in_order)


class WholeRest(Transport):
    """Nothing taken out of p."""

    def rest(self, fit: Fit, p: Tensor, q: Tensor, count: Tensor) -> Tensor:
        return p


@pytest.mark.parametrize(
    "mutant", [WrongCount(), Unquantised(), NoGain(), SmallFactor(), NoExchange(), OneSided(), WholeRest()], ids=str
)
def test_mutants_are_caught(mutant: MultiDraft) -> None:
    pair = Case((-1, 0, 0), (F, I, I))
    worst = max(error(mutant, pair, tables(4, 2, seed)) for seed in range(6))
    assert worst > 1e-5


def test_a_run_that_is_too_long_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """WITHOUT_REPLACEMENT children counted into the run: the drafts are not independent."""

    def too_long(q: Tensor, tokens: Tensor, probs: Tensor, real: Tensor) -> Tensor:
        return real.long().sum(1)

    monkeypatch.setattr(multidraft, "run_of", too_long)
    probs = tables(3, 2, 0)
    for rule in RULES:
        assert error(rule, Case((-1, 0, 0), (F, I, W)), probs) > 1e-3


def test_a_rest_behind_the_run_that_starts_from_p_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original, distributions = multidraft.try_children, tables(3, 2, 0)

    def from_p(rest: Tensor, *args: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return original(distributions.p[0].expand_as(rest), *args, **options)

    monkeypatch.setattr(multidraft, "try_children", from_p)
    for rule in RULES:
        assert error(rule, Case((-1, 0, 0, 0), (F, I, I, F)), distributions) > 1e-3
