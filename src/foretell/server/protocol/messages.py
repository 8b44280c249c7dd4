"""Messages of a conversation, as clients give them and send answers back."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from foretell.server.protocol.fields import TEXT_ALONE, NoImages, Strict, empty
from foretell.server.protocol.tools import GivenCall, GivenFunctionCall


def text_alone(given: Any) -> Any:
    """A part of a message as it is. Raises ValueError for one of a type that is no text's."""
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind not in ("text", "input_text", "output_text", "refusal"):
        raise ValueError(f"a part of type {kind!r:.40} is not read: {TEXT_ALONE}")
    return given


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(Strict):
    """A part of a message in which the model declined."""

    type: Literal["refusal"]
    refusal: str


Parts = Annotated[list[Annotated[TextPart, BeforeValidator(text_alone)]], Field(fail_fast=True)]
SaidParts = Annotated[
    list[Annotated[TextPart | RefusalPart, Field(discriminator="type"), BeforeValidator(text_alone)]],
    Field(fail_fast=True),
]


class GivenMessage(Strict):
    """A message to the model."""

    role: Literal["system", "developer", "user"]
    content: str | Parts
    name: str | None = None
    images: NoImages = None


class ToolMessage(Strict):
    """The result of a call."""

    role: Literal["tool", "function"]
    content: str | Parts | None = None
    tool_call_id: str | None = None
    name: str | None = None
    images: NoImages = None


class AssistantTurn(Strict):
    """A message of the model: of this server's answers, of other servers', or as clients keep them."""

    role: Literal["assistant"]
    content: str | SaidParts | None = None
    name: str | None = None
    tool_calls: Annotated[list[GivenCall], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = Field(None, description="What was thought: for templates that read it.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    images: NoImages = None
    audio: Annotated[None, empty(f"audio is not read: {TEXT_ALONE}")] = None
    function_call: GivenFunctionCall | None = Field(None, description="The older form of tool_calls, of one call.")

    @model_validator(mode="after")
    def _as_calls(self) -> Self:
        if self.function_call is not None:
            self.tool_calls = [*(self.tool_calls or ()), GivenCall(function=self.function_call)]
        return self


Message = Annotated[GivenMessage | ToolMessage | AssistantTurn, Field(discriminator="role")]
"""A turn of the conversation."""
