"""Answers of ``/v1/chat/completions``, ``/v1/completions`` and ``/infill``, whole and in a stream."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from foretell.server.protocol.tools import FunctionCall, ToolCall
from foretell.server.replies.common import (
    ChatLogprobs,
    Envelope,
    PromptLogprobs,
    Reply,
    ShortUsage,
    SpeculationReply,
    TextLogprobs,
    Usage,
)


class AssistantMessage(Reply):
    """The model's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = Field(None, description="What was thought before.")
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = Field(None, description="Where the request had functions instead of tools.")


class ChatChoice(SpeculationReply):
    """One reply."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class TextChoice(SpeculationReply):
    """One completion, whole or a piece."""

    text: str
    logprobs: TextLogprobs | None
    prompt_token_ids: list[int] | None = Field(None, description="In a stream: of the choice's first piece.")
    prompt_logprobs: PromptLogprobs | None = None


class ChatReply(Envelope):
    """A whole reply."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class FunctionDelta(Reply):
    """A piece of a call."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Reply):
    """A piece of a call; the first one has id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class Delta(Reply):
    """What was added."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionDelta | None = None


class ChatChunkChoice(SpeculationReply):
    """A piece of a reply."""

    delta: Delta
    logprobs: ChatLogprobs | None = None


class ChatChunk(Envelope):
    """An event of a stream."""

    object: Literal["chat.completion.chunk"]
    prompt_token_ids: list[int] | None = Field(None, description="Of the first event.")
    choices: list[ChatChunkChoice]
    usage: Usage | ShortUsage | None = None


class TextReply(Envelope):
    """Whole completions; in a stream, a piece of one."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage | ShortUsage | None = None


class InfillReply(BaseModel):
    """Of /infill, in llama.cpp's form: a text, or a piece of it: then content and stop alone. With response_fields any part
    of it."""

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
    generation_settings: dict[str, int] | None = Field(None, description="n_ctx: tokens of prompt and output together.")
    timings: dict[str, float] | None = Field(None, description="Tokens read, written and guessed, and the times.")
