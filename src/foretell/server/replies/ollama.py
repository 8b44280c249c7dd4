"""Answers of Ollama's routes."""

from typing import Any, Literal

from pydantic import Field

from foretell.server.replies.common import Reply, TokenLogprob


class OllamaDetails(Reply):
    """What kind of model it is."""

    parent_model: str = Field(description="Of an adapter.")
    format: str
    family: str
    families: list[str]
    parameter_size: Literal[""]
    quantization_level: str = Field(description="The type of its weights.")


class OllamaModel(Reply):
    """The model that is served."""

    name: str
    model: str
    modified_at: str
    size: int = Field(description="Bytes of its weights.")
    digest: str = Field(description="Of its name.")
    details: OllamaDetails
    expires_at: str | None = Field(None, description="When it is unloaded where nobody asks; far from now: never.")
    size_vram: int = Field(description="Bytes of its weights on an accelerator.")
    context_length: int | None = Field(None, description="Of one of several: once it was loaded.")


class OllamaModels(Reply):
    """All models."""

    models: list[OllamaModel]


class OllamaShown(Reply):
    """What the model is, and what it can do."""

    modelfile: Literal[""]
    parameters: Literal[""]
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "insert", "tools", "thinking"]]
    modified_at: str


class OllamaStatus(Reply):
    """A piece of what was done."""

    status: str


class OllamaVectors(Reply):
    """One vector of length 1 a text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = Field(description="Nanoseconds.")
    load_duration: int
    prompt_eval_count: int


class OllamaVector(Reply):
    """The older form, of one text."""

    embedding: list[float]


class OllamaFunctionCall(Reply):
    """The function of a call."""

    index: int
    name: str
    arguments: dict[str, Any] = Field(description="Empty where a limit cut the call off.")


class OllamaSaidCall(Reply):
    """A call of the model's."""

    id: str
    function: OllamaFunctionCall


class OllamaSaid(Reply):
    """The model's turn, or a piece of it."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaSaidCall] | None = None


class OllamaLine(Reply):
    """A piece of an answer. Figures are in the last one; times in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    logprobs: list[TokenLogprob] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatLine(OllamaLine):
    """Of a conversation."""

    message: OllamaSaid


class OllamaTextLine(OllamaLine):
    """Of a prompt."""

    response: str
    thinking: str | None = None


class OllamaError(Reply):
    """Every error."""

    error: str
