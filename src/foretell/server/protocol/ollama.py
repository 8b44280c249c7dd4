"""Requests of Ollama's routes, and what they are as a conversation."""

from typing import Annotated, Any, Literal

from pydantic import Field

from foretell.checkpoints.templates import tojson
from foretell.core.errors import ConfigError
from foretell.server.errors import bad
from foretell.server.options import seconds_of
from foretell.server.protocol.fields import (
    INT32,
    MAX_STOPS,
    MAX_TOOLS,
    OFFERED,
    Ignored,
    JsonObject,
    NoImages,
    Strict,
    Text,
    empty,
)
from foretell.server.protocol.requests import MAX_MESSAGES, MAX_PROMPTS, ChatRequest, PromptText
from foretell.server.protocol.sampling import Speculative
from foretell.server.protocol.tools import Function, Tool, called


class OllamaFunctionTool(Function):
    """A callable function: Ollama's own limits its name to nothing, this server to what a call can be read with."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class OllamaTool(Tool):
    """A function that the model may call."""

    function: OllamaFunctionTool


KeepAlive = Annotated[
    float | str | None,
    Field(description="How long one of several models then stays loaded: seconds, or '5m'; 0: not at all, -1: always."),
]
NoText = Annotated[str, Field(max_length=0)] | None


class Options(Strict):
    """How tokens are drawn. Those that say how a model is loaded are ignored."""

    num_predict: int | None = Field(None, ge=-2, le=INT32, description="Most tokens to write; below 0: all that fit.")
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=-1, le=INT32)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    repeat_last_n: int | None = Field(
        None, description="Penalties are over the whole text: -1, where repeat_penalty is not 1."
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None


class OllamaFunction(Strict):
    """The function of a call."""

    name: str
    arguments: JsonObject


class OllamaCall(Strict):
    """A call that the model made."""

    id: str | None = Field(None, description="By which a result names it, where results have a tool_call_id.")
    type: Ignored = None
    function: OllamaFunction


class OllamaMessage(Strict):
    """A turn."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = Field(None, description="What was thought: for templates that read it.")
    images: NoImages = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = Field(
        None, description="Of the call that is answered, where there are no ids: of one name they stand in their order."
    )
    tool_call_id: str | None = None


class Asked(Strict):
    """Fields that both routes have."""

    model: str | None = Field(None, max_length=512)
    stream: bool | None = Field(None, description="Lines of JSON, one a piece. Default true.")
    format: Literal["", "json"] | JsonObject | None = Field(None, description="A JSON object, or JSON of a schema.")
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = Field(None, description="Whether to think, or how much.")
    keep_alive: KeepAlive = None
    speculative: Speculative | bool | None = Field(None, description="How to guess; false: not at all.")
    logprobs: bool | None = Field(None, description="Of each token of the answer.")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="With logprobs: so many of the likeliest ones.")


class OllamaChatRequest(Asked):
    """A conversation to go on with."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS, fail_fast=True), OFFERED] | None = None


class GenerateRequest(Asked):
    """A prompt to answer, or with ``raw`` to go on with."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = Field(None, description="The prompt is the text itself: no template.")
    images: NoImages = None
    suffix: str | None = Field(None, description="The text after the gap that is to be filled, of models taught it.")
    template: Annotated[NoText, empty("the model's own template is used; raw is a text without one")] = None
    context: Annotated[
        Annotated[list[Any], Field(max_length=0)] | None,
        empty("nothing is kept between requests: /api/chat reads a whole conversation"),
    ] = None


class ShowRequest(Strict):
    """Which model to tell of."""

    model: str | None = Field(None, max_length=512)
    name: str | None = Field(None, max_length=512, description="The older name of model.")


class PullRequest(ShowRequest):
    """Which model should be there. No other than the served one is fetched."""

    stream: bool | None = Field(None, description="Lines of JSON. Default true.")


class EmbedRequest(Strict):
    """Texts whose last hidden states are asked for."""

    model: str | None = Field(None, max_length=512)
    input: PromptText | Annotated[list[PromptText], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    dimensions: int | None = Field(None, ge=1, le=INT32, description="As many as the hidden states have, or left out.")
    truncate: bool | None = Field(None, description="Of both nothing is cut off: a text that is too long is refused.")
    options: Options | None = Field(None, description="Without effect: no text is written.")
    keep_alive: KeepAlive = None


class OldEmbedRequest(Strict):
    """A text whose last hidden states are asked for."""

    model: str | None = Field(None, max_length=512)
    prompt: PromptText
    options: Options | None = Field(None, description="Without effect: no text is written.")
    keep_alive: KeepAlive = None


def keep_alive_of(body: Any) -> float | None:
    """The seconds of a request's field; None: it says nothing. Raises ApiError 400."""
    try:
        return None if body.keep_alive is None else seconds_of(body.keep_alive)
    except ConfigError as error:
        raise bad(str(error), "keep_alive") from None


def as_chat(body: OllamaChatRequest) -> ChatRequest:
    """A chat as a conversation. Raises ApiError 400."""
    return _conversation(body, list(map(_message, body.messages or ()))).model_copy(update={"tools": body.tools})


def of_prompt(body: GenerateRequest) -> ChatRequest:
    """A prompt as a conversation of one turn. Raises ApiError 400."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    return _conversation(body, [*system, {"role": "user", "content": body.prompt or ""}])


def _conversation(body: Asked, messages: list[dict[str, Any]]) -> ChatRequest:
    options = body.options or Options.model_validate({})
    past, penalty = options.repeat_last_n, options.repeat_penalty
    if past not in (None, -1) and penalty not in (None, 1):
        raise bad("options.repeat_last_n: penalties are over the whole text: give -1, or no repeat_penalty", "options")
    same = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed")
    given: dict[str, Any] = {"model": body.model, **{name: getattr(options, name) for name in same}}
    given["messages"], given["repetition_penalty"] = messages, penalty
    if options.num_predict is not None and options.num_predict >= 0:
        given["max_tokens"] = options.num_predict
    if body.speculative is not None:
        asked = body.speculative
        given["speculative"] = asked if isinstance(asked, bool) else asked.model_dump(exclude_none=True)
    if isinstance(body.format, dict):
        given["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": body.format}}
    elif body.format:
        given["response_format"] = {"type": "json_object"}
    if isinstance(body.think, str):
        given["reasoning_effort"] = body.think
    else:
        given["enable_thinking"] = body.think
    given["stream"] = body.stream is not False
    given |= {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    return ChatRequest.model_validate(given).model_copy(update={"stop": options.stop or None})


def _message(message: OllamaMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.role == "tool":
        return {**made, "name": message.tool_name, "tool_call_id": message.tool_call_id}
    if message.role != "assistant":
        return made
    if message.tool_calls:
        calls = [(one.id, one.function) for one in message.tool_calls]
        made["tool_calls"] = [called(id, one.name, tojson(one.arguments)) for id, one in calls]
    return {**made, "reasoning_content": message.thinking or None}
