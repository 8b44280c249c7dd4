"""Functions that the model may call, and calls of them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from foretell.server.protocol.fields import MAX_TOOLS, OFFERED, JsonObject, Strict

LongName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
"""A tool's name in Anthropic's API and in ``/v1/responses``; in chats it has half as many letters."""


class FunctionCall(Strict):
    """The function of a call."""

    name: str
    arguments: str = Field(description="JSON.")


class ToolCall(Strict):
    """A call that the assistant made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


def called(id: str | None, name: str, arguments: str) -> dict[str, Any]:
    """A call as a chat has it. arguments: JSON."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class GivenFunctionCall(FunctionCall):
    """The function of a call, as clients send it back."""


class GivenCall(Strict):
    """A call that the assistant made, as clients send it back."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: GivenFunctionCall


class Function(Strict):
    """A callable function."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(None, description="Arguments of a call always keep to the schema.")


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


def known_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None = None
) -> Tool:
    """A tool of another protocol, whose limits it has kept: a chat's are others."""
    function = Function.model_construct(name=name, description=description, parameters=parameters, strict=strict)
    return Tool.model_construct(type="function", function=function)


class FunctionName(Strict):
    """A function by its name."""

    name: str


class NamedTool(Strict):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True), OFFERED]


class AllowedChoice(Strict):
    """Only some of the tools that the prompt lists may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
