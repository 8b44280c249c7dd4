"""Every head's objective: gradients reach all of its parameters and none of the target's, and steps reduce the loss."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.heads.teacher import ComputedBatch, Objective, Outcome, Teacher, TeacherBatch
from foretell.methods.dflash.head import DFlashHead
from foretell.methods.dflash.objective import DFlashObjective
from foretell.methods.eagle.objective import Eagle1Objective, Eagle3Objective
from foretell.methods.kangaroo.head import KangarooObjective
from foretell.methods.medusa.head import MedusaHead, MedusaObjective
from foretell.model.hf.adapter import TransformersModel
from tests.methods.dflash.test_objective import CONFIG as DFLASH, SPARK
from tests.methods.eagle.eagles import EAGLE1, EAGLE3, random_head
from tests.methods.kangaroo.test_head import random_head as adapter
from tests.model.tiny import VOCAB, tiny_module

MODULE: Any = tiny_module("qwen3").requires_grad_(False)
TEACHER = Teacher(TransformersModel(MODULE))


def eagle3(**changes: Any) -> Objective:
    return Eagle3Objective(random_head(replace(EAGLE3, **changes)), num_slots=4)


def dflash(**changes: Any) -> Objective:
    return DFlashObjective(DFlashHead.fresh(replace(DFLASH, **changes), seed=1, model=TEACHER.model), num_anchors=6)


def medusa(vocab: torch.Tensor | None = None) -> Objective:
    return MedusaObjective(MedusaHead.fresh(TEACHER.model, num_heads=3, draft_vocab=vocab))


OBJECTIVES: dict[str, tuple[Callable[[], Objective], int]] = {
    "eagle1": (lambda: Eagle1Objective(random_head(replace(EAGLE1, own_embedding=True))), 1),
    "eagle3": (lambda: eagle3(own_embedding=True), 4),
    "eagle3.1": (lambda: eagle3(fc_norm=True, norm_output=True), 4),
    "eagle3-normed": (lambda: eagle3(norm_before_residual=True), 4),
    "dflash": (dflash, 3),
    "dflash-causal": (lambda: dflash(causal=True), 3),
    "dspark": (lambda: dflash(**SPARK), 4),
    "medusa": (medusa, 3),
    "medusa-reduced": (lambda: medusa(torch.arange(0, VOCAB, 2)), 3),
    "kangaroo": (lambda: KangarooObjective(adapter()), 1),
}
"""Each with the number of its slots that training knows."""


def divergences(outcome: Outcome, labeled: ComputedBatch) -> list[torch.Tensor]:
    """KL(p || q) of each slot, a mean over its places; p over the draft's columns alone."""
    found = []
    for slot in outcome.slots:
        p = labeled.logits[slot.row, slot.at]
        log_p = (p if slot.vocab is None else p[:, slot.vocab]).log_softmax(-1)
        found.append((log_p.exp() * (log_p - slot.logits.float().log_softmax(-1))).sum(-1).mean())
    return found


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_reach_every_parameter_and_steps_reduce_the_loss(name: str) -> None:
    make, trained = OBJECTIVES[name]
    objective = make()
    tokens = torch.tensor([[5, 9, 11, 17] * 6] * 2)
    labeled = TEACHER.label(TeacherBatch(tokens, torch.tensor([24, 20]), torch.tensor([4, 2])), objective.taps)

    def outcome(step: int, *, training: bool) -> Outcome:
        return objective.outcome(labeled, TEACHER, torch.Generator().manual_seed(step), training=training)

    def told() -> list[float]:
        return [float(one.detach()) for one in divergences(outcome(0, training=False), labeled)]

    before, largest = told(), dict.fromkeys(dict(objective.head.named_parameters()), 0.0)
    optimizer = torch.optim.AdamW(objective.head.parameters(), lr=3e-3)
    for step in range(30):
        optimizer.zero_grad()
        found = outcome(step, training=True)
        loss = sum((one.weight * each for one, each in zip(found.slots, divergences(found, labeled), strict=True)), 0.0)
        (loss if found.extra is None else loss + found.extra).backward()
        for key, parameter in objective.head.named_parameters():
            assert parameter.grad is not None, key
            assert torch.isfinite(parameter.grad).all(), key
            largest[key] = max(largest[key], float(parameter.grad.abs().max()))
        optimizer.step()
    assert min(largest.values()) > 1e-6, largest
    after = told()
    assert len(after) >= trained
    assert all(new < 0.9 * old for new, old in zip(after[:trained], before, strict=False)), (before, after)
    assert all(parameter.grad is None for parameter in MODULE.parameters())
