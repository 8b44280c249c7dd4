"""Streams and seeds: nothing is shared that should not be, and nothing depends on company."""

import gc

import pytest
import torch

from foretell import Engine, Request, SamplingParams
from foretell.methods.draft_model.drafter import DraftModel
from tests.engine.harness import ToyTokenizer, draft_engine, mixed_requests, outcome, outcomes, plain, prompts, table


def engine(gamma: int = 3) -> Engine:
    return draft_engine(table(), table(blur=0.2), gamma)


def test_a_stream_is_the_completion() -> None:
    for request in mixed_requests():
        whole = engine().generate(request.prompt, request.params)
        stream = engine().stream(request.prompt, request.params)
        pieces = list(stream)
        assert pieces == whole.pieces
        assert outcome(stream.completion) == outcome(whole)
        assert next(stream, None) is None


def test_two_streams_interleaved() -> None:
    shared, requests = engine(), mixed_requests()
    expected = plain(table(), requests)
    streams = [shared.stream(request.prompt, request.params) for request in requests]
    pieces: list[list[str]] = [[] for _ in streams]
    alive = set(range(len(streams)))
    turn = 0
    while alive:
        for index in sorted(alive):
            for _ in range(1 + (turn + index) % 3):
                piece = next(streams[index], None)
                if piece is None:
                    alive.discard(index)
                    break
                pieces[index].append(piece.text)
        turn += 1
        if turn == 2:  # and a whole batch in between
            found = shared.generate_batch(requests[:3])
            assert outcomes(found) == outcomes(expected[:3])
    assert [outcome(stream.completion) for stream in streams] == outcomes(expected)
    assert ["".join(texts) for texts in pieces] == [c.text for c in expected]


def test_pieces_come_while_decoding() -> None:
    shared = engine()
    stream = shared.stream([1, 2], seed=1, max_new_tokens=30, ignore_eos=True)
    assert shared.recorder.num_steps == 0
    first = next(stream)
    assert shared.recorder.num_steps == 1
    partial = stream.completion
    assert partial.finish_reason is None
    assert partial.token_ids[0] == first.token_id


def test_closing_early() -> None:
    shared = engine()
    request = mixed_requests()[0]
    stream = shared.stream(request.prompt, request.params)
    first = [next(stream) for _ in range(3)]
    steps = shared.recorder.num_steps
    stream.close()
    rest = list(stream)
    assert [piece.token_id for piece in [*first, *rest]] == stream.completion.token_ids, "only what was made already"
    assert shared.recorder.num_steps == steps
    stream.close()
    unused = shared.stream(request.prompt, request.params)
    unused.close()
    assert list(unused) == []
    del stream, unused
    gc.collect()
    assert outcome(shared.generate(request.prompt, request.params)) == outcome(plain(table(), [request])[0])
    assert not torch.is_inference_mode_enabled()


def test_an_abandoned_stream_leaves_no_mode_behind() -> None:
    stream = engine().stream([1], seed=1)
    next(stream)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_seeds() -> None:
    shared = engine()
    options = {"max_new_tokens": 20, "ignore_eos": True}
    one, again = (shared.generate([1, 2], seed=5, **options) for _ in range(2))
    assert one.token_ids == again.token_ids
    assert one.seed == 5
    assert shared.generate([1, 2], seed=6, **options).token_ids != one.token_ids
    fresh = [shared.generate([1, 2], **options) for _ in range(4)]
    assert len({tuple(completion.token_ids) for completion in fresh}) == 4
    assert len({completion.seed for completion in fresh}) == 4
    for completion in fresh:
        replayed = shared.generate([1, 2], seed=completion.seed, **options)
        assert replayed.token_ids == completion.token_ids, "a fresh seed is reported, and gives the text again"


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63 - 1, -(2**63), 2**64 + 3])
def test_any_integer_is_a_seed(seed: int) -> None:
    found = [engine(gamma).generate([1], seed=seed, max_new_tokens=8).token_ids for gamma in (1, 4)]
    assert found[0] == found[1]


def test_equal_requests_in_one_batch() -> None:
    """The row plays no part in the noise: equal seeds give equal texts, and unseeded rows differ."""
    same = [Request([1, 2], SamplingParams(seed=3, max_new_tokens=15, ignore_eos=True))] * 3
    found = engine().generate_batch(same)
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids
    unseeded = [Request([1, 2], SamplingParams(max_new_tokens=15, ignore_eos=True))] * 3
    assert len({tuple(completion.token_ids) for completion in engine().generate_batch(unseeded)}) == 3


def test_batch_size_and_order_do_not_matter() -> None:
    requests = mixed_requests()
    expected = outcomes(engine().generate_batch(requests, batch_size=1))
    for batch_size in (2, 5, 64):
        assert outcomes(engine().generate_batch(requests, batch_size=batch_size)) == expected
    reverse = engine().generate_batch(requests[::-1])
    assert outcomes(reverse[::-1]) == expected


def test_figures_do_not_depend_on_company() -> None:
    """Steps, guesses and acceptances of a row are its own too."""
    requests = mixed_requests()
    alone = engine(5).generate_batch(requests, batch_size=1)
    together = engine(5).generate_batch(requests)
    for one, other in zip(alone, together, strict=True):
        assert one.num_steps == other.num_steps
        assert one.num_draft_tokens == other.num_draft_tokens
        assert one.num_accepted_tokens_per_pos == other.num_accepted_tokens_per_pos


def test_texts_and_ids_are_the_same_prompt() -> None:
    tokenizer = ToyTokenizer()
    shared = Engine(table(), tokenizer, speculative="draft_model", method=DraftModel(table(blur=0.1)))
    for text in ("the end", "ab x\n", "é€"):
        by_text = shared.generate(text, seed=1, max_new_tokens=6)
        by_ids = shared.generate(tokenizer.encode(text), seed=1, max_new_tokens=6)
        assert by_text.token_ids == by_ids.token_ids
    assert prompts()[0] != []
