"""The acceptance head's training: token mixing, labels, the weighted loss, and calibration."""

import math

import pytest
import torch
from torch import Tensor

from foretoken.heads.acceptance import AcceptanceConfig, AcceptanceHead, predicted
from foretoken.noise import exponentials
from foretoken.train.lesson import Batch, Teacher
from foretoken.train.objectives.acceptance import (
    LABELS,
    AcceptanceObjective,
    calibrate,
    calibration_error,
    coupled_label,
    law_of,
    rejection_label,
    weighted_bce,
)
from foretoken.train.objectives.reading import ModelReader, can_say
from tests.engine.harness import VOCAB, foresight, table

TARGET, DRAFT = table(), table(blur=0.4)


def batch(num_rows: int = 6, length: int = 40) -> Batch:
    tokens = torch.randint(0, VOCAB, (num_rows, length), generator=torch.Generator().manual_seed(3))
    return Batch(tokens, torch.tensor([length - row for row in range(num_rows)]), torch.tensor([3] * num_rows))


def objective(**options: object) -> AcceptanceObjective:
    return AcceptanceObjective(foresight(DRAFT), ModelReader(DRAFT), **options)  # type: ignore[arg-type]


def test_places() -> None:
    """A share of the response is replaced; hidden states and labels are those of the mixed text at the replaced tokens,
    found again by the tables alone, which know no cache."""
    whole, teacher = batch(), Teacher(TARGET)
    lesson = teacher.teach(whole, ())
    mixed: list[Tensor] = []

    class Watching(Teacher):
        def teach(self, batch: Batch, taps: object) -> object:  # type: ignore[override]
            mixed.append(batch.tokens)
            return super().teach(batch, ())

    for rule in LABELS:
        mixed.clear()
        places = objective(rule=rule).places(lesson, Watching(TARGET), torch.Generator().manual_seed(1))
        assert len(mixed) == 1, "one pass of the target"
        tokens, before = mixed[0], torch.arange(whole.tokens.shape[1]) + 1
        response = (before - 1 >= whole.start[:, None]) & (before - 1 < whole.length[:, None])
        assert torch.equal(tokens[~response], whole.tokens[~response]), "prompts and padding stay"
        row_of = [
            (row, at) for row in range(len(tokens)) for at in range(int(whole.start[row]), int(whole.length[row]))
        ]
        share = len(places.labels) / len(row_of)
        assert 0.07 < share < 0.25
        # Which tokens were replaced is read off the hidden states: the table's stream holds the token itself.
        seen = {tuple(one.tolist()): float(label) for one, label in zip(places.hidden, places.labels, strict=True)}
        found = 0
        for row, at in row_of:
            changed = tokens[row, at] != whole.tokens[row, at]
            text = tokens[row, : at + 1].tolist()
            stream = (float(text[-1]), 1.0, 0.0, *[float(one) for one in text[::-1][: DRAFT.context]])
            if changed:
                p, q = TARGET.law_after(text[:-1])[None], DRAFT.law_after(text[:-1])[None]
                expected = float(LABELS[rule](p, q, torch.tensor([text[-1]])))
                assert seen[stream] == pytest.approx(expected, abs=1e-4)
                found += 1
        assert found >= 5


def test_everywhere_and_seeds() -> None:
    """everywhere: the whole response. The same generator gives the same places, another does not."""
    lesson, teacher = Teacher(TARGET).teach(batch(), ()), Teacher(TARGET)
    whole = objective(everywhere=True).places(lesson, teacher, torch.Generator().manual_seed(1))
    assert len(whole.labels) == int(lesson.batch.supervised.sum())
    one, same, other = (objective().places(lesson, teacher, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one.hidden, same.hidden)
    assert not torch.equal(one.hidden, other.hidden)
    with pytest.raises(ValueError, match="mixing"):
        objective(mixing=0.0)


def test_labels() -> None:
    """min(1, p / q) by hand; both labels are the overlap on average; zeros are zeros; temperature 0 is all or nothing."""
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).expand(4, -1)
    q = torch.tensor([[0.2, 0.6, 0.1, 0.1]]).expand(4, -1)
    tokens = torch.arange(4)
    torch.testing.assert_close(rejection_label(p, q, tokens), torch.tensor([1.0, 0.5, 1.0, 0.0]))
    kept = (rejection_label(p, q, tokens) * q[0]).sum()
    torch.testing.assert_close(kept, torch.minimum(p[0], q[0]).sum())
    # A race by hand: token 1 wins q; it wins p if no score of p is below its own.
    ratio = torch.maximum(0.6 / 0.3 * p[0], q[0]).sum()
    torch.testing.assert_close(coupled_label(p, q, tokens)[1], 1 / ratio)
    assert float(coupled_label(p, q, tokens)[3]) == 0.0
    torch.testing.assert_close(coupled_label(q, q, tokens), torch.ones(4))
    short = torch.tensor([[0.5, 0.5]])
    assert float(rejection_label(short, q[:1], torch.tensor([3]))) == 0.0, "a token that the target does not have"
    one_hot = law_of(torch.tensor([[0.1, 2.0, 0.3]]), 0.0)
    assert one_hot.tolist() == [[0.0, 1.0, 0.0]]
    torch.testing.assert_close(law_of(torch.tensor([[1.0, 2.0]]), 0.5), torch.tensor([[2.0, 4.0]]).softmax(-1))


def test_what_can_be_said() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 3.0]]).expand(4, -1)
    assert can_say(logits, torch.tensor([0, 1, 2, 3])).tolist() == [True, False, True, False]
    assert can_say(logits[:0], torch.tensor([], dtype=torch.int64)).tolist() == []


def test_the_coupled_label_is_how_often_races_agree() -> None:
    """200,000 races of one noise on both laws: within 5 standard errors, for every token that the drafter can say."""
    generator = torch.Generator().manual_seed(4)
    p, q = torch.rand(2, 6, generator=generator).log().neg()
    p, q = p / p.sum(), q / q.sum()
    noise = exponentials(torch.arange(200_000) * 7919, 6)
    first, second = (noise / q).argmin(1), (noise / p).argmin(1)
    for token in range(6):
        here = first == token
        share, count = float((second[here] == token).double().mean()), int(here.sum())
        expected = float(coupled_label(p[None], q[None], torch.tensor([token])))
        assert abs(share - expected) <= 5 * math.sqrt(expected * (1 - expected) / count) + 1e-6


def test_weighted_bce() -> None:
    """By hand, and its gradient by the formula: (accepted (s - 1) + rejected s) / mass, s the sigmoid."""
    logits = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0.9, 0.25, 0.0], dtype=torch.float64)
    loss = weighted_bce(logits, labels, 1.0, 6.0)
    total, mass, slope = 0.0, 0.0, []
    for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
        s = 1 / (1 + math.exp(-z))
        total -= y * math.log(s) + 6 * (1 - y) * math.log(1 - s)
        mass += y + 6 * (1 - y)
        slope.append(y * (s - 1) + 6 * (1 - y) * s)
    assert float(loss.detach()) == pytest.approx(total / mass)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([one / mass for one in slope])
    far = weighted_bce(torch.tensor([1e4, -1e4]), torch.tensor([0.5, 0.5]), 1.0, 6.0)
    assert bool(far.isfinite())
    assert float(weighted_bce(torch.zeros(0), torch.zeros(0), 1.0, 6.0)) == 0.0


def test_outcome_trains() -> None:
    """The loss has a gradient for all of the head and none for the models, figures come with it, and it falls."""
    lesson, teacher = Teacher(TARGET).teach(batch(8, 60), ()), Teacher(TARGET)
    mine = objective(mixing=0.5)
    config = AcceptanceConfig(DRAFT.spec.hidden_size, VOCAB, 2, True, "draft_model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mine.head = AcceptanceHead(config)
    optimizer = torch.optim.Adam(mine.head.parameters(), lr=0.03)
    curve = []
    for _ in range(25):
        outcome = mine.outcome(lesson, teacher, torch.Generator().manual_seed(5), training=True)
        assert outcome.slots == []
        assert outcome.extra is not None
        assert set(outcome.figures) == {"accuracy", "ece"}
        optimizer.zero_grad()
        outcome.extra.backward()
        assert all(parameter.grad is not None for parameter in mine.head.parameters())
        optimizer.step()
        curve.append(float(outcome.extra.detach()))
    assert curve[-1] < 0.9 * curve[0]


def test_calibration_error() -> None:
    chance, labels = torch.tensor([0.05, 0.15, 0.12, 1.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    expected = (0.05 + abs(0.27 - 1.0) + 0.0) / 4
    assert calibration_error(chance, labels) == pytest.approx(expected, abs=1e-6)
    assert calibration_error(torch.zeros(0), torch.zeros(0)) == 0.0


def test_calibrate() -> None:
    """Logits that are too sure and too low are set right: the true scale and shift come back, and the error falls."""
    generator = torch.Generator().manual_seed(6)
    true = torch.randn(20_000, generator=generator) * 1.5
    labels = (torch.rand(20_000, generator=generator) < torch.sigmoid(true)).float()
    raw = (true - 0.5) / 0.4 - math.log(6)
    head = foresight(DRAFT)
    head.shift.zero_()
    before = calibration_error(torch.sigmoid(raw), labels)
    scale, shift = calibrate(head, raw, labels)
    after = calibration_error(torch.sigmoid(raw * head.scale + head.shift), labels)
    assert scale == pytest.approx(0.4, rel=0.05)
    assert shift == pytest.approx(0.5 + 0.4 * math.log(6), rel=0.05)
    assert before > 0.1
    assert after < 0.02
    assert float(head.scale) == pytest.approx(scale)
    hidden = torch.randn(3, DRAFT.spec.hidden_size)
    torch.testing.assert_close(predicted(head, hidden), torch.sigmoid(head(hidden) * scale + shift).detach())
    scale, shift = calibrate(head, torch.full((10,), 2.0), torch.full((10,), 0.25))
    assert 1 / (1 + math.exp(-(2 * scale + shift))) == pytest.approx(0.25, abs=1e-3)
    calibrate(head, torch.tensor([-1.0, 1.0]), torch.tensor([0.0, 1.0]))  # separable: as sure as the steps allow
    assert math.isfinite(float(head.scale))
