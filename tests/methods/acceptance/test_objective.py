"""The acceptance head's training: where guesses stand, labels, the weighted loss, and calibration."""

import math

import pytest
import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.noise import exponentials
from foretell.core.tree import layout
from foretell.heads.teacher import Teacher, TeacherBatch
from foretell.methods.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, predicted
from foretell.methods.acceptance.objective import (
    LABELS,
    AcceptanceObjective,
    ModelReader,
    area_under_curve,
    calibrate,
    calibration_error,
    comb,
    coupled_label,
    distribution_of,
    open_reader,
    rejection_label,
    weighted_bce,
)
from tests.engine.harness import VOCAB, foresight, table

TARGET, DRAFT = table(), table(blur=0.4)


def batch(num_rows: int = 6, length: int = 40) -> TeacherBatch:
    tokens = torch.randint(0, VOCAB, (num_rows, length), generator=torch.Generator().manual_seed(3))
    return TeacherBatch(tokens, torch.tensor([length - row for row in range(num_rows)]), torch.tensor([3] * num_rows))


def objective(**options: object) -> AcceptanceObjective:
    return AcceptanceObjective(foresight(DRAFT), ModelReader(DRAFT), **options)  # type: ignore[arg-type]


def stream(text: list[int]) -> tuple[float, ...]:
    """The hidden state of a table after a text: the token itself, and its context."""
    return (float(text[-1]), 1.0, 0.0, *[float(one) for one in text[::-1][: DRAFT.context]])


def response(whole: TeacherBatch) -> Tensor:
    """[B, T] bool: tokens of the response."""
    index = torch.arange(whole.tokens.shape[1])
    return (index >= whole.start[:, None]) & (index < whole.length[:, None])


def label_by_hand(rule: str, prefix: list[int], guess: int, temperature: float) -> float:
    """From the tables alone, which know no cache."""
    p, q = TARGET.probs_after(prefix), DRAFT.probs_after(prefix)
    if temperature == 0:
        return float(p.argmax() == q.argmax() == guess)
    return float(LABELS[rule](p[None], q[None], torch.tensor([guess])))


@pytest.mark.parametrize("target_share", [0.15, 0.7])
def test_target_share_is_the_share_that_carries_no_label(target_share: float) -> None:
    """Of the authors' ``mixing_ratio`` 0.15 of the tokens stay the target's and 85 % carry labels. 2,000 tokens: five
    standard errors, so a right share fails once in a million seeds; the inverted one is 18 of them off."""
    labeled, teacher = Teacher(TARGET).label(batch(20, 120), ()), Teacher(TARGET)
    total = int(labeled.batch.supervised.sum())
    assert total > 2000
    places = objective(target_share=target_share).places(labeled, teacher, torch.Generator().manual_seed(1))
    share = len(places.labels) / total
    bound = 5 * math.sqrt(0.25 / total)
    assert abs(share - (1 - target_share)) < bound
    assert abs(share - target_share) > bound, "negative control: the share is not inverted"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", LABELS)
def test_mixed_places(rule: str, temperature: float) -> None:
    """Labels are those of the text as the target wrote it; hidden states are those of the mixed text, which no target
    reads: found again by the tables alone."""
    whole = batch()
    labeled = Teacher(TARGET).label(whole, ())

    class Never(Teacher):
        def label(self, batch: TeacherBatch, taps: object) -> object:  # type: ignore[override]
            raise AssertionError("a draft model needs no second pass of the target")

    one = objective(rule=rule, temperatures=(temperature,), target_share=0.4)
    places = one.places(labeled, Never(TARGET), torch.Generator().manual_seed(1))
    mixed = whole.tokens.clone()
    mixed[places.row, places.at] = places.hidden[:, 0].long()  # a table's stream holds the token itself
    assert torch.equal(mixed[~response(whole)], whole.tokens[~response(whole)]), "prompts and padding stay"
    assert len(places.labels) > 60
    assert len({(int(row), int(at)) for row, at in zip(places.row, places.at, strict=True)}) == len(places.labels)
    changed = 0
    for row, at, hidden, label in zip(
        places.row.tolist(), places.at.tolist(), places.hidden.tolist(), places.labels.tolist(), strict=True
    ):
        prefix, guess = whole.tokens[row, :at].tolist(), int(mixed[row, at])
        assert tuple(hidden) == stream([*mixed[row, :at].tolist(), guess])
        assert label == pytest.approx(label_by_hand(rule, prefix, guess, temperature), abs=1e-4)
        changed += mixed[row, :at].tolist() != prefix
        if temperature == 0:
            assert guess == int(DRAFT.probs_after(prefix).argmax())
    assert changed > 40, "most guesses stand behind other guesses"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_target_prefix(temperature: float) -> None:
    """A guess at every token of the response, each read behind the target's own text."""
    whole = batch()
    labeled, teacher = Teacher(TARGET).label(whole, ()), Teacher(TARGET)
    one = objective(prefix="target", temperatures=(temperature,))
    places = one.places(labeled, teacher, torch.Generator().manual_seed(1))
    assert len(places.labels) == int(response(whole).sum())
    guesses = places.hidden[:, 0].long()
    for row, at, guess, hidden, label, probs in zip(
        places.row.tolist(), places.at.tolist(), guesses.tolist(), places.hidden.tolist(), places.labels.tolist(),
        places.distribution_inputs.tolist(), strict=True,
    ):  # fmt: skip
        prefix = whole.tokens[row, :at].tolist()
        assert tuple(hidden) == stream([*prefix, guess])
        assert label == pytest.approx(label_by_hand("coupled", prefix, guess, temperature), abs=1e-4)
        q = DRAFT.probs_after(prefix)
        entropy = float(torch.special.entr(q).sum())
        expected = [math.log(float(q[guess])), math.log(float(q.max())), entropy, temperature]
        assert probs == pytest.approx(expected, abs=1e-4)
    own = whole.tokens[places.row, places.at]
    assert 0 < int((guesses == own).sum()) < len(own), "some guesses are the text's own tokens"


def test_temperatures_are_by_text_and_drawn_anew() -> None:
    """Every text of a batch is guessed at one of the temperatures; both occur, and another seed draws others."""
    labeled, teacher = Teacher(TARGET).label(batch(16, 20), ()), Teacher(TARGET)
    one = objective(prefix="target", temperatures=(0.0, 1.0))
    drawn = []
    for seed in (1, 2):
        places = one.places(labeled, teacher, torch.Generator().manual_seed(seed))
        by_row = [set(places.distribution_inputs[places.row == row, 3].tolist()) for row in range(16)]
        assert all(len(found) == 1 for found in by_row)
        drawn.append([found.pop() for found in by_row])
        assert set(drawn[-1]) == {0.0, 1.0}
    assert drawn[0] != drawn[1]


def test_seeds() -> None:
    """The same generator gives the same places, another does not."""
    labeled, teacher = Teacher(TARGET).label(batch(), ()), Teacher(TARGET)
    one, same, other = (objective().places(labeled, teacher, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one.hidden, same.hidden)
    assert not torch.equal(one.hidden, other.hidden)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "block"}, "rule = 'block' must be one of rejection, coupled"),
        ({"prefix": "draft"}, "prefix = 'draft' must be one of mixed, target"),
        ({"target_share": 1.5}, r"target_share = 1.5 must be in \[0, 1\]"),
        ({"target_share": 1.0}, "no token carries a label"),
        ({"temperatures": ()}, r"temperatures = \(\) must be some numbers"),
        ({"temperatures": (0.5, -1.0)}, "each at least 0"),
        ({"temperatures": (math.nan,)}, "each at least 0"),
        ({"temperatures": ("catch_up",)}, "each at least 0"),
    ],
)
def test_refused_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        objective(**options)


@pytest.mark.parametrize("head", ["eagle3", "kangaroo", "medusa"])
def test_heads_are_refused(head: str) -> None:
    with pytest.raises(ConfigError, match=f"bundled/{head} holds a head of '{head}'; .* draft models alone"):
        open_reader(f"bundled/{head}", TARGET)


def test_the_comb_is_what_layout_makes() -> None:
    """The plan of a trunk with a leaf under each node, without its products."""
    n = 6
    parent = torch.cat((torch.arange(-1, n - 1), torch.arange(n))).expand(3, -1)
    expected, found = layout(parent, torch.zeros(3, dtype=torch.int64), 2 * n), comb(3, n, torch.device("cpu"))
    for name in ("length", "ancestry", "slots", "positions", "tree_positions", "mask", "key_positions"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.span == expected.span


def test_area_under_curve() -> None:
    """Every pair of a kept and a rejected guess, counted; soft labels are shares of both; ties are halves."""
    generator = torch.Generator().manual_seed(8)
    score = torch.randint(0, 6, (40,), generator=generator).float()
    labels, weight = torch.rand(40, generator=generator), torch.rand(40, generator=generator)
    won = (score[:, None] > score).double() + 0.5 * (score[:, None] == score).double()
    pairs = (weight * labels).double()[:, None] * (weight * (1 - labels)).double()
    assert area_under_curve(score, labels, weight) == pytest.approx(float((won * pairs).sum() / pairs.sum()))
    assert area_under_curve(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0])) == 0.75
    assert area_under_curve(torch.zeros(4), torch.tensor([0.0, 1.0, 1.0, 0.0])) == 0.5
    assert math.isnan(area_under_curve(score, torch.ones(40)))


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
    probs = distribution_of(torch.tensor([[0.1, 2.0, 0.3], [1.0, 2.0, 0.0]]), torch.tensor([0.0, 0.5]))
    assert probs[0].tolist() == [0.0, 1.0, 0.0]
    torch.testing.assert_close(probs[1], torch.tensor([2.0, 4.0, 0.0]).softmax(-1))


def test_the_coupled_label_is_how_often_races_agree() -> None:
    """200,000 races of one noise on both distributions: within 5 standard errors, for every token that the drafter can
    say."""
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
    assert logits.grad.tolist() == pytest.approx([one / mass for one in slope])
    far = weighted_bce(torch.tensor([1e4, -1e4]), torch.tensor([0.5, 0.5]), 1.0, 6.0)
    assert bool(far.isfinite())
    assert float(weighted_bce(torch.zeros(0), torch.zeros(0), 1.0, 6.0)) == 0.0


def test_outcome_trains() -> None:
    """The loss has a gradient for all of the head and none for the models, figures come with it, and it falls."""
    labeled, teacher = Teacher(TARGET).label(batch(8, 60), ()), Teacher(TARGET)
    mine = objective(target_share=0.5)
    config = AcceptanceHeadConfig(DRAFT.spec.hidden_size, VOCAB, 2, True, "draft_model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mine.head = AcceptanceHead(config)
    optimizer = torch.optim.Adam(mine.head.parameters(), lr=0.03)
    curve = []
    for _ in range(25):
        outcome = mine.outcome(labeled, teacher, torch.Generator().manual_seed(5), training=True)
        assert outcome.slots == []
        assert set(outcome.figures) == {"accuracy", "ece", "auc"}
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


def test_a_batch_whose_guesses_are_all_kept() -> None:
    """The target drafts for itself: figures are numbers, as the log needs them."""
    labeled, teacher = Teacher(TARGET).label(batch(), ()), Teacher(TARGET)
    own = AcceptanceObjective(foresight(TARGET), ModelReader(TARGET), prefix="target", temperatures=(0.0,))
    figures = own.outcome(labeled, teacher, torch.Generator().manual_seed(1), training=False).figures
    assert figures["auc"] == 0.5
    assert all(math.isfinite(value) for value in figures.values())
