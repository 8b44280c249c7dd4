"""What is kept of a text, against the distributions it was made of."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from foretell.learn.training import gate
from foretell.learn.training.gate import HeldOut, judge
from foretell.learn.training.texts import RawText, ReplayBuffer, Text, reduce_laws

V = 32


def raw(tokens: list[int], start: int, temperature: float = 1.0, seed: int = 0) -> RawText:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(tokens) - start, V, generator=generator)
    logits = (logits - logits.amax(-1, keepdim=True)).half()
    return RawText(tokens, start, temperature, [logits[:2], logits[2:]])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_laws_come_back_up_to_half_precision(temperature: float) -> None:
    given_text = raw(list(range(10)), 4, temperature)
    text = given_text.reduced(V)
    true = torch.log_softmax(torch.cat(given_text.logits).float() / (temperature or 1.0), -1).exp()
    found = text.laws(V).exp()
    assert (found - true).abs().max() < 2e-3
    labeled = text.labeled(V)
    at_temperature = (labeled.logits[0, 3:9] / text.loss_temperature).softmax(-1)
    assert (at_temperature - true).abs().max() < 2e-3
    assert labeled.batch.supervised[0].nonzero()[:, 0].tolist() == list(range(3, 9))


def test_control_the_law_of_the_next_place_is_another() -> None:
    """The published trainer compares position p with token p + 1's law: that is found here."""
    given_text = raw(list(range(10)), 4)
    true = torch.log_softmax(torch.cat(given_text.logits).float(), -1).exp()
    found = given_text.reduced(V).laws(V).exp()
    assert (found[:-1] - true[1:]).abs().max() > 0.1


@given(st.integers(1, V), st.integers(0, 5))
def test_the_mass_that_is_not_held_is_not_lost(num_laws: int, seed: int) -> None:
    ids, logs, tail = reduce_laws(torch.cat(raw(list(range(8)), 2, seed=seed).logits), 1.0, num_laws)
    text = Text(torch.arange(8, dtype=torch.int32), 2, 1.0, ids, logs, tail)
    assert torch.allclose(text.laws(V).exp().sum(-1), torch.ones(6), atol=5e-3)
    assert ids.shape == (6, num_laws)


def test_a_ring_stays_within_its_bytes_and_drops_the_oldest() -> None:
    texts = [raw([index, *range(9)], 4).reduced(8) for index in range(12)]
    buffer = ReplayBuffer(texts[0].num_bytes * 5)
    for text in texts:
        buffer.add(text)
        assert buffer.num_bytes == sum(each.num_bytes for each in buffer) <= buffer.max_bytes
    assert [text.prompt[0] for text in buffer] == [7, 8, 9, 10, 11]


def test_one_prompt_repeated_does_not_crowd_out_the_others() -> None:
    buffer, held_out = ReplayBuffer(1 << 20), HeldOut(size=4)
    for index in range(40):
        text = raw([index % 20 if index < 8 else 31, *range(9)], 4).reduced(8)
        buffer.add(text)
        held_out.add(text, lambda n: n - 1)
    for held in (buffer, held_out.recent):
        assert sum(text.prompt[0] == 31 for text in held) <= 2
    assert sum(text.prompt[0] != 31 for text in buffer) == 8


def test_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_LOSS", 0.01)
    up = ([0.5, 0.4, 0.6, 0.5], [0.6, 0.5, 0.68, 0.61])
    same = ([0.5, 0.5], [0.5, 0.5])
    assert judge(up, same).passes
    assert judge(up, ([], [])).passes
    assert "old texts" in judge(up, ([0.5, 0.5], [0.48, 0.47])).reason
    less = ([0.5, 0.4, 0.6, 0.5], [0.507, 0.406, 0.606, 0.506])  # gains .006
    assert judge(less, ([0.5, 0.5], [0.495, 0.494])).passes
    assert "more than recent ones gain" in judge(less, ([0.5, 0.5], [0.493, 0.492])).reason
    assert "is asked" in judge((up[1], up[0]), same).reason
    assert "standard error" in judge(([0.5] * 4, [0.9, 0.2, 0.9, 0.2]), same).reason
    assert "too few" in judge(([0.5], [0.9]), same).reason


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("of", ["recent", "old"])
def test_a_score_that_is_no_number_passes_nothing(of: str, place: int, wrong: float) -> None:
    """Of any text, of the first as of the last: NaN on an old one is no loss to a comparison."""
    before, after = [0.5, 0.4], [0.6, 0.55]
    spoilt = [wrong if k == place else value for k, value in enumerate(after)]
    recent = (before, spoilt) if of == "recent" else (before, after)
    old = (before, spoilt) if of == "old" else (before, before)
    assert judge((before, after), (before, before)).passes
    verdict = judge(recent, old)
    assert not verdict.passes
    assert verdict.reason == "a score is not finite"


def test_of_few_held_out_texts_the_earlier_half_are_old_ones() -> None:
    """Else nothing says what the first swaps forget: old ones came with the thirteenth, after a hundred requests."""
    held_out = HeldOut(size=6)
    found = []
    for index in range(14):
        held_out.add(raw([index, *range(9)], 4).reduced(1), lambda n: n - 1)
        found.append((len(held_out.old), len(held_out.recent)))
    assert found[:10] == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 4), (2, 4), (3, 4), (4, 4), (4, 5), (5, 5)]
    assert found[10:] == [(5, 6), (6, 6), (6, 6), (6, 6)]
    assert [text.prompt[0] for text in held_out.recent] == list(range(8, 14))


def test_twice_as_many_are_held_out_at_first_and_equal_prompts_lie_on_one_side() -> None:
    held_out, marked = HeldOut(size=6), []
    for number in range(400):
        text = raw([number % 32, number // 32, *range(4)], 3).reduced(1)
        marked.append(held_out.takes(text, 8))
        if marked[-1]:
            held_out.add(text, lambda n: n - 1)
    assert sum(marked[:48]) > 48 / 8 * 1.9  # until twelve are there
    assert sum(marked[48:]) < 352 / 8 * 1.3
    later = HeldOut(size=0)
    for number in range(400):  # what is held out later was never learned from
        text = raw([number % 32, number // 32, *range(4)], 3).reduced(1)
        assert later.takes(text, 8) <= HeldOut(size=6).takes(text, 8)
    twin = raw([7, 7, 7], 2).reduced(1)
    held_out.recent.append(twin)
    assert held_out.takes(raw([7, 7, 5], 2).reduced(1), 10**6)


def test_old_texts_are_a_sample_of_all_that_aged() -> None:
    """A reservoir: after many texts each one is held with the same chance (six standard deviations allowed)."""
    import random

    counts = [0] * 60
    for seed in range(300):
        held_out, r = HeldOut(size=6), random.Random(seed)
        for index in range(66):
            held_out.add(raw([index % 32, index // 32, *range(4)], 3).reduced(1), r.randrange)
        for text in held_out.old:
            counts[text.prompt[0] + 32 * text.prompt[1]] += 1
    expected = 300 * 6 / 60
    assert all(abs(count - expected) < 6 * math.sqrt(expected) for count in counts)
    assert sum(counts) == 300 * 6
