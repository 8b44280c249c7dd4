"""Block verification: exact enumeration with the C kernels and in its closed form, Sun's example, and mutants."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.tree import DrawnBy, chain_tree
from foretell.verify import Evidence, Rejection, Walk
from foretell.verify.block import Block, slow_stops
from tests.verify.enumerate import Case, Tables, batch, chains, drafts, error, tables
from tests.verify.kernels import KERNELS, accepted, inputs, joint_error, use

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
TOLERANCE = 1e-12
VERIFIER = Block()
CHAIN = Case((-1, 0, 1), (F, I, I))


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations."""
    use(request.param, monkeypatch)
    return str(request.param)


def test_chains_to_depth_3_with_every_law_at_every_node(kernel: str) -> None:
    for vocab_size in (3, 4):
        for seed, sparse in ((0, 0.0), (1, 0.4)):
            probs = tables(vocab_size, 4, seed, sparse_p=sparse)
            for case in chains(3 if vocab_size == 3 else 2):
                assert error(VERIFIER, case, probs) < TOLERANCE, case
    assert error(VERIFIER, Case((-1, 0, 1, 2, 3), (F, I, I, I, I)), tables(3, 5, 1)) < TOLERANCE


def test_zeros_in_p_and_q(kernel: str) -> None:
    for seed in range(4):
        probs = tables(4, 3, seed, sparse_p=0.5, sparse_q=0.5)
        for case in chains(2):
            assert error(VERIFIER, case, probs) < TOLERANCE, case


def test_the_example_of_sun_et_al(kernel: str) -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 accepted token by token, 11/9 as a block."""
    p = torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float64)
    probs = Tables(2, [p.expand(2**d, 2) for d in range(3)], [p.flip(1).expand(2**d, 2) for d in range(3)])
    out = drafts(CHAIN, probs)
    assert abs(accepted(Rejection(), out) - 10 / 9) < TOLERANCE
    assert abs(accepted(VERIFIER, out) - 11 / 9) < TOLERANCE
    assert joint_error(VERIFIER, out, probs) < TOLERANCE


def test_at_least_as_long_as_token_by_token(kernel: str) -> None:
    gains = []
    for seed in range(30):
        out = drafts(Case((-1, 0, 1, 2), (F, I, I, I)), tables(3, 4, seed))
        gains.append(accepted(VERIFIER, out) - accepted(Rejection(), out))
    assert min(gains) > -TOLERANCE
    assert max(gains) > 0.02


def test_one_draft_and_one_hot_laws_are_rejection(kernel: str) -> None:
    for case in (Case((-1, 0), (F, I)), Case((-1, 0, 1, 2), (F, F, C, F))):
        out = drafts(case, tables(4, 4, 2))
        evidence = Evidence(out.tree, out.p)
        assert torch.allclose(VERIFIER.stops(evidence).stops, Rejection().stops(evidence).stops, atol=TOLERANCE, rtol=0)


def test_equal_laws_accept_everything_and_disjoint_ones_nothing(kernel: str) -> None:
    distributions = tables(4, 3, 3)
    out = drafts(CHAIN, Tables(4, distributions.p, distributions.p))
    assert abs(accepted(VERIFIER, out) - 2.0) < TOLERANCE
    assert joint_error(VERIFIER, out, distributions) < TOLERANCE
    half = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    out = drafts(Case((-1, 0), (F, I)), Tables(4, [half, distributions.p[1]], [half.flip(1), distributions.q[1]]))
    assert accepted(VERIFIER, out) == 0.0


def test_a_tree_that_branches_raises() -> None:
    out = drafts(Case((-1, 0, 0), (F, I, I)), tables(3, 2, 0))
    with pytest.raises(RuntimeError, match="chains"):
        VERIFIER.stops(Evidence(out.tree, out.p))


def test_a_ragged_padded_batch_equals_its_parts(kernel: str) -> None:
    probs = tables(3, 4, 1, sparse_p=0.2)
    cases = [Case((-1, 0), (F, C)), CHAIN, Case((-1, 0, 1, 2), (F, W, F, I)), Case((-1,), (F,))]
    parts = [drafts(case, probs) for case in cases]
    tree, p = batch(parts, 6)
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
            assert torch.allclose(together, single, atol=1e-15, rtol=0)


def test_inputs_are_not_mutated(kernel: str) -> None:
    out = drafts(CHAIN, tables(3, 3, 0))
    evidence = Evidence(out.tree, out.p)
    before = inputs(evidence)
    walk = VERIFIER.stops(evidence)
    for node in range(3):
        VERIFIER.residual(evidence, walk, torch.full((len(out.weight),), node)).zero_()
    assert all(torch.equal(x, y) for x, y in zip(before, inputs(evidence), strict=True))


def test_broken_q_counts_as_fixed(kernel: str) -> None:
    probs = tables(3, 3, 0)
    out = drafts(CHAIN, probs)
    assert out.tree.q is not None
    for value in (float("nan"), float("inf"), 0.0):
        evidence = Evidence(replace(out.tree, q=torch.full_like(out.p, value)), out.p)
        assert joint_error(VERIFIER, out, probs, evidence) < TOLERANCE
    q = out.tree.q.clone()
    q[:, 0, 2] = float("nan")  # one entry spoils the whole distribution
    assert joint_error(VERIFIER, out, probs, Evidence(replace(out.tree, q=q), out.p)) < TOLERANCE


def test_a_law_that_is_none_stops_the_walk_there(kernel: str) -> None:
    nan = float("nan")
    p = torch.tensor([[[0.5, 0.5, 0.0], [nan, nan, nan], [0.1, 0.2, 0.7]]])
    for label in (F, I):
        q = torch.full_like(p, 1 / 3) if label == I else None
        for token in (0, 2):
            evidence = Evidence(chain_tree(torch.tensor([[0, token, 1]]), drawn_by=label, q=q), p)
            walk = VERIFIER.stops(evidence)
            assert float(walk.stops[0, 2]) == 0.0
            assert abs(float(walk.stops.sum()) - 1.0) < 1e-6
            assert (float(walk.stops[0, 1]) > 0) == (token == 0)
        assert bool(VERIFIER.residual(evidence, walk, torch.tensor([1])).isnan().any())


# Mutants: each must be caught


class Slow(Block):
    """The closed form, to be spoiled."""

    def stops(self, evidence: Evidence) -> Walk:
        return slow_stops(evidence)


class FirstFailure(Slow):
    """Mutant: stops at the first failed test instead of after the last success."""

    def stops(self, evidence: Evidence) -> Walk:
        walk = slow_stops(evidence)
        # From stops back to h: h_i = stops_i / (1 - what stops behind i).
        behind = walk.stops.flip(1).cumsum(1).flip(1) - walk.stops
        succeed = torch.where(behind < 1, walk.stops / (1 - behind).clamp(min=1e-300), 0.0).clamp(max=1.0)
        succeed[:, 0] = 1.0
        passed = succeed.cumprod(1)
        stops = passed - torch.nn.functional.pad(passed, (0, 1))[:, 1:]
        return Walk(stops, walk.carry)


class PlainResidual(Slow):
    """Mutant: the residual of token-wise rejection, (p - q)+ instead of (P p - q)+."""

    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        ratio, from_q, has_child = walk.carry
        return super().residual(evidence, Walk(walk.stops, (torch.ones_like(ratio), from_q, has_child)), at)


class NoResidual(Slow):
    """Mutant: draws from p wherever it stops."""

    def residual(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        return evidence.p[torch.arange(len(at)), at]


@pytest.mark.parametrize("mutant", [FirstFailure(), PlainResidual(), NoResidual()])
def test_mutants_are_caught(mutant: Slow) -> None:
    case = Case((-1, 0, 1, 2), (F, I, I, I))
    assert max(error(Slow(), case, tables(3, 4, seed)) for seed in range(8)) < TOLERANCE
    assert max(error(mutant, case, tables(3, 4, seed)) for seed in range(8)) > 0.005
