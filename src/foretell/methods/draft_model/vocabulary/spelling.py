"""What the tokens of a tokenizer stand for, in bytes, and bytes as tokens: the ground that two vocabularies share.

Texts are compared as bytes: a token may hold a part of a character, and what ``decode`` shows for one depends on its
neighbours.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import VocabularyMismatchError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # sentencepiece writes spaces so
_ANCHOR = "\n"  # before a text, so that tokenizers which begin texts with a space add none to it


class Spelling:
    """A vocabulary of V tokens as bytes, and texts as its tokens.

    Special tokens (of chat formats, ends) have no bytes: they mark a place and are no text.
    """

    def __init__(self, tokenizer: Any, size: int, *, name: str, end_token_ids: Sequence[int] = ()) -> None:
        """tokenizer: of transformers, byte-level or sentencepiece-like. size: V, the columns of the model's logits.
        name: the model's, for messages. Raises VocabularyMismatchError for tokenizers of other kinds (WordPiece)."""
        self.tokenizer, self.name = tokenizer, name
        added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if index < size}
        self.special = {index: str(token) for index, token in added.items() if token.special}
        self.ends = [index for index in end_token_ids if index < size]
        for index in self.ends:
            self.special.setdefault(index, str(tokenizer.convert_ids_to_tokens(index)))
        vocab = {index: token for token, index in tokenizer.get_vocab().items() if index < size}
        bytewise = sum(_is_byte_level(token) for token in vocab.values()) > 0.99 * len(vocab)
        spell = _byte_level if bytewise else _sentencepiece
        self.bytes: list[bytes | None] = [None] * size
        self.is_fallback = [False] * size  # sentencepiece's <0x0A>: used where no other piece has the text
        for index, token in vocab.items():
            if index in self.special:
                continue
            self.bytes[index] = str(added[index]).encode() if index in added else spell(token)
            self.is_fallback[index] = not bytewise and _BYTE.fullmatch(token) is not None
        self._anchor = self._plain(_ANCHOR)
        self.adds_space = not bytewise and self._spelled(self._plain("a")) == b" a"
        if self._spelled(self._plain("a b")).lstrip(b" ") != b"a b":
            raise VocabularyMismatchError(
                f"the tokens of {name!r} do not spell texts byte by byte ('a b' came back as "
                f"{self._spelled(self._plain('a b'))!r}): byte-level and sentencepiece vocabularies can be translated"
            )

    @cached_property
    def by_bytes(self) -> dict[bytes, int]:
        """The token of each text: of several the one that is no fallback, then the lowest."""
        found: dict[bytes, int] = {}
        for index in sorted(range(len(self.bytes)), key=lambda at: (self.is_fallback[at], at)):
            spelled = self.bytes[index]
            if spelled:
                found.setdefault(spelled, index)
        return found

    @cached_property
    def start(self) -> list[int]:
        """What the tokenizer puts before a text (BOS), as a rule one token or none."""
        plain, whole = self._plain("a"), list(self.tokenizer.encode("a"))
        at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
        return whole[:at]

    def encode(self, text: bytes, *, begins: bool = False) -> list[int]:
        """Tokens that spell exactly this text: as the tokenizer splits it where it can, else the longest piece first. A
        byte that no token has is left out.

        begins: the text begins a document, and a space may be added before it. Only whole characters at the ends can be
        split by the tokenizer: what is cut from one is spelled by itself.
        """
        first, last = _whole(text)
        middle = self._encode(text[first:last].decode(), begins=begins and not first) if first < last else []
        return [*self._longest(text[:first]), *middle, *self._longest(text[last:])] if middle is not None else (
            self._longest(text)
        )  # fmt: skip

    def _encode(self, text: str, *, begins: bool) -> list[int] | None:
        """None where the tokenizer changes the text (normalises it, drops what it does not know)."""
        wanted, ids = text.encode(), self._plain(text)
        spelled = self._spelled(ids)
        if spelled == wanted or (begins and spelled == b" " + wanted):
            return ids
        ids = self._plain(_ANCHOR + text)
        size = len(self._anchor)
        if ids[:size] == self._anchor and self._spelled(ids[size:]) == wanted:
            return ids[size:]
        return None

    def _longest(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            for end in range(min(len(text), at + self._most), at, -1):
                found = self.by_bytes.get(text[at:end])
                if found is not None:
                    ids.append(found)
                    at = end
                    break
            else:
                at += 1
        return ids

    @cached_property
    def _most(self) -> int:
        return max(map(len, self.by_bytes), default=1)

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _spelled(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.spell(token) for token in ids)

    def spell(self, token: int) -> bytes:
        """The bytes of a token: of a special one its name, which is no text of the model's."""
        spelled = self.bytes[token] if token < len(self.bytes) else None
        return spelled if spelled is not None else self.special.get(token, "").encode()


def _whole(text: bytes) -> tuple[int, int]:
    """Bounds of the valid UTF-8 inside a text of which parts of characters may be cut off at both ends; (0, 0) where it
    is not valid in between either."""
    first = 0
    while first < min(3, len(text)) and text[first] & 0xC0 == 0x80:
        first += 1
    for last in range(len(text), max(first, len(text) - 4), -1):
        try:
            text[first:last].decode()
        except UnicodeDecodeError:
            continue
        return first, last
    return 0, 0


def _unicode_of_bytes() -> dict[str, int]:
    """Characters that byte-level vocabularies write bytes as (GPT-2): printable ones are themselves, the others follow
    from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _unicode_of_bytes()


def _is_byte_level(token: str) -> bool:
    return _SPACE not in token and all(character in _BYTES for character in token)


def _byte_level(token: str) -> bytes:
    if not _is_byte_level(token):
        return token.encode()  # an added token, which is written as it is
    return bytes(_BYTES[character] for character in token)


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


class Translation:
    """Two vocabularies, Vt tokens of the target and Vd of the draft model."""

    def __init__(self, target: Spelling, draft: Spelling) -> None:
        self.target, self.draft = target, draft

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """([n], [n]) int64 ids, target's and draft's, of the tokens that both have: each spells the same bytes, is the same
        special token, or ends a text. By ascending target id; no id stands twice."""
        pairs: dict[int, int] = {}
        theirs = self.draft.by_bytes
        for spelled, token in self.target.by_bytes.items():
            if spelled in theirs:
                pairs[token] = theirs[spelled]
        named = {name: token for token, name in self.draft.special.items()}
        for token, name in self.target.special.items():
            if name in named:
                pairs[token] = named[name]
        taken = set(pairs.values())
        ends = [token for token in self.draft.ends if token not in taken]
        pairs |= zip([end for end in self.target.ends if end not in pairs], ends, strict=False)
        chosen = sorted(pairs)
        return torch.tensor(chosen, dtype=torch.int64), torch.tensor([pairs[token] for token in chosen]).long()

    @cached_property
    def draft_of(self) -> list[int]:
        """[Vt] the draft's id of each target token; -1: it has none."""
        table = torch.full((len(self.target.bytes),), -1, dtype=torch.int64)
        ours, theirs = self.pairs
        table[ours] = theirs
        ids: list[int] = table.tolist()
        return ids

    def text(self, ids: Sequence[int]) -> list[int]:
        """A whole text of target tokens in the draft's: what the draft's tokenizer would make of it. Special tokens stand
        for themselves, or are spelled out where the draft has none of the name."""
        out, rest = list(self.draft.start), list(ids)
        if rest[: len(self.target.start)] == self.target.start:
            rest = rest[len(self.target.start) :]
        run: list[bytes] = []
        begins = True
        for token in [*rest, -1]:
            if token >= 0 and self._own(token) < 0:
                run.append(self.target.spell(token))
                continue
            said = b"".join(run)
            if begins and said.startswith(b" ") and self.target.adds_space:
                said = said[1:]
            out += self.draft.encode(said, begins=begins)
            run, begins = [], False
            if token >= 0:
                out.append(self._own(token))
        return out or self.draft.encode(b"\n")  # a draft model needs something to read

    def one(self, token: int) -> list[int]:
        """A target token by itself in the draft's tokens: one where both have it, else several; none where its bytes are
        not in the draft's vocabulary."""
        known = self.draft_of[token] if token < len(self.draft_of) else -1
        return [known] if known >= 0 else self.draft.encode(self.target.spell(token))

    @cached_property
    def _specials(self) -> dict[int, int]:
        ours, theirs = self.pairs
        return {a: b for a, b in zip(ours.tolist(), theirs.tolist(), strict=True) if a in self.target.special}

    def _own(self, token: int) -> int:
        """The draft's token for a special one of the target's; -1 for all others."""
        return self._specials.get(token, -1)
