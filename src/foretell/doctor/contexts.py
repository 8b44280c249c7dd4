"""Where a head is measured: the target's own answers, and each slot's chance of acceptance there, text by text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams
from foretell.engine.engine import Engine
from foretell.heads.head import Head
from foretell.heads.teacher import ComputedBatch, LossSlot, Objective, Outcome, Teacher
from foretell.methods.dflash.head import DFlashHead
from foretell.methods.dflash.objective import DFlashObjective
from foretell.methods.eagle.eagle1 import Eagle1Head
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.methods.eagle.objective import Eagle1Objective, Eagle3Objective
from foretell.methods.kangaroo.head import KangarooHead, KangarooObjective
from foretell.methods.medusa.head import MedusaHead, MedusaObjective
from foretell.train.metrics import Meter, SlotFigures, compare, expected_length
from foretell.train.responses import Responses, pack

LEAST_ANSWER = 8
"""Tokens of an answer, below which it is left out: a head has hardly a place to guess at."""
NUM_SLOTS = 4
"""Guesses in a line that are looked at."""
LEAST_CHANCE = 1e-3
"""Chances of acceptance below it count as it in the mean of their logs."""


@dataclass(frozen=True)
class TextScore:
    """A head on one text."""

    length: float  # expected tokens of a step, sampled at temperature 1
    slots: tuple[SlotFigures, ...]
    num_places: int  # of all slots
    log_chance: float  # sum over them of the log of the chance of acceptance
    stated: float  # mean of the head's largest probability in slot 1 ...
    true: float  # ... and of the target's probability of that token
    not_finite: int  # places at which the head's logits are not finite


def answers(engine: Engine, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, seed: int) -> Responses:
    """The target's own answers to prompts of token ids, at temperature 1, without guessing: the texts that a head guesses
    on. Prompts that leave no room, and answers of fewer than LEAST_ANSWER tokens, are left out. Raises ConfigError where
    none is left."""
    room = engine.model.spec.max_positions
    fitting = [list(ids) for ids in prompts if len(ids) < room - 1]
    if not fitting:
        raise ConfigError(f"none of {len(prompts)} prompts fits the context of {room} tokens")
    plain = engine.with_method(None, speculation="on")
    texts = []
    for index, ids in enumerate(fitting):
        params = SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens, seed=seed + index)
        answer = plain.generate(ids, params).token_ids
        if len(answer) >= LEAST_ANSWER:
            texts.append(([*ids, *answer], len(ids)))
    if not texts:
        raise ConfigError(
            f"the target's answers to {len(fitting)} prompts have fewer than {LEAST_ANSWER} tokens each: give prompts "
            "with longer answers"
        )
    return pack(texts)


def objective_of(head: Head) -> Objective:
    """The objective by which a head's slots are computed on a known text. Raises ConfigError for a kind without one."""
    if isinstance(head, Eagle3Head):
        return Eagle3Objective(head, num_slots=NUM_SLOTS)
    if isinstance(head, Eagle1Head):
        return Eagle1Objective(head, num_slots=NUM_SLOTS)
    if isinstance(head, MedusaHead):
        return MedusaObjective(head)
    if isinstance(head, DFlashHead):
        return DFlashObjective(head)
    if isinstance(head, KangarooHead):
        return KangarooObjective(head)
    raise ConfigError(f"a head of kind {head.method!r} does not guess, so there is nothing to diagnose")


@torch.no_grad()
def label(teacher: Teacher, responses: Responses, index: int, layers: Sequence[int]) -> ComputedBatch:
    """The target on one text, the outputs of ``layers`` (ascending) as taps."""
    return teacher.label(responses.batch([index]).to(teacher.model.spec.device), layers)


@torch.no_grad()
def score(head: Head, teacher: Teacher, labeled: ComputedBatch, layers: Sequence[int]) -> TextScore:
    """A head on one labeled text, whose taps are the outputs of ``layers``."""
    objective = objective_of(head)
    parts: Mapping[int, Any] = dict(zip(layers, labeled.taps.chunk(len(layers), -1), strict=True))
    mine = torch.cat([parts[layer] for layer in objective.taps], -1)
    own = ComputedBatch(labeled.batch, mine, labeled.hidden, labeled.logits)
    outcome = objective.outcome(own, teacher, torch.Generator().manual_seed(0), training=False)
    kept = [_finite(slot) for slot in outcome.slots[:NUM_SLOTS]]
    places = [compare(slot, own) for slot, _ in kept]
    meter = Meter()
    meter.add(own, Outcome([slot for slot, _ in kept]), stepwise=objective.stepwise, places=places)
    slots = meter.slots()[:NUM_SLOTS]
    chances = torch.cat([place.acceptance for place in places]).clamp(min=LEAST_CHANCE)
    return TextScore(
        length=expected_length([slot.conditional for slot in slots]),
        slots=slots,
        num_places=len(chances),
        log_chance=float(chances.log().sum()),
        stated=float(places[0].stated.mean()) if len(places[0].stated) else 0.0,
        true=float(places[0].true.mean()) if len(places[0].true) else 0.0,
        not_finite=sum(count for _, count in kept),
    )


def _finite(slot: LossSlot) -> tuple[LossSlot, int]:
    """The slot with uniform guesses where its logits are not finite, and at how many places."""
    broken = ~slot.logits.isfinite().all(-1)
    if not bool(broken.any()):
        return slot, 0
    logits = torch.where(broken[:, None], torch.zeros_like(slot.logits), slot.logits)
    return LossSlot(logits, slot.row, slot.at, slot.weight, slot.vocab), int(broken.sum())
