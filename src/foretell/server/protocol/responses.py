"""Requests of ``/v1/responses``, and what they are as a conversation."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from foretell.server.protocol.fields import INT32, MAX_TOOLS, Ignored, JsonObject, Off, One, Returned, Strict, empty
from foretell.server.protocol.formats import JsonSchema, ObjectFormat, TextFormat
from foretell.server.protocol.messages import text_alone
from foretell.server.protocol.requests import MAX_MESSAGES, ChatRequest, Verbosity
from foretell.server.protocol.sampling import Sampling, StreamOptions
from foretell.server.protocol.tools import LongName, Tool, known_tool


class ItemPart(Returned):
    """Text of a message: given, or written by the model before."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


class DeclinedPart(Returned):
    """A message in which the model declined."""

    type: Literal["refusal"]
    refusal: str


Content = (
    str
    | Annotated[
        list[Annotated[ItemPart | DeclinedPart, Field(discriminator="type"), BeforeValidator(text_alone)]],
        Field(fail_fast=True),
    ]
)


class MessageItem(Returned):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Content
    status: Ignored = None
    phase: Ignored = None


class CallItem(Returned):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON.")
    status: Ignored = None
    namespace: Annotated[None, empty("the server has functions alone, and no namespaces of them")] = None


class CallOutputItem(Returned):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    status: Ignored = None


class ThoughtPart(Strict):
    """A piece of what was thought."""

    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class ReasoningItem(Returned):
    """What was thought before: for templates that read it."""

    type: Literal["reasoning"]
    summary: Annotated[list[ThoughtPart], Field(fail_fast=True)] | None = None
    content: Annotated[list[ThoughtPart], Field(fail_fast=True)] | None = None
    encrypted_content: Annotated[None, empty("another server has written it, and it cannot be read here")] = None
    status: Ignored = None


def _item_type(given: Any) -> str | None:
    """The type of an item; a message may leave it out."""
    kind = given.get("type", "message") if isinstance(given, dict) else getattr(given, "type", None)
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message="an item is a message, function_call, function_call_output or reasoning",
    ),
]


class FunctionTool(Returned):
    """A function that the model may call."""

    type: Literal["function"]
    name: LongName
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(None, description="Arguments of a call always keep to the schema.")


class ChosenTool(Strict):
    """A function by its name."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Strict):
    """Only these may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class NamedSchema(JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


class TextSettings(Strict):
    """What the text must look like."""

    format: Annotated[TextFormat | ObjectFormat | NamedSchema, Field(discriminator="type")] | None = None
    verbosity: Verbosity = None


NO_SUMMARY = empty("what was thought comes as it was, and is not summed up")


class Reasoning(Strict):
    """How much to think."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Annotated[None, NO_SUMMARY] = None
    generate_summary: Annotated[None, NO_SUMMARY] = None


class ResponseStreamOptions(StreamOptions):
    """What a stream tells of its tokens. Its last event has the usage in any case."""

    continuous_usage_stats: Off | None = None


class ResponsesRequest(Sampling):
    """Items to go on with. No response is stored: a conversation is sent whole."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)]
    instructions: str | None = Field(None, description="A first message of the system.")
    max_output_tokens: int | None = Field(None, ge=0, le=INT32, description="Most tokens to write.")
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    stream_options: ResponseStreamOptions | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    truncation: Literal["disabled"] | None = None
    background: Off | None = None
    n: One | None = None
    provenance: Off | None = None
    trace: Off | None = None
    thinking_budget: int | None = Field(
        None, ge=0, le=INT32, description="Most tokens of thoughts: then their end is forced, and the answer comes."
    )
    chat_template_kwargs: JsonObject | None = Field(None, description="Further values for the model's template.")
    metadata: dict[str, str] | None = Field(None, description="Given back.")
    service_tier: str | None = Field(None, description="Ignored.")
    safety_identifier: str | None = Field(None, description="Ignored.")
    prompt_cache_key: str | None = Field(None, description="Ignored: equal beginnings are found by themselves.")
    prompt_cache_retention: str | None = Field(None, description="Ignored.")

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text's log probabilities are asked for."""
        return "message.output_text.logprobs" in (self.include or ())


SHARED = tuple(name for name in Sampling.model_fields if name not in ("n", "max_tokens", "stream_options"))


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The same request as a conversation."""
    given: dict[str, Any] = {
        name: value for name, value in body.model_dump(exclude_none=True, by_alias=True).items() if name in SHARED
    }
    given["messages"] = list(_messages(body))
    given["max_tokens"] = body.max_tokens if body.max_output_tokens is None else body.max_output_tokens
    given["thinking_budget"] = body.thinking_budget
    given["parallel_tool_calls"], given["chat_template_kwargs"] = body.parallel_tool_calls, body.chat_template_kwargs
    if body.text is not None:
        given["verbosity"] = body.text.verbosity
    if body.tool_choice is not None:
        given["tool_choice"] = _choice(body.tool_choice)
    if body.text is not None and body.text.format is not None:
        given["response_format"] = _format(body.text.format)
    if body.reasoning is not None:
        given["reasoning_effort"] = body.reasoning.effort
    if body.wants_logprobs:
        given |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    tools = None if body.tools is None else list(map(_tool, body.tools))
    return ChatRequest.model_validate(given).model_copy(update={"tools": tools})


def _messages(body: ResponsesRequest) -> Iterable[dict[str, Any]]:
    if body.instructions is not None:
        yield {"role": "system", "content": body.instructions}
    items: Sequence[Item] = (
        [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    )
    turn: dict[str, Any] | None = None  # the model's, while its items come
    for item in items:
        said = isinstance(item, MessageItem) and item.role == "assistant"
        if said or isinstance(item, (CallItem, ReasoningItem)):
            full = (
                turn is not None and (said or isinstance(item, ReasoningItem)) and (turn.keys() - {"role", "reasoning"})
            )
            if turn is None or full:
                if turn is not None:
                    yield turn
                turn = {"role": "assistant"}
            _add(turn, item)
            continue
        if turn is not None:
            yield turn
            turn = None
        if isinstance(item, MessageItem):
            yield {"role": item.role, "content": _text(item.content)}
        elif isinstance(item, CallOutputItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    if turn is not None:
        yield turn


def _add(turn: dict[str, Any], item: Item) -> None:
    if isinstance(item, MessageItem):
        turn["content"] = _text(item.content)
    elif isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, ReasoningItem):
        thoughts = "\n".join(part.text for part in item.content or item.summary or ())
        turn["reasoning"] = "\n".join(filter(None, (turn.get("reasoning"), thoughts)))


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, ItemPart) else part.refusal for part in content)


def _tool(tool: FunctionTool) -> Tool:
    return known_tool(tool.name, tool.description, tool.parameters, tool.strict)


def _choice(choice: str | ChosenTool | AllowedFunctions) -> str | Mapping[str, Any]:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, ChosenTool):
        return {"type": "function", "function": {"name": choice.name}}
    tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


def _format(format: TextFormat | ObjectFormat | NamedSchema) -> dict[str, Any]:
    if isinstance(format, NamedSchema):
        schema = format.model_dump(exclude_none=True, by_alias=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": schema}
    return {"type": format.type}
