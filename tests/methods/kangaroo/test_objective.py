"""Kangaroo's objective: the right target for every place."""

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
