"""The server's answers, as the OpenAPI document describes them. The answers themselves are plain dicts, made in
``chat.py``, ``completions.py`` and ``usage.py``; the tests check every one of them against these models."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foretell.server.protocol import ToolCall

FinishReason = Literal["stop", "length", "tool_calls", "timeout"]


class Reply(BaseModel):
    """Fields that are not described are refused."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Reply):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """Every error."""

    error: ErrorDetail


class PromptDetails(Reply):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(description="Found in the prefix store.")


class CompletionDetails(Reply):
    """Of the client's prediction, never of drafters (see metrics)."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int = Field(description="Tokens of the prediction that were not accepted.")


class Usage(Reply):
    """Tokens, summed over choices; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ShortUsage(Reply):
    """Tokens so far, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SpeculativeDecoding(Reply):
    """How speculation went, in vLLM's shape; summed over choices."""

    mean_acceptance_length: float = Field(description="1 + accepted / steps that guessed.")
    draft_acceptance_rate: float = Field(description="Accepted / guessed; of a tree all nodes count.")
    acceptance_histogram: list[int] = Field(description="[K + 1] steps that accepted so many tokens.")
    acceptance_histogram_by_draft_length: dict[str, list[int]] = Field(
        description="The same for each number k of tokens guessed in a line: [k + 1]."
    )
    num_spec_steps: int = Field(description="Steps that guessed.")
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int = Field(description="K: most tokens guessed in a line.")
    plain_reason: str | None = Field(description="Why a choice made no guess though guesses were asked for.")


class Metrics(Reply):
    """Figures of this request."""

    speculative_decoding: SpeculativeDecoding


class TopLogprob(Reply):
    """One of the likeliest tokens."""

    token: str
    logprob: float = Field(description="Of the model itself, before temperature and processors; -9999 at least.")
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that was written."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """One entry a token; the end token has none."""

    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(Reply):
    """One entry a token; the end token has one only with echo."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for a prompt's first token, which follows nothing.")
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class Provenance(Reply):
    """Where a token came from."""

    token: str
    token_id: int
    source: Annotated[str, Field(pattern=r"^(draft:.+|bonus|plain)$")] = Field(
        description="'draft:<method>': a guess that was accepted; 'bonus': the model's own after guesses; 'plain'."
    )
    logprob: float | None


class StepTree(Reply):
    """The guesses of one step. Node 0 is the token before them."""

    tokens: list[str]
    token_ids: list[int]
    parent: list[int] = Field(description="-1 for node 0.")
    probability: list[float] = Field(description="Of each node's token after its path, by the model.")
    path: list[int] = Field(description="The nodes that were kept.")
    bonus: int | None = Field(description="The token id that followed them; null where the text ended with a guess.")


class Choice(Reply):
    """Common fields of choices; provenance, trace and seed are present if they were requested or drawn."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: Literal["timeout", "context"] | None = Field(
        None, description="'timeout': the request's time was up; 'context': the model's context was full."
    )
    seed: int | None = Field(None, description="Given as 'seed' with n = 1, it gives this choice again.")
    provenance: list[Provenance] | None = None
    trace: list[StepTree] | None = None


class AssistantMessage(Reply):
    """The model's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    """One reply."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class TextChoice(Choice):
    """One completion, whole or a piece."""

    text: str
    logprobs: TextLogprobs | None


class Envelope(Reply):
    """Common fields of answers."""

    id: str
    created: int = Field(description="Unix time.")
    model: str
    system_fingerprint: str
    metrics: Metrics | None = None


class ChatReply(Envelope):
    """A whole reply."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


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
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Choice):
    """A piece of a reply."""

    delta: Delta
    logprobs: ChatLogprobs | None = None


class ChatChunk(Envelope):
    """An event of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | ShortUsage | None = None


class TextReply(Envelope):
    """Whole completions; in a stream, a piece of one."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage | ShortUsage | None = None


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


class OutputCall(Reply):
    """A call of the model's."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


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
    output: list[Annotated[OutputMessage | OutputCall, Field(discriminator="type")]]
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
    metrics: Metrics | None = None


class ResponseEvent(BaseModel):
    """An event of a response's stream, in OpenAI's forms; its type is the event's name too."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class Model(Reply):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(description="The model that this one was made of: itself.")
    max_model_len: int = Field(description="Tokens of prompt and output together.")
    speculative: dict[str, Any] = Field(description="The speculation of requests that choose none.")
    methods: list[str] = Field(description="Values for `speculative.method` in a request.")


class ModelList(Reply):
    """All models."""

    object: Literal["list"]
    data: list[Model]


class Version(Reply):
    """Of the server's program."""

    version: str


class LearnerReply(Reply):
    """What a server that learns has learned, of this client's own requests where API keys are asked for."""

    figures: dict[str, Any] = Field(description="Counters and gauges, as /metrics has them, of all clients together.")
    failure: str = Field(description="Why learning has ended; empty where it has not.")
    paused: bool
    adapters: list[dict[str, Any]] = Field(description="Name, method, version, versions kept, acceptance of late.")
    events: list[dict[str, Any]] = Field(description="Updates, swaps, refusals, reverts and drifts, the last ones.")
    history: list[dict[str, Any]] = Field(description="Of each request: first guesses made and kept, and the version.")


class ExplainedRunner(Reply):
    """A token that could follow a place of the text."""

    token: int
    text: str
    p: float = Field(description="The target's probability of it.")
    q: float | None = Field(description="The drafter's; null where it has none, or other requests shared the step.")
    time_p: float | None = Field(description="When it arrives in the target's race; null: never, or there is none.")
    time_q: float | None = Field(description="... in the drafter's, under the same noise.")


class ExplainedGuess(Reply):
    """A node of the tree of guesses."""

    node: int
    parent: int = Field(description="The node that it follows; 0 is the last token of the text.")
    text: str
    how: str = Field(description="How it was drawn: fixed, iid, without replacement or coupled.")
    p: float
    q: float | None
    reach: float = Field(description="The chance that it is kept, before anything was drawn.")
    kept: bool


class ExplainedPlace(Reply):
    """A place of the text at which the target decided."""

    node: int
    after: str = Field(description="The text of the node.")
    runners: list[ExplainedRunner] = Field(description="The most probable first.")
    guesses: list[str]
    winner: str = Field(description="The token that was written here.")
    was_guessed: bool
    accept: float | None = Field(description="Where a weighted coin decides: the chance of the first guess.")


class ExplainedWords(Reply):
    """The step in words, each term introduced where it first stands."""

    before: list[str]
    guess: list[str]
    check: list[str]
    verdicts: list[str] = Field(description="One for each place.")
    kept: str
    result: list[str]


class ExplainedStepReply(Reply):
    """A decode step, taken apart."""

    number: int = Field(description="From 1.")
    text: str = Field(description="The end of the text before the step.")
    method: str
    verifier: str
    exact: bool
    is_race: bool
    temperature: float
    guesses: list[ExplainedGuess]
    places: list[ExplainedPlace]
    num_kept: int
    emitted: list[str]
    stop_uniform: float = Field(description="The random number by which rules with a coin choose where to stop.")
    seconds_draft: float
    seconds_target: float
    seconds_rest: float
    words: ExplainedWords


class ExplainReply(Reply):
    """The first steps of a text."""

    object: Literal["foretell.explanation"]
    model: str
    seed: int = Field(description="With it the same text comes again.")
    chosen: int = Field(description="Index of the step to show first: some of its guesses were kept, some not.")
    steps: list[ExplainedStepReply]


class Status(Reply):
    """Of the server."""

    status: Literal["ok", "ready"]
