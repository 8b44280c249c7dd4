"""Log probabilities of prompts: by enumeration, by the steps of decoding, and in every state of a queue."""

import math
from dataclasses import replace

import pytest
import torch

from foretell import Engine, Piece, SamplingParams, Submission
from foretell.core.errors import ConfigError, PromptError
from foretell.engine.request import scoring
from foretell.engine.request.scoring import Scoring
from foretell.model.target import Target
from tests.engine.harness import VOCAB, ToyTokenizer, table
from tests.engine.integrity import check_service
from tests.service.test_service import ENDLESS, Mailbox, service

TEXT = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 4, 7]


def score(ids: list[int], num_logprobs: int = 0, model: int = 1) -> list[Piece]:
    (pieces,) = Engine(table(model), ToyTokenizer()).score([ids], num_logprobs=num_logprobs)
    return pieces


def stepped(ids: list[int]) -> list[float]:
    """The slow twin: each token's log probability from a decoding step of its own, which is made to choose it."""
    made, found = service(prefix_reuse=False), []
    try:
        for place in range(1, len(ids)):
            box, wanted = Mailbox(), ids[place]
            params = SamplingParams(
                max_new_tokens=1, temperature=0, logit_bias={wanted: 1e4}, ignore_eos=True, logprobs=0
            )
            made.submit(Submission(str(place), ids[:place], params), box.hear)
            done = box.last(str(place)).completion
            assert done.token_ids == [wanted]
            value = done.pieces[0].logprob
            assert value is not None
            found.append(value)
    finally:
        made.close()
    return found


@pytest.mark.parametrize("chunk", [1, 3, 128])
def test_scores_are_those_of_decoding(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(scoring, "SCORE_CHUNK", chunk)
    pieces = score(TEXT)
    assert [piece.token_id for piece in pieces] == TEXT
    assert pieces[0].logprob is None
    assert [piece.logprob for piece in pieces[1:]] == pytest.approx(stepped(TEXT), abs=1e-5)


def test_all_tokens_of_a_place_are_a_law() -> None:
    """Exactly: the probabilities of every possible next token sum to 1, at each place of a text."""
    for place in range(1, 5):
        ways = [score([*TEXT[:place], token])[-1].logprob for token in range(VOCAB)]
        assert math.fsum(math.exp(value) for value in ways if value is not None) == pytest.approx(1.0, abs=1e-5)
        best = score(TEXT[: place + 1], VOCAB)[-1].top_logprobs
        assert [value for _, value in best] == sorted((value for value in ways if value is not None), reverse=True)


def test_a_score_is_the_same_with_every_method_and_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SCORE_CHUNK", 4)
    wanted = score(TEXT, 2)
    for method in ("ngram", "suffix"):
        (pieces,) = Engine(table(1), ToyTokenizer(), speculative=method).score([TEXT], num_logprobs=2)
        assert pieces == wanted
    made, box = service(), Mailbox()
    try:
        made.submit(Submission("other", [1, 2], ENDLESS), box.hear)
        params = SamplingParams(max_new_tokens=3, seed=1)
        made.submit(Submission("both", TEXT, params, num_prompt_logprobs=2), box.hear)
        made.submit(Submission("plain", TEXT, params), box.hear)
        made.submit(Submission("alone", TEXT, params, num_prompt_logprobs=2, write=False), box.hear)
        both, plain, alone = (box.last(name).completion for name in ("both", "plain", "alone"))
        box.last("other")
        assert both.prompt_pieces == alone.prompt_pieces == wanted
        assert (both.token_ids, plain.prompt_pieces) == (plain.token_ids, [])
        assert (alone.token_ids, alone.finish_reason, alone.num_prompt_tokens) == ([], "length", len(TEXT))
        check_service(made)
    finally:
        made.close()


def test_a_prompt_that_fills_the_context_is_scored_and_not_continued() -> None:
    made, box = service(max_model_len=32), Mailbox()
    full = (TEXT * 3)[:32]
    try:
        made.submit(Submission("full", full, num_prompt_logprobs=0, write=False), box.hear)
        done = box.last("full").completion
        assert len(done.prompt_pieces) == 32
        for submission in (
            Submission("more", [*full, 1], num_prompt_logprobs=0, write=False),
            Submission("written", full, num_prompt_logprobs=0),
        ):
            with pytest.raises(PromptError, match="shorten the prompt"):
                made.submit(submission, box.hear)
        with pytest.raises(ConfigError, match="num_prompt_logprobs = -1 must be at least 0"):
            made.submit(Submission("less", TEXT, num_prompt_logprobs=-1), box.hear)
    finally:
        made.close()


def test_it_can_be_cancelled_times_out_and_ends_with_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Scoring.read
    monkeypatch.setattr(Scoring, "read", lambda self: read(self) and False)  # never done
    made, box = service(), Mailbox()
    given = Submission("a", TEXT, num_prompt_logprobs=0)
    try:
        made.submit(given, box.hear)
        check_service(made)
        assert made.snapshot().num_waiting >= 1
        made.cancel("a")
        made.submit(replace(given, request_id="b", timeout_s=0.01), box.hear)
        ended = [box.last(name).completion for name in "ab"]
        assert [one.finish_reason for one in ended if one is not None] == ["cancelled", "timeout"]
        made.submit(replace(given, request_id="c"), box.hear)
    finally:
        made.close()
    assert box.last("c").error is not None


@pytest.mark.parametrize(("ids", "texts"), [([7, 8, 0], ["", "é", "a"]), ([0, 7], ["a", "\ufffd"]), ([22], [""])])
def test_texts_of_a_prompt_are_whole_characters(ids: list[int], texts: list[str]) -> None:
    assert [piece.text for piece in score(ids)] == texts


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_scores_of_a_real_model_are_those_of_one_whole_pass(implementation: str) -> None:
    """Against transformers' own forward pass, which reads the text at once."""
    reference = Engine.load("bundled", implementation="transformers", dtype="float32")
    engine = Engine.load("bundled", implementation=implementation, dtype="float32")
    ids = engine.tokenizer.encode("def add(a, b):\n    return a + b\n\n" * 12)
    assert len(ids) > scoring.SCORE_CHUNK
    module = reference.model.module  # type: ignore[attr-defined]
    with torch.inference_mode():
        wanted = torch.log_softmax(module(torch.tensor([ids])).logits[0].float(), -1)
    values = [piece.logprob for piece in next(engine.score([ids]))]
    assert values[1:] == pytest.approx([float(wanted[at, token]) for at, token in enumerate(ids[1:])], abs=2e-4)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_texts_that_begin_alike_are_read_once_with_equal_scores(
    monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    monkeypatch.setattr(scoring, "SCORE_CHUNK", 16)
    passes: list[int] = []
    forward = Target.forward
    monkeypatch.setattr(
        Target, "forward", lambda self, tokens, *a, **k: (passes.append(1), forward(self, tokens, *a, **k))[1]
    )
    engine = Engine.load("bundled", implementation=implementation, dtype="float32")
    shared = engine.tokenizer.encode("def add(a, b):\n    return a + b\n\n" * 4)[:40]
    ends = [shared[:32], shared[:33], [*shared, 5, 6, 7], [*shared, 9], shared[:20], [3, *shared]]
    alone = [next(engine.score([ids], num_logprobs=2)) for ids in ends]
    singly = len(passes)
    passes.clear()
    assert list(engine.score(ends, num_logprobs=2)) == alone
    assert len(passes) < singly - 4


def test_refused_before_anything_is_read() -> None:
    engine = Engine(table(1), ToyTokenizer())
    for prompts, options, match in (
        ("text", {}, "give \\[prompt\\]"),
        ([[]], {}, "empty"),
        ([[VOCAB]], {}, "not in the vocabulary"),
        ([[1]], {"num_logprobs": -1}, "must be at least 0"),
    ):
        with pytest.raises((PromptError, ConfigError), match=match):
            engine.score(prompts, **options)  # type: ignore[arg-type]
    assert score([1])[0].logprob is None
