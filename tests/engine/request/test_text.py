"""Streams of text: pieces add up to the tokenizer's own decoding, never split a character, never show a stop text."""

import codecs
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from foretell.engine.request.text import TextStream, joins
from tests.engine.harness import EOS, PIECES, ToyTokenizer

CORPUS = ["def add(a, b):\n    return a + b\n", "naïve café, 5 €, 日本語, 😀👍🏽", "  spaces   and\ttabs  "] * 3


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A real byte-level BPE of about 400 tokens with one special token, trained here."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", clean_up_tokenization_spaces=False)


def pieces_of(tokenizer: object, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, stop)  # type: ignore[arg-type]
    pieces = []
    for token in ids:
        stream.push(token)
        if stream.stopped:
            break
        pieces.append(stream.take())
    stream.finish()
    pieces.append(stream.take())
    return pieces, stream


class Plain:
    """Of a tokenizer only what the protocol has: nothing is known of how it decodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        self.num_decoded += 1
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def check(tokenizer: object, ids: list[int], stop: tuple[str, ...] = ()) -> None:
    whole: str = tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[attr-defined]
    pieces, stream = pieces_of(tokenizer, ids, stop)
    text = "".join(pieces)
    assert text == stream.text
    places = [at for at in (whole.find(s) for s in stop) if at >= 0]
    if not places:
        assert text == whole
        assert not stream.stopped
    elif "\ufffd" not in whole:
        assert stream.stopped
        assert text == whole[: min(places)]
    assert not any(s in text for s in stop)
    for piece in pieces:
        if "\ufffd" in piece:
            assert "\ufffd" in whole


@given(data=st.data())
def test_random_tokens(tokenizer: PreTrainedTokenizerFast, data: st.DataObject) -> None:
    """Mostly no UTF-8 at all: half characters, stray bytes, special tokens in the middle. With the texts of single tokens
    put together and, the slow twin, without: the same pieces."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    check(tokenizer, ids)
    assert pieces_of(tokenizer, ids)[0] == pieces_of(Plain(tokenizer), ids)[0]


@given(text=st.text(alphabet="aé €日😀👍🏽\n\t .x", max_size=30), data=st.data())
def test_real_text_in_random_pieces(tokenizer: PreTrainedTokenizerFast, text: str, data: st.DataObject) -> None:
    """Valid UTF-8, cut into bytes or whatever the vocabulary has: no piece ever holds half a character."""
    if data.draw(st.booleans()):
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        letters = codecs.encode(text, "utf-8")
        alphabet = {byte: tokenizer.convert_tokens_to_ids(symbol) for byte, symbol in byte_symbols().items()}
        ids = [alphabet[byte] for byte in letters]
    pieces, _ = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    check(tokenizer, ids)


@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=24),
    stop=st.lists(st.sampled_from(["a", "ab", "aba", "abc", "the end", "é", "€", "ba", "bab", " ", "0 1"]), max_size=3),
)
def test_stop_texts_never_leak(ids: list[int], stop: list[str]) -> None:
    check(ToyTokenizer(), ids, tuple(stop))


@given(
    text=st.text(alphabet="abc", max_size=30),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=3),
)
def test_stop_texts_anywhere(text: str, stop: list[str]) -> None:
    """Few letters, so that candidates overlap; the first place at which one is complete cuts, the earliest start wins."""
    tokenizer = ToyTokenizer([b"a", b"b", b"c", b"ab", b"ca"], special=())
    pieces, stream = pieces_of(tokenizer, tokenizer.encode(text), tuple(stop))
    said = ""
    for piece in pieces:
        said += piece
        assert not any(s in said for s in stop)
    assert text.startswith(said)
    assert stream.stopped == any(s in text for s in stop)
    if not stream.stopped:
        assert said == text


@given(
    text=st.text(alphabet="ab", max_size=40), stop=st.lists(st.text(alphabet="ab", min_size=3, max_size=7), max_size=3)
)
def test_nothing_but_the_longest_possible_beginning_is_held_back(text: str, stop: list[str]) -> None:
    stream = TextStream(ToyTokenizer([b"a", b"b"], special=()), tuple(stop))
    said = ""
    for letter in text:
        stream.push("ab".index(letter))
        if stream.stopped:
            return
        said += stream.take()
        ends = (stream.text[at:] for at in range(len(stream.text)))
        held = next((end for end in ends if any(one.startswith(end) for one in stop)), "")
        assert said + held == stream.text


def test_the_longest_stop_texts_cost_next_to_nothing() -> None:
    """16 of 1024 characters are allowed: each token cost 5 ms, of the thread that decodes for everybody."""
    stop = tuple("ab" * 500 + letter * 24 for letter in "cdefghijklmnopqr")
    stream = TextStream(ToyTokenizer([b"a", b"b"], special=()), stop)
    began = time.thread_time()
    for place in range(600):
        stream.push(place % 2)
        stream.take()
    assert time.thread_time() - began < 0.3


def test_one_piece_a_whole_character(tokenizer: PreTrainedTokenizerFast) -> None:
    symbols = byte_symbols()
    ids = [tokenizer.convert_tokens_to_ids(symbols[byte]) for byte in "é😀".encode()]
    pieces, _ = pieces_of(tokenizer, ids)
    assert [piece for piece in pieces if piece] == ["é", "😀"]
    assert pieces[:6] == ["", "é", "", "", "", "😀"]


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer: PreTrainedTokenizerFast) -> None:
    symbols = byte_symbols()
    ids = [tokenizer.convert_tokens_to_ids(symbols[byte]) for byte in "a😀".encode()[:-1]]
    pieces, stream = pieces_of(tokenizer, ids)
    assert pieces == ["a", "", "", "", "\ufffd"]
    assert stream.text == tokenizer.decode(ids)


def test_without_a_tokenizer_there_is_no_text() -> None:
    pieces, stream = pieces_of(None, [1, 2, 3], ("a",))
    assert "".join(pieces) == ""
    assert not stream.stopped


def byte_symbols() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in printable}
    for index, byte in enumerate(byte for byte in range(256) if byte not in symbols):
        symbols[byte] = chr(256 + index)
    return symbols


class Counting(ToyTokenizer):
    """Counts the tokens that it decodes."""

    num_decoded = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    "run", [[9], [EOS], [11, 11, 9], [EOS, 9], [7, EOS, EOS]], ids=["half", "special", "halves", "both", "mixed"]
)
def test_tokens_that_show_nothing_cost_no_more_the_more_there_are(run: list[int]) -> None:
    """Halves of characters and special tokens: each is decoded with a few others, not with all before it."""
    ids = [0, *run * 300, 9, 10, 1]  # a whole character at the end
    tokenizer = Counting()
    stream = TextStream(tokenizer)
    pieces = []
    for token in ids:
        stream.push(token)
        pieces.append(stream.take())
    stream.finish()
    pieces.append(stream.take())
    assert tokenizer.num_decoded < 100 * len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces).endswith("€b")


def test_a_stop_text_is_found_behind_such_a_run() -> None:
    stream = TextStream(ToyTokenizer(), ("\ufffdab",))
    for token in [0, *[9] * 100, 2, 1]:
        stream.push(token)
    assert stream.stopped
    assert stream.text == "a" + "\ufffd" * 99


def test_texts_of_tokens_are_their_own_tokenizers(tokenizer: PreTrainedTokenizerFast) -> None:
    """The texts of single tokens are kept beyond a row, and of each tokenizer by itself."""
    ids = tokenizer.encode("def add(a, b): 日本語 naïve", add_special_tokens=False)
    for _ in range(2):
        check(tokenizer, ids)
        check(ToyTokenizer(), [token % len(PIECES) for token in ids if token % len(PIECES) != EOS])

    class Slotted:
        """No reference can be kept to it."""

        __slots__ = ()

        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            return "".join(chr(97 + token % 26) for token in ids)

    check(Slotted(), ids)


def test_texts_are_joined_only_where_no_neighbour_can_change_them(tokenizer: PreTrainedTokenizerFast) -> None:
    assert joins(tokenizer)
    assert not joins(Plain(tokenizer))
    assert not joins(None)
    bpe = tokenizer.backend_tokenizer
    assert not joins(PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=True))

    class Own(PreTrainedTokenizerFast):  # type: ignore[misc]
        """Somebody's own class, which may decode otherwise."""

    assert not joins(Own(tokenizer_object=bpe, clean_up_tokenization_spaces=False))
    other = Tokenizer.from_str(bpe.to_str())
    other.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert not joins(PreTrainedTokenizerFast(tokenizer_object=other, clean_up_tokenization_spaces=False))


def test_a_known_token_is_not_decoded_again(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokenizer.encode("def add(a, b):", add_special_tokens=False)
    pieces, _ = pieces_of(tokenizer, ids)

    def decode(*args: object, **options: object) -> str:
        raise AssertionError("its text is known")

    stream = TextStream(tokenizer)
    monkeypatch.setattr(type(tokenizer), "decode", decode)
    again = []
    for token in ids:
        stream.push(token)
        again.append(stream.take())
    assert again == pieces[:-1]
