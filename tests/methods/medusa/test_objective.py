"""Medusa's slots: the right place for each head, its weight, its vocabulary."""

import pytest
import torch

from foretell.heads.teacher import Teacher, TeacherBatch
from foretell.methods.medusa.head import MedusaHead, MedusaObjective
from foretell.model.hf.adapter import TransformersModel
from tests.model.tiny import tiny_module

V, K = 30, 3


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    module = tiny_module("qwen3", hidden_size=16, num_hidden_layers=2, vocab_size=V, num_attention_heads=2)
    return TransformersModel(module.requires_grad_(False))


def batch() -> TeacherBatch:
    tokens = torch.randint(0, V, (2, 10), generator=torch.Generator().manual_seed(0))
    return TeacherBatch(tokens, torch.tensor([10, 7]), torch.tensor([4, 2]))


@pytest.mark.parametrize("own", [True, False])
def test_slots(model: TransformersModel, own: bool) -> None:
    """Head k at position t stands before p at t + k, wherever token t + k + 1 is of the response."""
    head, teacher = MedusaHead.fresh(model, num_heads=K, own_lm_head=own), Teacher(model)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1)
    labeled = teacher.label(batch(), head.taps)
    outcome = MedusaObjective(head).outcome(labeled, teacher, torch.Generator(), training=True)
    assert outcome.extra is None
    assert [slot.weight for slot in outcome.slots] == pytest.approx([0.8, 0.64, 0.512])
    assert torch.equal(labeled.taps, labeled.hidden), "the last layer is what is tapped"
    for k, slot in enumerate(outcome.slots, start=1):
        places = {(row, at) for row, at in zip(slot.row.tolist(), slot.at.tolist(), strict=True)}
        expected = {(0, at) for at in range(3, 9) if at - k >= 0} | {(1, at) for at in range(1, 6) if at - k >= 0}
        assert places == expected
        for row, at, logits in zip(slot.row, slot.at, slot.logits, strict=True):
            x = head(model.normed(labeled.hidden[row : row + 1, at - k : at - k + 1]), k - 1)
            said = x if own else model.head(x)
            torch.testing.assert_close(logits, said[0, 0], atol=1e-5, rtol=1e-5)
        assert slot.logits.requires_grad
    sum(slot.logits.sum() for slot in outcome.slots).backward()  # type: ignore[union-attr]
    assert all(parameter.grad is not None for parameter in head.parameters())
