"""Request fields: those of OpenAI, of vLLM, and foretell's own. The OpenAPI document is generated from these models.

A field that is not here is refused, unless its value changes nothing (see ``unsupported``). Fields marked "ignored" have
no effect: they are accepted because clients send them. Of a list only the first fault is looked for (``fail_fast``): a
body of megabytes may have a million, and finding them holds up the event loop.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from foretell.draft.ngram import MAX_NGRAM
from foretell.draft.recycling import MAX_CANDIDATES
from foretell.draft.suffix import MAX_MATCH, MAX_SPEC

INT32 = 2**31 - 1
MAX_BIASES = 1024

TokenId = Annotated[int, Field(ge=0, le=INT32)]
Count = Annotated[int, Field(ge=1, le=INT32)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Grammar = Annotated[str, Field(min_length=1, max_length=65536)]
Choices = Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)]
JsonObject = dict[str, Any]
Ignored = Annotated[Any, Field(description="Ignored.", exclude=True)]


def _off(given: bool) -> bool:
    if given:
        raise ValueError("only false is taken")
    return given


def _none_if_off(given: int | None) -> int | None:
    return None if given is False else given


# A literal false would take 0 as well, which the document does not.
Off = Annotated[bool, AfterValidator(_off), WithJsonSchema({"type": "boolean", "const": False})]
One = Annotated[int, Field(ge=1, le=1)]
"""The same of 1 and true."""
Option = (
    bool
    | Annotated[int, Field(ge=-INT32, le=INT32)]
    | Annotated[float, Field(ge=-1e6, le=1e6)]
    | Annotated[str, Field(max_length=256)]
    | None
)
"""A value of a method's own option."""


class Strict(BaseModel):
    """Strict types, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """What a stream tells of its tokens."""

    include_usage: bool | None = Field(None, description="A last chunk with usage and no choices.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: every chunk tells the usage so far."
    )
    include_obfuscation: bool | None = Field(None, description="Ignored: nothing is padded.")


class Speculative(BaseModel):
    """The speculation of this request. Keys that are left out have the server's values; with the default verifier the
    text does not depend on them. Further keys are the method's own options, as in ``--speculative-config``."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, Option] = Field(init=False)

    method: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        None, description="A method of those that the server has loaded, or 'none'."
    )
    num_speculative_tokens: int | None = Field(None, ge=1, le=64, description="Most tokens guessed in a line.")
    num_draft_tokens: int | None = Field(None, ge=0, le=64, description="Another name of it; 0: no guesses.")
    verify: str | None = Field(None, max_length=256, description="How guesses are checked, e.g. 'coupled'.")
    shape: str | None = Field(None, max_length=256, description="The shape of a proposal, e.g. 'sequoia/size=16'.")
    draws: str | None = Field(None, max_length=64, description="How children are drawn.")
    prompt_lookup_min: int | None = Field(
        None, ge=1, le=MAX_NGRAM, description="ngram: shortest suffix of the text that is looked up, in tokens."
    )
    prompt_lookup_max: int | None = Field(None, ge=1, le=MAX_NGRAM, description="ngram: longest such suffix.")
    num_candidates: int | None = Field(
        None, ge=1, le=MAX_CANDIDATES, description="recycling: candidates that are kept of each token."
    )
    suffix_decoding_min_match: int | None = Field(
        None, ge=1, le=MAX_MATCH, description="suffix: shortest match that is followed, in tokens."
    )
    suffix_decoding_max_match: int | None = Field(
        None, ge=1, le=MAX_MATCH, description="suffix: longest match; longer ones count as this."
    )
    suffix_decoding_max_spec_factor: float | None = Field(
        None, ge=0, le=MAX_SPEC, description="suffix: guesses in a line for each token of the match."
    )
    suffix_decoding_max_spec_offset: float | None = Field(
        None, ge=-MAX_SPEC, le=MAX_SPEC, description="suffix: guesses in a line beside those."
    )
    suffix_decoding_min_token_prob: float | None = Field(
        None, ge=0, le=1, description="suffix: least share of a guess on its path."
    )
    always: bool | None = Field(
        None, description="Guess in every step that no other request shares, even where the server expects no gain."
    )


class Sampling(Strict):
    """Common fields of both completion routes."""

    model: str | None = Field(None, max_length=512, description="One of /v1/models; may be left out, as there is one.")
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy. Default 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Keep the likeliest tokens of this mass.")
    top_k: int | None = Field(None, ge=-1, le=INT32, description="Keep the k likeliest tokens; -1 or 0: all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Drop tokens below this share of the likeliest one's.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Over prompt and output; 1: off.")
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}),
        ]
        | None
    ) = Field(None, description="Token ids, and what is added to their logits.")
    seed: int | None = Field(
        None,
        ge=-(2**63),
        le=2**64 - 1,
        description="The same seed gives the same text. Choice i > 0 has its own, of it.",
    )
    n: int | None = Field(None, ge=1, le=128, description="Completions of each prompt.")
    max_tokens: int | None = Field(
        None, ge=0, le=INT32, description="Most tokens to write; 0: none, the prompt is read and counted."
    )
    min_tokens: int | None = Field(None, ge=0, le=INT32, description="No end before so many.")
    stop: Text | Annotated[list[Text], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description="Texts that end the output; they are not part of it."
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = Field(
        None, description="More end tokens."
    )
    ignore_eos: bool | None = Field(None, description="Go on after the model's end token.")
    stream: bool | None = Field(None, description="Server-sent events, ended by 'data: [DONE]'.")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Ignored.")
    store: bool | None = Field(
        None, description="false: a server that learns while it serves (--learn) keeps nothing of the request."
    )
    speculative: Speculative | bool | None = Field(None, description="How to guess; false: not at all.")
    num_draft_tokens: int | None = Field(
        None, ge=0, le=64, description="Most tokens guessed in a line, as MLX and LM Studio call it; 0: none."
    )
    include_metrics: bool | None = Field(
        None, description="metrics.speculative_decoding in the response, or in the last chunk. Default: the server's."
    )
    provenance: bool | None = Field(None, description="Where every token came from: a guess, or the model itself.")
    trace: bool | None = Field(None, description="The tree of guesses of every step.")


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """A schema and its name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True)

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class SchemaFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class ConstantTag(Strict):
    """One text alone."""

    type: Literal["const_string"]
    value: Text


class SchemaTag(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonObject


class RegexTag(Strict):
    """Text that matches a regular expression."""

    type: Literal["regex"]
    pattern: Grammar


class GrammarTag(Strict):
    """Text of a grammar: EBNF ('::=') or Lark."""

    type: Literal["grammar"]
    grammar: Grammar


class TagFormat(Strict):
    """A structural tag, as XGrammar calls it: those that hold for the whole text."""

    type: Literal["structural_tag"]
    format: Annotated[ConstantTag | SchemaTag | RegexTag | GrammarTag, Field(discriminator="type")]


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat | TagFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """vLLM's name of all formats: one of them."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True)

    json_: str | JsonObject | None = Field(None, alias="json", description="A JSON schema.")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = Field(None, description="EBNF ('::=') or Lark.")
    json_object: bool | None = None


class Formatted(Sampling):
    """What the text must look like. At most one may be given; the names are those of several servers."""

    response_format: ResponseFormat | None = None
    regex: Grammar | None = Field(None, description="A regular expression that the whole text matches (Rust's syntax).")
    ebnf: Grammar | None = Field(
        None, description="A grammar with '::=' and a rule 'root', as llama.cpp's and XGrammar's."
    )
    grammar: Grammar | None = Field(None, description="The same, as llama.cpp calls it.")
    json_schema: str | JsonObject | None = Field(None, description="A JSON schema, or its text.")
    guided_json: str | JsonObject | None = Field(None, description="The same, as vLLM called it.")
    guided_regex: Grammar | None = Field(None, description="regex, as vLLM called it.")
    guided_choice: Choices | None = Field(None, description="The text is one of these.")
    guided_grammar: Grammar | None = Field(None, description="EBNF ('::=') or Lark, as vLLM called it.")
    structured_outputs: StructuredOutputs | None = Field(None, description="One of these, as vLLM calls it.")


class Returned(Strict):
    """What clients and other servers add to messages, and to their parts. Histories come back with it."""

    id: Ignored = None
    index: Ignored = None
    cache_control: Ignored = None
    extra_content: Ignored = None
    provider_specific_fields: Ignored = None


NOT_TEXT = ("image", "input_image", "audio", "input_audio", "video", "file", "input_file")
"""How the types of other parts of messages begin."""


class TextPart(Returned):
    """A part of a message."""

    type: Literal["text"]
    text: str
    annotations: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind.startswith(NOT_TEXT):
            raise ValueError(f"a part of type {kind!r:.40} is not read: texts alone are, of multi-modal models too")
        return given


class RefusalPart(Returned):
    """A part of a message in which the model declined."""

    type: Literal["refusal"]
    refusal: str


Parts = Annotated[list[TextPart], Field(fail_fast=True)]
SaidParts = Annotated[list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]], Field(fail_fast=True)]


class FunctionCall(Strict):
    """The function of a call."""

    name: str
    arguments: str = Field(description="JSON.")


class ToolCall(Strict):
    """A call that the assistant made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class GivenFunctionCall(FunctionCall):
    """The function of a call, as clients send it back."""

    parsed_arguments: Ignored = None
    provider_specific_fields: Ignored = None


class GivenCall(Returned):
    """A call that the assistant made, as clients send it back."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: GivenFunctionCall


class GivenMessage(Returned):
    """A message to the model."""

    role: Literal["system", "developer", "user"]
    content: str | Parts
    name: str | None = None


class ToolMessage(Returned):
    """The result of a call."""

    role: Literal["tool"]
    content: str | Parts | None = None
    tool_call_id: str | None = None
    name: str | None = None


class AssistantTurn(Returned):
    """A message of the model: of this server's answers, of other servers', or as clients keep them."""

    role: Literal["assistant"]
    content: str | SaidParts | None = None
    name: str | None = None
    tool_calls: Annotated[list[GivenCall], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = Field(None, description="What was thought: for templates that read it.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    reasoning_details: Ignored = None
    thinking_blocks: Ignored = None
    refusal: Ignored = None
    annotations: Ignored = None
    parsed: Ignored = None
    images: Annotated[list[JsonObject], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


Message = Annotated[GivenMessage | ToolMessage | AssistantTurn, Field(discriminator="role")]
"""A turn of the conversation."""


class Function(Returned):
    """A callable function."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(None, description="Arguments of a call always keep to the schema.")


class Tool(Returned):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


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
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128, fail_fast=True)]


class AllowedChoice(Strict):
    """Only some of the tools that the prompt lists may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Prediction(Strict):
    """The client's guess of the output, e.g. the file to be edited."""

    type: Literal["content"]
    content: str | Parts


class ChatRequest(Formatted):
    """A conversation to go on with."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=0, le=INT32, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
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
    chat_template_kwargs: JsonObject | None = Field(None, description="Further values for the model's template.")
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    metadata: dict[str, str] | None = Field(None, description="Ignored.")
    service_tier: str | None = Field(None, description="Ignored.")
    safety_identifier: str | None = Field(None, description="Ignored.")
    prompt_cache_key: str | None = Field(None, description="Ignored: equal beginnings are found by themselves.")
    prompt_cache_retention: str | None = Field(None, description="Ignored.")


PromptText = Annotated[str, Field(min_length=1)]


class LearnerRequest(BaseModel):
    """A command for what learns."""

    model_config = ConfigDict(extra="forbid", strict=True)

    action: Literal["pause", "resume", "revert", "save"] = Field(
        description="Stop learning, go on, serve the version before, or write checkpoints to --learn-dir."
    )


class ExplainRequest(Strict):
    """A text whose first steps are taken apart."""

    prompt: PromptText = Field(description="A text to go on with, or with `chat` a user's message.")
    chat: bool | None = Field(None, description="Put the prompt into the model's chat template.")
    model: str | None = Field(None, max_length=512, description="The model that is served.")
    temperature: float | None = Field(None, ge=0, le=2, description="0.7 where it is left out.")
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


class CompletionRequest(Formatted):
    """Texts to go on with."""

    prompt: Prompt = Field(description="A text, texts, token ids, or lists of them.")
    echo: bool | None = Field(
        None,
        description="The prompt's text before the completion; with logprobs, its tokens' log probabilities as well.",
    )
    logprobs: Annotated[Annotated[int, Field(ge=0, le=20)] | Off | None, AfterValidator(_none_if_off)] = Field(
        None, description="Of each token, and so many of the likeliest ones; false: none, as null."
    )
    best_of: int | None = Field(None, ge=1, le=128, description="Must equal n.")
