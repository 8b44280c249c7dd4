"""What a server says of itself: its model, its version, whether it is well, and what it has learned."""

from typing import Any, Literal

from pydantic import Field

from foretell.server.replies.common import Reply


class ModelReply(Reply):
    """The model that is served."""

    id: str
    object: Literal["model"]
    type: Literal["model"] = Field(description="With display_name and created_at: as Anthropic's clients read it.")
    display_name: str
    created_at: str
    created: int
    owned_by: str
    root: str = Field(description="The model that is served.")
    parent: str | None = Field(description="Of an adapter the model that it changes, else null.")
    max_model_len: int | None = Field(
        description="Tokens of prompt and output together; null of one of several that was never loaded."
    )
    speculative: dict[str, Any] = Field(description="The speculation of requests that choose none.")
    methods: list[str] = Field(description="Values for `speculative.method` in a request.")
    resting: dict[str, float] = Field(
        description="Those not tried now because their drafters failed several times in a row: for how many seconds."
    )
    status: dict[str, str] | None = Field(None, description="Of one of several: value is loaded, loading or unloaded.")


class ModelList(Reply):
    """All models."""

    object: Literal["list"]
    data: list[ModelReply]
    first_id: str | None = Field(description="null where there is no model.")
    last_id: str | None
    has_more: Literal[False]


class VersionReply(Reply):
    """Of the server's program."""

    version: str


class Props(Reply):
    """What llama.cpp's clients read before they use a server."""

    default_generation_settings: dict[str, Any] = Field(description="n_ctx: tokens of prompt and output together.")
    total_slots: int = Field(description="Requests that are decoded at once.")
    model_path: str
    model_alias: str
    chat_template: str
    modalities: dict[str, bool]
    bos_token: str
    eos_token: str
    build_info: str


class LearnerReply(Reply):
    """What a server that learns has learned, of this client's own requests where API keys are asked for."""

    figures: dict[str, Any] = Field(
        description="Counters and gauges, as /metrics has them; with API keys the key's own, "
        "of its adapters and of the events below."
    )
    failure: str = Field(description="Why learning has ended; empty where it has not.")
    paused: bool
    adapters: list[dict[str, Any]] = Field(description="Name, method, version, versions kept, acceptance of late.")
    events: list[dict[str, Any]] = Field(description="Updates, swaps, refusals, reverts and drifts, the last ones.")
    history: list[dict[str, Any]] = Field(description="Of each request: first guesses made and kept, and the version.")


class Status(Reply):
    """Of the server."""

    status: Literal["ok", "ready"]
