"""Messages between the engine's thread and its callers: submissions in, updates out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foretell.core.errors import ForetellError
from foretell.core.params import SamplingParams
from foretell.core.places import keyed
from foretell.draft.config import MethodConfig
from foretell.engine.event import StepEvent
from foretell.engine.request.result import Completion
from foretell.engine.request.row import Piece

Watcher = Callable[[StepEvent, int], None]
"""Called after every step of a request with the step and the request's row in it, on the engine's thread: it delays all
requests that share the thread, so it must be short. An exception that it raises ends the decoding."""


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
    num_prompt_logprobs: int | None = (
        None  # ``params.logprobs`` of the prompt's tokens, in ``Completion.prompt_pieces``
    )
    write: bool = True  # False: nothing is written, whatever ``params`` allow: the prompt is only scored
    trace: bool = False  # updates carry the tree of each step
    watch: Watcher | None = None  # told every step; with the draft's logits in those that no other request shares
    timeout_s: float | None = None  # from submission on; the output until then is returned
    note: str = ""  # why guesses that were asked for cannot be made: told in ``Completion.plain_reason``
    store: bool = True  # False: nothing of it is kept to learn from
    tenant: str | None = None  # who sent it: a name, or a hash of a key; see ``ServiceOptions.shared_drafts``


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
