"""Two vocabularies on their common ground: bytes, shared tokens, texts of one in the other."""

import itertools
from typing import Any

import pytest
from hypothesis import given, strategies as st

from foretell.core.errors import VocabularyMismatchError
from foretell.methods.draft_model.vocabulary.spelling import Spelling
from tests.methods.draft_model.vocabularies import KINDS, TEXT, byte_level, pieces, spelling, translation

PAIRS = list(itertools.permutations(KINDS, 2))
SPELLINGS = {name: spelling(kind()) for name, kind in KINDS.items()}
TRANSLATIONS = {pair: translation(*pair) for pair in PAIRS}


def spelled(one: Spelling, ids: list[int]) -> bytes:
    return b"".join(one.spell(token) for token in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_spell_the_text(kind: str) -> None:
    one = SPELLINGS[kind]
    ids = one.tokenizer.encode(TEXT, add_special_tokens=False)
    assert spelled(one, ids) == (b" " if one.adds_space else b"") + TEXT.encode()
    assert one.adds_space == (kind == "pieces")
    assert one.start == []
    assert one.encode(TEXT.encode(), begins=True) == ids


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_every_piece_of_bytes_is_spelled_exactly(kind: str, data: st.DataObject) -> None:
    """Cut anywhere, inside of characters too, and bytes that are no text at all."""
    whole = data.draw(st.one_of(st.text(max_size=12).map(str.encode), st.binary(max_size=9), st.just(TEXT.encode())))
    first = data.draw(st.integers(0, len(whole)))
    part = whole[first : data.draw(st.integers(first, len(whole)))]
    one = SPELLINGS[kind]
    assert spelled(one, one.encode(part)) == part


def test_a_byte_that_no_token_has_is_left_out() -> None:
    one = spelling(byte_level([(b"a", b"b")], alphabet=b"ab "))
    assert spelled(one, one.encode(b"abXa b")) == b"aba b"


def test_a_vocabulary_that_drops_spaces_is_refused() -> None:
    """WordPiece: its tokens do not say where words end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(VocabularyMismatchError, match=r"'bert' do not spell texts byte by byte .* can be translated"):
        Spelling(PreTrainedTokenizerFast(tokenizer_object=inner), 3, name="bert")


# -- shared tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_shared_tokens_against_all_pairs(pair: tuple[str, str]) -> None:
    """By brute force: every token of the one beside every token of the other."""
    between = TRANSLATIONS[pair]
    ours, theirs = (ids.tolist() for ids in between.pairs)
    assert ours == sorted(set(ours))
    assert len(set(theirs)) == len(theirs)
    target, draft = between.target, between.draft
    chosen = dict(zip(ours, theirs, strict=True))
    for token, piece in enumerate(target.bytes):
        if piece is None:
            continue
        same = [other for other, bytes_ in enumerate(draft.bytes) if bytes_ == piece]
        if token in chosen:
            assert chosen[token] in same
        else:  # none, or another token of the target spells the same and was taken
            assert not same or any(target.bytes[other] == piece for other in ours if other != token)
    assert any(len(target.bytes[token] or b"") > 1 for token in ours), "more than single bytes is shared"


def test_pieces_come_before_byte_tokens() -> None:
    """A sentencepiece vocabulary has the letter a twice; the byte token is never written where the piece can be."""
    one = SPELLINGS["pieces"]
    letter = one.by_bytes[b"a"]
    assert not one.is_fallback[letter]
    assert one.is_fallback[one.by_bytes[b"\xc3"]]
    assert TRANSLATIONS["words", "pieces"].draft_of[SPELLINGS["words"].by_bytes[b"a"]] == letter


def test_special_tokens_by_name_and_ends_by_what_they_do() -> None:
    between = TRANSLATIONS["words", "halves"]
    turn, end = (between.target.tokenizer.convert_tokens_to_ids(name) for name in ("<turn>", "<eos>"))
    assert between.draft_of[turn] == between.draft.tokenizer.convert_tokens_to_ids("<turn>")
    assert between.draft_of[end] == -1, "halves' end is <turn>, which is taken by its name"
    between = TRANSLATIONS["words", "pieces"]
    assert between.draft_of[end] == between.draft.tokenizer.eos_token_id
    assert between.draft_of[turn] == -1


# -- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_a_text_is_what_the_drafts_tokenizer_makes_of_it(pair: tuple[str, str]) -> None:
    between = TRANSLATIONS[pair]
    ids = between.target.tokenizer.encode(TEXT)
    assert between.text(ids) == between.draft.tokenizer.encode(TEXT)
    assert between.text([]) == between.draft.encode(b"\n"), "a draft model needs a token to read"


@pytest.mark.parametrize("pair", PAIRS)
@given(data=st.data())
def test_texts_grow_without_losing_a_byte(pair: tuple[str, str], data: st.DataObject) -> None:
    """Random target tokens, halves of characters among them, translated one by one."""
    between = TRANSLATIONS[pair]
    ordinary = sorted(between.target.by_bytes.values())
    ids = data.draw(st.lists(st.sampled_from(ordinary), min_size=1, max_size=25))
    start = data.draw(st.integers(1, len(ids)))
    wanted = spelled(between.target, ids)
    text = between.text(ids[:start])
    for token in ids[start:]:
        text += between.one(token)
    space = between.draft.adds_space or between.target.adds_space
    found = spelled(between.draft, text)
    assert found == wanted or (space and found.lstrip(b" ") == wanted.lstrip(b" "))


def test_special_tokens_stand_for_themselves() -> None:
    between = TRANSLATIONS["words", "halves"]
    target, draft = between.target.tokenizer, between.draft.tokenizer
    turn, other = target.convert_tokens_to_ids("<turn>"), draft.convert_tokens_to_ids("<turn>")
    ids = [turn, *target.encode("the cat"), turn, *target.encode("\n"), target.eos_token_id, *target.encode(" the")]
    wanted = [other, *draft.encode("the cat"), other, *draft.encode("\n<eos> the")]
    assert between.text(ids) == wanted


def test_bos_is_the_drafts_own() -> None:
    tokenizer: Any = pieces()
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    with_bos = spelling(tokenizer)
    assert with_bos.start == [1]
    from foretell.methods.draft_model.vocabulary.spelling import Translation

    plain = SPELLINGS["words"]
    ids = plain.tokenizer.encode("the cat")
    assert Translation(plain, with_bos).text(ids) == tokenizer.encode("the cat")
    assert Translation(with_bos, plain).text(tokenizer.encode("the cat")) == ids
