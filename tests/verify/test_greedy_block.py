"""Greedy multi-path block verification, by exact enumeration: both distributions of the best path, every mixture, and
mutants."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.tree import DrawnBy, TokenTree, chain_tree
from foretell.verify import Evidence, greedy_block as module
from foretell.verify.block import Block
from foretell.verify.greedy_block import GreedyBlock, Level, draws_of
from tests.verify.enumerate import Case, Tables, batch, chains, drafts, error, labelled, renumbered, shapes, tables
from tests.verify.kernels import KERNELS, accepted, inputs, joint_error, use

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
TOLERANCE = 1e-12
VERIFIER = GreedyBlock()
CHAIN = Case((-1, 0, 1), (F, I, I))
PATHS = Case((-1, 0, 0, 1, 2), (F, I, I, I, I))
BUSHY = Case((-1, 0, 0, 1, 1, 2, 2), (F, I, I, I, I, I, I))
UNEVEN = Case((-1, 0, 0, 0, 1, 1, 2), (F, I, I, I, I, I, I))


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations."""
    use(request.param, monkeypatch)
    return str(request.param)


def test_all_shapes_to_4_nodes_with_every_law_and_mixture_at_v_3(kernel: str) -> None:
    probs = tables(3, 4, 1, sparse_p=0.2)
    for tried, parent in enumerate(shapes(4)):
        for case in labelled(parent, 3, num_mixed=4 if kernel == "torch" else 12):
            assert error(VERIFIER, case, probs) < TOLERANCE, case
            if tried % 3 == 0:
                assert error(VERIFIER, renumbered(case, tried), probs) < TOLERANCE, case


def test_shapes_at_v_4() -> None:
    probs = tables(4, 4, 5)
    for parent in shapes(4):
        for case in labelled(parent, 4, num_mixed=1):
            assert error(VERIFIER, case, probs) < TOLERANCE, case


def test_trees_of_even_branching(kernel: str) -> None:
    """Where the marginal distribution applies: parallel paths, two levels of pairs, a fork behind a line, a fork between
    chains."""
    probs = tables(3, 5, 7, sparse_p=0.1)
    for parent in (
        PATHS.parent,
        BUSHY.parent,
        (-1, 0, 0, 0, 1, 2, 3),
        (-1, 0, 0, 1, 2, 3, 4),
        (-1, 0, 1, 1, 2, 3),
        (-1, 0, 1, 1, 1),
    ):
        case = Case(parent, (F, *[I] * (len(parent) - 1)))
        assert bool(draws_of(drafts(case, probs).tree)[1].all())
        assert error(VERIFIER, case, probs) < TOLERANCE, case
    assert not bool(draws_of(drafts(UNEVEN, probs).tree)[1].any())
    assert error(VERIFIER, UNEVEN, probs) < TOLERANCE


def test_zeros_in_p_and_q(kernel: str) -> None:
    for seed in range(3):
        probs = tables(4, 3, seed, sparse_p=0.5, sparse_q=0.5)
        for case in (CHAIN, PATHS, Case((-1, 0, 0, 1), (F, I, F, C)), Case((-1, 0, 0, 1, 1), (F, W, I, I, I))):
            assert error(VERIFIER, case, probs) < TOLERANCE, case


def test_ties_in_the_order_are_settled_by_id(kernel: str) -> None:
    """Equal p / q, and ratios that share a rank: the order is strict all the same."""
    base = torch.tensor([[0.3, 0.3001, 0.2999, 0.1]], dtype=torch.float64)
    distributions = Tables(
        4, [base.expand(4**d, 4) for d in range(3)], [base.flip(1).expand(4**d, 4) for d in range(3)]
    )
    for case in (PATHS, Case((-1, 0, 0, 0), (F, I, I, I))):
        assert error(VERIFIER, case, distributions) < TOLERANCE
        same = Tables(4, distributions.p, distributions.p)
        assert error(VERIFIER, case, same) < TOLERANCE


def test_with_one_draw_a_node_it_is_block_verification(kernel: str) -> None:
    probs = tables(3, 4, 3, sparse_p=0.2)
    for case in chains(3):
        out = drafts(case, probs)
        evidence = Evidence(out.tree, out.p)
        assert torch.allclose(VERIFIER.stops(evidence).stops, Block().stops(evidence).stops, atol=TOLERANCE, rtol=0)


def test_several_paths_accept_more_than_one() -> None:
    gains = []
    for seed in range(10):
        probs = tables(3, 3, seed)
        gains.append(accepted(VERIFIER, drafts(PATHS, probs)) - accepted(Block(), drafts(CHAIN, probs)))
    assert sum(gains) / len(gains) > 0.05


def test_equal_laws_and_disjoint_ones(kernel: str) -> None:
    """One path of p = q is accepted whole; disjoint supports accept nothing."""
    distributions = tables(4, 3, 3)
    assert abs(accepted(VERIFIER, drafts(CHAIN, Tables(4, distributions.p, distributions.p))) - 2.0) < TOLERANCE
    half = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    apart = Tables(4, [half, distributions.p[1]], [half.flip(1), distributions.q[1]])
    assert accepted(VERIFIER, drafts(Case((-1, 0, 0), (F, I, I)), apart)) == 0.0


def test_a_ragged_padded_batch_equals_its_parts(kernel: str) -> None:
    """Rows with the marginal distribution beside rows without."""
    probs = tables(3, 4, 1, sparse_p=0.2)
    cases = [Case((-1, 0), (F, C)), CHAIN, PATHS, UNEVEN, Case((-1, 0, 0, 0), (F, I, I, F)), Case((-1,), (F,))]
    parts = [drafts(case, probs) for case in cases]
    tree, p = batch(parts, 8)
    evidence = Evidence(tree, p)
    walk = VERIFIER.stops(evidence)
    assert bool((walk.stops[~tree.valid] == 0).all())
    start = 0
    for part in parts:
        rows = slice(start, start := start + len(part.weight))
        alone = VERIFIER.stops(Evidence(part.tree, part.p))
        assert torch.allclose(walk.stops[rows, : part.p.shape[1]], alone.stops, atol=1e-13, rtol=0)
        for node in range(part.p.shape[1]):
            together = VERIFIER.residual(evidence, walk, torch.full((len(p),), node))[rows]
            single = VERIFIER.residual(Evidence(part.tree, part.p), alone, torch.full((len(part.weight),), node))
            assert torch.allclose(together, single, atol=1e-13, rtol=0)


@pytest.mark.parametrize("case", [CHAIN, PATHS, UNEVEN])
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
    for case in (CHAIN, PATHS):
        out = drafts(case, probs)
        assert out.tree.q is not None
        for value in (float("nan"), float("inf"), 0.0):
            evidence = Evidence(replace(out.tree, q=torch.full_like(out.p, value)), out.p)
            assert joint_error(VERIFIER, out, probs, evidence) < TOLERANCE
        first = out.tree.q.clone()
        first[:, 0] = float("nan")  # only the root's distribution is none
        assert joint_error(VERIFIER, out, probs, Evidence(replace(out.tree, q=first), out.p)) < TOLERANCE
        below = out.tree.q.clone()
        below[:, 1:, 2] = float("inf")  # one entry spoils the whole distribution, of nodes below the root
        assert joint_error(VERIFIER, out, probs, Evidence(replace(out.tree, q=below), out.p)) < TOLERANCE


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("parent", [PATHS.parent, BUSHY.parent, UNEVEN.parent, (-1, 0, 0, 0, 1, 2, 3, 4, 5, 6)])
def test_the_kernel_equals_torch(parent: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """At sizes that cannot be enumerated: stops and distributions within 1e-5 in float32, 1e-11 in float64."""
    bound = 1e-5 if dtype == torch.float32 else 1e-11
    generator = torch.Generator().manual_seed(0)
    num_nodes, size = len(parent), 1031
    p, q = torch.softmax(2 * torch.randn(2, 1, num_nodes, size, generator=generator).to(dtype), -1).unbind(0)
    q = torch.softmax(q.log() + 0.5 * p.log(), -1)
    tokens = torch.zeros(1, num_nodes, dtype=torch.int64)
    for node in range(1, num_nodes):
        tokens[0, node] = torch.multinomial(q[0, parent[node]].double(), 1, generator=generator)[0]
    probs = torch.tensor([[0, *[int(I)] * (num_nodes - 1)]])
    evidence = Evidence(TokenTree(tokens, torch.tensor([parent]), probs, q), p)
    found = []
    for kernel in KERNELS:
        use(kernel, monkeypatch)
        walk = VERIFIER.stops(evidence)
        distributions = [VERIFIER.residual(evidence, walk, torch.tensor([node])) for node in range(num_nodes)]
        found.append([walk.stops, *(probs / probs.sum(-1, keepdim=True) for probs in distributions)])
        monkeypatch.undo()
    for fast, slow in zip(*found, strict=True):
        assert torch.allclose(fast, slow, atol=bound, rtol=0)


# Mutants: each must be caught


def worst(case: Case) -> float:
    return max(error(VERIFIER, case, tables(3, 3, seed)) for seed in range(2))


@pytest.mark.parametrize("case", [Case((-1, 0, 0), (F, I, I)), PATHS, UNEVEN])
def test_mutant_wrong_power(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    use("torch", monkeypatch)
    assert worst(case) < TOLERANCE
    right = module.best_distribution

    def wrong(p: Tensor, q: Tensor, level: Level) -> tuple[Tensor, Tensor]:
        return right(p, q, replace(level, power=(level.power - 1).clamp(min=1)))

    monkeypatch.setattr(module, "best_distribution", wrong)
    assert worst(case) > 0.01


def test_mutant_marginal_law_where_it_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    use("torch", monkeypatch)
    right = module.draws_of
    monkeypatch.setattr(
        module, "draws_of", lambda tree: (right(tree)[0], torch.ones(len(tree.tokens), dtype=torch.bool))
    )
    assert worst(UNEVEN) > 1e-3


def test_mutant_levels_above_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    use("torch", monkeypatch)
    right = module.best_distribution
    monkeypatch.setattr(module, "best_distribution", lambda p, q, level: right(p, q, replace(level, outer=())))
    assert worst(PATHS) > 1e-3


def test_mutant_without_replacement_labelled_iid() -> None:
    errors = []
    for seed in range(10):
        probs = tables(3, 3, seed)
        out = drafts(Case((-1, 0, 0), (F, W, W)), probs)
        label = torch.tensor([[0, int(I), int(I)]]).expand_as(out.tree.drawn_by)
        errors.append(joint_error(VERIFIER, out, probs, Evidence(replace(out.tree, drawn_by=label), out.p)))
    assert max(errors) > 0.05
