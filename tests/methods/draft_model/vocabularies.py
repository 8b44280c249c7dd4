"""Awkward pairs of vocabularies, and language models over them that speak one language: a text that repeats."""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from foretell.methods.draft_model.vocabulary.spelling import Spelling, Translation
from tests.model.table import TableLM

TEXT = "the cat sat, the café's cat ate 10 rats; the end \U0001f600 .\n"
_TO_UNICODE = {}
for _byte in range(256):
    _known = 0x21 <= _byte < 0x7F or 0xA1 <= _byte < 0xAD or _byte >= 0xAE
    _TO_UNICODE[_byte] = chr(_byte) if _known else None
_next = 0x100
for _byte, _character in _TO_UNICODE.items():
    if _character is None:
        _TO_UNICODE[_byte] = chr(_next)
        _next += 1


def written(piece: bytes) -> str:
    """A piece as byte-level vocabularies write it."""
    return "".join(str(_TO_UNICODE[byte]) for byte in piece)


def byte_level(
    merges: Sequence[tuple[bytes, bytes]], *, special: Sequence[str] = ("<eos>",), alphabet: bytes | None = None
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over these merges. Special tokens come first. alphabet: the single bytes; None: all."""
    single = [bytes([byte]) for byte in (range(256) if alphabet is None else alphabet)]
    pieces = [written(piece) for piece in [*single, *dict.fromkeys(left + right for left, right in merges)]]
    vocab = {token: index for index, token in enumerate([*special, *pieces])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[(written(left), written(right)) for left, right in merges]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=special[0], clean_up_tokenization_spaces=False)


def sentencepiece(pieces: Sequence[str], merges: Sequence[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """BPE over characters, spaces as U+2581, one before every text, bytes to fall back on."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokens += [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    inner = Tokenizer(
        models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


def words() -> PreTrainedTokenizerFast:
    """Whole words with their spaces."""
    return byte_level(
        [
            (b"t", b"h"), (b"th", b"e"), (b" ", b"the"), (b"c", b"a"), (b"ca", b"t"), (b" ", b"cat"), (b"a", b"t"),
            (b"s", b"at"), (b" ", b"sat"), (b"\xc3", b"\xa9"), (b"at", b"e"), (b" ", b"ate"), (b"e", b"n"), (b"en", b"d"),
            (b"1", b"0"), (b"\xf0", b"\x9f"),
        ],
        special=("<eos>", "<turn>"),
    )  # fmt: skip


def halves() -> PreTrainedTokenizerFast:
    """Pieces that end inside of the other's: "he", "ca", " s", "at," and half an emoji."""
    return byte_level(
        [
            (b"h", b"e"), (b" ", b"t"), (b"c", b"a"), (b" ", b"c"), (b" ", b"s"), (b"a", b"t"), (b"f", b"\xc3"),
            (b"ca", b"f\xc3"), (b"\x9f", b"\x98"), (b" ", b"e"), (b"r", b"a"), (b"ra", b"t"), (b"n", b"d"), (b"s", b";"),
        ],
        special=("<turn>", "</end>"),
    )  # fmt: skip


def pieces() -> PreTrainedTokenizerFast:
    """Sentencepiece-like: another leading space, byte tokens for what it does not know."""
    space = "\u2581"
    return sentencepiece(
        [space, *"abcdefhnorst,.;'10\u00e9"],
        [
            ("t", "h"), ("th", "e"), (space, "the"), (space, "c"), (space + "c", "a"), ("a", "t"), ("s", "at"),
            (space, "sat"), ("e", "n"), (space, "1"), ("r", "at"),
        ],
    )  # fmt: skip


KINDS = {"words": words, "halves": halves, "pieces": pieces}


def spelling(tokenizer: Any, *, ends: Sequence[int] | None = None) -> Spelling:
    """Its spelling, in a vocabulary with three padded rows."""
    ids = [tokenizer.eos_token_id] if ends is None else ends
    return Spelling(tokenizer, len(tokenizer) + 3, name="toy", end_token_ids=ids)


def translation(target: str, draft: str) -> Translation:
    """Between two of KINDS."""
    return Translation(spelling(KINDS[target]()), spelling(KINDS[draft]()))


def speaker(tokenizer: Any, *, seed: int, sure: float = 0.9, text: str = TEXT, context: int = 6) -> TableLM:
    """A model that goes on as ``text`` does, over and over: tokens that continue it share ``sure`` of the mass, longer ones
    more, and a table of the seed has the rest."""
    spelled = spelling(tokenizer)
    size = len(spelled.bytes)
    noise = TableLM(size, seed=seed, context=2, sharpness=2.0, dtype=torch.float64, num_layers=1)
    cycle = text.encode() * 3
    once = len(text.encode())

    def probs(ids: tuple[int, ...]) -> Tensor:
        said = b"".join(spelled.spell(token) if token >= 0 and token not in spelled.special else b"" for token in ids)
        place = -1
        for length in range(min(len(said), once), 0, -1):
            place = cycle.find(said[-length:], once - length if length < once else 0)
            if place >= 0:
                place += length
                break
        known = torch.zeros(size, dtype=torch.float64)
        rest = cycle[place % once if place >= 0 else 0 :][:once]
        for token, piece in enumerate(spelled.bytes):
            if piece and rest.startswith(piece):
                known[token] = 4.0 ** len(piece)
        known[tokenizer.eos_token_id] = 0.02 * float(known.sum())
        other = noise.probs_after(ids[-2:])
        return sure * known / known.sum() + (1 - sure) * other if known.sum() > 0 else other

    ends = (tokenizer.eos_token_id,)
    return TableLM(
        size, probs=probs, context=context, dtype=torch.float64, num_layers=1, eos_token_ids=ends, name=f"speaker{seed}"
    )
