"""Block verification: where it is rejection, what it refuses, and mutants. Its proof is in test_matrix.py."""

import pytest
import torch
from torch import Tensor

from foretell.core.tree import DrawnBy
from foretell.verify import Evidence, Rejection, Walk
from foretell.verify.block import Block, slow_stops
from tests.verify.enumerate import Case, drafts, error, tables

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
TOLERANCE = 1e-12
VERIFIER = Block()


def test_one_draft_and_one_hot_laws_are_rejection(kernel: str) -> None:
    for case in (Case((-1, 0), (F, I)), Case((-1, 0, 1, 2), (F, F, C, F))):
        out = drafts(case, tables(4, 4, 2))
        evidence = Evidence(out.tree, out.p)
        assert torch.allclose(VERIFIER.stops(evidence).stops, Rejection().stops(evidence).stops, atol=TOLERANCE, rtol=0)


def test_a_tree_that_branches_raises() -> None:
    out = drafts(Case((-1, 0, 0), (F, I, I)), tables(3, 2, 0))
    with pytest.raises(RuntimeError, match="chains"):
        VERIFIER.stops(Evidence(out.tree, out.p))


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
