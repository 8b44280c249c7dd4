"""Fields that every route that writes texts has: how tokens are drawn and guessed, and what replies say of them."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from foretell.draft.ngram import MAX_NGRAM
from foretell.server.protocol.fields import INT32, Option, Strict, Text, TokenId

MAX_BIASES = 1024
MAX_ALLOWED = 65536


class StreamOptions(Strict):
    """What a stream tells of its tokens."""

    include_usage: bool | None = Field(None, description="A last chunk with usage and no choices.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: every chunk tells the usage so far."
    )


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
    min_tokens: int | None = Field(None, ge=0, le=INT32, description="No end token and no stop text before so many.")
    stop: Text | Annotated[list[Text], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description="Texts that end the output; they are not part of it."
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = Field(
        None, description="More end tokens."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED, fail_fast=True)] | None = (
        Field(
            None,
            description="The output is made of these tokens alone: an end token ends it only where it is one of them.",
        )
    )
    ignore_eos: bool | None = Field(None, description="Go on after the model's end token.")
    stream: bool | None = Field(None, description="Server-sent events, ended by 'data: [DONE]'.")
    stream_options: StreamOptions | None = None
    store: bool | None = Field(
        None, description="false: a server that learns (--learn, --shared-drafts) keeps nothing of the request."
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
