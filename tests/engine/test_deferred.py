"""Steps whose probabilities are made when they are read: which are made, and what observers find."""

from typing import Any

import pytest
import torch

from foretell import Engine, SamplingParams
from foretell.core import deferred as module
from foretell.core.deferred import Deferred
from foretell.core.noise import Stream, race, stream_keys
from foretell.core.probs import History, Paths, Processors, logits_to_probs
from foretell.core.tree import ancestors
from foretell.engine import judging
from foretell.engine.event import StepEvent
from foretell.verify import Evidence
from tests.engine.harness import ToyTokenizer, draft_engine, mixed_requests, outcome, outcomes, plain, prompts, table


def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow twin: the probabilities of all nodes, at once."""
    later = judging.evidence_of

    def at_once(*given: Any) -> Evidence:
        evidence = later(*given)
        return Evidence(evidence.tree, evidence.p, evidence.noise, evidence.taps)

    monkeypatch.setattr(judging, "evidence_of", at_once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("verify", ["coupled", "exact", "typical", "rejection"])
def test_the_slow_twin_writes_the_same(verify: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = table(dtype=dtype), table(blur=0.3, dtype=dtype)
    engine = draft_engine(target, draft, 4, verify=verify)
    found = engine.generate_batch(mixed_requests()[:4])
    eager(monkeypatch)
    expected = engine.generate_batch(mixed_requests()[:4])
    assert outcomes(found) == outcomes(expected)
    assert sum(one.num_accepted_tokens for one in found) == sum(one.num_accepted_tokens for one in expected) > 0


def test_only_visited_nodes_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 every draw needs probabilities, so that they can be counted."""
    made: list[int] = []

    def count(logits: torch.Tensor, *given: Any) -> torch.Tensor:
        made.append(logits.shape[1])
        return logits_to_probs(logits, *given)

    target = table()
    engine = draft_engine(target, table(seed=99), 6)
    monkeypatch.setattr(module, "logits_to_probs", count)
    completions = engine.generate_batch(mixed_requests()[:4])
    assert set(made) == {1}, "never all nodes of a tree"
    drawn = sum(one.num_tokens + one.num_draft_tokens for one in completions)
    assert len(made) <= drawn + sum(one.num_steps for one in completions)
    assert outcomes(completions) == outcomes(plain(target, mixed_requests()[:4]))


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.7, "top_p": 0.8}, {"repetition_penalty": 1.6, "presence_penalty": 0.5}]
)
def test_an_observer_finds_p_as_it_was_before_the_step(settings: dict[str, float]) -> None:
    engine = Engine(table(), ToyTokenizer(), speculative={"method": "ngram", "num_speculative_tokens": 3})
    num_steps = 0

    def observe(event: StepEvent) -> None:
        nonlocal num_steps
        evidence = event.evidence
        assert evidence.deferred is not None
        ids = event.text(0)
        history = History([ids], [len(event.rows[0].prompt_ids)])
        paths = Paths(evidence.tree.tokens, ancestors(evidence.tree.parent))
        expected = logits_to_probs(event.logits, evidence.deferred.processors, history, paths)
        assert torch.equal(evidence.p, expected)
        assert torch.equal(evidence.p, Evidence(evidence.tree, evidence.p).rows(0, 1).p)
        num_steps += evidence.tree.num_nodes > 1

    engine.observers.append(observe)
    for ids in prompts():
        engine.generate(ids, SamplingParams(seed=5, max_new_tokens=20, **settings))  # type: ignore[arg-type]
    assert num_steps > 3


@pytest.mark.parametrize("temperature", [1e-30, 1e30, 1e46, 1e300])
def test_a_temperature_beyond_floats_is_drawn_by_its_probabilities(temperature: float) -> None:
    """As by the slow twin; at an endless one every possible token is as probable as another."""
    logits = torch.tensor([[[3.0, 1.0, 0.0, -torch.inf]]])
    processors = Processors(
        [SamplingParams(temperature=temperature)], vocab_size=4, end_token_ids=(), device=logits.device
    )
    paths = Paths(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, 1, dtype=torch.bool))
    deferred = Deferred(logits, processors, History([[1]], [1]), paths)
    keys = stream_keys(torch.arange(2000), torch.tensor(0), Stream.COUPLED)
    drawn = [token for token, _ in deferred.draw([0] * 2000, [0] * 2000, keys.tolist())]
    probs = deferred.probs[0, 0]
    assert drawn == race(probs.expand(2000, 4), keys).tolist()
    assert torch.allclose(probs, torch.tensor([1, 1, 1, 0.0]) / 3 if temperature > 1 else torch.eye(4)[0])


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("size", [1e39, -1e300])
def test_a_penalty_beyond_floats_does_not_forbid_what_was_only_guessed(name: str, size: float) -> None:
    ids = [1, 2, 3, 4] * 3
    params = SamplingParams(max_new_tokens=10, seed=3, ignore_eos=True, **{name: size})
    plainly = Engine(table(), ToyTokenizer()).generate(ids, params)
    guessed = draft_engine(table(), table(2, blur=0.3), 4).generate(ids, params)
    assert outcome(guessed) == outcome(plainly)
    assert guessed.num_draft_tokens
