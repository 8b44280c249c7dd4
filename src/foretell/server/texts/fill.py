"""Text between texts (fill in the middle): the tokens by which a model was taught it, and prompts made of them."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),  # Qwen
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "", "<|file_separator|>"),  # CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),  # StarCoder 2
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", "<filename>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("[PREFIX]", "[SUFFIX]"),  # Codestral: the text goes on after the prefix
)
"""Prefix, suffix, middle, name of a repository, of a file. Those that are known to a vocabulary most count."""
ENDS = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>")
"""What models write where the gap is filled, beside the tokens above and the end tokens of any text."""
KEYS = ("pre", "suf", "mid", "rep", "sep")


class Fill:
    """A model's tokens for gaps, and its vocabulary by spelling.

    The tokens are those that its file names (``fill_ids``, of GGUF's metadata), else those that are spelled as in
    SPELLINGS. ``prefix`` is None where the model was not taught it, any other one where it has none.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """vocab_size: the model's, which may have fewer tokens than its tokenizer."""
        known: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
        self._known = {text: token for text, token in known.items() if token < vocab_size}
        spelled = max(SPELLINGS, key=lambda row: sum(text in self._known for text in row))
        found = {key: self._known.get(text) for key, text in zip(KEYS, spelled, strict=False)}
        found |= getattr(tokenizer, "fill_ids", {})
        self.prefix, self.suffix, self.middle, self.repository, self.file = map(found.get, KEYS)
        if self.prefix is None or self.suffix is None:
            self.prefix = self.suffix = None
        ends = {*found.values(), *map(self._known.get, ENDS)}
        self.ends = sorted(token for token in ends if token is not None)

    def prompt(
        self, first: Sequence[int], prefix: Sequence[int], suffix: Sequence[int], begun: Sequence[int]
    ) -> list[int]:
        """Prefix, suffix, middle, as llama.cpp's default. first: what stands before all; begun: of the middle."""
        before, after = [self.prefix, *prefix], [self.suffix, *suffix]
        order = [*after, *before] if self.middle is None else [*before, *after, self.middle]
        return [token for token in (*first, *order, *begun) if token is not None]

    @cached_property
    def texts(self) -> dict[int, str]:
        """What tokens spell. Byte-level vocabularies write a space as one letter, SentencePiece's as another."""
        return {token: text.replace("Ġ", " ").replace("▁", " ") for text, token in self._known.items()}

    @cached_property
    def _sorted(self) -> list[tuple[str, int]]:
        return sorted((text, token) for token, text in self.texts.items())

    def onward(self, text: str) -> list[int]:
        """The tokens that begin with a text, or with which it begins."""
        at = [bisect_left(self._sorted, (one,)) for one in (text, text + "\U0010ffff")]
        pairs = self._sorted[slice(*at)]
        for size in range(1, len(text)):
            place = bisect_left(self._sorted, (text[:size],))
            pairs += [one for one in self._sorted[place : place + 1] if one[0] == text[:size]]
        return [token for _, token in pairs]


class Begun:
    """A LogitsProcessor: an output that begins with a text of ASCII letters and spaces, the part of a word before the
    cursor. It is written anew, as a word's own tokens are seldom those of its part and the rest."""

    error, left_out = "", ()

    def __init__(self, text: str, fill: Fill, num_prompt: int) -> None:
        self._text, self._fill, self._num_prompt = text, fill, num_prompt

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """See ``LogitsProcessor``."""
        rest = self._text
        for token in ids[self._num_prompt :].tolist():
            written = self._fill.texts.get(token, "")
            if not rest or not rest.startswith(written):
                return logits  # all is written, or this is a guess that is not kept
            rest = rest[len(written) :]
        if not rest or not (onward := self._fill.onward(rest)):
            return logits
        made = torch.full_like(logits, -torch.inf)
        made[onward] = logits[onward]
        return made
