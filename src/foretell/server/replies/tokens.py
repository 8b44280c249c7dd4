"""Answers of ``/tokenize``, ``/detokenize`` and ``/v1/embeddings``."""

from typing import Literal

from pydantic import Field

from foretell.server.replies.common import Reply


class TokenPiece(Reply):
    """A token and its text."""

    id: int
    piece: str


class TokensReply(Reply):
    """The tokens; of a content nothing else, as llama.cpp has it."""

    tokens: list[int] | list[TokenPiece]
    count: int | None = None
    max_model_len: int | None = None
    token_strs: list[str] | None = None


class TextOfTokens(Reply):
    """The text, under vLLM's name and llama.cpp's."""

    prompt: str
    content: str


class Embedding(Reply):
    """Of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(
        description="Of length 1; base64 of little-endian float32 where it was asked for."
    )


class EmbeddingUsage(Reply):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(Reply):
    """The texts' last hidden states, pooled."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    pooling: Literal["mean", "last"]
    usage: EmbeddingUsage
