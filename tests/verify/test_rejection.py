"""Rejection: closed forms, defined outcomes of broken input, and mutants. Its proof is in test_matrix.py."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.tree import DrawnBy, TokenTree, chain_tree
from foretell.verify import Evidence, Rejection, Walk, rejection as module
from foretell.verify.base import stops_from_edges
from foretell.verify.rejection import children_of, try_children
from tests.verify.enumerate import Case, Drafts, Tables, drafts, emitted_joint, error, tables
from tests.verify.kernels import joint_error, use

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
TOLERANCE = 1e-12
VERIFIER = Rejection()
pytestmark = pytest.mark.usefixtures("kernel")
CHAIN = Case((-1, 0, 1), (F, I, I))
PAIR = Case((-1, 0, 0), (F, I, I))
FORK = Case((-1, 0, 0, 1, 1, 2), (F, I, I, I, I, I))


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
    return joint_error(VERIFIER, out, distributions, Evidence(tree, out.p))


def many_tables(count: int = 30, depth: int = 2, vocab_size: int = 3) -> list[Tables]:
    return [tables(vocab_size, depth, seed) for seed in range(count)]


def test_mutant_deterministic_top_2_labelled_iid() -> None:
    top = Case((-1, 0, 0), (F, F, F))
    assert max([mislabelled(top, probs, (F, I, I), q_given=True) for probs in many_tables()]) > 0.3


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
    assert max([mislabelled(case, probs, (F, *wrong)) for probs in many_tables(100, vocab_size=4)]) > least


def test_drawn_nodes_labelled_fixed_are_sound() -> None:
    """FIXED is always sound, so every drafter composes with every verifier."""
    for case in (CHAIN, FORK, Case((-1, 0, 0, 0), (F, W, W, I))):
        probs = tables(3, 3, 4)
        out = drafts(case, probs)
        tree = replace(out.tree, drawn_by=torch.zeros_like(out.tree.drawn_by), q=None)
        assert joint_error(VERIFIER, out, probs, Evidence(tree, out.p)) < TOLERANCE


def pruned(out: Drafts, floor: float) -> TokenTree:
    """Drop each drawn chain node whose q(x) is below floor, and all behind it: after the draw."""
    chance = out.tree.q[:, :-1].gather(2, out.tree.tokens[:, 1:, None])[..., 0]  # [R, N-1]
    kept = torch.cat([torch.ones_like(chance[:, :1]), (chance >= floor).double().cumprod(1)], 1) > 0
    tree = chain_tree(out.tree.tokens, kept.sum(1), drawn_by=I, q=out.tree.q)
    return replace(tree, max_children=None)


def test_mutant_pruning_after_the_draw() -> None:
    """Item 6.3: p = q, and the dropped set comes out with d q(x), the others with (1 + d) q(x)."""
    errors = []
    for probs in many_tables(depth=3):
        out = drafts(CHAIN, probs)
        errors.append(joint_error(VERIFIER, out, probs, Evidence(pruned(out, 0.3), out.p)))
    assert max(errors) > 0.05
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
    assert joint_error(VERIFIER, out, distributions, Evidence(tree, out.p)) < TOLERANCE


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
    return max([error(verifier, case, probs) for probs in many_tables(10, depth)])


def test_mutant_residual_is_p() -> None:
    assert class_error(ResidualIsP(), Case((-1, 0), (F, I)), 2) > 0.05


def test_mutant_missing_break() -> None:
    assert class_error(NoBreak(), CHAIN, 3) > 0.05


def test_mutant_stops_of_fixed_with_leftover_of_iid() -> None:
    assert class_error(AcceptBelowOneOnly(), PAIR, 2) > 0.05


def test_mutant_residual_not_normalised_by_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    use("torch", monkeypatch)

    def unscaled(rest: Tensor, source: Tensor | None, token: Tensor, from_q: Tensor, here: Tensor) -> Tensor:
        reduced = torch.where(from_q[:, None], (rest - source).clamp(min=0.0), rest.scatter(1, token, 0.0))
        return torch.where(here[:, None], reduced, rest)

    assert class_error(Rejection(), Case((-1, 0, 0, 0), (F, I, I, I)), 2) < TOLERANCE
    monkeypatch.setattr(module, "reject_child", unscaled)
    assert class_error(Rejection(), Case((-1, 0, 0, 0), (F, I, I, I)), 2) > 1e-3


# Defined outcomes (items 6.4, 6.5, 6.6, 6.11)


def test_broken_q_counts_as_fixed() -> None:
    """Items 6.5 and 6.11: q NaN, inf, or q(x) = 0 of a drawn x: struck from p, never accepted with certainty."""
    distributions = tables(3, 2, 0)
    for value in (float("nan"), float("inf"), 0.0):
        out = drafts(Case((-1, 0), (F, I)), distributions)
        q = torch.full_like(out.p, value)
        evidence = Evidence(replace(out.tree, q=q), out.p)
        assert joint_error(VERIFIER, out, distributions, evidence) < TOLERANCE
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
    edges, rest = try_children(p, None, tokens, torch.zeros(1, 2, dtype=torch.int64), real, asks_rest=True)
    assert torch.allclose(edges, torch.tensor([[0.5, 0.3]]))
    assert rest.tolist() == [[p[0, 0].item(), 0.0, 0.0]]
    assert try_children(p, None, tokens[:, :1], tokens[:, :1] * 0, real[:, :1])[1] is p
