"""Messages of a conversation, as clients give them and send answers back."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from foretell.server.protocol.fields import Ignored, JsonObject, Returned
from foretell.server.protocol.tools import GivenCall

NOT_TEXT = ("image", "input_image", "audio", "input_audio", "video", "file", "input_file", "document", "search_result")
"""How the types of other parts of messages begin."""


class TextPart(Returned):
    """A part of a message."""

    type: Literal["text"]
    text: str
    annotations: Ignored = None
    citations: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind.startswith(NOT_TEXT):
            raise ValueError(f"a part of type {kind!r:.40} is not read: texts alone are, of multi-modal models too")
        return given


class RefusalPart(Returned):
    """A part of a message in which the model declined."""

    type: Literal["refusal"]
    refusal: str


Parts = Annotated[list[TextPart], Field(fail_fast=True)]
SaidParts = Annotated[list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]], Field(fail_fast=True)]


class GivenMessage(Returned):
    """A message to the model."""

    role: Literal["system", "developer", "user"]
    content: str | Parts
    name: str | None = None


class ToolMessage(Returned):
    """The result of a call."""

    role: Literal["tool"]
    content: str | Parts | None = None
    tool_call_id: str | None = None
    name: str | None = None


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
    images: Annotated[list[JsonObject], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


Message = Annotated[GivenMessage | ToolMessage | AssistantTurn, Field(discriminator="role")]
"""A turn of the conversation."""
