"""Greedy multi-path block verification: the distributions of the best path, and mutants; its proof is in test_matrix.py."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.tree import DrawnBy, TokenTree
from foretell.verify import Evidence, greedy_block as module
from foretell.verify.block import Block
from foretell.verify.greedy_block import GreedyBlock, Level, draws_of
from tests.verify.enumerate import Case, Tables, chains, drafts, error, tables
from tests.verify.kernels import KERNELS, accepted, use

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
TOLERANCE = 1e-12
VERIFIER = GreedyBlock()
CHAIN = Case((-1, 0, 1), (F, I, I))
PATHS = Case((-1, 0, 0, 1, 2), (F, I, I, I, I))
BUSHY = Case((-1, 0, 0, 1, 1, 2, 2), (F, I, I, I, I, I, I))
UNEVEN = Case((-1, 0, 0, 0, 1, 1, 2), (F, I, I, I, I, I, I))


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
