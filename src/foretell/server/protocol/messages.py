"""Messages of a conversation, as clients give them and send answers back."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from foretell.server.protocol.fields import TEXT_ALONE, Ignored, NoImages, Returned, empty
from foretell.server.protocol.tools import GivenCall


def text_alone(given: Any) -> Any:
    """A part of a message as it is. Raises ValueError for one of a type that is no text's."""
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind not in ("text", "input_text", "output_text", "refusal"):
        raise ValueError(f"a part of type {kind!r:.40} is not read: {TEXT_ALONE}")
    return given


class TextPart(Returned):
    """A part of a message."""

    type: Literal["text"]
    text: str
    annotations: Ignored = None
    citations: Ignored = None


class RefusalPart(Returned):
    """A part of a message in which the model declined."""

    type: Literal["refusal"]
    refusal: str


Parts = Annotated[list[Annotated[TextPart, BeforeValidator(text_alone)]], Field(fail_fast=True)]
SaidParts = Annotated[
    list[Annotated[TextPart | RefusalPart, Field(discriminator="type"), BeforeValidator(text_alone)]],
    Field(fail_fast=True),
]


class GivenMessage(Returned):
    """A message to the model."""

    role: Literal["system", "developer", "user"]
    content: str | Parts
    name: str | None = None
    images: NoImages = None


class ToolMessage(Returned):
    """The result of a call."""

    role: Literal["tool"]
    content: str | Parts | None = None
    tool_call_id: str | None = None
    name: str | None = None
    images: NoImages = None


class AssistantTurn(Returned):
    """A message of the model: of this server's answers, of other servers', or as clients keep them."""

    role: Literal["assistant"]
    content: str | SaidParts | None = None
    name: str | None = None
    tool_calls: Annotated[list[GivenCall], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = Field(None, description="What was thought: for templates that read it.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    reasoning_details: Ignored = None
    thinking_blocks: Ignored = None
    refusal: Ignored = None
    annotations: Ignored = None
    parsed: Ignored = None
    images: NoImages = None
    audio: Annotated[None, empty(f"audio is not read: {TEXT_ALONE}")] = None
    function_call: Annotated[None, empty("give tool_calls")] = None


Message = Annotated[GivenMessage | ToolMessage | AssistantTurn, Field(discriminator="role")]
"""A turn of the conversation."""
