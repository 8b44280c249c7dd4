"""``benchmarks.foresight``: its guesses are those that decoding makes, and its lines those that decoding walks."""

import math

import pytest
import torch
from benchmarks.foresight import Area, Guesses, along, answers, area, guess, resampled

from foretell import Engine, SamplingParams
from foretell.heads.teacher import Teacher
from foretell.methods.acceptance.objective import ModelReader, area_under_curve
from foretell.methods.draft_model.drafter import DraftModel
from tests.engine.harness import foresight, prompts, table

TARGET, DRAFT = table(dtype=torch.float32), table(blur=0.4, dtype=torch.float32)
DEPTH, MOST = 3, 24


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_are_those_of_decoding(temperature: float) -> None:
    """Step by step: accepted lengths of real decoding are the runs of kept guesses in the lines."""
    wanted = prompts()
    texts = answers(Engine(TARGET, None, speculative={"method": "none"}), wanted, temperature, 40, MOST)
    heads = {"plain": foresight(DRAFT), "law": foresight(DRAFT, reads_law=True)}
    guesses = guess(texts, Teacher(TARGET), ModelReader(DRAFT), heads, temperature, 40, batch_tokens=150)
    assert guesses.agreement == 1.0
    assert set(guesses.scores) == {"plain", "law", "q(x)", "max q", "entropy"}
    line = guesses.lines(DEPTH)
    engine = Engine(
        TARGET, None, speculative={"method": "draft_model", "num_speculative_tokens": DEPTH}, method=DraftModel(DRAFT)
    )
    compared = 0
    for number, text in enumerate(sorted(set(guesses.text.tolist()))):
        assert text == number
        params = SamplingParams(temperature=temperature, max_new_tokens=MOST, seed=40 + text)
        done = engine.generate(wanted[text], params)
        assert done.token_ids == texts.text(text)[len(wanted[text]) :]
        own = guesses.text == text
        assert torch.equal(guesses.at[own].sort().values, guesses.at[own]), "in the order of the text"
        runs = [int(guesses.kept[own][line[own] == one].sum()) for one in line[own].unique().tolist() if one >= 0]
        steps = [accepted for _, accepted in done.steps]
        assert runs[: len(steps) - 1] == steps[:-1], "the last step is cut by the limit"
        compared += len(steps) - 1
    assert compared > 20
    assert 0.2 < float(guesses.kept.mean()) < 0.95
    if temperature:
        other = guess(texts, Teacher(TARGET), ModelReader(DRAFT), {}, temperature, 41, batch_tokens=150)
        assert other.agreement < 0.9, "negative control: under other noise the target's race picks other tokens"


def test_lines() -> None:
    """By hand: a line ends at a rejection, or full, and then the next position is the target's own; texts begin anew."""
    kept = torch.tensor([1, 0, 1, 1, 1, 1, 1, 0, 0, 1], dtype=torch.float32)
    text = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 1, 1])
    guesses = Guesses(text, torch.arange(10), kept, {}, 1.0)
    assert guesses.lines(3).tolist() == [0, 0, 1, 1, 1, -1, 2, 2, 3, 4]
    line = torch.tensor([0, 0, 1, 1, 1, -1, 2])
    score = torch.tensor([0.5, 0.5, 0.25, 0.5, 1.0, 0.5, 0.75])
    assert along(score, line).tolist() == [0.5, 0.25, 0.25, 0.125, 0.125, 0.5, 0.75]
    assert along(-score, line).tolist() == [-0.5, -1.0, -0.25, -0.75, -1.75, -0.5, -0.75]


def test_intervals() -> None:
    """Prompts are drawn, not guesses; a score's difference from itself is nothing, and from its reverse it is wide."""
    text = torch.arange(20).repeat_interleave(5)
    weights = resampled(text, 200)
    assert weights.shape == (200, 100)
    assert torch.equal(weights.reshape(200, 20, 5).amin(-1), weights.reshape(200, 20, 5).amax(-1))
    assert bool((weights.sum(1) == 100).all())
    generator = torch.Generator().manual_seed(2)
    kept = (torch.rand(100, generator=generator) < 0.5).float()
    score = kept + torch.randn(100, generator=generator)
    found = area(score, kept, weights)
    assert found.value > 0.6
    one_by_one = [area_under_curve(score, kept, weight) for weight in weights]
    assert found.samples.tolist() == pytest.approx(one_by_one, nan_ok=True)
    assert float((found - found).samples.abs().max()) == 0.0
    assert float((found - area(-score, kept, weights)).samples.nanmean()) > 0.2
    assert str(Area(0.5, torch.tensor([0.25, 0.25, math.nan], dtype=torch.float64))) == "0.500 [0.250, 0.250]"
