"""Traversal, by exact enumeration: every distribution, mixture and shape, with the C kernels and without; and its
mutants."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.tree import DrawnBy, TokenTree, chain_tree
from foretell.verify import Evidence, Rejection, Verifier, Walk, traversal as module
from foretell.verify.block import Block
from foretell.verify.traversal import Traversal, slow_ratios, stops_in_postorder
from tests.verify.enumerate import Case, Tables, batch, chains, drafts, error, labelled, renumbered, shapes, tables
from tests.verify.kernels import KERNELS, accepted, inputs, joint_error, use

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
TOLERANCE = 1e-12
VERIFIER = Traversal()
CHAIN = Case((-1, 0, 1), (F, I, I))
PAIR = Case((-1, 0, 0), (F, I, I))
FORK = Case((-1, 0, 0, 1, 1, 2), (F, I, I, I, I, I))
WOR = Case((-1, 0, 0, 1, 1, 2), (F, W, W, W, W, W))


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations."""
    use(request.param, monkeypatch)
    return str(request.param)


def test_all_shapes_to_4_nodes_with_every_law_and_mixture_at_v_3(kernel: str) -> None:
    probs = tables(3, 4, 1, sparse_p=0.2)
    for tried, parent in enumerate(shapes(4)):
        for case in labelled(parent, 3, num_mixed=10):
            assert error(VERIFIER, case, probs) < TOLERANCE, case
            assert error(VERIFIER, renumbered(case, tried), probs) < TOLERANCE, case


def test_shapes_of_5_and_6_nodes_with_sampled_mixtures(kernel: str) -> None:
    probs = tables(3, 4, 2)
    tried = 0
    for parent in shapes(6):
        if len(parent) <= 5 or (kernel == "torch" and len(parent) > 6):
            continue
        for case in labelled(parent, 3, num_mixed=1):
            tried += 1
            assert error(VERIFIER, case, probs) < TOLERANCE, case
    assert tried > 60


def test_shapes_at_v_4(kernel: str) -> None:
    probs = tables(4, 4, 5)
    for parent in shapes(4 if kernel == "c" else 3):
        for case in labelled(parent, 4, num_mixed=3):
            assert error(VERIFIER, case, probs) < TOLERANCE, case


def test_zeros_in_p_and_q(kernel: str) -> None:
    for seed in range(4):
        probs = tables(4, 3, seed, sparse_p=0.5, sparse_q=0.5)
        for case in (CHAIN, PAIR, FORK, Case((-1, 0, 0, 1), (F, I, F, C))):
            assert error(VERIFIER, case, probs) < TOLERANCE, case


def test_fixed_before_drawn_siblings_is_sound_too(kernel: str) -> None:
    probs = tables(3, 3, 0)
    for group in ((F, I), (F, W, W), (C, W, I), (F, I, F, I)):
        case = Case((-1, *[0] * len(group), 1), (F, *group, I))
        assert error(VERIFIER, case, probs) < TOLERANCE, case


def test_on_a_chain_it_is_block_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block in torch is its closed form, written without a tree."""
    probs = tables(3, 4, 3, sparse_p=0.2)
    use("c", monkeypatch)
    found = []
    for case in chains(3):
        out = drafts(case, probs)
        evidence = Evidence(out.tree, out.p)
        found.append((evidence, VERIFIER.stops(evidence).stops))
    use("torch", monkeypatch)
    for evidence, stops in found:
        assert torch.allclose(stops, Block().stops(evidence).stops, atol=TOLERANCE, rtol=0)
        assert torch.allclose(stops, VERIFIER.stops(evidence).stops, atol=TOLERANCE, rtol=0)


def test_it_accepts_at_least_what_recursive_rejection_does(kernel: str) -> None:
    gains = []
    for seed in range(12):
        probs = tables(3, 3, seed)
        for case in (CHAIN, PAIR, FORK, WOR, Case((-1, 0, 0, 1, 2), (F, W, W, I, I))):
            out = drafts(case, probs)
            gains.append(accepted(VERIFIER, out) - accepted(Rejection(), out))
    assert min(gains) > -TOLERANCE
    assert max(gains) > 0.02


def test_depth_one_is_recursive_rejection(kernel: str) -> None:
    probs = tables(4, 2, 3)
    for case in (PAIR, Case((-1, 0, 0, 0), (F, W, W, F))):
        out = drafts(case, probs)
        evidence = Evidence(out.tree, out.p)
        assert torch.allclose(VERIFIER.stops(evidence).stops, Rejection().stops(evidence).stops, atol=TOLERANCE, rtol=0)


def test_a_deterministic_tree_is_exact_match(kernel: str) -> None:
    probs = tables(4, 3, 3)
    out = drafts(Case((-1, 0, 0, 1, 1), (F, F, F, F, F)), probs)
    evidence = Evidence(out.tree, out.p)
    assert torch.allclose(VERIFIER.stops(evidence).stops, Rejection().stops(evidence).stops, atol=TOLERANCE, rtol=0)


def test_equal_laws_accept_everything_and_disjoint_ones_nothing(kernel: str) -> None:
    distributions = tables(4, 3, 3)
    for case in (CHAIN, FORK):
        out = drafts(case, Tables(4, distributions.p, distributions.p))
        assert abs(accepted(VERIFIER, out) - 2.0) < TOLERANCE
        assert joint_error(VERIFIER, out, distributions) < TOLERANCE
    half = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    apart = Tables(4, [half, distributions.p[1]], [half.flip(1), distributions.q[1]])
    out = drafts(PAIR, apart)
    assert accepted(VERIFIER, out) == 0.0
    walk = VERIFIER.stops(Evidence(out.tree, out.p))
    left = VERIFIER.residual(Evidence(out.tree, out.p), walk, torch.zeros(len(out.weight), dtype=torch.int64))
    assert torch.allclose(left / left.sum(1, keepdim=True), half.expand_as(left))


def test_a_ragged_padded_batch_equals_its_parts(kernel: str) -> None:
    probs = tables(3, 4, 1, sparse_p=0.2)
    cases = [Case((-1, 0), (F, C)), CHAIN, FORK, Case((-1, 0, 0, 0), (F, W, W, F)), Case((-1,), (F,))]
    parts = [drafts(case, probs) for case in cases]
    tree, p = batch(parts, 8)
    evidence = Evidence(tree, p)
    walk = VERIFIER.stops(evidence)
    assert bool((walk.stops[~tree.valid] == 0).all())
    start = 0
    for part in parts:
        rows = slice(start, start := start + len(part.weight))
        alone = VERIFIER.stops(Evidence(part.tree, part.p))
        assert torch.allclose(walk.stops[rows, : part.p.shape[1]], alone.stops, atol=1e-15, rtol=0)
        for node in range(part.p.shape[1]):
            together = VERIFIER.residual(evidence, walk, torch.full((len(p),), node))[rows]
            single = VERIFIER.residual(Evidence(part.tree, part.p), alone, torch.full((len(part.weight),), node))
            assert torch.allclose(together, single, atol=1e-14, rtol=0)


@pytest.mark.parametrize("case", [CHAIN, FORK, WOR, Case((-1, 0, 0, 0), (F, W, W, F))])
def test_inputs_are_not_mutated(kernel: str, case: Case) -> None:
    out = drafts(case, tables(3, 3, 0))
    evidence = Evidence(out.tree, out.p)
    before = inputs(evidence)
    walk = VERIFIER.stops(evidence)
    for node in range(out.tree.num_nodes):
        VERIFIER.residual(evidence, walk, torch.full((len(out.weight),), node)).zero_()
    assert all(torch.equal(x, y) for x, y in zip(before, inputs(evidence), strict=True))


def test_broken_q_counts_as_fixed(kernel: str) -> None:
    probs = tables(3, 3, 0)
    for value in (float("nan"), float("inf"), 0.0):
        for case in (CHAIN, FORK):
            out = drafts(case, probs)
            evidence = Evidence(replace(out.tree, q=torch.full_like(out.p, value)), out.p)
            assert joint_error(VERIFIER, out, probs, evidence) < TOLERANCE
            assert out.tree.q is not None
            q = out.tree.q.clone()
            q[:, 0, 2] = float("nan") if value != 0.0 else q[:, 0, 2]  # one entry spoils the whole distribution
            assert joint_error(VERIFIER, out, probs, Evidence(replace(out.tree, q=q), out.p)) < TOLERANCE


def test_a_law_that_is_none_stops_the_walk_there(kernel: str) -> None:
    nan = float("nan")
    p = torch.tensor([[[0.5, 0.5, 0.0], [nan, nan, nan], [0.1, 0.2, 0.7]]])
    for label in (F, I):
        q = torch.full_like(p, 1 / 3) if label == I else None
        tree = chain_tree(torch.tensor([[0, 0, 1]]), drawn_by=label, q=q)
        walk = VERIFIER.stops(Evidence(tree, p))
        assert float(walk.stops[0, 2]) == 0.0
        assert abs(float(walk.stops.sum()) - 1.0) < 1e-6
        assert bool(VERIFIER.residual(Evidence(tree, p), walk, torch.tensor([1])).isnan().any())
        tree = chain_tree(torch.tensor([[0, 2, 1]]), drawn_by=label, q=q)  # p(2) = 0: the bad row is never reached
        assert VERIFIER.stops(Evidence(tree, p)).stops.tolist() == [[1.0, 0.0, 0.0]]


def test_float32_laws_stay_close(kernel: str) -> None:
    out = drafts(Case((-1, 0, 0, 1, 1, 3), (F, I, I, W, W, I)), tables(4, 4, 2))
    assert out.tree.q is not None
    walk = VERIFIER.stops(Evidence(replace(out.tree, q=out.tree.q.float()), out.p.float()))
    assert walk.stops.dtype == torch.float32
    exact = VERIFIER.stops(Evidence(out.tree, out.p))
    assert torch.allclose(walk.stops.double(), exact.stops, atol=2e-6)


# Mutants: each must be caught


class Slow(Traversal):
    """Traversal in torch, to be spoiled."""

    def stops(self, evidence: Evidence) -> Walk:
        end, rest = self.ratios(evidence.tree, evidence.p)
        return Walk(stops_in_postorder(evidence.tree.parent, end), rest)

    def ratios(self, tree: TokenTree, p: Tensor) -> tuple[Tensor, Tensor]:
        return slow_ratios(tree, p)


class RatioNotUpdated(Slow):
    """Mutant: P of a node stays as it was after a rejected child."""

    def ratios(self, tree: TokenTree, p: Tensor) -> tuple[Tensor, Tensor]:
        num_nodes = tree.num_nodes
        leaf = torch.ones(num_nodes, dtype=torch.bool)
        leaf[tree.parent[0, 1:]] = False
        end, rest = slow_ratios(tree, p)
        start = torch.ones_like(end)
        rows = torch.arange(len(p))
        for node in range(1, num_nodes):
            at = tree.parent[:, node]
            token = tree.tokens[:, node]
            assert tree.q is not None
            start[:, node] = (start[rows, at] * p[rows, at, token] / tree.q[rows, at, token]).clamp(max=1.0)
        return torch.where(leaf, end, start), rest


class ResidualIsP(Slow):
    """Mutant: after rejected children draws from p."""

    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        return evidence.p[torch.arange(len(at)), at]


class PreOrder(Slow):
    """Mutant: decides on a node before its subtree, with the ratios of traversal."""

    def stops(self, evidence: Evidence) -> Walk:
        end, rest = slow_ratios(evidence.tree, evidence.p)
        not_before = torch.cat([torch.ones_like(end[:, :1]), (1 - end[:, 1:]).cumprod(1)[:, :-1]], 1)
        stops = end[:, 1:] * not_before
        return Walk(torch.cat([1 - stops.sum(1, keepdim=True), stops], 1), rest)


def worst(verifier: Verifier, case: Case) -> float:
    return max(error(verifier, case, tables(3, 3, seed)) for seed in range(10))


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        (RatioNotUpdated(), CHAIN),
        (RatioNotUpdated(), FORK),
        (ResidualIsP(), FORK),
        (PreOrder(), FORK),
        (PreOrder(), CHAIN),
    ],
)
def test_mutants_are_caught(mutant: Slow, case: Case) -> None:
    assert worst(Slow(), case) < TOLERANCE
    assert worst(mutant, case) > 0.01


def test_mutant_siblings_not_struck_from_q() -> None:
    wrong = Case((-1, 0, 0, 1), (F, W, W, W))
    out_errors = []
    for seed in range(10):
        probs = tables(3, 3, seed)
        out = drafts(wrong, probs)
        label = torch.where(out.tree.drawn_by == W, int(I), out.tree.drawn_by)
        out_errors.append(joint_error(VERIFIER, out, probs, Evidence(replace(out.tree, drawn_by=label), out.p)))
    assert max(out_errors) > 0.03


def test_mutant_broken_law_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn as FIXED and labelled IID: what ``believed`` cannot see is caught by enumeration."""
    distributions = tables(3, 3, 1)
    out = drafts(Case((-1, 0, 0), (F, F, F)), distributions)
    q = torch.zeros_like(out.p)
    q[:, 0] = distributions.q[0][0]
    label = torch.tensor([[0, 1, 1]]).expand_as(out.tree.drawn_by)
    assert joint_error(VERIFIER, out, distributions, Evidence(replace(out.tree, drawn_by=label, q=q), out.p)) > 0.05
    monkeypatch.setattr(module, "believed", lambda source, token, drawn: torch.zeros_like(drawn))
    monkeypatch.setattr(module, "try_tree", lambda tree, p, ahead: None)
    assert (
        joint_error(VERIFIER, out, distributions, Evidence(replace(out.tree, drawn_by=label, q=q), out.p)) < TOLERANCE
    )
