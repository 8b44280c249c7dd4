"""The block drafter's objective: which places are asked, and what is compared."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.heads.teacher import ComputedBatch, Outcome, Teacher, TeacherBatch
from foretell.methods.dflash.head import DFlashHead, DFlashHeadConfig
from foretell.methods.dflash.objective import DFlashObjective, acceptance, choose_anchors
from foretell.model.hf.adapter import TransformersModel
from tests.model.tiny import VOCAB, tiny_module

CONFIG = DFlashHeadConfig(
    hidden_size=32, vocab_size=VOCAB, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, num_layers=2,
    block_size=4, layer_ids=(0, 2, 3), mask_token_id=VOCAB - 1,
)  # fmt: skip
SPARK: dict[str, Any] = {"sample_from_anchor": True, "markov_rank": 6, "confidence": True}


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    module: Any = tiny_module("qwen3")
    return Teacher(TransformersModel(module.requires_grad_(False)))


@pytest.fixture(scope="module")
def batch() -> TeacherBatch:
    tokens = torch.randint(0, VOCAB, (3, 14), generator=torch.Generator().manual_seed(4))
    return TeacherBatch(tokens, torch.tensor([14, 9, 3]), torch.tensor([5, 1, 2]))


@pytest.fixture(scope="module")
def labeled(teacher: Teacher, batch: TeacherBatch) -> ComputedBatch:
    return teacher.label(batch, CONFIG.layer_ids)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def places(outcome: Outcome) -> list[set[tuple[int, int]]]:
    return [set(zip(slot.row.tolist(), slot.at.tolist(), strict=True)) for slot in outcome.slots]


@pytest.mark.parametrize("changes", [{}, {"causal": True}, SPARK])
def test_slots_ask_for_every_next_token_of_the_response(
    changes: dict[str, Any], teacher: Teacher, labeled: ComputedBatch, batch: TeacherBatch
) -> None:
    """With anchors everywhere, slot k is asked k - 1 places behind each anchor, as far as the text goes."""
    head = DFlashHead.fresh(replace(CONFIG, **changes), seed=1)
    outcome = DFlashObjective(head, num_anchors=99).outcome(labeled, teacher, generator(), training=True)
    assert len(outcome.slots) == head.config.num_guesses
    spans = list(zip(batch.start.tolist(), batch.length.tolist(), strict=True))
    for index, found in enumerate(places(outcome)):
        expected = {
            (row, a + index) for row, (start, end) in enumerate(spans) for a in range(start - 1, end - 1 - index)
        }
        assert found == expected
        assert outcome.slots[index].weight == math.exp(-index / 4.0)
        assert outcome.slots[index].logits.shape == (len(expected), VOCAB)


@pytest.mark.parametrize("changes", [{}, {"causal": True}, SPARK])
def test_a_slot_is_the_block_behind_its_anchor_alone(
    changes: dict[str, Any], teacher: Teacher, labeled: ComputedBatch, batch: TeacherBatch
) -> None:
    """Each place again, by one block on the text cut behind its anchor: no packing, no feature from the anchor on."""
    head = DFlashHead.fresh(replace(CONFIG, **changes), seed=1)
    with torch.no_grad():
        if head.markov_head is not None:
            head.markov_head.markov_w2.weight.normal_(generator=generator(3))
        outcome = DFlashObjective(head, num_anchors=99).outcome(labeled, teacher, generator(), training=False)
        for index, slot in enumerate(outcome.slots):
            for place in range(len(slot.row)):
                row, at = int(slot.row[place]), int(slot.at[place])
                anchor = at - index
                ids = [int(batch.tokens[row, anchor])] + [CONFIG.mask_token_id] * (CONFIG.block_size - 1)
                blocks = teacher.model.embed(torch.tensor([[ids]]))
                normed = head(labeled.taps[row : row + 1, :anchor], blocks, torch.tensor([[anchor]]))
                logits = teacher.model.head(normed[0])[0, index + head.config.first_row]
                if head.markov_head is not None:
                    logits = logits + head.bias(batch.tokens[row, at])
                torch.testing.assert_close(slot.logits[place], logits, rtol=1e-5, atol=1e-5)


def test_anchors(batch: TeacherBatch) -> None:
    able = [set(range(4, 13)), set(range(8)), {1}]
    everything, real = choose_anchors(batch, 99, None)
    assert [set(row[keep].tolist()) for row, keep in zip(everything, real, strict=True)] == able
    spread, real = choose_anchors(batch, 3, None)
    assert [sorted(row[keep].tolist()) for row, keep in zip(spread, real, strict=True)] == [[4, 7, 10], [0, 2, 5], [1]]
    again, _ = choose_anchors(batch, 3, None)
    assert torch.equal(again, spread)
    drawn = [choose_anchors(batch, 3, generator(seed)) for seed in range(30)]
    for anchors, real in drawn:
        for row, keep, allowed in zip(anchors, real, able, strict=True):
            chosen = row[keep].tolist()
            assert len(set(chosen)) == len(chosen) == min(3, len(allowed))
            assert set(chosen) <= allowed
    assert set(itertools.chain(*(anchors[0].tolist() for anchors, _ in drawn))) == able[0]
    assert torch.equal(drawn[7][0], choose_anchors(batch, 3, generator(7))[0])


def test_a_text_without_response_has_no_anchor() -> None:
    anchors, real = choose_anchors(
        TeacherBatch(torch.zeros(1, 4).long(), torch.tensor([4]), torch.tensor([4])), 3, generator()
    )
    assert anchors.shape == real.shape == (1, 1)
    assert not bool(real.any())


def test_a_text_shorter_than_a_block_leaves_slots_empty(teacher: Teacher) -> None:
    labeled = teacher.label(
        TeacherBatch(torch.tensor([[5, 6, 7]]), torch.tensor([3]), torch.tensor([2])), CONFIG.layer_ids
    )
    head = DFlashHead.fresh(replace(CONFIG, confidence=True), seed=1)
    outcome = DFlashObjective(head).outcome(labeled, teacher, generator(), training=True)
    assert [tuple(slot.logits.shape) for slot in outcome.slots] == [(1, VOCAB), (0, VOCAB), (0, VOCAB)]
    assert math.isfinite(float(outcome.extra.detach()))


def test_the_confidence_loss_is_against_the_exact_acceptance(teacher: Teacher, labeled: ComputedBatch) -> None:
    head = DFlashHead.fresh(replace(CONFIG, **SPARK), seed=1)
    outcome = DFlashObjective(head, num_anchors=99, gamma=2.0).outcome(labeled, teacher, generator(), training=True)
    expected = 0.0
    for index, slot in enumerate(outcome.slots):
        p = labeled.logits[slot.row, slot.at].softmax(-1)
        label = 1.0 - 0.5 * (p - slot.logits.detach().softmax(-1)).abs().sum(-1)
        # A fresh confidence head says 1/2 of everything: its loss is log 2 whatever the label is.
        assert bool(((label > 0) & (label < 1)).all())
        torch.testing.assert_close(acceptance(labeled.logits[slot.row, slot.at], slot.logits.detach()), label)
        expected += math.exp(-index / 2.0) * math.log(2)
    assert float(outcome.extra.detach()) == pytest.approx(expected, rel=1e-5)
    assert outcome.figures["confidence_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_draft_vocabulary_is_asked_for_its_tokens_alone(teacher: Teacher, labeled: ComputedBatch) -> None:
    """In training nothing is asked where the target's best token is none of them; in evaluation everything, and the chance
    to be kept is that of all the target's mass."""
    maps = draft_vocabulary((torch.arange(VOCAB) * 7) % 11, VOCAB // 2)
    config = replace(CONFIG, **SPARK, draft_vocab_size=VOCAB // 2)
    head = DFlashHead.fresh(config, seed=1, vocabulary=maps, output=torch.randn(VOCAB, 32, generator=generator(2)))
    ids = head.target_ids
    assert set(ids.tolist()) == set(maps[1].nonzero()[:, 0].tolist())
    objective = DFlashObjective(head, num_anchors=99)
    asked = objective.outcome(labeled, teacher, generator(), training=True)
    told = objective.outcome(labeled, teacher, generator(), training=False)
    best = labeled.logits.argmax(-1)
    for some, every in zip(asked.slots, told.slots, strict=True):
        inside = maps[1][best[every.row, every.at]]
        assert 0 < int(inside.sum()) < len(every.row)
        wanted = set(zip(every.row[inside].tolist(), every.at[inside].tolist(), strict=True))
        assert set(zip(some.row.tolist(), some.at.tolist(), strict=True)) == wanted
        assert torch.equal(every.vocab, ids)
        assert every.logits.shape == (len(every.row), len(ids))
        p, q = labeled.logits[every.row, every.at].softmax(-1), torch.zeros(len(every.row), VOCAB)
        q[:, ids] = every.logits.detach().softmax(-1)
        kept = acceptance(labeled.logits[every.row, every.at], every.logits.detach(), ids)
        torch.testing.assert_close(kept, torch.minimum(p, q).sum(-1))


def test_tapped_layers_begin_alike() -> None:
    """Each tap of the fusion begins with the inverse of what its layer's outputs measure."""
    plain = DFlashHead.fresh(CONFIG, seed=1)
    scaled = DFlashHead.fresh(CONFIG, seed=1, tap_scale=[1.0, 4.0, 20.0])
    for part, other, scale in zip(plain.fc.weight.chunk(3, 1), scaled.fc.weight.chunk(3, 1), (1, 4, 20), strict=True):
        torch.testing.assert_close(other * scale, part)
