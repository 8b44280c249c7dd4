"""What a grammar leaves no choice about: the text that must come next, as guesses (jump-forward decoding, 2312.07104, 3.3).

White space is a choice that most grammars leave. It is guessed to be that of the JSON before: on one line, closed up or
with a space after ``:`` and ``,``, or one value a line, indented. The tokens are the tokenizer's own for that text; a model
may write it by others, so a pass checks them as it checks every guess.
"""

import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

MOST_PIECES, TAIL = 32, 64
"""Pieces that are put together, white space or a mark between two; tokens before them of which white space is learned."""
INDENT = 2
_BLANK = b" \n\t\r"
_DIGITS = b"-0123456789"
_BY_ID = re.compile(rb"\xff\[(\d+)\]")
_BREAK, _SPACE = re.compile(rb"[{\[,]\n"), re.compile(rb'"[:,](.)')
_STEP = re.compile(rb"(?:^|\n)( *)[^ \n][^\n]*[{\[]\n( +)|^[{\[]\n( +)")


def blank_before(mark: bytes, before: bytes) -> bytes:
    """The white space that JSON in the style of what stands before has between that and a mark."""
    text = before.rstrip(_BLANK)
    trail, last, line = before[len(text) :], text[-1:], text[text.rfind(b"\n") + 1 :]
    blank = b""
    if _BREAK.search(before):
        steps = [len(two or three) - len(one) for one, two, three in _STEP.findall(before)]
        step = steps[-1] if steps and steps[-1] > 0 else INDENT
        indent = len(line) - len(line.lstrip(b" "))
        opens, closes = last in (b"{", b"["), mark in (b"}", b"]")
        if last == b"," or opens != closes:
            blank = b"\n" + b" " * max(0, indent + step * (opens - closes))
    if not blank and last in (b":", b","):
        blank = b" " if (_SPACE.findall(before) or [b" "])[-1] in _BLANK else b""
    return blank[len(trail) :] if blank.startswith(trail) else b""


class ExpectedText:
    """Reads what comes off matchers of one tokenizer."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self._tokenizer, self._width = tokenizer, vocab_size

    @cached_property
    def _characters(self) -> list[tuple[int, int]]:
        """(byte, token) of ASCII characters that are tokens by themselves."""
        spelled = ((byte, self._tokenizer.tokenize_bytes(bytes([byte]))) for byte in range(128))
        return [(byte, ids[0]) for byte, ids in spelled if len(ids) == 1 and ids[0] < self._width]

    def read(self, matcher: LLMatcher, output: Sequence[int], bits: NDArray[np.uint8]) -> tuple[list[int], list[int]]:
        """The tokens that come, and those by which the matcher, which stood after the output, was moved to find them. bits:
        of the tokens that are permitted there."""
        before: bytes = self._tokenizer.decode_bytes(list(output[-TAIL:]))
        text, moved = b"", list[int]()
        for _ in range(MOST_PIECES):
            more: bytes = matcher.compute_ff_bytes() or self._only(matcher, before + text, None if moved else bits)
            tokens = self._tokens(more)
            taken = matcher.try_consume_tokens(tokens) if tokens else 0
            moved += tokens[:taken]
            if not tokens or taken < len(tokens):
                break
            text += more
        return self._tokens(text), moved

    def _tokens(self, text: bytes) -> list[int]:
        """As the tokenizer writes it. llguidance names tokens that have no text by their ids."""
        found: list[int] = []
        for place, part in enumerate(_BY_ID.split(text)):
            found += [int(part)] if place % 2 else self._tokenizer.tokenize_bytes(part)
        return found

    def _only(self, matcher: LLMatcher, before: bytes, bits: NDArray[np.uint8] | None) -> bytes:
        """The one character beside white space that may come, and the white space before it or before a number."""
        if matcher.is_error() or matcher.is_stopped() or matcher.is_accepting():
            return b""
        mask = matcher.compute_bitmask() if bits is None else bits.tobytes()
        may = bytes(byte for byte, token in self._characters if mask[token >> 3] >> (token & 7) & 1)
        mark = may.translate(None, _BLANK)
        if len(mark) != 1 and mark.translate(None, _DIGITS):
            return b""
        blank = blank_before(mark, before)
        return (blank if blank[:1] in may else b"") + (mark if len(mark) == 1 else b"")
