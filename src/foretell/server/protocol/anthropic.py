"""Requests of ``/v1/messages``, Anthropic's form, and what they are as a conversation."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from foretell.checkpoints.templates import tojson
from foretell.server.errors import bad
from foretell.server.protocol.fields import (
    INT32,
    MAX_STOPS,
    MAX_TOOLS,
    OFFERED,
    TEXT_ALONE,
    Ignored,
    JsonObject,
    Off,
    One,
    Strict,
    Text,
)
from foretell.server.protocol.messages import Parts, TextPart
from foretell.server.protocol.requests import MAX_MESSAGES, ChatRequest
from foretell.server.protocol.responses import SHARED, kind_of
from foretell.server.protocol.sampling import Sampling
from foretell.server.protocol.tools import LongName, called, known_tool


class ThinkingBlock(Strict):
    """What was thought before: for templates that read it."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Strict):
    """A thought that this server has not written, and that nobody here can read."""

    type: Literal["redacted_thinking"]
    data: Ignored = None


class ToolUseBlock(Strict):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: str
    input: JsonObject


class ToolResultBlock(Strict):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Parts | None = None
    is_error: bool | None = Field(None, description="The text then begins with 'Error: '.")


Block = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        kind_of,
        custom_error_type="block",
        custom_error_message=f"a block is a text, thinking, redacted_thinking, tool_use or tool_result: an image or a "
        f"document is not read, as {TEXT_ALONE}",
    ),
]


class AnthropicMessage(Strict):
    """A turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class AnthropicTool(Strict):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: LongName
    description: str | None = None
    input_schema: JsonObject = Field(description="JSON schema of the arguments.")
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _own(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise ValueError(f"the tool {kind!r:.64} is not there: tools have an input_schema, and clients run them")
        return given


class AnthropicChoice(Strict):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = Field(None, description="Of the tool, for type 'tool'.")
    disable_parallel_tool_use: bool | None = None


class ThinkingSettings(Strict):
    """Whether to think, and how much."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, le=INT32, description="Most tokens of thoughts.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="'omitted': the thought's text is left out."
    )


class AnthropicSchema(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputSettings(Strict):
    """What the answer must look like, and how much is thought before."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicSchema | None = None


def _known_edit(given: Any) -> Any:
    if isinstance(given, str) and given != "clear_thinking_20251015":
        raise ValueError(f"the edit {given!r:.64} is not done: send the conversation as the model should read it")
    return given


class ContextEdit(Strict):
    """Which earlier thoughts are kept: the template says that, and reads no more of them."""

    type: Annotated[Literal["clear_thinking_20251015"], BeforeValidator(_known_edit)]
    keep: Ignored = None


class ContextSettings(Strict):
    """What of a conversation is left out before it is read."""

    edits: Annotated[list[ContextEdit], Field(fail_fast=True)] | None = None


class MessagesRequest(Sampling):
    """A conversation to go on with, in Anthropic's form."""

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)]
    system: str | Parts | None = None
    stop_sequences: Annotated[list[Text], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    thinking: ThinkingSettings | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True), OFFERED] | None = None
    tool_choice: AnthropicChoice | None = None
    output_config: OutputSettings | None = None
    context_management: ContextSettings | None = Field(None, description="Without effect: other edits are refused.")
    chat_template_kwargs: JsonObject | None = Field(None, description="Further values for the model's template.")
    n: One | None = None
    provenance: Off | None = None
    trace: Off | None = None


def as_chat(body: MessagesRequest) -> ChatRequest:
    """The same request as a conversation. Raises ApiError 400."""
    given: dict[str, Any] = {
        name: value for name, value in body.model_dump(exclude_none=True, by_alias=True).items() if name in SHARED
    }
    given["messages"], given["max_tokens"] = list(_messages(body)), body.max_tokens
    if len(given["messages"]) > MAX_MESSAGES:
        raise bad(f"messages: {len(given['messages'])} turns and results; {MAX_MESSAGES} are taken", "messages")
    given["chat_template_kwargs"] = body.chat_template_kwargs
    own = dict[str, Any]()  # what keeps to Anthropic's limits, and need not to OpenAI's
    if body.stop_sequences is not None:
        if body.stop is not None:
            raise bad("stop and stop_sequences are one setting: give it once", "stop_sequences")
        own["stop"] = body.stop_sequences or None
    if body.tools is not None:
        own["tools"] = [known_tool(one.name, one.description, one.input_schema, one.strict) for one in body.tools]
    if body.tool_choice is not None:
        given["tool_choice"] = _choice(body.tool_choice)
        given["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None:
        given["enable_thinking"], given["thinking_budget"] = (
            body.thinking.type != "disabled",
            body.thinking.budget_tokens,
        )
    if body.output_config is not None:
        effort = body.output_config.effort
        if effort is not None and given.get("enable_thinking") is not False:  # it is of what is thought alone
            given["reasoning_effort"] = "xhigh" if effort == "max" else effort
        if (format := body.output_config.format) is not None:
            schema = {"name": "answer", "schema": format.schema_, "strict": False}
            given["response_format"] = {"type": "json_schema", "json_schema": schema}
    if given["messages"][-1]["role"] == "assistant" and not given["messages"][-1].get("tool_calls"):
        given["continue_final_message"] = True
    return ChatRequest.model_validate(given).model_copy(update=own)


def _messages(body: MessagesRequest) -> Iterable[dict[str, Any]]:
    if body.system:
        yield {"role": "system", "content": _text(body.system)}
    for at, message in enumerate(body.messages):
        blocks: Sequence[Block] = (
            [TextPart(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        )
        known = {"assistant": ("text", "thinking", "redacted_thinking", "tool_use"), "user": ("text", "tool_result")}
        for place, block in enumerate(blocks):
            if block.type not in known.get(message.role, ("text",)):
                param = f"messages.{at}.content.{place}.type"
                raise bad(f"{param}: a {block.type} is no block of the {message.role}", param)
        if message.role == "assistant":
            yield _said(blocks)
        else:
            yield from _told(message.role, blocks)


def _said(blocks: Sequence[Block]) -> dict[str, Any]:
    """The model's turn."""
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(one.text for one in blocks if isinstance(one, TextPart)),
    }
    if thoughts := [one.thinking for one in blocks if isinstance(one, ThinkingBlock) and one.thinking]:
        turn["reasoning_content"] = "\n".join(thoughts)
    calls = [one for one in blocks if isinstance(one, ToolUseBlock)]
    if calls:
        turn["tool_calls"] = [called(one.id, one.name, tojson(one.input)) for one in calls]
    return turn


def _told(role: str, blocks: Sequence[Block]) -> Iterable[dict[str, Any]]:
    """What the user, or the system, says: results of calls are turns of their own."""
    texts: list[TextPart] = []
    for one in blocks:
        if isinstance(one, TextPart):
            texts.append(one)
        elif isinstance(one, ToolResultBlock):
            if texts:
                yield {"role": role, "content": _text(texts)}
                texts = []
            text = _text(one.content or "")
            yield {
                "role": "tool",
                "tool_call_id": one.tool_use_id,
                "content": f"Error: {text}" if one.is_error else text,
            }
    if texts or not blocks:
        yield {"role": role, "content": _text(texts)}


def _text(content: str | Sequence[TextPart]) -> str:
    """Blocks are paragraphs."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _choice(choice: AnthropicChoice) -> str | Mapping[str, Any]:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if not choice.name:
        raise bad("tool_choice.name: a tool_choice of type 'tool' names it", "tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}
