"""What answers share: errors, usage, figures of speculation, log probabilities, and the beginning of a choice."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


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
    """Of thoughts, and of the client's prediction, never of drafters (see metrics)."""

    reasoning_tokens: int = Field(description="Tokens of what was thought.")
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


class MetricsReply(Reply):
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


class PromptLogprob(Reply):
    """A token of the prompt, or one of the likeliest there."""

    logprob: float
    rank: int | None = Field(description="1 is the likeliest; null: not among those that were asked for.")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By the token's id; null for the first token, which follows nothing."""


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


class SpeculationReply(Reply):
    """Common fields of choices; provenance, trace and seed are present if they were requested or drawn."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: Literal["timeout", "context"] | None = Field(
        None, description="'timeout': the request's time was up; 'context': the model's context was full."
    )
    matched_stop: int | str | None = Field(None, description="The end token's id, or the stop text, that ended it.")
    token_ids: list[int] | None = None
    seed: int | None = Field(None, description="Given as 'seed' with n = 1, it gives this choice again.")
    provenance: list[Provenance] | None = None
    trace: list[StepTree] | None = None


class Envelope(Reply):
    """Common fields of answers."""

    id: str
    created: int = Field(description="Unix time.")
    model: str
    system_fingerprint: str
    metrics: MetricsReply | None = None
