"""Requests of ``/v1/responses``, and what they are as a conversation."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from foretell.checkpoints.templates import tojson
from foretell.server.errors import bad
from foretell.server.protocol.fields import (
    INT32,
    MAX_TOOLS,
    OF_THE_CLIENT,
    OFFERED,
    Ignored,
    JsonObject,
    Off,
    One,
    Strict,
    empty,
)
from foretell.server.protocol.formats import JsonSchema, ObjectFormat, TextFormat
from foretell.server.protocol.messages import RefusalPart, text_alone
from foretell.server.protocol.requests import MAX_MESSAGES, ChatRequest, Choice, Verbosity
from foretell.server.protocol.sampling import Sampling, StreamOptions
from foretell.server.protocol.tools import LongName, Tool, called, known_tool


class ItemPart(Strict):
    """Text of a message: given, or written by the model before."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    logprobs: Ignored = None


Content = (
    str
    | Annotated[
        list[Annotated[ItemPart | RefusalPart, Field(discriminator="type"), BeforeValidator(text_alone)]],
        Field(fail_fast=True),
    ]
)


class MessageItem(Strict):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Content


class CallItem(Strict):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON.")
    namespace: str | None = Field(None, description="Of the function, where the tools have it there.")


class CustomCallItem(Strict):
    """A call of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CallOutputItem(Strict):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content


class ThoughtPart(Strict):
    """A piece of what was thought."""

    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class ReasoningItem(Strict):
    """What was thought before: for templates that read it."""

    type: Literal["reasoning"]
    summary: Annotated[list[ThoughtPart], Field(fail_fast=True)] | None = None
    content: Annotated[list[ThoughtPart], Field(fail_fast=True)] | None = None
    encrypted_content: Annotated[None, empty("another server has written it, and it cannot be read here")] = None


def kind_of(given: Any, missing: str | None = None) -> str | None:
    """The type of an item or a block. missing: of one that leaves it out."""
    kind = given.get("type", missing) if isinstance(given, dict) else getattr(given, "type", None)
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        lambda given: kind_of(given, "message"),
        custom_error_type="item_type",
        custom_error_message="an item is a message, function_call, custom_tool_call, the output of one, or reasoning",
    ),
]


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: LongName
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(None, description="Arguments of a call always keep to the schema.")


class CustomTool(Strict):
    """A tool that takes a text: the model sees a function of one argument, ``input``."""

    type: Literal["custom"]
    name: LongName
    description: str | None = None
    format: JsonObject | None = Field(
        None, description="Of the text: the model reads its definition, and is not held to it."
    )


SingleTool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class NamespaceTool(Strict):
    """Functions under a name: the model sees ``NAMESPACE__NAME``, and calls come back with both."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = Field(None, description="The model reads it before the first function's.")
    tools: Annotated[list[SingleTool], Field(max_length=MAX_TOOLS, fail_fast=True), OFFERED]


GivenTool = Annotated[FunctionTool | CustomTool | NamespaceTool, Field(discriminator="type")]


class ChosenTool(Strict):
    """A function by its name."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedFunctions(Strict):
    """Only these may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True), OFFERED]


class NamedSchema(JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


class TextSettings(Strict):
    """What the text must look like."""

    format: Annotated[TextFormat | ObjectFormat | NamedSchema, Field(discriminator="type")] | None = None
    verbosity: Verbosity = None


class Reasoning(Strict):
    """How much to think."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponseStreamOptions(StreamOptions):
    """What a stream tells of its tokens. Its last event has the usage in any case."""

    continuous_usage_stats: Off | None = None


Included = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url",
    "web_search_call.action.sources", "web_search_call.results",
]  # fmt: skip
"""Beside the first two: of tools that this server does not run and parts that it does not read. There are none."""


class ResponsesRequest(Sampling):
    """Items to go on with. No response is stored: a conversation is sent whole."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)]
    instructions: str | None = Field(None, description="A first message of the system.")
    max_output_tokens: int | None = Field(None, ge=0, le=INT32, description="Most tokens to write.")
    tools: Annotated[list[GivenTool], Field(max_length=MAX_TOOLS, fail_fast=True), OFFERED] | None = None
    tool_choice: Annotated[Choice | ChosenTool | AllowedFunctions | None, OF_THE_CLIENT] = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    stream_options: ResponseStreamOptions | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[Included] | None = None
    truncation: Literal["disabled", "auto"] | None = Field(
        None, description="Of both nothing is dropped: a conversation that is too long is refused."
    )
    background: Off | None = None
    n: One | None = None
    provenance: Off | None = None
    trace: Off | None = None
    thinking_budget: int | None = Field(
        None, ge=0, le=INT32, description="Most tokens of thoughts: then their end is forced, and the answer comes."
    )
    chat_template_kwargs: JsonObject | None = Field(None, description="Further values for the model's template.")
    metadata: dict[str, str] | None = Field(None, description="Given back.")
    user: str | None = Field(None, description="Given back.")

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text's log probabilities are asked for."""
        return "message.output_text.logprobs" in (self.include or ())


Namer = Callable[[str | None, str], str]
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
        given["tool_choice"] = _choice(body.tool_choice, _namer(body))
    if body.text is not None and body.text.format is not None:
        given["response_format"] = _format(body.text.format)
    if body.reasoning is not None:
        given["reasoning_effort"] = body.reasoning.effort
    if body.wants_logprobs:
        given |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    tools = None if body.tools is None else [_tool(name, one) for name, _, one in flat_tools(body)]
    return ChatRequest.model_validate(given).model_copy(update={"tools": tools})


def _messages(body: ResponsesRequest) -> Iterable[dict[str, Any]]:
    if body.instructions is not None:
        yield {"role": "system", "content": body.instructions}
    items: Sequence[Item] = (
        [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    )
    named = _namer(body)
    turn: dict[str, Any] | None = None  # the model's, while its items come
    for item in items:
        said = isinstance(item, MessageItem) and item.role == "assistant"
        if said or isinstance(item, (CallItem, CustomCallItem, ReasoningItem)):
            full = (
                turn is not None and (said or isinstance(item, ReasoningItem)) and (turn.keys() - {"role", "reasoning"})
            )
            if turn is None or full:
                if turn is not None:
                    yield turn
                turn = {"role": "assistant"}
            _add(turn, item, named)
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


def _add(turn: dict[str, Any], item: Item, named: Namer) -> None:
    if isinstance(item, MessageItem):
        turn["content"] = _text(item.content)
    elif isinstance(item, (CallItem, CustomCallItem)):
        arguments = item.arguments if isinstance(item, CallItem) else tojson({"input": item.input})
        turn.setdefault("tool_calls", []).append(called(item.call_id, named(item.namespace, item.name), arguments))
    elif isinstance(item, ReasoningItem):
        thoughts = "\n".join(part.text for part in item.content or item.summary or ())
        turn["reasoning"] = "\n".join(filter(None, (turn.get("reasoning"), thoughts)))


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, ItemPart) else part.refusal for part in content)


def flat_tools(body: ResponsesRequest) -> list[tuple[str, str | None, SingleTool]]:
    """(the name that the model sees, the namespace, the tool) of each. Raises ApiError 400."""
    pairs = list[tuple[str | None, SingleTool]]()
    for tool in body.tools or ():
        if not isinstance(tool, NamespaceTool):
            pairs.append((None, tool))
            continue
        about = tool.description
        for one in tool.tools:
            text = "\n".join(filter(None, (about, one.description)))
            pairs.append((tool.name, one.model_copy(update={"description": text or None})))
            about = None
    if len(pairs) > MAX_TOOLS:
        raise bad(f"tools: {len(pairs)} with those of all namespaces; {MAX_TOOLS} are taken", "tools")
    made, used = list[tuple[str, str | None, SingleTool]](), {one.name for space, one in pairs if space is None}
    for space, one in pairs:
        name = flat_name(space, one.name)
        while space is not None and name in used:
            name = f"{name[-127:]}_"
        used.add(name)
        made.append((name, space, one))
    return made


def flat_name(space: str | None, name: str) -> str:
    """A function of a namespace as the model sees it. None: of no namespace."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", f"{space.removesuffix('__')}__{name}")[-128:] if space else name


def _namer(body: ResponsesRequest) -> Namer:
    names = {(space, one.name): name for name, space, one in flat_tools(body)}
    return lambda space, name: names.get((space, name)) or flat_name(space, name)


def _tool(name: str, tool: SingleTool) -> Tool:
    if isinstance(tool, FunctionTool):
        return known_tool(name, tool.description, tool.parameters, tool.strict)
    form = (tool.format or {}).get("definition")
    about = "\n".join(filter(None, (tool.description, f"The input has this form:\n{form}" if form else None)))
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return known_tool(name, about or None, {**text, "additionalProperties": False})


def _choice(
    choice: str | ChosenTool | AllowedFunctions, named: Callable[[str | None, str], str]
) -> str | Mapping[str, Any]:
    if isinstance(choice, str):
        return choice
    listed = [choice] if isinstance(choice, ChosenTool) else choice.tools
    tools = [{"type": "function", "function": {"name": named(one.namespace, one.name)}} for one in listed]
    if isinstance(choice, ChosenTool):
        return tools[0]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


def _format(format: TextFormat | ObjectFormat | NamedSchema) -> dict[str, Any]:
    if isinstance(format, NamedSchema):
        schema = format.model_dump(exclude_none=True, by_alias=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": schema}
    return {"type": format.type}
