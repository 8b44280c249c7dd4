"""Answers of ``/v1/responses``."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foretell.server.replies.common import MetricsReply, PromptDetails, Reply, TokenLogprob


class InputDetails(PromptDetails):
    """Of a response's input."""

    cache_write_tokens: int = Field(description="0: texts are kept at no price.")


class ResponseUsage(Reply):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class OutputText(Reply):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[TokenLogprob]


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Reply):
    """The model's message."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(Reply):
    """A thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Reply):
    """What was thought before."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: Annotated[list[Any], Field(max_length=0)]
    content: list[ReasoningText]


class OutputCall(Reply):
    """A call of the model's."""

    id: str
    type: Literal["function_call", "custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str | None = Field(None, description="Of a function: JSON.")
    input: str | None = Field(None, description="Of a tool that takes a text.")


class ResponseReply(Reply):
    """A response: its settings and its items."""

    id: str
    object: Literal["response"]
    created_at: int
    status: ItemStatus
    background: Literal[False]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Annotated[OutputReasoning | OutputMessage | OutputCall, Field(discriminator="type")]]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    seed: int | None = Field(description="Given as 'seed', it gives this response again.")
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    metrics: MetricsReply | None = None


class ResponseEvent(BaseModel):
    """An event of a response's stream, in OpenAI's forms; its type is the event's name too."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
