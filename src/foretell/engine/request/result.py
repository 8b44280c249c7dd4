"""What a request gives back: a completion and its figures, and updates until then."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from foretell.core.errors import ForetellError
from foretell.engine.request.row import Piece, Row


@dataclass(frozen=True)
class Completion:
    """One finished (or, in a stream, partial) output and its figures."""

    text: str
    token_ids: list[int]  # an end token included
    finish_reason: str | None  # "stop": an end token or stop text; "length": max_new_tokens or the context's end
    seed: int | None  # as given, or the fresh one that was drawn: the same seed gives the same text
    num_prompt_tokens: int
    num_tokens: int
    seconds_prefill: float
    seconds_decode: float
    tokens_per_second: float  # num_tokens / seconds_decode
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int  # of the drafted ones, before an end or limit cut the path
    num_draft_tokens_per_pos: list[int]  # steps that guessed at least k + 1 tokens in a line
    num_accepted_tokens_per_pos: list[int]
    mean_acceptance_length: float  # 1 + accepted / steps
    acceptance_rate: float  # accepted / drafted; 0 where nothing was drafted
    pieces: list[Piece]  # every token with its text and where it came from
    config: dict[str, Any]  # the resolved configuration
    steps: list[tuple[int, int]] = field(default_factory=list)  # (depth of the proposal, accepted) of every step
    seconds_queue: float = 0.0  # of a service: from submission to the first pass
    num_cached_tokens: int = 0  # of the prompt, whose KV was reused
    prompt_pieces: list[Piece] = field(default_factory=list)  # of a service: the prompt's tokens, where asked for
    num_preemptions: int = 0  # how often the request lost its row to others and resumed later
    left_out: tuple[str, ...] = ()  # places in json_schema that were not enforced, with lenient_schema
    plain_reason: str | None = None  # why no token, or no more, was guessed though guesses were asked for

    @classmethod
    def of(cls, row: Row, config: dict[str, Any], plain_reason: str | None = None) -> "Completion":
        """The completion of a row. plain_reason: why nothing was guessed, where its drafter has not failed."""
        if row.draft_error:
            plain_reason = f"{row.draft_error}, and the text went on without guesses"
        return cls(
            text="".join(piece.text for piece in row.pieces),
            token_ids=list(row.token_ids),
            finish_reason=row.finish_reason,
            seed=row.params.seed,
            num_prompt_tokens=len(row.prompt_ids),
            num_tokens=len(row.token_ids),
            seconds_prefill=row.seconds_prefill,
            seconds_decode=row.seconds_decode,
            tokens_per_second=len(row.token_ids) / row.seconds_decode if row.seconds_decode else 0.0,
            num_steps=row.num_steps,
            num_draft_tokens=row.num_draft_tokens,
            num_accepted_tokens=row.num_accepted_tokens,
            num_draft_tokens_per_pos=list(row.drafted_per_pos),
            num_accepted_tokens_per_pos=list(row.accepted_per_pos),
            mean_acceptance_length=1 + row.num_accepted_tokens / max(1, row.num_steps),
            acceptance_rate=row.num_accepted_tokens / max(1, row.num_draft_tokens),
            pieces=list(row.pieces),
            config=config,
            steps=list(row.steps),
            seconds_queue=row.seconds_queue,
            num_cached_tokens=row.num_cached_tokens,
            prompt_pieces=list(row.prompt_pieces),
            num_preemptions=row.num_preemptions,
            left_out=tuple(getattr(row.params.logits_processor, "left_out", ())),
            plain_reason=plain_reason,
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields but the pieces and steps, ready for JSON."""
        fields = asdict(self)
        del fields["pieces"], fields["steps"], fields["prompt_pieces"]
        return fields


@dataclass(frozen=True)
class StepTrace:
    """One step of one row: its tree of guesses, the kept path and the bonus."""

    tokens: list[int]  # [n] of the row's real nodes; node 0 is the pending token
    parent: list[int]  # [n]; -1 for node 0
    probability: list[float]  # [n] the target's distribution of each node's token after its path; 1 for node 0
    path: list[int]  # kept nodes, 0 first
    bonus: int | None  # the token that followed them; None where the text ended with a guess


@dataclass(frozen=True)
class Update:
    """An update of one request, sent on the engine's thread. The last one has a completion or an error, never both."""

    request_id: str
    pieces: tuple[Piece, ...] = ()
    trace: StepTrace | None = None
    completion: Completion | None = None  # finish_reason "stop", "length", "cancelled" or "timeout"
    error: ForetellError | None = None  # of this request alone; other requests continue
    tail: str = ""  # text of tokens sent before, held back for a possible stop text; sent with the end of the request
    prompt_pieces: tuple[Piece, ...] = ()  # all of them, once, before anything is written

    @property
    def is_last(self) -> bool:
        """Whether this is the last update."""
        return self.completion is not None or self.error is not None


Sink = Callable[[Update], None]
"""Called on the engine's thread, in order; it must not block and must not raise."""
