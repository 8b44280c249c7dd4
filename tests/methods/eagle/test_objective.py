"""EAGLE objectives: which distribution stands at which slot, and what is left out."""

from dataclasses import replace

import pytest
import torch

from foretell.core.errors import ConfigError
from foretell.heads.teacher import ComputedBatch, Objective, Outcome, Teacher, TeacherBatch
from foretell.methods.eagle.eagle1 import Eagle1Head
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.methods.eagle.objective import Eagle1Objective, Eagle3Objective
from foretell.model.hf.adapter import TransformersModel
from tests.methods.eagle.eagles import EAGLE1, EAGLE3, random_head
from tests.model.tiny import VOCAB, tiny_module

MODULE = tiny_module("llama").requires_grad_(False)
TEACHER = Teacher(TransformersModel(MODULE))


def eagle3(**changes: object) -> Eagle3Head:
    return random_head(replace(EAGLE3, **changes))  # type: ignore[arg-type]


def eagle1(**changes: object) -> Eagle1Head:
    return random_head(replace(EAGLE1, **changes))  # type: ignore[arg-type]


def labeled_for(objective: Objective, lengths: tuple[int, ...] = (12, 7), start: int = 4) -> ComputedBatch:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (len(lengths), max(lengths)), generator=generator)
    length = torch.tensor(lengths)
    return TEACHER.label(TeacherBatch(tokens, length, torch.full_like(length, start)), objective.taps)


def outcome(objective: Objective, labeled: ComputedBatch, *, training: bool, seed: int = 0) -> Outcome:
    return objective.outcome(labeled, TEACHER, torch.Generator().manual_seed(seed), training=training)


def test_slots_cover_the_supervised_positions_that_have_an_anchor() -> None:
    objective = Eagle3Objective(eagle3(), num_slots=6, decay=0.5)
    labeled = labeled_for(objective)
    given = outcome(objective, labeled, training=False)
    assert [slot.weight for slot in given.slots] == [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125]
    for number, slot in enumerate(given.slots, start=1):
        # Position t has the distribution of token t + 1: the response begins at token 4, and an anchor is 0 or more.
        expected = [(0, at) for at in range(3, 11) if at >= number] + [(1, at) for at in range(3, 6) if at >= number]
        assert list(zip(slot.row.tolist(), slot.at.tolist(), strict=True)) == expected
        assert slot.logits.shape == (len(expected), EAGLE3.draft_vocab_size)
        assert slot.vocab is not None


def test_training_leaves_out_places_whose_token_the_head_cannot_say() -> None:
    objective = Eagle3Objective(eagle3(), num_slots=2)
    labeled = labeled_for(objective)
    everywhere = outcome(objective, labeled, training=False).slots
    given = outcome(objective, labeled, training=True).slots
    for some, every in zip(given, everywhere, strict=True):
        best = labeled.logits[every.row, every.at].argmax(-1)
        known = objective.head.t2d[best]
        assert 0 < int(known.sum()) < len(known)
        assert torch.equal(some.at, every.at[known])
        torch.testing.assert_close(some.logits, every.logits[known])


def test_a_whole_draft_vocabulary_needs_no_columns() -> None:
    objective = Eagle3Objective(eagle3(draft_vocab_size=VOCAB), num_slots=1)
    labeled = labeled_for(objective)
    slot = outcome(objective, labeled, training=True).slots[0]
    assert slot.vocab is None
    assert len(slot.at) == 8 + 3


def test_no_slot_at_all_is_refused() -> None:
    for objective in (lambda: Eagle3Objective(eagle3(), num_slots=0), lambda: Eagle1Objective(eagle1(), num_slots=0)):
        with pytest.raises(ConfigError, match="num_slots"):
            objective()


def test_slot_1_is_learned_alone_at_first() -> None:
    """Until ``alone`` of training is done, and in training only; what it learns then is what slot 1 always is."""
    objective = Eagle3Objective(eagle3(), num_slots=3, alone=0.5)
    labeled = labeled_for(objective)
    seen = []
    for share in (0.0, 0.49, 0.5, 0.9):
        objective.share = share
        seen.append(len(outcome(objective, labeled, training=True).slots))
        assert len(outcome(objective, labeled, training=False).slots) == 3
    assert seen == [1, 1, 3, 3]
    objective.share = 0.0
    first = outcome(objective, labeled, training=True).slots[0]
    objective.share = 0.9
    torch.testing.assert_close(first.logits, outcome(objective, labeled, training=True).slots[0].logits)
    with pytest.raises(ConfigError, match=r"alone = 1\.5"):
        Eagle3Objective(eagle3(), alone=1.5)


def test_eagle1_trains_slot_1_with_noise_and_is_evaluated_on_all() -> None:
    objective = Eagle1Objective(eagle1(), num_slots=3, weight_law=0.1)
    labeled = labeled_for(objective)
    noisy = [outcome(objective, labeled, training=True, seed=seed) for seed in (1, 1, 2)]
    assert [len(one.slots) for one in noisy] == [1, 1, 1]
    assert noisy[0].slots[0].weight == 0.1
    assert torch.equal(noisy[0].slots[0].logits, noisy[1].slots[0].logits)
    assert not torch.equal(noisy[0].slots[0].logits, noisy[2].slots[0].logits)
    quiet = outcome(objective, labeled, training=False)
    assert len(quiet.slots) == 3
    unnoised = outcome(Eagle1Objective(eagle1(), num_slots=3, noise=0.0), labeled, training=True)
    torch.testing.assert_close(unnoised.slots[0].logits, quiet.slots[0].logits)


def test_the_feature_loss_compares_with_the_feature_of_the_next_position() -> None:
    objective = Eagle1Objective(eagle1(), weight_feature=3.0)
    labeled = labeled_for(objective)
    given = outcome(objective, labeled, training=False)
    true = TEACHER.model.normed(labeled.hidden)
    with torch.no_grad():
        embeds = TEACHER.model.embed(labeled.batch.tokens[:, 1:])
        predicted = objective.head.unroll(embeds, true[:, :-1], 1)[0][0]
    total, count = 0.0, 0
    for row, at in zip(given.slots[0].row.tolist(), given.slots[0].at.tolist(), strict=True):
        off = (predicted[row, at - 1] - true[row, at]).abs()
        total += float(torch.where(off < 1, 0.5 * off**2, off - 0.5).sum())
        count += len(off)
    assert float(given.extra.detach()) == pytest.approx(3.0 * total / count, rel=1e-5)
    assert given.figures["feature_loss"] == pytest.approx(total / count, rel=1e-5)


def test_a_batch_without_a_response_is_no_loss() -> None:
    objective = Eagle1Objective(eagle1())
    labeled = labeled_for(objective, (5, 4), start=5)
    given = outcome(objective, labeled, training=True)
    assert float(given.extra.detach()) == 0.0
    assert len(given.slots[0].at) == 0
