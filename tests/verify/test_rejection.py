"""Rejection, by exact enumeration: every distribution, mixture, chain and shape, to 1e-12; and mutants that must be
caught."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.tree import DrawnBy, TokenTree, ancestors, chain_tree
from foretell.verify import Evidence, Rejection, Walk, rejection as module
from foretell.verify.base import stops_from_edges
from foretell.verify.rejection import children_of, try_children
from tests.verify.enumerate import (
    Case,
    Drafts,
    Tables,
    batch,
    chains,
    drafts,
    emitted_joint,
    error,
    labelled,
    renumbered,
    shapes,
    tables,
    target_joint,
)
from tests.verify.kernels import KERNELS, use

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
TOLERANCE = 1e-12
VERIFIER = Rejection()
CHAIN = Case((-1, 0, 1), (F, I, I))
PAIR = Case((-1, 0, 0), (F, I, I))
FORK = Case((-1, 0, 0, 1, 1, 2), (F, I, I, I, I, I))


@pytest.fixture(autouse=True, params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test with the C kernels, and as on a machine without a compiler."""
    use(request.param, monkeypatch)
    return str(request.param)


def test_chains_to_depth_3_with_every_law_at_every_node() -> None:
    for vocab_size in (3, 4):
        for seed, sparse in ((0, 0.0), (1, 0.4)):  # zeros in p too: drafted tokens that p excludes
            probs = tables(vocab_size, 4, seed, sparse_p=sparse)
            for case in chains(3 if vocab_size == 3 else 2):
                assert error(VERIFIER, case, probs) < TOLERANCE, case


def test_chains_where_q_has_zeros_and_supports_may_be_disjoint() -> None:
    for seed in range(4):
        probs = tables(4, 3, seed, sparse_p=0.5, sparse_q=0.5)
        for case in chains(2):
            assert error(VERIFIER, case, probs) < TOLERANCE, case


@pytest.mark.parametrize("max_drafted", [4, 6])
def test_all_shapes_with_every_law_and_mixture_at_v_3(kernel: str, max_drafted: int) -> None:
    """All rooted trees with up to 6 drafted nodes, depth up to 3, up to 4 children."""
    probs = tables(3, 4, 1, sparse_p=0.2)
    tried = 0
    for parent in shapes(max_drafted):
        if max_drafted == 6 and len(parent) <= 5:
            continue
        if kernel == "torch" and len(parent) > 6:
            continue
        for case in labelled(parent, 3, num_mixed=12 if max_drafted == 4 else 2):
            tried += 1
            assert error(VERIFIER, case, probs) < TOLERANCE, case
            if kernel == "c" or tried % 3 == 0:
                assert error(VERIFIER, renumbered(case, tried), probs) < TOLERANCE, case
    assert tried > (150 if kernel == "c" else 70)


def test_shapes_at_v_4() -> None:
    probs = tables(4, 4, 5)
    for parent in shapes(4):
        for case in labelled(parent, 4, num_mixed=4):
            assert error(VERIFIER, case, probs) < TOLERANCE, case


def test_fixed_before_drawn_siblings_is_sound_too() -> None:
    """Drawn ones first is a matter of acceptance, not of soundness."""
    probs = tables(3, 2, 0)
    for group in ((F, I), (F, W, W), (C, W, I), (F, I, F, I)):
        case = Case((-1, *[0] * len(group)), (F, *group))
        assert error(VERIFIER, case, probs) < TOLERANCE, case


def test_a_ragged_padded_batch_equals_its_parts() -> None:
    probs = tables(3, 4, 1, sparse_p=0.2)
    cases = [Case((-1, 0), (F, C)), CHAIN, FORK, Case((-1, 0, 0, 0), (F, W, W, F)), Case((-1,), (F,))]
    parts = [drafts(case, probs) for case in cases]
    tree, p = batch(parts, 8)
    tree.check()
    evidence = Evidence(tree, p)
    walk = VERIFIER.stops(evidence)
    start = 0
    for part in parts:
        rows = slice(start, start := start + len(part.weight))
        alone = VERIFIER.stops(Evidence(part.tree, part.p))
        num_nodes = part.p.shape[1]
        assert torch.allclose(walk.stops[rows, :num_nodes], alone.stops, atol=1e-15, rtol=0)
        assert bool((walk.stops[rows, num_nodes:] == 0).all())
        for node in range(num_nodes):
            together = VERIFIER.residual(evidence, walk, torch.full((len(p),), node))[rows]
            single = VERIFIER.residual(Evidence(part.tree, part.p), alone, torch.full((len(part.weight),), node))
            assert torch.allclose(together, single, atol=1e-15, rtol=0)


def test_max_children_known_beforehand_changes_nothing() -> None:
    probs = tables(3, 3, 2)
    out = drafts(FORK, probs)
    known = replace(out.tree, max_children=3)
    assert children_of(known).shape[-1] == 3
    assert children_of(out.tree).shape[-1] == 2
    assert torch.equal(VERIFIER.stops(Evidence(known, out.p)).stops, VERIFIER.stops(Evidence(out.tree, out.p)).stops)
    assert children_of(out.tree)[0].tolist() == [[1, 2], [3, 4], [5, -1], [-1, -1], [-1, -1], [-1, -1]]


# Closed forms


def test_one_drawn_child_is_accepted_with_1_minus_tv() -> None:
    for seed in range(10):
        distributions = tables(4, 2, seed)
        out = drafts(Case((-1, 0), (F, I)), distributions)
        accepted = (out.weight * VERIFIER.stops(Evidence(out.tree, out.p)).stops[:, 1]).sum()
        overlap = torch.minimum(distributions.p[0], distributions.q[0]).sum()
        assert abs(float(accepted - overlap)) < 1e-14


def test_equal_laws_accept_everything_and_disjoint_ones_nothing() -> None:
    """Metamorphic; zero residual: p = q leaves nothing, and then p is the distribution."""
    distributions = tables(4, 3, 3)
    same = Tables(4, distributions.p, distributions.p)
    out = drafts(CHAIN, same)
    walk = VERIFIER.stops(Evidence(out.tree, out.p))
    assert torch.allclose(walk.stops[:, 2], torch.ones_like(out.weight))
    left = VERIFIER.residual(Evidence(out.tree, out.p), walk, torch.zeros(len(out.weight), dtype=torch.int64))
    assert bool((left.sum(1) > 0).all())
    half = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    apart = Tables(4, [half, distributions.p[1]], [half.flip(1), distributions.q[1]])
    out = drafts(Case((-1, 0), (F, I)), apart)
    walk = VERIFIER.stops(Evidence(out.tree, out.p))
    assert torch.equal(walk.stops[:, 0], torch.ones_like(out.weight))
    left = VERIFIER.residual(Evidence(out.tree, out.p), walk, torch.zeros(len(out.weight), dtype=torch.int64))
    assert torch.allclose(left, half.expand_as(left))


def test_fixed_children_are_accepted_with_their_summed_p() -> None:
    distributions = tables(4, 2, 3)
    out = drafts(Case((-1, 0, 0, 0), (F, F, F, F)), distributions)
    stops = VERIFIER.stops(Evidence(out.tree, out.p)).stops[0]
    chosen = out.tree.tokens[0, 1:]
    assert len(set(chosen.tolist())) == 3
    assert torch.allclose(stops[1:], distributions.p[0][0, chosen])


# Mutants and negative controls: each must be caught


def mislabelled(case: Case, distributions: Tables, wrong: tuple[DrawnBy, ...], *, q_given: bool = False) -> float:
    """Error when the nodes are drawn as case says and verified under other labels."""
    out = drafts(case, distributions)
    label = torch.tensor([int(probs) for probs in wrong]).expand_as(out.tree.drawn_by)
    q = out.tree.q
    if q_given:
        q = torch.zeros_like(out.p)
        for node in range(len(case.parent)):
            if node in case.parent:
                q[:, node] = distributions.q[out.depth[node]][out.code[:, node]]
    tree = replace(out.tree, drawn_by=label, q=q)
    return joint_error(out, distributions, Evidence(tree, out.p))


def joint_error(out: Drafts, distributions: Tables, evidence: Evidence, verifier: Rejection = VERIFIER) -> float:
    """Largest difference of the joint distributions, with evidence that may lie."""
    joint = emitted_joint(verifier, out, distributions, evidence)
    return float((joint - target_joint(distributions, max(out.depth) + 1)).abs().max())


def worst(errors: list[float]) -> float:
    """The largest of some tables' errors: a mutant need not show on every table."""
    return max(errors)


def many_tables(count: int = 30, depth: int = 2, vocab_size: int = 3) -> list[Tables]:
    return [tables(vocab_size, depth, seed) for seed in range(count)]


def test_mutant_without_replacement_labelled_iid() -> None:
    wor = Case((-1, 0, 0), (F, W, W))
    assert worst([mislabelled(wor, probs, (F, I, I)) for probs in many_tables()]) > 0.05


def test_iid_labelled_without_replacement_is_sound() -> None:
    """No mutant: given that it repeats no rejected sibling, an iid token is a draw without replacement; and one that
    does repeat is never accepted, since nothing of it is left in p."""
    for probs in many_tables(10):
        assert mislabelled(PAIR, probs, (F, W, W)) < TOLERANCE
        assert mislabelled(Case((-1, 0, 0, 0), (F, I, I, I)), probs, (F, W, W, W)) < TOLERANCE


def test_mutant_deterministic_top_2_labelled_iid() -> None:
    top = Case((-1, 0, 0), (F, F, F))
    assert worst([mislabelled(top, probs, (F, I, I), q_given=True) for probs in many_tables()]) > 0.3


@pytest.mark.parametrize(
    ("drawn", "wrong", "least"),
    [
        ((I, F), (I, I), 0.05),
        ((W, F), (W, W), 0.03),
        ((W, F, F), (W, W, W), 0.05),
        ((W, W, F), (I, I, I), 0.1),
        ((I, I, F), (I, I, I), 0.02),
        ((I, W), (I, I), 0.1),
    ],
)
def test_mutant_mixed_siblings_under_one_label(
    drawn: tuple[DrawnBy, ...], wrong: tuple[DrawnBy, ...], least: float
) -> None:
    case = Case((-1, *[0] * len(drawn)), (F, *drawn))
    assert worst([mislabelled(case, probs, (F, *wrong)) for probs in many_tables(100, vocab_size=4)]) > least


def test_drawn_nodes_labelled_fixed_are_sound() -> None:
    """FIXED is always sound, so every drafter composes with every verifier."""
    for case in (CHAIN, FORK, Case((-1, 0, 0, 0), (F, W, W, I))):
        probs = tables(3, 3, 4)
        out = drafts(case, probs)
        tree = replace(out.tree, drawn_by=torch.zeros_like(out.tree.drawn_by), q=None)
        assert joint_error(out, probs, Evidence(tree, out.p)) < TOLERANCE


def test_mutant_q_at_another_temperature() -> None:
    """Item 6.2: the q in the ratio is not the distribution the token was drawn from."""
    errors = []
    for probs in many_tables():
        out = drafts(Case((-1, 0), (F, I)), probs)
        assert out.tree.q is not None
        q = out.tree.q**0.7
        q = torch.where(q > 0, q / q.sum(-1, keepdim=True).clamp(min=1e-300), 0.0)
        errors.append(joint_error(out, probs, Evidence(replace(out.tree, q=q), out.p)))
    assert worst(errors) > 0.02


def test_mutant_p_and_q_swapped() -> None:
    errors = []
    for probs in many_tables():
        out = drafts(Case((-1, 0), (F, I)), probs)
        assert out.tree.q is not None
        p = out.p.clone()
        q = torch.zeros_like(p)
        p[:, 0], q[:, 0] = out.tree.q[:, 0], out.p[:, 0]
        errors.append(joint_error(out, probs, Evidence(replace(out.tree, q=q), p)))
    assert worst(errors) > 0.1


def pruned(out: Drafts, floor: float) -> TokenTree:
    """Drop each drawn chain node whose q(x) is below floor, and all behind it: after the draw."""
    assert out.tree.q is not None
    chance = out.tree.q[:, :-1].gather(2, out.tree.tokens[:, 1:, None])[..., 0]  # [R, N-1]
    kept = torch.cat([torch.ones_like(chance[:, :1]), (chance >= floor).double().cumprod(1)], 1) > 0
    tree = chain_tree(out.tree.tokens, kept.sum(1), drawn_by=I, q=out.tree.q)
    return replace(tree, max_children=None)


def test_mutant_pruning_after_the_draw() -> None:
    """Item 6.3: p = q, and the dropped set comes out with d q(x), the others with (1 + d) q(x)."""
    errors = []
    for probs in many_tables(depth=3):
        out = drafts(CHAIN, probs)
        errors.append(joint_error(out, probs, Evidence(pruned(out, 0.3), out.p)))
    assert worst(errors) > 0.05
    p = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    probs = Tables(3, [p, p.expand(3, 3)], [p, p.expand(3, 3)])
    out = drafts(Case((-1, 0), (F, I)), probs)
    first = emitted_joint(VERIFIER, out, probs, Evidence(pruned(out, 0.3), out.p)).view(3, 3).sum(1)
    # d = 0.3: a dropped token comes only as a draw from p, the others also as themselves.
    expected = torch.tensor([0.7 * 1.3, 0.2 * 0.3, 0.1 * 0.3], dtype=torch.float64)
    assert torch.allclose(first, expected)


def test_pruning_before_the_draw_is_sound() -> None:
    """The other half of item 6.3: whether to draw may depend on all that was drawn before (here: on max q)."""
    distributions = tables(3, 3, 0)
    out = drafts(CHAIN, distributions)
    sure = distributions.q[1][out.code[:, 1]].amax(1) > 0.6
    assert bool(sure.any())
    assert bool((~sure).any())
    tree = chain_tree(out.tree.tokens, torch.where(sure, 3, 2), drawn_by=I, q=out.tree.q)
    assert joint_error(out, distributions, Evidence(tree, out.p)) < TOLERANCE


class ResidualIsP(Rejection):
    """Mutant: after a rejection draws from p."""

    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        return evidence.p[torch.arange(len(at)), at]


class NoBreak(Rejection):
    """Mutant, chains: counts all accepted nodes instead of stopping at the first rejected one."""

    def stops(self, evidence: Evidence) -> Walk:
        tree, p = evidence.tree, evidence.p
        table = children_of(tree)
        rows = torch.arange(len(p))
        count = torch.zeros_like(p[..., 0])
        count[:, 0] = 1.0
        for node in range(1, tree.num_nodes):
            token = tree.tokens[:, node : node + 1]
            assert tree.q is not None
            chance = (p[rows, node - 1].gather(1, token) / tree.q[rows, node - 1].gather(1, token)).clamp(max=1.0)
            count = count * (1 - chance) + torch.cat([torch.zeros_like(chance), count[:, :-1] * chance], 1)
        return Walk(count, table)


class AcceptBelowOneOnly(Rejection):
    """Mutant: forgets that a rejected drawn child takes its share out of p before the next sibling is tried."""

    def stops(self, evidence: Evidence) -> Walk:
        tree = replace(evidence.tree, drawn_by=torch.where(evidence.tree.drawn_by == I, int(F), evidence.tree.drawn_by))
        walk = super().stops(Evidence(tree, evidence.p))
        return Walk(walk.stops, children_of(evidence.tree))


def class_error(verifier: Rejection, case: Case, depth: int) -> float:
    return worst([error(verifier, case, probs) for probs in many_tables(10, depth)])


def test_mutant_residual_is_p() -> None:
    assert class_error(ResidualIsP(), Case((-1, 0), (F, I)), 2) > 0.05


def test_mutant_missing_break() -> None:
    assert class_error(NoBreak(), CHAIN, 3) > 0.05


def test_mutant_stops_of_fixed_with_leftover_of_iid() -> None:
    assert class_error(AcceptBelowOneOnly(), PAIR, 2) > 0.05


def test_mutant_residual_not_normalised_by_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    use("torch", monkeypatch)

    def unscaled(rest: Tensor, source: Tensor | None, token: Tensor, from_q: Tensor, here: Tensor) -> Tensor:
        assert source is not None
        reduced = torch.where(from_q[:, None], (rest - source).clamp(min=0.0), rest.scatter(1, token, 0.0))
        return torch.where(here[:, None], reduced, rest)

    assert class_error(Rejection(), Case((-1, 0, 0, 0), (F, I, I, I)), 2) < TOLERANCE
    monkeypatch.setattr(module, "reject_child", unscaled)
    assert class_error(Rejection(), Case((-1, 0, 0, 0), (F, I, I, I)), 2) > 1e-3


def test_mutant_siblings_are_not_struck_from_q(monkeypatch: pytest.MonkeyPatch) -> None:
    use("torch", monkeypatch)
    case = Case((-1, 0, 0, 0), (F, W, W, W))
    assert class_error(Rejection(), case, 2) < TOLERANCE
    monkeypatch.setattr(module, "strike", lambda unseen, token, from_q: unseen)
    assert class_error(Rejection(), case, 2) > 0.01


# Defined outcomes (items 6.4, 6.5, 6.6, 6.11)


def evidence_of(case: Case, seed: int = 0) -> Evidence:
    out = drafts(case, tables(3, 4, seed))
    return Evidence(out.tree, out.p)


@pytest.mark.parametrize("case", [CHAIN, PAIR, FORK, Case((-1, 0, 0, 0), (F, W, W, F))])
def test_inputs_are_not_mutated(case: Case) -> None:
    """Item 6.6: in-place corruption."""
    evidence = evidence_of(case)
    tree = evidence.tree
    assert tree.q is not None
    before = [x.clone() for x in (tree.tokens, tree.parent, tree.drawn_by, tree.q, evidence.p)]
    walk = VERIFIER.stops(evidence)
    kept = walk.stops.clone()
    for node in range(tree.num_nodes):
        probs = VERIFIER.residual(evidence, walk, torch.full((len(kept),), node))
        probs.zero_()  # what is returned is the caller's: no view of the inputs
    after = (tree.tokens, tree.parent, tree.drawn_by, tree.q, evidence.p)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert torch.equal(walk.stops, kept)


def test_broken_q_counts_as_fixed() -> None:
    """Items 6.5 and 6.11: q NaN, inf, or q(x) = 0 of a drawn x: struck from p, never accepted with certainty."""
    distributions = tables(3, 2, 0)
    for value in (float("nan"), float("inf"), 0.0):
        out = drafts(Case((-1, 0), (F, I)), distributions)
        q = torch.full_like(out.p, value)
        evidence = Evidence(replace(out.tree, q=q), out.p)
        assert joint_error(out, distributions, evidence) < TOLERANCE
        walk = VERIFIER.stops(evidence)
        token = out.tree.tokens[:, 1]
        assert torch.allclose(walk.stops[:, 1], distributions.p[0][0, token])
        left = VERIFIER.residual(evidence, walk, torch.zeros(len(token), dtype=torch.int64))
        assert bool((left.gather(1, token[:, None]) == 0).all())


def test_without_replacement_that_repeats_a_token_counts_as_fixed() -> None:
    probs = tables(3, 2, 0)
    out = drafts(PAIR, probs)  # IID, so that pairs are equal in some rows
    wrong = replace(out.tree, drawn_by=torch.tensor([[0, int(W), int(W)]]).expand_as(out.tree.drawn_by))
    walk = VERIFIER.stops(Evidence(wrong, out.p))
    equal = out.tree.tokens[:, 1] == out.tree.tokens[:, 2]
    assert bool(equal.any())
    assert bool(torch.isfinite(walk.stops).all())
    assert bool((walk.stops[equal, 2] < 1e-15).all())


def test_a_token_that_p_excludes_is_always_rejected() -> None:
    p = torch.tensor([[[0.0, 0.4, 0.6], [1.0, 0.0, 0.0]]])
    q = torch.tensor([[[0.9, 0.1, 0.0], [0.0, 0.0, 0.0]]])
    for label in (F, I, W):
        tree = chain_tree(torch.tensor([[0, 0]]), drawn_by=label, q=None if label == F else q)
        walk = VERIFIER.stops(Evidence(tree, p))
        assert walk.stops.tolist() == [[1.0, 0.0]]
        assert float(VERIFIER.residual(Evidence(tree, p), walk, torch.tensor([0]))[0, 0]) == 0.0


def test_drawn_without_q_is_verified_as_fixed() -> None:
    """Item 6.4: q = None means one-hot."""
    p = torch.tensor([[[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]])
    tree = chain_tree(torch.tensor([[0, 1]]), drawn_by=I)
    assert torch.allclose(VERIFIER.stops(Evidence(tree, p)).stops, torch.tensor([[0.7, 0.3]]))


def test_a_law_that_is_none_spoils_only_its_own_node() -> None:
    """Item 6.5: p all NaN at a node that is never reached (a grammar's dead end) leaves the row sound."""
    nan = float("nan")
    p = torch.tensor([[[0.5, 0.5, 0.0], [nan, nan, nan], [0.1, 0.2, 0.7]]])
    for token, expected in ((2, [1.0, 0.0, 0.0]), (0, [0.5, 0.5, 0.0])):
        tree = chain_tree(torch.tensor([[0, token, 1]]))
        evidence = Evidence(tree, p)
        walk = VERIFIER.stops(evidence)
        assert walk.stops.tolist() == [expected]
        assert bool(VERIFIER.residual(evidence, walk, torch.tensor([1])).isnan().any())
    q = torch.full_like(p, 1 / 3)
    pair = TokenTree(torch.tensor([[0, 2, 0, 1]]), torch.tensor([[-1, 0, 0, 1]]), torch.tensor([[0, 1, 1, 1]]), None)
    wide = torch.cat([p, p[:, 2:]], 1)
    evidence = Evidence(replace(pair, q=torch.cat([q, q[:, :1]], 1)), wide)
    assert torch.allclose(VERIFIER.stops(evidence).stops.sum(1), torch.ones(1))


def test_children_above_one_raise() -> None:
    with pytest.raises(RuntimeError, match="children"):
        stops_from_edges(torch.tensor([[-1, 0, 0]]), torch.tensor([[0.0, 0.8, 0.4]]))
    stops = stops_from_edges(torch.tensor([[-1, 0, 0, 1, -1]]), torch.tensor([[9.0, 0.5, 0.25, 0.5, 7.0]]))
    assert stops.tolist() == [[0.25, 0.25, 0.25, 0.25, 0.0]]


def test_try_children_leaves_the_rest_only_where_asked() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5]])
    tokens, real = torch.tensor([[2, 1]]), torch.ones(1, 2, dtype=torch.bool)
    edges, rest = try_children(p, None, tokens, torch.zeros(1, 2, dtype=torch.int64), real)
    assert rest is not None
    assert torch.allclose(edges, torch.tensor([[0.5, 0.3]]))
    assert rest.tolist() == [[p[0, 0].item(), 0.0, 0.0]]
    assert try_children(p, None, tokens[:, :1], tokens[:, :1] * 0, real[:, :1])[1] is None


def test_float32_laws_stay_close() -> None:
    probs = tables(4, 4, 2)
    case = Case((-1, 0, 0, 1, 1, 3), (F, I, I, W, W, I))
    out = drafts(case, probs)
    assert out.tree.q is not None
    evidence = Evidence(replace(out.tree, q=out.tree.q.float()), out.p.float())
    walk = VERIFIER.stops(evidence)
    exact = VERIFIER.stops(Evidence(out.tree, out.p))
    assert walk.stops.dtype == torch.float32
    assert torch.allclose(walk.stops.double(), exact.stops, atol=1e-6)
    assert bool(ancestors(out.tree.parent)[0, 5, 3])
