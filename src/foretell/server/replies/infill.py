"""Answers of ``/infill``, in llama.cpp's form."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class InfillReply(BaseModel):
    """A text, or a piece of it: then content and stop alone. With response_fields any part of it."""

    model_config = ConfigDict(extra="allow")

    content: str | None = None
    stop: bool | None = Field(None, description="Whether this is the end.")
    model: str | None = None
    seed: int | None = None
    stop_type: Literal["eos", "limit", "word"] | None = None
    stopping_word: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = Field(None, description="Of the prompt.")
    tokens_cached: int | None = Field(None, description="Of these, known from earlier requests.")
    truncated: bool | None = Field(None, description="Whether some of the request was left out to fit.")
    timings: dict[str, float] | None = Field(None, description="Tokens read, written and guessed, and the times.")
