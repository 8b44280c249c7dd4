"""Incremental detokenization: whole characters only, and stop texts across token boundaries."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from tokenizers.decoders import ByteLevel

from foretell.checkpoints.tokenizer import PlainTokenizer
from foretell.engine.structured.thinking import AnswerText
from foretell.engine.structured.thoughts import Thinking

LONGEST_CHARACTER = 4
"""Bytes of a character, and so tokens, at most."""
MOST_PENDING = 16
"""Tokens without a whole character, after which most of them are settled: each new one is decoded with all that are not."""


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer; transformers' tokenizers have it."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        ...


class TextStream:
    """The text of one row. ``take`` gives pieces that never split a character and never hold part of a stop text.

    A tokenizer's decoding of a token depends on its neighbours (spaces, bytes of one character), so a short window of
    tokens is decoded with and without the newest ones, and the difference is the piece, once it does not end in an
    incomplete character.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = (), thinking: Thinking | None = None) -> None:
        """thinking: stop texts end the answer alone, however the output thinks; None: they end any text."""
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.text = ""  # final text, stop text cut off
        self.stopped = False
        self._ids: list[int] = []
        self._window = 0  # first token of the decoding window
        self._decoded = 0  # tokens whose text is in self.text
        self._given = 0  # characters already handed out by take
        self._may_stop = True
        self._answer = AnswerText(thinking) if stop and thinking is not None else None
        self._searched = 0  # characters in which stop texts have been looked for
        self._passed = 0  # characters of tokens that may not stop
        self._begun = [0] * len(self.stop)  # how many characters of each stop text the text ends with
        self._followed = 0  # characters of the text that this holds for
        self._final = False
        self._known = known_of(_TEXTS, tokenizer)
        self._joins = joins(tokenizer)

    def push(self, token: int, *, may_stop: bool = True) -> None:
        """Append a token; afterwards ``stopped`` says whether a stop text is complete. may_stop: False for a token that
        ends no text: stop texts count only where a later token completes them."""
        if self.tokenizer is None or self.stopped:
            return
        self._ids.append(token)
        self._may_stop = may_stop
        if self._answer is not None and token in self._answer.hidden:
            self._answer.push(self._answer.hidden[token], shown=False)
        self._decode(final=False)
        if self.stop and not may_stop:
            self._passed = len(self.text) + self._num_waiting()

    def finish(self) -> None:
        """No more tokens: release held-back text (an incomplete character becomes U+FFFD, an incomplete stop text
        stays)."""
        if self.tokenizer is not None and not self.stopped:
            self._decode(final=True)
            if self._answer is not None:
                self._answer.finish()
                self._search()
        self._final = True

    def take(self) -> str:
        """The text that became final since the last take."""
        end = len(self.text) if self.stopped or self._final else len(self.text) - self._held()
        piece = self.text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _decode(self, *, final: bool) -> None:
        if self._joins and self._decoded == len(self._ids) - 1:
            text = self._text_of_one(self._ids[-1])
            if text and "\ufffd" not in text:  # whole characters behind whole ones: no neighbour changes them
                self._add(text, len(self._ids))
                return
        settled = self._ids[self._window : self._decoded]
        before = self._text_of_one(settled[0]) if len(settled) == 1 else self._text_of(settled)
        now = self._text_of(self._ids[self._window :])
        if len(now) > len(before) and (final or not now.endswith("\ufffd")):
            self._add(now[len(before) :], len(self._ids))
        elif len(self._ids) - self._decoded >= MOST_PENDING:
            self._let_go(before, now)

    def _text_of(self, ids: list[int]) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _text_of_one(self, token: int) -> str:
        """The same of one token, which is asked for in most steps: kept, as there are only so many."""
        text = self._known.get(token)
        if text is None:
            text = self._known[token] = self._text_of([token])
        return text

    def _add(self, piece: str, decoded: int) -> None:
        """Append the text of the tokens before ``decoded`` that is not in ``text`` yet."""
        self.text += piece
        self._window, self._decoded = self._decoded, decoded
        if self._answer is not None:
            self._answer.push(piece)
        self._search()

    def _search(self) -> None:
        """Look for stop texts in what has come since: within the answer, where they end that alone."""
        first = 0 if self._answer is None else None if self._answer.is_open else self._answer.begin
        if not self._may_stop or self.stopped or first is None:
            return
        begin = max(self._searched, self._passed)
        found = [self.text.find(stop, max(first, begin - len(stop) + 1)) for stop in self.stop]
        self._searched = len(self.text)
        if any(at >= 0 for at in found):
            self.text, self.stopped = self.text[: min(at for at in found if at >= 0)], True

    def _let_go(self, before: str, now: str) -> None:
        """Many tokens have made no whole character: settle all but the last few, where that changes nothing of ``now``."""
        cut = len(self._ids) - LONGEST_CHARACTER
        if len(now) <= len(before):  # special tokens, which are not shown
            if self._text_of(self._ids[self._window : self._decoded] + self._ids[cut:]) == now:
                del self._ids[self._decoded : cut]
            return
        settled = self._text_of(self._ids[self._window : cut])
        if len(settled) > len(before) and settled + self._text_of(self._ids[cut:]) == now:
            self._add(settled[len(before) :], cut)

    def _num_waiting(self) -> int:
        """How many whole characters wait for an incomplete one after them."""
        if self._decoded == len(self._ids):
            return 0
        before, now = self._text_of(self._ids[self._window : self._decoded]), self._text_of(self._ids[self._window :])
        return len(now[len(before) :].rstrip("\ufffd"))

    def _held(self) -> int:
        """Length of the longest end of the text that may become a stop text."""
        if self._answer is not None:
            first = self._answer.begin
            if first is None or self._answer.is_open:
                return 0 if first is None else len(self.text) - first
            if self._followed < first:
                self._followed, self._begun = first, [0] * len(self.stop)
        text, self._followed = self.text[self._followed :], len(self.text)
        for place, stop in enumerate(self.stop):
            begun = _follow(stop, self._begun[place], text)
            self._begun[place] = begun if begun < len(stop) else _borders(stop)[-1]  # a whole one that did not stop
        return max(self._begun, default=0)


def joins(tokenizer: object) -> bool:
    """Whether the text of tokens is their own texts one behind the other, where those are of whole characters: each token
    stands for bytes, and nothing is done to the text afterwards. To be known rather than tried: a call of ``decode`` after
    a pass takes 35 microseconds."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    cleans = getattr(tokenizer, "clean_up_tokenization_spaces", True)
    is_known = isinstance(tokenizer, PlainTokenizer) or type(tokenizer).__module__.startswith("transformers.")
    return cleans is False and is_known and type(decoder) is ByteLevel


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_TEXTS: WeakKeyDictionary[Tokenizer, dict[int, str]] = WeakKeyDictionary()


def known_of(
    store: WeakKeyDictionary[Tokenizer, dict[_Key, _Value]], tokenizer: Tokenizer | None
) -> dict[_Key, _Value]:
    """What is known of a tokenizer, for as long as it lives; nothing where no reference to it can be kept."""
    try:
        return {} if tokenizer is None else store.setdefault(tokenizer, {})
    except TypeError:
        return {}


def _follow(stop: str, begun: int, text: str) -> int:
    """How many characters of stop a text ends with once ``text`` is appended, if it ended with ``begun`` before. A step
    or two a character: comparing every end with every stop text took 5 ms a token for the longest ones allowed."""
    borders = _borders(stop)
    for letter in text:
        while begun and (begun == len(stop) or stop[begun] != letter):
            begun = borders[begun - 1]
        begun += stop[begun] == letter
    return begun


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """[len(stop)] the longest proper beginning of stop that its first 1, 2, ... characters end with (Knuth, Morris and
    Pratt 1977)."""
    found = [0]
    size = 0
    for letter in stop[1:]:
        while size and stop[size] != letter:
            size = found[size - 1]
        size += stop[size] == letter
        found.append(size)
    return tuple(found)
