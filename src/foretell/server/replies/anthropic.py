"""Answers of ``/v1/messages``, in Anthropic's form."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foretell.server.replies.common import MetricsReply, Reply


class SaidText(Reply):
    """A text."""

    type: Literal["text"]
    text: str


class SaidThinking(Reply):
    """What was thought before."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""] = Field(description="Thoughts are not signed.")


class SaidToolUse(Reply):
    """A call of the model's."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(description="Empty where a limit cut the call off.")


class ThinkingDetails(Reply):
    """Of the output's tokens."""

    thinking_tokens: int


class MessageUsage(Reply):
    """Tokens of a message."""

    input_tokens: int = Field(description="Without those found in the prefix store.")
    cache_creation_input_tokens: int = Field(description="0: texts are kept at no price.")
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails | None = None


class MessageReply(Reply):
    """A whole message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[SaidText | SaidThinking | SaidToolUse, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage
    metrics: MetricsReply | None = None


class TokenCount(Reply):
    """Of a prompt."""

    input_tokens: int


class MessageEvent(BaseModel):
    """An event of a message's stream, in Anthropic's forms; its type is the event's name too."""

    model_config = ConfigDict(extra="allow")

    type: str


class MessageFault(Reply):
    """What is wrong."""

    type: str
    message: str


class MessageError(Reply):
    """Every error."""

    type: Literal["error"]
    error: MessageFault
