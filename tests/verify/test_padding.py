"""Padding behind a ragged chain is no guess, whatever token stands in it."""

import pytest
import torch
from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.tree import DrawnBy, chain_tree
from foretell.verify.base import Evidence
from foretell.verify.drawing import draw
from foretell.verify.exact import Coupled, Exact, target_draws
from tests.verify.enumerate import tables


class AllAtOnce(Coupled):
    """Draws at every node, as on an accelerator."""

    def choices(self, evidence: Evidence) -> Tensor:
        return target_draws(evidence)


@pytest.mark.parametrize("verifier", [Coupled(), Exact(), AllAtOnce()], ids=["coupled", "exact", "all-at-once"])
def test_padding_that_would_match_is_not_accepted(verifier: Exact) -> None:
    """All tokens are the target's own draws, so every real guess is accepted, and nothing behind the last."""
    num_rows, num_nodes = 6, 5
    p = tables(4, 2, 3).p[1][:1].expand(num_rows, num_nodes, -1).contiguous()
    noise = Noise(torch.arange(num_rows), torch.full((num_rows,), 7))
    count = torch.tensor([1, 2, 3, 4, 5, 1])
    tokens = torch.zeros(num_rows, num_nodes, dtype=torch.int64)
    drawn = target_draws(Evidence(chain_tree(tokens), p, noise))  # p is the same at every node
    tokens[:, 1:] = drawn[:, :-1]
    tree = chain_tree(tokens, count, drawn_by=DrawnBy.COUPLED)
    evidence = Evidence(tree, p, noise)
    verdict = draw(verifier, evidence)
    assert verdict.count.tolist() == count.tolist()
    assert verdict.bonus.tolist() == drawn.gather(1, count[:, None] - 1)[:, 0].tolist()
    assert verifier.stops(evidence).stops.argmax(1).tolist() == (count - 1).tolist()
