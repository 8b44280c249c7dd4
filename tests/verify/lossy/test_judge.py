"""The judge's head and threshold: normalisation over its own columns, strictest and laxest settings, what it taps."""

import math
from dataclasses import replace

import pytest
import torch

from foretell.core.errors import ConfigError
from foretell.verify import Coupled
from foretell.verify.lossy.judge import Judge, JudgeHead
from tests.verify.random_trees import decided, random_evidence


def test_normalisation_reads_its_own_columns_alone() -> None:
    """Zeros behind the columns (an inflated target), and other layers before and behind, change nothing."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(2, 3, 5, generator=generator)
    weight = torch.randn(5, generator=generator)
    plain = JudgeHead(weight, 0.25, eps=1e-6)
    expected = (h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight).sum(-1) + 0.25
    assert torch.allclose(plain(h), expected, atol=1e-6)
    assert torch.equal(plain(torch.cat([h, torch.zeros(2, 3, 7)], -1)), plain(h))
    beside = torch.cat([torch.full((2, 3, 4), 9.0), h, torch.full((2, 3, 1), -9.0)], -1)
    assert torch.equal(replace(plain, start=4)(beside), plain(h))
    assert torch.allclose(plain(h * 100), plain(h), atol=1e-4), "the size of a state says nothing"
    assert not torch.allclose(JudgeHead(weight, 0.25)(h * 100), JudgeHead(weight, 0.25)(h))


@pytest.mark.parametrize("logit", [-200.0, 200.0])
def test_thresholds_0_and_1_hold_for_every_logit(logit: float) -> None:
    """A sigmoid in float32 is 0 or 1 there: the comparison is one of logits."""
    evidence = random_evidence(2)
    judge = Judge(off_support=True, head=lambda taps: torch.full_like(taps[..., 0], logit))
    at, _ = decided(replace(judge, threshold=1.0), evidence)
    assert torch.equal(at, Coupled().decide(evidence)[0])
    at, _ = decided(replace(judge, threshold=0.0), evidence)
    has_child = torch.zeros_like(evidence.tree.parent).scatter_add_(
        1, evidence.tree.parent.clamp(min=0), (evidence.tree.parent >= 0).long()
    )
    without_distribution = (
        evidence.p.gather(1, at[:, None, None].expand(-1, 1, evidence.p.shape[-1])).sum(-1)[:, 0] == 0
    )
    assert ((has_child.gather(1, at[:, None])[:, 0] == 0) | without_distribution).all(), "the walk ends at a leaf"


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.9])
def test_the_cut_is_the_thresholds_logit(threshold: float) -> None:
    assert 1 / (1 + math.exp(-Judge(threshold).cut)) == pytest.approx(threshold)


def test_nothing_to_tolerate_needs_no_head() -> None:
    evidence = random_evidence(1)
    at, bonus = decided(Judge(threshold=1.0), evidence)
    expected = Coupled().decide(evidence)
    assert torch.equal(at, expected[0])
    assert torch.equal(bonus, expected[1])
    with pytest.raises(ConfigError, match="no head"):
        decided(Judge(threshold=0.99), evidence)


def test_it_taps_what_its_head_reads() -> None:
    assert Judge().taps == ()
    assert Judge(head=JudgeHead(torch.ones(2)), layers=(3,)).taps == (3,)
