"""Traversal: the rules that it equals on some trees, and its mutants. Its proof is in test_matrix.py."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.tree import DrawnBy, TokenTree
from foretell.verify import Evidence, Rejection, Verifier, Walk, traversal as module
from foretell.verify.block import Block
from foretell.verify.traversal import Traversal, slow_ratios, stops_in_postorder
from tests.verify.enumerate import Case, chains, drafts, error, tables
from tests.verify.kernels import joint_error, use

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
TOLERANCE = 1e-12
VERIFIER = Traversal()
CHAIN = Case((-1, 0, 1), (F, I, I))
PAIR = Case((-1, 0, 0), (F, I, I))
FORK = Case((-1, 0, 0, 1, 1, 2), (F, I, I, I, I, I))


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


@pytest.mark.parametrize(
    "case", [PAIR, Case((-1, 0, 0, 0), (F, W, W, F)), Case((-1, 0, 0, 1, 1), (F,) * 5)], ids=["pair", "mixed", "fixed"]
)
@pytest.mark.usefixtures("kernel")
def test_at_depth_one_and_of_fixed_guesses_it_is_recursive_rejection(case: Case) -> None:
    out = drafts(case, tables(4, 3, 3))
    evidence = Evidence(out.tree, out.p)
    assert torch.allclose(VERIFIER.stops(evidence).stops, Rejection().stops(evidence).stops, atol=TOLERANCE, rtol=0)


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
