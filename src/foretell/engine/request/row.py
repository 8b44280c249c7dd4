"""A request as it is decoded: its tokens, their pieces of text, where it ends, and its figures."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from foretell.core.errors import ForetellError
from foretell.core.params import HEATS, SamplingParams
from foretell.core.places import keyed
from foretell.draft.config import MethodConfig
from foretell.engine.request.text import TextStream
from foretell.engine.speculation import Speculation
from foretell.engine.structured.thoughts import Thinking, ThoughtState
from foretell.planner.acceptance import private

Watcher = Callable[[Any, int], None]
"""Called on the engine's thread after every step of a request, with the ``StepEvent`` and the request's row in it. It
delays all requests that share the thread, so it must be short. An exception that it raises ends the decoding."""


@keyed
@dataclass(frozen=True)
class Submission:
    """One request to a ``Service``."""

    request_id: str  # unique among the requests that have not ended
    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    prediction_ids: Sequence[int] = ()  # the caller's guess of the output, for the method ``prediction``
    speculative: MethodConfig | None = None  # from ``Service.method``; None: the service's own choice
    always: bool = False  # guess in every step that no other request shares, whether that pays or not
    # ``params.logprobs`` of the prompt's tokens, in ``Completion.prompt_pieces``
    num_prompt_logprobs: int | None = None
    write: bool = True  # False: nothing is written, whatever ``params`` allow: the prompt is only scored
    prepares: bool = False  # its prompt is read for the prefix store, while nobody else is there; nothing is written
    trace: bool = False  # updates carry the tree of each step
    watch: Watcher | None = None  # told every step; with the draft's logits in those that no other request shares
    timeout_s: float | None = None  # from submission on; the output until then is returned
    note: str = ""  # why guesses that were asked for cannot be made: told in ``Completion.plain_reason``
    store: bool = True  # False: nothing of it is kept to learn from
    lora: str | None = None  # the target's adapter, a name of ``CausalModel.loras``; None: the engine's own choice
    thinking: Thinking | None = None  # how it thinks, where thoughts stand apart: see ``GOVERNS``; None: not at all
    tenant: str | None = None  # who sent it: a name, or a hash of a key; see ``ServiceOptions.shared_drafts``

    @property
    def owner(self) -> tuple[str | None, str | None]:
        """Whose keys and values its text's are: another sender may not see them, another adapter would compute others."""
        return self.tenant, self.lora


@dataclass(frozen=True)
class Piece:
    """One emitted token as a stream yields it."""

    token_id: int
    text: str  # whole characters only: "" while a character or a stop text may still be incomplete
    source: str  # "draft:<method>", "bonus" or "plain"; "prompt" where it was given
    logprob: float | None = None  # natural log of the model's own probability, before temperature and processors
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token, logprob) of the most probable ones, the best first
    offset: int = 0  # characters of the text before its own, among them those that are held back


@dataclass
class Row:
    """One request being decoded, and its figures."""

    index: int  # index of the request in the caller's list
    submission: Submission  # as it was asked for
    choice: Speculation  # who guesses for it, and by which rule
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]  # tokens that end the output, wherever they come
    max_tokens: int  # of output, the context's end included
    text: TextStream
    prediction: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)  # one a token
    prompt_pieces: list[Piece] = field(default_factory=list)  # where the prompt was scored
    finish_reason: str | None = None  # "stop" or "length"; of a service also "cancelled", "timeout" and "error"
    error: ForetellError | None = None  # set where the row ended with an error
    draft_error: str = ""  # why it is no longer guessed for: its drafter failed, or its method rests
    steps: list[tuple[int, int]] = field(default_factory=list)  # (depth of the proposal, accepted) of every step
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_per_pos: list[int] = field(default_factory=list)  # steps that proposed at least k + 1 tokens in a line
    accepted_per_pos: list[int] = field(default_factory=list)  # ... of which position k was accepted
    seconds_queue: float = 0.0
    seconds_prefill: float = 0.0
    seconds_decode: float = 0.0
    num_cached_tokens: int = 0  # of the prompt, whose KV was found in the prefix store
    num_preemptions: int = 0
    lora: int = 0  # as ``KVCache.loras`` has it
    beginnings: tuple[bytes, ...] = ()  # of its prompt: see ``engine/beginnings.py``
    loading: Future[Any] | None = None  # a file of the prefix store, read while others decode ...
    has_looked: bool = False  # ... where there is one, which is asked once
    waits_for: "Row | None" = None  # whose prompt, which begins as its own does, is being read
    answer_ends: frozenset[int] = frozenset()  # tokens that end the answer, and nothing of a thought
    state: ThoughtState | None = None  # where a thought or the answer stands, if such tokens are looked for
    capture: object | None = None  # of a service that learns: see ``Learning.assign``

    @property
    def request_id(self) -> str:
        """See ``Submission``."""
        return self.submission.request_id

    @property
    def method(self) -> str:
        """The name of its method."""
        return self.choice.method.name

    @property
    def heat(self) -> int:
        """``SamplingParams.heat``, for the planner: of every adapter, and of requests that are not to be stored, other
        numbers. An adapter's texts are others, and so is how well they are guessed."""
        heat = self.params.heat + HEATS * self.lora
        return heat if self.submission.store else private(heat)

    @property
    def known(self) -> list[int]:
        """The text so far, the pending token last."""
        return self.prompt_ids + self.token_ids

    @property
    def length(self) -> int:
        """Of ``known``."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def num_slots(self) -> int:
        """Slots that its next step may use."""
        return self.length + self.choice.num_nodes

    @property
    def depth_limit(self) -> int:
        """How many guesses the next step can use: one token of the remaining output is kept for the bonus.

        max_tokens ends with the context, so no guess within room lies beyond it either. 0 without a drafter, and where the
        text is longer than those that its method was made for.
        """
        if self.draft_error:
            return 0
        room, method = self.max_tokens - len(self.token_ids) - 1, self.choice.method
        return room if method.max_positions is None or method.light is not None else min(room, self.trained_room)

    @property
    def trained_room(self) -> int:
        """How many guesses lie within the positions that its method was made for (``Method.max_positions``)."""
        most = self.choice.method.max_positions
        return self.max_tokens if most is None else max(0, most - self.length)

    def emit(self, tokens: Sequence[int], source: Sequence[str]) -> int:
        """Take tokens until the row ends; returns how many were taken."""
        for taken, (token, origin) in enumerate(zip(tokens, source, strict=True), start=1):
            self.token_ids.append(token)
            offset = len(self.text.text)
            is_end = self._ends(token)
            if not is_end:
                self.text.push(token, may_stop=len(self.token_ids) > self.params.min_new_tokens)
            if is_end or self.text.stopped:
                self.finish_reason = "stop"
            elif len(self.token_ids) >= self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                self.text.finish()
                if self.text.stopped:  # a stop text whose token also ended in half a character
                    self.finish_reason = "stop"
            self.pieces.append(Piece(token, self.text.take(), origin, offset=offset))
            if self.finish_reason is not None:
                return taken
        return len(tokens)

    def _ends(self, token: int) -> bool:
        """Whether the output ends with a further token of it."""
        thinking = self.submission.thinking
        if thinking is not None and self.answer_ends:
            self.state = thinking.thoughts.after(self.state or ThoughtState(thinking.start), token)
        return token in self.end_ids or (token in self.answer_ends and self.state is not None and self.state.is_answer)
