"""Where outputs end: end tokens, stop texts and limits inside an accepted path; the text, length and figures are cut."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from foretell import Completion, Engine, Piece, Request, SamplingParams
from foretell.methods.draft_model.drafter import DraftModel
from tests.engine.harness import EOS, PIECES, VOCAB, ToyTokenizer, draft_engine, outcome, plain, prompts, table
from tests.model.table import TableLM

TOKENIZER = ToyTokenizer()
ID = {piece: index for index, piece in enumerate(PIECES)}


def scripted(
    script: Sequence[int], *, wrong: float = 0.0, max_positions: int = 4096, eos: Sequence[int] = (EOS,)
) -> TableLM:
    """A model that says the script after the prompt [4, 4, ... 4]: its context is long enough to count."""
    context = len(script) + 2

    def probs(text: tuple[int, ...]) -> torch.Tensor:
        said = list(text)
        while said and said[0] == 4:  # the prompt is made of line breaks; no script has one
            said = said[1:]
        token = script[len(said)] if len(said) < len(script) and list(script[: len(said)]) == said else 20
        out = torch.full((VOCAB,), wrong / VOCAB, dtype=torch.float64)
        out[token] += 1.0 - wrong
        return out

    return TableLM(
        VOCAB,
        probs=probs,
        context=context,
        num_layers=1,
        dtype=torch.float64,
        max_positions=max_positions,
        eos_token_ids=eos,
    )


def ids_of(*pieces: bytes) -> list[int]:
    return [ID[piece] for piece in pieces]


def both(model: TableLM, prediction: Sequence[int], **options: Any) -> Completion:
    """One completion by a prediction that runs past the end, checked against plain decoding, a draft model, and batches."""
    params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 40, **options})
    request = Request([4, 4], params, list(prediction))
    expected = plain(model, [request])[0]
    guided = Engine(model, TOKENIZER, speculative={"method": "prediction", "num_speculative_tokens": 12})
    found = guided.generate_batch([request])[0]
    assert outcome(found) == outcome(expected)
    other = Request([4], SamplingParams(temperature=0.0, max_new_tokens=33), [20] * 50)
    assert outcome(guided.generate_batch([other, request, other])[1]) == outcome(expected)
    drafted = draft_engine(model, model, 5).generate_batch([request])[0]
    assert outcome(drafted) == outcome(expected)
    assert "".join(piece.text for piece in found.pieces) == found.text
    assert [piece.token_id for piece in found.pieces] == found.token_ids
    return found


AFTER = ids_of(b"x", b"y", b"x", b"y", b"x", b"y", b"x", b"y")


def test_eos_in_the_middle_of_a_path() -> None:
    script = [*ids_of(b"a", b"b"), EOS, *AFTER]
    found = both(scripted(script), script)
    assert found.token_ids == script[:3]
    assert found.text == "ab"
    assert found.finish_reason == "stop"
    assert found.num_steps == 1
    assert found.num_draft_tokens == 11  # of 12 asked for, all there were
    assert found.num_accepted_tokens == 11
    assert found.num_accepted_tokens_per_pos == [1] * 11


@pytest.mark.parametrize("place", [0, 1, 4, 5, 6, 11, 12])
def test_eos_at_every_place_of_a_path(place: int) -> None:
    """First token, inside, the last guess, the bonus of a path of 5 or 12 guesses."""
    script = [*ids_of(*[b"x", b"y"] * 6)[:place], EOS, *AFTER]
    found = both(scripted(script), script)
    assert found.token_ids == script[: place + 1]
    assert found.finish_reason == "stop"
    assert EOS not in [ID[piece.encode()] for piece in found.text]


def test_ignore_eos_goes_on() -> None:
    script = [*ids_of(b"a"), EOS, *ids_of(b"b"), *AFTER]
    found = both(scripted(script), script, ignore_eos=True, max_new_tokens=4)
    assert found.token_ids == script[:4]
    assert found.finish_reason == "length"
    assert found.text == "abx"  # a special token has no text


def test_stop_token_ids_end_like_eos() -> None:
    script = [*ids_of(b"a", b"b", b"!"), *AFTER]
    found = both(scripted(script), script, stop_token_ids=(ID[b"!"],))
    assert (found.token_ids, found.text, found.finish_reason) == (script[:3], "ab", "stop")


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "count"),
    [
        ([b"a", b"b", b"c", b"x"], ("bc",), "a", 3),  # spans tokens
        ([b"x", b"abc", b"y"], ("b",), "xa", 2),  # inside a token
        ([b"abc", b"y"], ("abc",), "", 1),  # the first token
        ([b"abc", b"y"], ("a", "ab", "abc"), "", 1),  # all of them at once: the first place wins
        ([b"x", b"ab", b"ab", b"c", b"y"], ("ababc", "abc"), "x", 4),  # the longer begins earlier
        ([b"a", b"a", b"a", b"b", b"x"], ("aab",), "a", 4),  # a false start inside a false start
        ([b"a", b"b", b"a", b"x"], ("abc", "abx"), "abax"[:4], None),  # only beginnings: nothing stops
        ([b"the", b" ", b"end", b"x"], ("e e",), "th", 3),
        ([b"x", b"\xe2\x82", b"\xac", b"y"], ("€",), "x", 3),  # a character of two tokens
        ([b"x", b"\xf0\x9f", b"\x98\x80", b"y"], ("\U0001f600y",), "x", 4),
        ([b"x", b"\xc3", b"\xa9", b"\xc3", b"\xa9", b"y"], ("éy",), "xé", 6),
    ],
)
def test_stop_texts(pieces: list[bytes], stop: tuple[str, ...], text: str, count: int | None) -> None:
    script = [*ids_of(*pieces), *AFTER]
    found = both(scripted(script), script, stop=stop, max_new_tokens=len(pieces) + 6)
    if count is None:
        assert found.finish_reason == "length"
        assert found.text.startswith(text)
    else:
        assert (found.text, len(found.token_ids), found.finish_reason) == (text, count, "stop")


@pytest.mark.parametrize(
    ("pieces", "stop", "minimum", "text", "count"),
    [
        ([b"a", b"b", b"a", b"b", b"x"], ("b",), 1, "a", 2),  # the first token past the minimum may end the text
        ([b"a", b"b", b"a", b"b", b"x"], ("b",), 2, "aba", 4),  # the minimum's last token may not
        ([b"a", b"b", b"x", b"y", b"x"], ("b",), 3, "abxyxxy", None),  # and what it wrote never does later
        ([b"a", b"b", b"c", b"x", b"y"], ("bc",), 2, "a", 3),  # begun before, complete after
        ([b"a", b"b", b"c", b"x", b"y"], ("bc", "cx"), 3, "ab", 4),
        ([b"a", b"a", b"a", b"a", b"x"], ("aa",), 2, "a", 3),  # overlaps the one that was passed over
        ([b"a", b"b", b"a", b"b", b"a", b"x"], ("aba",), 3, "ab", 5),
        ([b"abc", b"abc", b"x"], ("b",), 1, "abca", 2),
        ([b"the", b" ", b"end", b"x"], ("e e",), 2, "th", 3),
        ([b"x", b"\xe2\x82", b"\xac", b"y"], ("€",), 2, "x", 3),  # the token past the minimum completes the character
        ([b"x", b"\xe2\x82", b"\xac", b"\xe2\x82", b"\xac", b"y"], ("€",), 3, "x€", 5),
        ([b"x", b"\xc3", b"\xa9", b"x", b"y"], ("x",), 1, "xé", 4),
    ],
)
def test_min_new_tokens_holds_against_stop_texts(
    pieces: list[bytes], stop: tuple[str, ...], minimum: int, text: str, count: int | None
) -> None:
    """A stop text ends the output where a token past the minimum completes it, wherever it began."""
    script = [*ids_of(*pieces), *AFTER]
    limit = len(pieces) + 2
    found = both(scripted(script), script, stop=stop, min_new_tokens=minimum, max_new_tokens=limit)
    if count is None:
        assert (found.text, found.finish_reason) == (text, "length")
    else:
        assert (found.text, found.num_tokens, found.finish_reason) == (text, count, "stop")


@pytest.mark.parametrize("count", [2, 3])
def test_a_stop_text_that_waited_for_half_a_character_counts_as_written_before(count: int) -> None:
    """The token "zz" with half a character after it is the minimum's last: its text is known one token later."""
    tokenizer = ToyTokenizer([*PIECES[:-1], b"zz\xc3"])
    script = [ID[b"x"], VOCAB - 1, ID[b"\xa9"], *AFTER]
    engine = Engine(scripted(script), tokenizer)
    found = engine.generate([4, 4], temperature=0.0, min_new_tokens=count, max_new_tokens=4, stop=("zz",))
    assert (found.text, found.finish_reason) == ("xzzéx", "length")
    found = engine.generate([4, 4], temperature=0.0, min_new_tokens=count, max_new_tokens=3, stop=("é",))
    assert (found.text, found.finish_reason) == (("xzz", "stop") if count == 2 else ("xzzé", "length"))


def test_min_new_tokens_of_all_tokens_leaves_no_stop_text() -> None:
    """At the limit the rest of the text is released, and must not end it either."""
    tokenizer = ToyTokenizer([*PIECES[:-1], b"zz\xe2"])
    engine = Engine(scripted([ID[b"x"], VOCAB - 1]), tokenizer)
    found = engine.generate([4, 4], temperature=0.0, min_new_tokens=2, max_new_tokens=2, stop=("zz",))
    assert (found.text, found.finish_reason) == ("xzz\ufffd", "length")


def test_a_stop_text_that_was_passed_over_is_shown_at_once() -> None:
    """Only what may still become one is held back."""
    script = [*ids_of(b"a", b"b", b"c", b"x", b"a", b"b"), *AFTER]
    engine = draft_engine(scripted(script), scripted(script), 5)
    pieces = [
        piece.text for piece in engine.stream([4, 4], temperature=0.0, max_new_tokens=7, stop=("ab",), min_new_tokens=5)
    ]
    assert pieces == ["", "ab", "c", "x", "", ""]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_min_new_tokens_is_one_rule_for_all_methods(data: st.DataObject) -> None:
    """Random scripts, stop texts and minima: plain decoding is as the rule says, and guessing is as plain decoding."""
    alphabet = [b"a", b"b", b"x", b"ab", b"abc", b" "]
    pieces = data.draw(st.lists(st.sampled_from(alphabet), min_size=4, max_size=12))
    stop = tuple(data.draw(st.lists(st.text("abx ", min_size=1, max_size=3), min_size=1, max_size=3)))
    minimum = data.draw(st.integers(0, len(pieces)))
    script = ids_of(*pieces)
    found = both(scripted(script), script, stop=stop, min_new_tokens=minimum, max_new_tokens=len(pieces))
    for count in range(minimum + 1, len(pieces) + 1):
        before, text = (b"".join(pieces[:until]).decode() for until in (max(minimum, count - 1), count))
        ends = [
            at for each in stop for at in range(len(text)) if text.startswith(each, at) and at + len(each) > len(before)
        ]
        if ends:
            assert (found.num_tokens, found.text, found.finish_reason) == (count, text[: min(ends)], "stop")
            return
    assert (found.num_tokens, found.finish_reason) == (len(pieces), "length")


def test_pieces_never_hold_part_of_a_stop_text() -> None:
    script = [*ids_of(b"x", b"a", b"b", b"a", b"b", b"c"), *AFTER]
    engine = draft_engine(scripted(script), scripted(script), 5)
    said = ""
    for piece in engine.stream([4, 4], temperature=0.0, stop=("abc",)):
        said += piece.text
        assert "xab".startswith(said)
    assert said == "xab"


def test_a_half_stop_text_at_the_limit_is_text() -> None:
    script = [*ids_of(b"x", b"a", b"b"), *AFTER]
    found = both(scripted(script), script, stop=("abc",), max_new_tokens=3)
    assert (found.text, found.finish_reason) == ("xab", "length")


def test_a_half_character_at_the_limit_is_shown_as_such() -> None:
    script = [*ids_of(b"x", b"\xe2\x82", b"\xac"), *AFTER]
    found = both(scripted(script), script, max_new_tokens=2)
    assert (found.text, found.finish_reason) == ("x\ufffd", "length")


def test_a_stop_text_before_a_half_character_is_found_at_the_end() -> None:
    """A token that ends in half a character holds its text back; the end decides it, and the reason is the stop text."""
    tokenizer = ToyTokenizer([*PIECES[:-1], b"zz\xe2"])
    script = [ID[b"x"], VOCAB - 1]
    model = scripted(script)
    engine = Engine(model, tokenizer)
    found = engine.generate([4, 4], temperature=0.0, max_new_tokens=2, stop=("zz",))
    assert (found.text, found.finish_reason) == ("x", "stop")


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 12, 13, 14])
def test_the_limit_cuts_a_path(limit: int) -> None:
    script = ids_of(*[b"x", b"y", b"z"] * 8)
    found = both(scripted(script), script, max_new_tokens=limit)
    assert found.token_ids == script[:limit]
    assert found.finish_reason == "length"
    assert found.num_draft_tokens <= limit - 1, "nothing is guessed that could not be emitted"
    assert found.num_steps == -(-limit // 13)


@pytest.mark.parametrize("max_positions", [8, 9, 10, 20])
@pytest.mark.parametrize("gamma", [1, 5, 8])
def test_the_context_ends(max_positions: int, gamma: int) -> None:
    """The last token may fill the context's last place; no position beyond it is ever computed."""
    target, draft = table(max_positions=max_positions), table(blur=0.2, max_positions=max_positions)
    forward = TableLM.forward

    def bounded(self: TableLM, tokens: Any, plan: Any, *rest: Any, **options: Any) -> Any:
        assert int(plan.positions.max()) <= max_positions - 1
        return forward(self, tokens, plan, *rest, **options)

    target.forward = bounded.__get__(target)  # type: ignore[method-assign]
    draft.forward = bounded.__get__(draft)  # type: ignore[method-assign]
    lengths = (1, 4, 7)
    requests = [
        Request([3] * length, SamplingParams(max_new_tokens=100, seed=length, ignore_eos=True)) for length in lengths
    ]
    expected = plain(target, requests)
    assert [c.num_tokens for c in expected] == [max_positions - length for length in lengths]
    assert {c.finish_reason for c in expected} == {"length"}
    for batch_size in (1, 3):
        found = draft_engine(target, draft, gamma).generate_batch(requests, batch_size=batch_size)
        assert [outcome(one) for one in found] == [outcome(one) for one in expected]


def test_a_full_batch_mate_does_not_stop_the_guessing() -> None:
    """A row at the end of its context goes on by single tokens; the others still get their guesses."""
    target = table(max_positions=40)
    long = Request([3] * 37, SamplingParams(max_new_tokens=3, seed=1, ignore_eos=True))
    short = Request([3] * 2, SamplingParams(max_new_tokens=12, seed=2, ignore_eos=True))
    engine = draft_engine(target, target, 5)
    alone, together = engine.generate_batch([short])[0], engine.generate_batch([short, long])[0]
    assert outcome(alone) == outcome(together)
    assert (together.num_steps, together.num_draft_tokens) == (alone.num_steps, alone.num_draft_tokens)


def test_min_new_tokens_forbids_the_end_at_draft_positions() -> None:
    """A model that always wants to end: the end comes exactly where it is allowed, whatever the draft length."""

    def probs(text: tuple[int, ...]) -> torch.Tensor:
        out = torch.full((VOCAB,), 0.1 / VOCAB, dtype=torch.float64)
        out[EOS] += 0.9
        return out

    model = TableLM(VOCAB, probs=probs, num_layers=1, dtype=torch.float64, eos_token_ids=(EOS,))
    for minimum in (0, 1, 4, 6, 9):
        params = SamplingParams(temperature=0.0, min_new_tokens=minimum, max_new_tokens=20)
        expected = plain(model, [Request([1], params)])[0]
        assert expected.num_tokens == minimum + 1
        assert expected.token_ids[-1] == EOS
        for gamma in (1, 5, 8):
            found = draft_engine(model, model, gamma).generate([1], params)
            assert outcome(found) == outcome(expected)
            assert found.num_accepted_tokens == found.num_draft_tokens
        guessed = Request([1], params, [EOS] * 30)
        found = Engine(model, TOKENIZER, speculative="prediction").generate_batch([guessed])[0]
        assert outcome(found) == outcome(expected)


def test_figures_and_provenance() -> None:
    target = table()
    requests = [
        Request(ids, SamplingParams(max_new_tokens=25, seed=i, ignore_eos=True)) for i, ids in enumerate(prompts())
    ]
    for found in draft_engine(target, table(blur=0.3), 4).generate_batch(requests):
        kinds = [piece.source for piece in found.pieces]
        assert set(kinds) <= {"draft:draft_model", "bonus", "plain"}
        assert kinds.count("bonus") + kinds.count("plain") == found.num_steps
        assert kinds.count("draft:draft_model") == found.num_accepted_tokens
        assert found.mean_acceptance_length == 1 + found.num_accepted_tokens / found.num_steps
        assert found.acceptance_rate == found.num_accepted_tokens / found.num_draft_tokens
        assert sum(found.num_draft_tokens_per_pos) == found.num_draft_tokens
        assert found.num_tokens == found.num_steps + found.num_accepted_tokens
    for found in plain(target, requests):
        assert {piece.source for piece in found.pieces} == {"plain"}
        assert (found.num_draft_tokens, found.acceptance_rate, found.mean_acceptance_length) == (0, 0.0, 1.0)
        assert found.num_steps == found.num_tokens


@pytest.mark.parametrize("method", ["ngram", "prediction"])
def test_provenance_names_the_drafter(method: str) -> None:
    script = ids_of(*[b"x", b"y", b"z"] * 6)
    request = Request([4, 4], SamplingParams(temperature=0.0, max_new_tokens=18), script)
    pieces: list[Piece] = Engine(scripted(script), TOKENIZER, speculative=method).generate_batch([request])[0].pieces
    assert f"draft:{method}" in {piece.source for piece in pieces}
    if method == "ngram":  # the first period is not known yet: plain steps, not bonuses of empty drafts
        assert [piece.source for piece in pieces[:4]] == ["plain"] * 4
    else:
        assert [piece.source for piece in pieces[:9]] == ["draft:prediction"] * 7 + ["bonus", "draft:prediction"]


def test_json_figures_are_plain_values() -> None:
    completion = draft_engine(table(), table(blur=0.3), 4).generate([1, 2], seed=4, max_new_tokens=9)
    found = json.loads(json.dumps(completion.to_dict()))
    assert found["token_ids"] == completion.token_ids
    assert found["config"]["speculative"]["num_speculative_tokens"] == 4
    assert isinstance(DraftModel.capabilities.summary, str)
