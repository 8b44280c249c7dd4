"""Whether target and drafter speak the same tokens; and what happens at the edges of vocabularies that nearly do."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from foretell import Engine, Request, SamplingParams
from foretell.core.errors import ModelError, VocabularyMismatchError
from foretell.engine.request.request import check_vocabulary
from foretell.model.hf.adapter import TransformersModel
from foretell.model.llama.run.lean import LeanModel
from tests.engine.harness import VOCAB, ToyTokenizer, draft_engine, mixed_requests, outcomes, plain, table
from tests.model.table import TableLM
from tests.model.tiny import tiny_module


class Words:
    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens

    def get_vocab(self) -> Mapping[str, int]:
        return self.tokens


def words(count: int, **changes: int) -> Words:
    return Words({**{f"t{i}": i for i in range(count)}, **changes})


def check(target: Words, draft: Words) -> None:
    check_vocabulary(target, draft, target_name="big", draft_name="small")


def test_legal_pairs() -> None:
    check(words(200), words(200))
    check(words(200), words(203))  # the draft knows further tokens
    check(words(200), words(199))  # the target has a further special token
    check(words(200, extra=260), words(200))  # ids with gaps
    check(words(1), words(1))


def test_another_vocabulary() -> None:
    other = {f"t{i}": i for i in range(200)}
    other["t7"], other["t9"] = 9, 7
    with pytest.raises(VocabularyMismatchError) as caught:
        check(words(200), Words(other))
    message = str(caught.value)
    assert "target 'big' has 200 tokens and draft 'small' has 200" in message
    assert "id 7: 't7' and 't9'" in message
    assert "id 9: 't9' and 't7'" in message
    assert isinstance(caught.value, ModelError)


def test_a_prefix_is_another_vocabulary() -> None:
    with pytest.raises(VocabularyMismatchError, match="id 100: 't100' and nothing"):
        check(words(200), words(100))


def test_only_the_first_differences_are_named() -> None:
    with pytest.raises(VocabularyMismatchError) as caught:
        check(words(50), Words({f"u{i}": i for i in range(60)}))
    message = str(caught.value)
    assert "has 50 tokens" in message
    assert "has 60" in message
    assert message.count("id ") == 3


# -- logits of other widths ------------------------------------------------------------------------------------------


def other_width(size: int) -> TableLM:
    """A draft model with other columns: cut, or with surplus ones that have most of the mass."""
    full = table(blur=0.2)

    def probs(context: tuple[int, ...]) -> torch.Tensor:
        known = full.probs_after(context)
        if size <= VOCAB:
            return known[:size] / known[:size].sum()
        return torch.cat([0.4 * known, torch.full((size - VOCAB,), 0.6 / (size - VOCAB), dtype=torch.float64)])

    return TableLM(size, probs=probs, dtype=torch.float64, num_layers=1)


@pytest.mark.parametrize("size", [VOCAB - 9, VOCAB - 1, VOCAB + 1, VOCAB + 40])
@pytest.mark.parametrize("verify", ["coupled", "exact"])
def test_draft_logits_of_another_width(size: int, verify: str) -> None:
    """A padded draft never guesses beyond the target's tokens; a narrow one is fed tokens that it does not have."""
    expected = outcomes(plain(table(), mixed_requests(), verify=verify))
    engine = draft_engine(table(), other_width(size), 4, verify=verify)
    found = engine.generate_batch(mixed_requests())
    assert outcomes(found) == expected
    assert sum(c.num_accepted_tokens for c in found) > 10


def test_rejection_with_another_width() -> None:
    for size in (VOCAB - 9, VOCAB + 9):
        for completion in draft_engine(table(), other_width(size), 4, verify="rejection").generate_batch(
            mixed_requests()
        ):
            assert completion.num_tokens > 0
            assert all(0 <= token < VOCAB for token in completion.token_ids)


@pytest.mark.parametrize("implementation", ["lean", "transformers"])
def test_a_token_that_the_drafts_embedding_does_not_have(implementation: str) -> None:
    """The target says a token whose id is beyond the draft's vocabulary: fed as another one, and still the same text."""
    narrow = tiny_module("qwen3", vocab_size=40, num_hidden_layers=1)
    draft = LeanModel.from_hf(narrow) if implementation == "lean" else TransformersModel(narrow)
    target = LeanModel.from_hf(tiny_module("qwen3", num_hidden_layers=2))
    tokenizer = ToyTokenizer([b"w"] * 61, special=(2,))
    requests = [Request([60, 3, 45, 7], SamplingParams(max_new_tokens=15, seed=i, ignore_eos=True)) for i in range(3)]
    expected = plain(target, requests, tokenizer=tokenizer)
    assert any(token >= 40 for completion in expected for token in completion.token_ids)
    found = draft_engine(target, draft, 3, tokenizer=tokenizer).generate_batch(requests)
    assert outcomes(found) == outcomes(expected)


@pytest.mark.parametrize("verify", ["coupled", "exact", "rejection"])
def test_only_tokens_that_the_draft_does_not_have_are_allowed(verify: str) -> None:
    """The draft's distribution is empty everywhere: its guesses are worth nothing, and nothing breaks."""
    banned = tuple(range(VOCAB - 3))
    requests = [
        Request([VOCAB - 1, 2], SamplingParams(max_new_tokens=9, seed=i, banned_token_ids=banned, ignore_eos=True))
        for i in range(4)
    ]
    found = draft_engine(table(), other_width(VOCAB - 9), 3, verify=verify).generate_batch(requests)
    assert all(token >= VOCAB - 3 for completion in found for token in completion.token_ids)
    if verify != "rejection":
        assert outcomes(found) == outcomes(plain(table(), requests, verify=verify))


def test_a_processor_that_invents_a_token_for_the_draft() -> None:
    """A user's rule may lift a token that the draft has no embedding for: it is proposed, fed and verified all the same."""

    def lift(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        out: Any = torch.full_like(logits, -torch.inf)
        out[VOCAB - 1] = 0.0
        out[int(ids[-1]) % 5] = 0.0
        return out

    requests = [Request([1, 2], SamplingParams(max_new_tokens=12, seed=i, logits_processor=lift)) for i in range(3)]
    found = draft_engine(table(), other_width(VOCAB - 9), 4).generate_batch(requests)
    assert outcomes(found) == outcomes(plain(table(), requests))
    assert all(c.acceptance_rate == 1.0 for c in found)
    assert any(VOCAB - 1 in c.token_ids for c in found)


def test_a_draft_in_memory_that_the_configuration_does_not_name_is_used() -> None:
    """It was ignored, and the bundled draft guessed in its place: tokens of another vocabulary."""
    target, draft = tiny_module("llama"), tiny_module("qwen3")
    for config in ("draft_model", {"method": "draft_model", "num_speculative_tokens": 2}):
        assert Engine(target, None, speculative=config, draft=draft).method.model.spec.name == "Qwen3ForCausalLM"  # type: ignore[attr-defined]
    with pytest.raises(VocabularyMismatchError, match="has 8192"):
        Engine(target, None, speculative="draft_model")
