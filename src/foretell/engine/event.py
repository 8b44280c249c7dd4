"""What one decode step did. Certify, bench, metrics and traces read these events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from foretell.draft.base import Commit, LightStep
from foretell.draft.shapes import Shape
from foretell.engine.request.row import Row
from foretell.verify.base import Evidence, Verdict, Verifier


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of a step, guessed by one drafter and judged by one verifier."""

    start: int
    stop: int
    method: str
    shape: Shape
    verifier: Verifier


@dataclass(slots=True)  # not frozen: it is made in every step, and that would take several microseconds
class StepEvent:
    """One step of all rows. Its tensors are valid until the observer returns: copy what is to be kept; change nothing.

    Row b of every tensor and list is ``rows[b]``, whose output holds the step's tokens already.
    """

    rows: Sequence[Row]
    evidence: Evidence  # what the verifier read: the tree, p [B, N, V] after all processors, the noise, its taps
    logits: Tensor  # [B, N, V] of the target, before any processor
    verdict: Verdict
    commit: Commit  # what was kept, cut where a row ended
    depth_limit: Sequence[int]  # [B] greatest depth that the plan and the row's limits allowed
    # Where the time went, on the host clock: on an accelerator, work is queued, not done, by then.
    seconds_draft: float  # proposing, the draft model's passes included
    seconds_draft_model: float  # the draft model's passes alone, where an observer or the recorder asks for them
    seconds_target: float  # the target's pass
    seconds_rest: float  # layout, probabilities, verification, commit, bookkeeping
    # More where plain steps were made in one call, of which this is the last (``judging.run``) ...
    num_passes: int = 1
    num_before: int = 0  # ... and the tokens that those before it emitted; seconds are of all
    bytes_read: int = 0  # of files, by the target's passes: of experts that are not held
    # What the loop adds for observers.
    parts: Sequence[Part] = ()  # the drafter and verifier of each group of rows, in order
    tap_layers: tuple[int, ...] = ()  # of ``commit.taps``, in order
    light_steps: Sequence[LightStep | None] = ()  # [B] see ``Drafter.light_steps``
    draft_logits: Sequence[Tensor] = ()  # if requested: [B, n, V] of the draft, after the root and the nodes it read

    @property
    def seconds(self) -> float:
        """The step's own time."""
        return self.seconds_draft + self.seconds_target + self.seconds_rest

    @property
    def is_light(self) -> bool:
        """Whether the light parts of the rows' methods made all guesses of the step (``Method.light``)."""
        return any(self.light_steps) and all(one is not None and one.proposed for one in self.light_steps)

    def text(self, row: int) -> list[int]:
        """Token ids of a row's text before the step: prompt and output, the pending token last."""
        known = self.rows[row].known
        return known[: len(known) - len(self.commit.tokens[row])]


Observer = Callable[[StepEvent], None]
"""Called after every step, on the thread that decodes. It must not block. An exception that it raises ends the
decoding."""
