"""Kangaroo's objective: the right target for every place, gradients for the adapter alone, and a loss that falls."""

import torch

from foretell.heads.teacher import ComputedBatch, Teacher, TeacherBatch
from foretell.methods.kangaroo.head import KangarooObjective
from foretell.model.hf.adapter import TransformersModel
from tests.methods.kangaroo.test_head import random_head
from tests.model.tiny import VOCAB, tiny_module


def labeled_for(teacher: Teacher, objective: KangarooObjective) -> ComputedBatch:
    """Three ragged texts."""
    tokens = torch.randint(3, VOCAB, (3, 12), generator=torch.Generator().manual_seed(1))
    batch = TeacherBatch(tokens, torch.tensor([12, 7, 9]), torch.tensor([4, 3, 1]))
    return teacher.label(batch, objective.taps)


def test_one_slot_of_every_supervised_place() -> None:
    teacher, objective = Teacher(TransformersModel(tiny_module("qwen3"))), KangarooObjective(random_head())
    labeled = labeled_for(teacher, objective)
    outcome = objective.outcome(labeled, teacher, torch.Generator(), training=True)
    (slot,) = outcome.slots
    assert slot.vocab is None
    assert slot.weight == 1.0
    assert list(zip(slot.row.tolist(), slot.at.tolist(), strict=True)) == [
        *((0, at) for at in range(3, 11)),
        *((1, at) for at in range(2, 6)),
        *((2, at) for at in range(8)),
    ]
    assert slot.logits.shape == (20, VOCAB)


def test_a_place_reads_nothing_behind_it() -> None:
    teacher, objective = Teacher(TransformersModel(tiny_module("qwen3"))), KangarooObjective(random_head())
    labeled = labeled_for(teacher, objective)
    (slot,) = objective.outcome(labeled, teacher, torch.Generator(), training=False).slots
    cut = TeacherBatch(labeled.batch.tokens[:1, :6], torch.tensor([6]), torch.tensor([4]))
    (short,) = objective.outcome(teacher.label(cut, objective.taps), teacher, torch.Generator(), training=False).slots
    assert short.at.tolist() == [3, 4]
    torch.testing.assert_close(short.logits, slot.logits[:2], atol=1e-5, rtol=1e-5)


def test_a_few_steps_lower_the_loss() -> None:
    model = TransformersModel(tiny_module("qwen3"))
    model.module.requires_grad_(False)
    teacher, objective = Teacher(model), KangarooObjective(random_head())
    labeled = labeled_for(teacher, objective)
    optimizer = torch.optim.Adam(objective.head.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        (slot,) = objective.outcome(labeled, teacher, torch.Generator(), training=True).slots
        log_p = labeled.logits[slot.row, slot.at].log_softmax(-1)
        loss = (log_p.exp() * (log_p - slot.logits.log_softmax(-1))).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in objective.head.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(weight.grad is None for weight in model.module.parameters())
