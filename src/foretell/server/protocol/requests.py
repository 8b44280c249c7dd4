"""Whole requests, but those of ``/v1/responses``."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from foretell.server.errors import bad
from foretell.server.protocol.fields import (
    INT32,
    OF_THE_CLIENT,
    OFFERED,
    Ignored,
    JsonObject,
    Off,
    One,
    Strict,
    Text,
    TokenId,
)
from foretell.server.protocol.formats import Formatted
from foretell.server.protocol.messages import Message, Parts
from foretell.server.protocol.sampling import Sampling, Speculative
from foretell.server.protocol.tools import AllowedChoice, Function, FunctionName, NamedTool, Tool


def _none_if_off(given: int | None) -> int | None:
    return None if given is False else given


MAX_MESSAGES = 4096
Choice = Literal["none", "auto", "required"]
Verbosity = Annotated[
    Literal["low", "medium", "high"] | None,
    Field(description="For templates that read it; elsewhere the header x-foretell-without-effect names it."),
]
PromptLogprobs = Annotated[
    int | None,
    Field(
        ge=0, le=20, description="Of each token of the prompt, and so many of the likeliest ones, as vLLM's. No stream."
    ),
]


class Prediction(Strict):
    """The client's guess of the output, e.g. the file to be edited."""

    type: Literal["content"]
    content: str | Parts


class ChatRequest(Formatted):
    """A conversation to go on with."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=0, le=INT32, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: PromptLogprobs = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True), OFFERED] | None = None
    tool_choice: Annotated[Choice | NamedTool | AllowedChoice | None, OF_THE_CLIENT] = None
    functions: Annotated[list[Function], Field(max_length=128, fail_fast=True)] | None = Field(
        None, description="The older form of tools: of one call at most, and message.function_call has it."
    )
    function_call: Literal["none", "auto"] | FunctionName | None = Field(
        None, description="The older form of tool_choice."
    )
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    add_generation_prompt: bool | None = Field(
        None, description="Default true, but where the last message is continued: the template opens the reply."
    )
    continue_final_message: bool | None = Field(
        None, description="The last message is the assistant's, and the reply goes on with its text."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="For templates that read it; 'none' also turns off what enable_thinking does. Where the template "
        "reads neither, the response's header x-foretell-without-effect says so.",
    )  # fmt: skip
    enable_thinking: bool | None = Field(
        None, description="Whether to think, for templates that read it or thinking. false, elsewhere: a budget of 0."
    )
    thinking_budget: int | None = Field(
        None, ge=0, le=INT32, description="Most tokens of thoughts: then their end is forced, and the answer comes."
    )
    separate_reasoning: bool | None = Field(
        None, description="false: thoughts stay in the text, as they were written. Default true: in reasoning_content."
    )
    verbosity: Verbosity = None
    chat_template_kwargs: JsonObject | None = Field(None, description="Further values for the model's template.")
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None


def with_tools(body: ChatRequest) -> ChatRequest:
    """A chat whose functions, the older form, are its tools. Raises ApiError 400."""
    call, functions = body.function_call, body.functions
    if functions is None:
        if isinstance(call, FunctionName):
            raise bad("function_call: no functions were given: give both, or tools and tool_choice", "function_call")
        return body
    if body.tools is not None or body.tool_choice is not None:
        raise bad("functions and tools are one setting: give one of them, with its own choice", "functions")
    tools = [Tool.model_construct(type="function", function=one) for one in functions]
    choice = NamedTool(type="function", function=call) if isinstance(call, FunctionName) else call
    return body.model_copy(update={"tools": tools, "tool_choice": choice, "parallel_tool_calls": False})


PromptText = Annotated[str, Field(min_length=1)]


class LearnerRequest(Strict):
    """A command for what learns."""

    action: Literal["pause", "resume", "revert", "save"] = Field(
        description="Stop learning, go on, serve the version before, or write checkpoints to --learn-dir."
    )


class ExplainRequest(Strict):
    """A text whose first steps are taken apart."""

    prompt: PromptText = Field(description="A text to go on with, or with `chat` a user's message.")
    chat: bool | None = Field(None, description="Put the prompt into the model's chat template.")
    model: str | None = Field(None, max_length=512, description="The model that is served.")
    temperature: float | None = Field(None, ge=0, le=2, description="0.7 where it is left out.")
    top_p: float | None = Field(None, gt=0, le=1, description="Of the target and of the drafter. Default 1.")
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1, description="Fresh where it is left out.")
    max_tokens: int | None = Field(None, ge=1, le=64, description="Of the text whose steps are watched. Default 64.")
    speculative: Speculative | None = Field(None, description="How the text is guessed for.")


MAX_PROMPTS = 1024  # a server may take fewer (``max_choices``)
PromptIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompt = (
    PromptText
    | Annotated[list[PromptText], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | PromptIds
    | Annotated[list[PromptIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
)


class TokenizeRequest(Strict, json_schema_extra={"examples": [{"prompt": "A text."}]}):
    """A text, as vLLM's clients (``prompt``) or llama.cpp's (``content``) give it, or a conversation."""

    model: str | None = Field(None, max_length=512, description="The model that is served.")
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = Field(None, description="Of a conversation. Default true.")
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    add_special_tokens: bool | None = Field(None, description="Of a prompt: with the tokenizer's own. Default true.")
    add_special: bool | None = Field(None, description="Of a content: with the tokenizer's own. Default false.")
    parse_special: bool | None = Field(None, description="false: markers in a text are text. Default true.")
    return_token_strs: bool | None = Field(None, description="The texts of a prompt's tokens, too.")
    with_pieces: bool | None = Field(None, description="The texts of a content's tokens, too.")


class DetokenizeRequest(Strict):
    """Tokens."""

    model: str | None = Field(None, max_length=512, description="The model that is served.")
    tokens: list[TokenId]


class EmbeddingRequest(Strict):
    """Texts whose last hidden states are asked for."""

    model: str | None = Field(None, max_length=512, description="The model that is served.")
    input: Prompt = Field(description="A text, texts, token ids, or lists of them.")
    pooling: Literal["mean", "last"] | None = Field(
        None, description="Of the last hidden states of a text the mean, or that of its last token. Default mean."
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=INT32, description="As many as the hidden states have, or left out.")


AnyPrompt = Prompt | str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionRequest(Formatted):
    """Texts to go on with."""

    prompt: AnyPrompt = Field(
        description="A text, texts, token ids, or lists of them. An empty text begins as texts do: with BOS, or with "
        "<|endoftext|>."
    )
    echo: bool | None = Field(
        None,
        description="The prompt's text before the completion; with logprobs, its tokens' log probabilities as well.",
    )
    logprobs: Annotated[Annotated[int, Field(ge=0, le=20)] | Off | None, AfterValidator(_none_if_off)] = Field(
        None, description="Of each token, and so many of the likeliest ones; false: none, as null."
    )
    prompt_logprobs: PromptLogprobs = None
    best_of: int | None = Field(None, ge=1, le=128, description="Must equal n.")
    suffix: str | None = Field(None, description="The text after the completion; the model must know how to fill gaps.")


class ExtraFile(Strict):
    """Text from elsewhere in the project."""

    text: str
    filename: str = "filename"
    time: Ignored = None


class InfillRequest(Sampling):
    """A gap to fill, for llama.cpp's route. The default temperature is 0."""

    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text after the gap.")
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        default=[],
        description="Other texts, the least important first: where not all fit the context, the last are kept.",
    )
    prompt: str = Field("", description="The beginning of what fills the gap: the line up to the cursor.")
    n: One | None = None
    n_predict: int | None = Field(None, ge=-1, le=INT32, description="As max_tokens; -1: as many as fit the context.")
    n_indent: int = Field(0, ge=0, le=INT32, description="A line that is indented by less ends the text before it.")
    t_max_predict_ms: int = Field(
        0, ge=0, le=INT32, description="So long after its first token a text of more than a line ends; 0: no limit."
    )
    t_max_prompt_ms: int = Field(0, ge=0, le=INT32, description="Without effect, as in llama.cpp.")
    samplers: list[Text] | None = Field(None, description="Without effect: what is asked for by name (top_k) applies.")
    response_fields: list[str] | None = Field(
        None, description="These alone; of a/b the field b, under the name 'a/b'."
    )
