"""Padding behind a ragged chain is no guess, whatever token stands in it."""

import pytest
import torch

from foretell.core.noise import Noise
from foretell.core.tree import DrawnBy, chain_tree
from foretell.verify import VERIFIERS
from foretell.verify.base import Evidence
from foretell.verify.drawing import draw
from foretell.verify.exact import target_draws
from tests.verify.enumerate import tables


@pytest.mark.parametrize("rule", ["coupled", "exact", "gumbel_list"])
def test_padding_that_would_match_is_not_accepted(rule: str) -> None:
    """All tokens are the target's own draws, so every real guess is accepted, and nothing behind the last."""
    num_rows, num_nodes = 6, 5
    p = tables(4, 2, 3).p[1][:1].expand(num_rows, num_nodes, -1).contiguous()
    noise = Noise(torch.arange(num_rows), torch.full((num_rows,), 7))
    count = torch.tensor([1, 2, 3, 4, 5, 1])
    tokens = torch.zeros(num_rows, num_nodes, dtype=torch.int64)
    drawn = target_draws(Evidence(chain_tree(tokens), p, noise))  # p is the same at every node
    tokens[:, 1:] = drawn[:, :-1]
    tree = chain_tree(tokens, count, drawn_by=DrawnBy.COUPLED)
    verifier, evidence = VERIFIERS[rule], Evidence(tree, p, noise)
    verdict = draw(verifier, evidence)
    assert verdict.count.tolist() == count.tolist()
    assert verdict.bonus.tolist() == drawn.gather(1, count[:, None] - 1)[:, 0].tolist()
    assert verifier.stops(evidence).stops.argmax(1).tolist() == (count - 1).tolist()
