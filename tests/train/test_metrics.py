"""Slot figures against sums written out by hand, and against a chain that is really run."""

import numpy as np
import pytest
import torch
from torch import Tensor

from foretell.heads.teacher import ComputedBatch, LossSlot, Outcome, TeacherBatch
from foretell.train.losses import DIVERGENCES, forward_kl
from foretell.train.metrics import Meter, compare, divergence_of, evaluate, expected_length, loss_per_slot, slot_losses
from tests.train.harness import Linear, teacher, texts

B, T, V = 2, 6, 5


def labeled(seed: int = 0) -> ComputedBatch:
    generator = torch.Generator().manual_seed(seed)
    batch = TeacherBatch(torch.zeros(B, T, dtype=torch.int64), torch.tensor([T, T - 1]), torch.tensor([1, 3]))
    return ComputedBatch(
        batch, torch.zeros(B, T, 0), torch.zeros(B, T, 1), torch.randn(B, T, V, generator=generator) * 2
    )


def slot(index: int, seed: int, known: ComputedBatch, vocab: Tensor | None = None) -> LossSlot:
    row, at = known.batch.supervised[:, index:].nonzero(as_tuple=True)
    size = V if vocab is None else len(vocab)
    logits = torch.randn(len(row), size, generator=torch.Generator().manual_seed(seed)) * 2
    return LossSlot(logits, row, at + index, vocab=vocab)


def by_start(one: LossSlot, index: int, known: ComputedBatch) -> dict[tuple[int, int], tuple[float, float]]:
    """(row, start) -> (acceptance, agreement), each place by itself."""
    out = {}
    for m, (row, at) in enumerate(zip(one.row.tolist(), one.at.tolist(), strict=True)):
        p, q = known.logits[row, at].softmax(-1).numpy(), one.logits[m].softmax(-1).numpy()
        ids = np.arange(V) if one.vocab is None else one.vocab.numpy()
        out[row, at - index] = (np.minimum(p[ids], q).sum(), float(ids[q.argmax()] == p.argmax()))
    return out


def test_conditional_figures() -> None:
    known = labeled()
    slots = [slot(index, 10 + index, known) for index in range(3)]
    meter = Meter()
    meter.add(known, Outcome(slots), stepwise=False)
    figures = meter.slots()
    places = [by_start(one, index, known) for index, one in enumerate(slots)]
    for kind, name in ((0, "conditional"), (1, "conditional_greedy")):
        for depth in range(3):
            kept = mass = 0.0
            for start, value in places[depth].items():
                if all(start in before for before in places[:depth]):
                    chance = float(np.prod([before[start][kind] for before in places[:depth]]))
                    mass, kept = mass + chance, kept + chance * value[kind]
            assert getattr(figures[depth], name) == pytest.approx(kept / mass if mass else 0.0, abs=1e-6)
    for one, found in zip(places, figures, strict=True):
        assert found.num_places == len(one)
        assert found.acceptance == pytest.approx(np.mean([value[0] for value in one.values()]), abs=1e-6)
        assert found.agreement == pytest.approx(np.mean([value[1] for value in one.values()]), abs=1e-6)


def test_stepwise_is_the_same_slot_further_on() -> None:
    known = labeled(1)
    first = slot(0, 20, known)
    index = torch.arange(len(first.row))

    def later(k: int) -> LossSlot:  # the places of slot 1 that are k positions behind a supervised one
        kept = torch.tensor(
            [
                int(at) - k >= 0 and bool(known.batch.supervised[row, at - k])
                for row, at in zip(first.row, first.at, strict=True)
            ]
        )
        return LossSlot(first.logits[index[kept]], first.row[kept], first.at[kept])

    one, many = Meter(), Meter()
    one.add(known, Outcome([first]), stepwise=True)
    many.add(known, Outcome([later(k) for k in range(4)]), stepwise=False)
    for mine, theirs in zip(one.slots()[:4], many.slots(), strict=True):
        assert mine.conditional == pytest.approx(theirs.conditional, abs=1e-6)
        assert mine.conditional_greedy == pytest.approx(theirs.conditional_greedy, abs=1e-6)
        assert mine.num_places == theirs.num_places


def test_draft_vocabulary_counts_what_it_misses() -> None:
    known, ids = labeled(2), torch.tensor([1, 3, 4])
    row, at = known.batch.supervised.nonzero(as_tuple=True)
    perfect = LossSlot(known.logits[row, at][:, ids], row, at, vocab=ids)
    p = known.logits[row, at].softmax(-1)
    q = p[:, ids] / p[:, ids].sum(-1, keepdim=True)
    found = compare(perfect, known)
    torch.testing.assert_close(found.acceptance, torch.minimum(p[:, ids], q).sum(-1))
    assert bool((found.acceptance < 1).all())  # measured against the whole of p
    assert float(divergence_of(known, Outcome([perfect]), forward_kl).total) == pytest.approx(
        0.0, abs=1e-6
    )  # learned in part


def test_calibration_error() -> None:
    known = labeled(3)
    row, at = known.batch.supervised.nonzero(as_tuple=True)
    for logits, wanted in ((known.logits[row, at], 0.0), (known.logits[row, at] * 100, None)):
        meter = Meter()
        meter.add(known, Outcome([LossSlot(logits, row, at)]), stepwise=False)
        p, q = known.logits[row, at].softmax(-1), logits.softmax(-1)
        stated, best = q.max(-1)
        gap = (stated - p.gather(1, best[:, None])[:, 0]).numpy()
        bins = (stated.numpy() * 15).astype(int).clip(max=14)
        expected = sum(abs(gap[bins == b].sum()) for b in range(15)) / len(gap)
        assert meter.slots()[0].ece == pytest.approx(expected if wanted is None else wanted, abs=1e-5)


def test_expected_length() -> None:
    assert expected_length([0.5, 0.5]) == 1.75
    assert expected_length([]) == 1.0
    assert expected_length([1.0] * 7) == 8.0


@pytest.mark.parametrize("name", DIVERGENCES)
def test_loss_is_the_weighted_sum_of_slots(name: str) -> None:
    known, divergence = labeled(4), DIVERGENCES[name]
    slots = [slot(index, 30 + index, known) for index in range(2)]
    weights = (0.25, torch.rand(len(slots[1].row), generator=torch.Generator().manual_seed(1)))
    slots = [LossSlot(one.logits, one.row, one.at, weight) for one, weight in zip(slots, weights, strict=True)]
    empty = LossSlot(torch.zeros(0, V), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    values = [divergence(known.logits[one.row, one.at], one.logits) for one in slots]
    expected = 0.25 * values[0].mean() + (weights[1] * values[1]).mean() + 2.0
    found = divergence_of(known, Outcome([*slots, empty], torch.tensor(2.0)), divergence)
    torch.testing.assert_close(found.total, expected)
    # The parts: a mean of a place of each slot, whatever its weight, and their mean by weight; not what is added.
    means = [values[0].mean(), (weights[1] * values[1]).sum() / weights[1].sum(), None]
    assert slot_losses(found.parts) == [None if one is None else pytest.approx(float(one), rel=1e-5) for one in means]
    by_weight = (float(expected) - 2.0) / (0.25 + float(weights[1].mean()))
    assert loss_per_slot(found.parts) == pytest.approx(by_weight, rel=1e-5)
    nothing = divergence_of(known, Outcome([], torch.tensor(2.0)), divergence)
    assert (float(nothing.total), slot_losses(nothing.parts), loss_per_slot(nothing.parts)) == (2.0, [], None)


def test_a_loss_of_a_slot_does_not_grow_with_the_number_of_slots() -> None:
    known = labeled(5)
    one = slot(0, 31, known)
    few, many = (divergence_of(known, Outcome([one] * count), forward_kl) for count in (1, 7))
    assert float(many.total) == pytest.approx(7 * float(few.total), rel=1e-5)
    assert loss_per_slot(many.parts) == pytest.approx(loss_per_slot(few.parts), rel=1e-6)


def test_evaluate_does_not_depend_on_batches() -> None:
    objective = Linear()
    few, many = (evaluate(objective, teacher(), texts(), forward_kl, batch_tokens=size) for size in (32, 1024))
    assert few.num_tokens == many.num_tokens == int((texts().length - texts().start).sum())
    assert len(many.slot_losses) == len(many.as_dict()["slot_losses"]) == 2
    assert many.loss_per_slot == pytest.approx(many.loss / 1.5, rel=1e-5)  # weights 1 and 1/2
    assert many.loss_per_slot == pytest.approx((many.slot_losses[0] + 0.5 * many.slot_losses[1]) / 1.5, rel=1e-5)
    for mine, theirs in zip(few.slots, many.slots, strict=True):
        assert mine.num_places == theirs.num_places
        assert mine.conditional == pytest.approx(theirs.conditional, abs=1e-5)
        assert mine.ece == pytest.approx(theirs.ece, abs=1e-5)
    assert (
        evaluate(objective, teacher(), texts(), forward_kl, batch_tokens=32, max_tokens=20).num_tokens < few.num_tokens
    )
    assert objective.head.training
