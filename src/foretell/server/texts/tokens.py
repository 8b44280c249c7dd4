"""Single tokens as text and bytes, for log probabilities and provenance."""

import math
import re
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from foretell.engine.request.result import StepTrace
from foretell.engine.request.row import Piece

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


class TokenTexts:
    """Texts of single tokens, cached."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: an engine's, or None: tokens are then shown as their ids."""
        self.tokenizer = tokenizer
        # Not of methods: an object that holds itself would be freed by the collector alone.
        self.text = lru_cache(maxsize=65536)(partial(_text, tokenizer))
        self._is_hidden = lru_cache(maxsize=65536)(partial(_decodes_to_nothing, tokenizer))

    def spelling(self, token: int) -> list[int]:
        """UTF-8 bytes; of an incomplete character its bytes, where the tokenizer's vocabulary gives them."""
        text = self.text(token)
        spelled = self._spelled(token) if "\ufffd" in text else None
        return list(text.encode("utf-8", "replace") if spelled is None else spelled)

    def provenance(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Where each token came from."""
        return [
            {
                "token": self.text(piece.token_id),
                "token_id": piece.token_id,
                "source": piece.source,
                "logprob": None if piece.logprob is None else finite(piece.logprob),
            }
            for piece in pieces
        ]

    def tree(self, step: StepTrace) -> dict[str, Any]:
        """The guesses of one step."""
        return {
            "tokens": [self.text(token) for token in step.tokens],
            "token_ids": step.tokens,
            "parent": step.parent,
            "probability": [finite(value) for value in step.probability],
            "path": step.path,
            "bonus": step.bonus,
        }

    def chat_logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """OpenAI's shape of chat completions."""
        return {"content": [self._entry(piece) for piece in pieces], "refusal": None}

    def prompt_logprobs(self, pieces: Sequence[Piece]) -> list[dict[str, Any] | None]:
        """vLLM's shape, of a prompt: by the token's id."""
        return [None if _is_first(piece) else self._ranked(piece) for piece in pieces]

    def _ranked(self, piece: Piece) -> dict[str, Any]:
        ranks = {token: place for place, (token, _) in enumerate(piece.top_logprobs, 1)}
        found = {piece.token_id: _logprob(piece)} | dict(piece.top_logprobs)
        return {
            str(token): {"logprob": finite(value), "rank": ranks.get(token), "decoded_token": self.text(token)}
            for token, value in found.items()
        }

    def text_logprobs(self, pieces: Sequence[Piece], before: int, *, echo: str = "") -> dict[str, Any]:
        """OpenAI's shape of completions. before: characters before the text of which these are pieces. echo: that text
        where it is a prompt's; special tokens count where it shows them, which the text of an output never does."""
        offsets = []
        for piece in pieces:
            at = before + piece.offset
            offsets.append(at)
            if echo and self._is_hidden(piece.token_id) and echo.startswith(self.text(piece.token_id), at):
                before += len(self.text(piece.token_id))
        return {
            "tokens": [self.text(piece.token_id) for piece in pieces],
            "token_logprobs": [None if _is_first(piece) else _logprob(piece) for piece in pieces],
            "top_logprobs": [None if _is_first(piece) else self._best(piece) for piece in pieces],
            "text_offset": offsets,
        }

    def _best(self, piece: Piece) -> dict[str, float]:
        """By text; of tokens with the same text the likeliest. The token itself is always included."""
        best: dict[str, float] = {}
        for token, value in (*piece.top_logprobs, (piece.token_id, _logprob(piece))):
            best.setdefault(self.text(token), finite(value))
        return best

    def _entry(self, piece: Piece) -> dict[str, Any]:
        return {
            **self._one(piece.token_id, _logprob(piece)),
            "top_logprobs": [self._one(token, value) for token, value in piece.top_logprobs],
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": self.spelling(token)}

    def _spelled(self, token: int) -> bytes | None:
        """The bytes that a vocabulary spells: byte-level BPE's letters, or <0xE2>."""
        convert = getattr(self.tokenizer, "convert_ids_to_tokens", None)
        name = convert(token) if convert is not None else None
        if not isinstance(name, str):
            return None
        if (found := BYTE.fullmatch(name)) is not None:
            return bytes([int(found[1], 16)])
        letters = _byte_letters()
        return bytes(letters[char] for char in name) if all(char in letters for char in name) else None


def _text(tokenizer: Any, token: int) -> str:
    return str(token) if tokenizer is None else str(tokenizer.decode([token]))


def _decodes_to_nothing(tokenizer: Any, token: int) -> bool:
    """Whether a text leaves a token out."""
    return tokenizer is not None and not tokenizer.decode([token], skip_special_tokens=True)


def finite(value: float) -> float:
    """value, or the nearest number that JSON has."""
    return value if math.isfinite(value) else LOWEST


def _is_first(piece: Piece) -> bool:
    """Whether it is the first token of a prompt, which follows nothing."""
    return piece.source == "prompt" and piece.logprob is None


def _logprob(piece: Piece) -> float:
    return LOWEST if piece.logprob is None else finite(piece.logprob)


@lru_cache(maxsize=1)
def _byte_letters() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable letter: itself where it is one, else from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + at): byte for at, byte in enumerate(hidden)}
