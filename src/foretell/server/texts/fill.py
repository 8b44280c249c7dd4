"""Text between two texts (fill in the middle): the tokens by which a model was taught it, and prompts made of them.

The order is prefix, suffix, middle, as llama.cpp's default; models without a middle token go on with the prefix after the
suffix. Extra files come first, so that the prefix store finds them however the cursor moves.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

REPOSITORY, FILE = "repository", "filename"  # where a request does not say how they are called
SPELLINGS = (
    # prefix, suffix, middle (none: the text goes on after the prefix), repository, file
    (("<|fim_prefix|>",), ("<|fim_suffix|>",), ("<|fim_middle|>",), ("<|repo_name|>",),
     ("<|file_sep|>", "<|file_separator|>")),
    (("<fim_prefix>",), ("<fim_suffix>",), ("<fim_middle>",), ("<repo_name>", "<reponame>"), ("<file_sep>", "<filename>")),
    (("<fim-prefix>",), ("<fim-suffix>",), ("<fim-middle>",), (), ()),
    (("▁<PRE>", "<PRE>"), ("▁<SUF>", "<SUF>"), ("▁<MID>", "<MID>"), (), ()),
    (("<｜fim▁begin｜>",), ("<｜fim▁hole｜>",), ("<｜fim▁end｜>",), (), ()),
    (("[PREFIX]",), ("[SUFFIX]",), ("[MIDDLE]",), (), ()),
)  # fmt: skip
"""Of Qwen and CodeGemma; StarCoder and Granite; SantaCoder; Code Llama; DeepSeek; Codestral."""
ENDS = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<EOT>")
"""What models write where the gap is filled, beside the tokens above and the end tokens of any text."""


@dataclass(frozen=True)
class FillTokens:
    """Ids of a model's tokens. None: it has none for this."""

    prefix: int
    suffix: int
    middle: int | None = None
    repository: int | None = None
    file: int | None = None
    ends: tuple[int, ...] = ()  # all that end the text, those above among them

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int) -> "FillTokens | None":
        """Those that its file names (``fill_ids``, as llama.cpp reads GGUF's metadata), else those spelled as in
        SPELLINGS; None where a prefix or a suffix has none. vocab_size: the model's, which may have fewer tokens."""
        listed: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
        known = {text: token for text, token in listed.items() if token < vocab_size}
        named: dict[str, int] = getattr(tokenizer, "fill_ids", {})
        for row in SPELLINGS:
            found = [next((known[one] for one in spelled if one in known), None) for spelled in row]
            found = [named.get(key, one) for key, one in zip(("pre", "suf", "mid", "rep", "sep"), found, strict=True)]
            prefix, suffix, middle, repository, file = found
            if prefix is not None and suffix is not None:
                ends = {token for token in found if token is not None} | {known[one] for one in ENDS if one in known}
                return cls(prefix, suffix, middle, repository, file, tuple(sorted(ends)))
        return None

    def around(
        self, first: Sequence[int], prefix: Sequence[int], suffix: Sequence[int], begun: Sequence[int]
    ) -> list[int]:
        """The prompt. first: what stands before all (BOS, extra files); begun: the beginning of the middle."""
        if self.middle is None:
            return [*first, self.suffix, *suffix, self.prefix, *prefix, *begun]
        return [*first, self.prefix, *prefix, self.suffix, *suffix, self.middle, *begun]


class Spelled:
    """The vocabulary by its spelling, to find the tokens that go on with a text of ASCII letters, digits and a space."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        known: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
        # Byte-level vocabularies write a space as one of these letters, SentencePiece's as the other.
        self._sorted = sorted(
            (token.replace("Ġ", " ").replace("▁", " "), number)
            for token, number in known.items()
            if number < vocab_size
        )
        self.texts = {number: text for text, number in self._sorted}

    def onward(self, text: str) -> list[int]:
        """Ids of tokens that begin with a text, or that it begins with."""
        at = bisect_left(self._sorted, (text, -1))
        longer = takewhile(lambda one: one[0].startswith(text), self._sorted[at:])
        found = [number for _, number in longer]
        for size in range(1, len(text)):
            place = bisect_left(self._sorted, (text[:size], -1))
            shorter = takewhile(lambda one, size=size: one[0] == text[:size], self._sorted[place:])  # type: ignore[misc]
            found += [number for _, number in shorter]
        return found


class Begun:
    """A LogitsProcessor: an output that begins with a text, the part of a word before the cursor. It is written again, as a
    word's own tokens are seldom those of its part and the rest; after it any token may come."""

    error, left_out = "", ()

    def __init__(self, text: str, spelled: Spelled, num_prompt: int) -> None:
        self._text, self._spelled, self._num_prompt = text, spelled, num_prompt

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """See ``LogitsProcessor``."""
        rest = self._text
        for token in ids[self._num_prompt :].tolist():
            written = self._spelled.texts.get(token, "")
            if not rest or not rest.startswith(written):
                return logits  # all is written, or this guess is none that can be kept
            rest = rest[len(written) :]
        onward = self._spelled.onward(rest) if rest else []
        if not onward:
            return logits
        allowed = torch.tensor(onward, device=logits.device)
        return torch.full_like(logits, -torch.inf).scatter_(0, allowed, logits[allowed])


class Fill:
    """All that a server needs of a tokenizer to fill gaps."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """Read its vocabulary; ``tokens`` is None where the model was not taught it."""
        self.tokens, self._tokenizer, self._vocab_size = FillTokens.of(tokenizer, vocab_size), tokenizer, vocab_size

    @cached_property
    def spelled(self) -> Spelled:
        """See ``Spelled``: a sort of the whole vocabulary, once."""
        return Spelled(self._tokenizer, self._vocab_size)
