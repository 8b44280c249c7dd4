"""Requests of ``/infill``, llama.cpp's route for editors."""

from typing import Annotated

from pydantic import Field

from foretell.server.protocol.fields import INT32, Ignored, Strict, Text
from foretell.server.protocol.requests import MAX_MESSAGES
from foretell.server.protocol.sampling import Sampling


class ExtraFile(Strict):
    """Text from elsewhere in the project."""

    text: str
    filename: str | None = None
    time: Ignored = None


class InfillRequest(Sampling):
    """A gap to fill."""

    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text after the gap.")
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = Field(
        None, description="Other texts, the least important first: where all do not fit the context, the last are kept."
    )
    prompt: str | None = Field(None, description="The beginning of what fills the gap: the line up to the cursor.")
    temperature: float | None = Field(None, ge=0, le=100, description="Default 0: greedy.")
    n: Annotated[int, Field(ge=1, le=1)] | None = Field(None, description="One text is made.")
    n_predict: int | None = Field(
        None,
        ge=-1,
        le=INT32,
        description="Another name of max_tokens; -1: as many as fit; 0: the prompt is read alone.",
    )
    n_indent: int | None = Field(
        None, ge=0, le=INT32, description="The text ends before a line that is indented by fewer blanks and tabs."
    )
    t_max_predict_ms: int | None = Field(
        None, ge=0, le=INT32, description="So long after its first token the text ends at the next token, if it has more "
        "than a line. 0: no limit.",
    )  # fmt: skip
    t_max_prompt_ms: int | None = Field(
        None,
        ge=0,
        le=INT32,
        description="Without effect, as in llama.cpp; the header x-foretell-without-effect names it.",
    )
    samplers: list[Text] | None = Field(
        None, description="Without effect: what is asked for by name (top_k, ...) applies, in this server's order."
    )
    n_cache_reuse: Ignored = None
    response_fields: list[Annotated[str, Field(max_length=256)]] | None = Field(
        None, description="These fields of the answer alone; a/b is the field b of a, and becomes one named 'a/b'."
    )
