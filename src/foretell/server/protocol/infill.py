"""Requests of ``/infill``, llama.cpp's route for editors."""

from typing import Annotated

from pydantic import Field

from foretell.server.protocol.fields import INT32, Ignored, One, Strict, Text
from foretell.server.protocol.requests import MAX_MESSAGES
from foretell.server.protocol.sampling import Sampling


class ExtraFile(Strict):
    """Text from elsewhere in the project."""

    text: str
    filename: str = "filename"
    time: Ignored = None


class InfillRequest(Sampling):
    """A gap to fill. The default temperature is 0."""

    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text after the gap.")
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        default=[],
        description="Other texts, the least important first: where not all fit the context, the last are kept.",
    )
    prompt: str = Field("", description="The beginning of what fills the gap: the line up to the cursor.")
    n: One | None = None
    n_predict: int | None = Field(None, ge=-1, le=INT32, description="As max_tokens; -1: as many as fit the context.")
    n_indent: int = Field(0, ge=0, le=INT32, description="A line that is indented by less ends the text before it.")
    t_max_predict_ms: int = Field(
        0, ge=0, le=INT32, description="So long after its first token a text of more than a line ends; 0: no limit."
    )
    t_max_prompt_ms: int = Field(0, ge=0, le=INT32, description="Without effect, as in llama.cpp.")
    samplers: list[Text] | None = Field(None, description="Without effect: what is asked for by name (top_k) applies.")
    response_fields: list[str] | None = Field(
        None, description="These alone; of a/b the field b, under the name 'a/b'."
    )
