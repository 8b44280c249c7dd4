"""Requests that cannot be, and models that go wrong: one clear error each, and the engine still works afterwards."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import ConfigError, Engine, ModelError, PromptError, Request, SamplingParams
from foretell.core.errors import DrafterError, VocabularyMismatchError
from tests.engine.harness import VOCAB, ToyTokenizer, draft_engine, outcomes, table, tree_engine
from tests.model.table import TableLM


def test_a_text_that_is_none() -> None:
    """A tokenizer raises a TypeError for it, which ended a batch of other prompts, and was called an internal error."""
    engine = Engine(table(), ToyTokenizer(), speculative="none")
    with pytest.raises(PromptError, match="its character 1 is half a surrogate pair"):
        engine.generate("a\ud83d")


@pytest.mark.parametrize("method", ["none", "ngram", "prediction"])
def test_prompts_that_cannot_be(method: str) -> None:
    engine = Engine(table(max_positions=16), speculative=method)
    with pytest.raises(PromptError, match="the prompt is empty"):
        engine.generate([])
    with pytest.raises(PromptError, match="the prompt has 16 tokens; 'table' has a context of 16"):
        engine.generate([1] * 16)
    for token in (-1, VOCAB, 10**9):
        with pytest.raises(
            PromptError, match=f"token id {token} is not in the vocabulary of 'table': 0 to {VOCAB - 1}"
        ):
            engine.generate([1, token])
        with pytest.raises(PromptError, match=f"token id {token} is not in the vocabulary"):
            engine.generate([1], prediction=[2, token])
    with pytest.raises(PromptError):
        engine.stream([])
    longest = engine.generate([1] * 15, seed=1)
    assert (longest.num_tokens, longest.finish_reason) == (1, "length")


def test_a_bad_request_spoils_nothing_before_it_runs() -> None:
    """All of a batch are read before any is decoded."""
    engine = Engine(table())
    with pytest.raises(PromptError):
        engine.generate_batch([[1, 2], []])
    assert engine.recorder.num_steps == 0
    assert engine.generate([1, 2], seed=1, max_new_tokens=3).num_tokens == 3


class Broken(TableLM):
    """NaN logits for every text that ends with token 5."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden).masked_fill((hidden[..., 3] == 5)[..., None], torch.nan)


def only(token: int) -> SamplingParams:
    banned = tuple(other for other in range(VOCAB) if other != token)
    return SamplingParams(banned_token_ids=banned, max_new_tokens=6, seed=0, ignore_eos=True)


@pytest.mark.parametrize("verify", ["coupled", "exact", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_nan_logits_name_the_request(verify: str, temperature: float, method: str) -> None:
    model = Broken(VOCAB, seed=1, dtype=torch.float64, num_layers=1)
    requests = [Request([1], replace(only(token), temperature=temperature)) for token in (3, 4, 5)]
    engine = draft_engine(model, table(), 3, verify=verify)
    if method == "none":
        engine = engine.with_method({"method": "none", "verify": verify})
    with pytest.raises(ModelError) as caught:
        engine.generate_batch(requests)
    assert "request 2: no token is possible after 2 tokens" in str(caught.value)
    with pytest.raises(ModelError, match="request 2"):
        engine.generate_batch(requests, batch_size=2)
    good = engine.generate_batch(requests[:2])
    assert [c.token_ids for c in good] == [[3] * 6, [4] * 6]


def test_nan_of_a_draft_costs_only_guesses() -> None:
    broken = Broken(VOCAB, seed=1, sharpness=2.0, dtype=torch.float64, num_layers=1)
    requests = [Request([5, i], SamplingParams(max_new_tokens=20, seed=i)) for i in range(6)]
    for verify in ("coupled", "exact"):
        engine = draft_engine(table(), broken, 4, verify=verify)
        expected = engine.with_method({"method": "none", "verify": verify}).generate_batch(requests)
        assert outcomes(engine.generate_batch(requests)) == outcomes(expected)
    assert all(c.num_tokens for c in draft_engine(table(), broken, 4, verify="rejection").generate_batch(requests))


def test_nan_on_a_branch_that_is_not_taken() -> None:
    """A wrong guess may lead to a text on which the model breaks: nobody goes there."""
    model = Broken(VOCAB, seed=1, dtype=torch.float64, num_layers=1)

    def guess(ids: list[int], depth: int) -> list[tuple[int, int]]:
        return [(0, 5), (1, 5)] if depth > 1 else []

    params = SamplingParams(max_new_tokens=12, seed=3, banned_token_ids=(5,), ignore_eos=True)
    for verify in ("coupled", "exact", "rejection"):
        assert tree_engine(model, guess, 4, verify=verify).generate([1], params).num_tokens == 12


def test_everything_banned() -> None:
    params = SamplingParams(banned_token_ids=tuple(range(VOCAB)), seed=1)
    for verify in ("coupled", "exact", "rejection"):
        with pytest.raises(ModelError, match="request 0: no token is possible after 1 tokens"):
            draft_engine(table(), table(), 2, verify=verify).generate([1], params)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda ids, logits: logits[:-1], rf"returned \({VOCAB - 1},\); expected logits of shape \({VOCAB},\)"),
        (lambda ids, logits: logits[None], r"returned \(1, "),
        (lambda ids, logits: None, "returned NoneType"),
        (lambda ids, logits: logits.tolist(), "returned list"),
    ],
)
def test_a_processor_of_the_wrong_shape(wrong: Any, message: str) -> None:
    for engine in (Engine(table()), draft_engine(table(), table(), 2)):
        with pytest.raises(ConfigError, match=message):
            engine.generate([1], logits_processor=wrong)


def test_a_processor_that_raises_is_not_swallowed() -> None:
    def raises(ids: Tensor, logits: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        Engine(table()).generate([1], logits_processor=raises)


def test_a_bias_beyond_the_vocabulary() -> None:
    for options in ({"logit_bias": {VOCAB: 1.0}}, {"banned_token_ids": (VOCAB,)}, {"logit_bias": {-1: 1.0}}):
        with pytest.raises(ConfigError, match="logit_bias or banned_token_ids"):
            Engine(table()).generate([1], **options)


@pytest.mark.parametrize("verify", ["coupled", "rejection", "traversal"])
@pytest.mark.parametrize("token", [VOCAB, 10**6, -1])
def test_a_drafter_that_guesses_outside_the_vocabulary_is_named(verify: str, token: int) -> None:
    """Before the target reads the tree, so that no model or kernel indexes with it."""

    def guess(ids: list[int], depth: int) -> list[tuple[int, int]]:
        return [(0, 1), (0, token)] if depth else []

    engine = tree_engine(table(), guess, verify=verify, drafter_errors="raise")
    told = rf"the drafter of method 'tree' failed .*row 0, node 2 of a tree has token id {token}"
    with pytest.raises(DrafterError, match=told) as caught:
        engine.generate([1, 2], seed=1)
    assert isinstance(caught.value.__cause__, VocabularyMismatchError)
