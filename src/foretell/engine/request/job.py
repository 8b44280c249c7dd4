"""One request of the loop that has not ended: its state, and what is reported of it to its sink and the planner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from foretell.draft.base import LightStep
from foretell.engine.event import StepEvent
from foretell.engine.failures import GuardedPlanner
from foretell.engine.request.result import Sink, StepTrace, Update
from foretell.engine.request.row import Piece, Row
from foretell.engine.request.scoring import Scoring, trace_of, with_logprobs
from foretell.planner.observations import RowStep, RowView, StepObservation
from foretell.planner.plan import StepPlan
from foretell.planner.planner import Planner

Phase: TypeAlias = Literal["scoring", "waiting", "reading", "decoding", "ended"]


@dataclass(eq=False)
class Job:
    """A request that has not ended, and its state."""

    row: Row
    sink: Sink | None  # None: the caller reads ``row``, and ``tick`` returns what has ended
    arrived: float
    since: float  # when its phase began
    phase: Phase | None = None  # None: no loop holds it yet; ``Loop._move`` alone sets it
    decoded_s: float = 0.0  # seconds of decoding before it was preempted
    num_draft_tokens: int = 0  # of ``row`` before the last step
    num_asked: int = 0  # steps in which it might guess
    num_delivered: int = 0  # pieces that were sent to the sink, or are sent with the end
    tail: str = ""  # see Update
    scoring: Scoring | None = None  # of its prompt, while that is read for its own sake
    undelivered: tuple[tuple[Piece, ...], StepTrace | None] = ((), None)  # of the last step, sent with the end

    @property
    def has_row(self) -> bool:
        """Whether it has a row of the pool."""
        return self.phase in ("reading", "decoding")


def deliver(job: Job, index: int, event: StepEvent) -> None:
    """Score the tokens of one step, where that is asked for, and send its updates. Those of a request's last step are sent
    when its row is free."""
    pieces = job.row.pieces[job.num_delivered :]
    count = job.row.params.logprobs
    if count is not None and pieces:
        path = event.commit.path[index]
        pieces = with_logprobs(pieces, event.logits[index], path, count)
        job.row.pieces[job.num_delivered :] = pieces
    job.num_delivered = len(job.row.pieces)
    trace = trace_of(event, index) if job.row.submission.trace and job.row.error is None else None
    if job.sink is not None and job.row.finish_reason is None and (pieces or trace):
        job.sink(Update(job.row.request_id, tuple(pieces), trace))
    else:
        job.undelivered = (tuple(pieces), trace)


def view_of(job: Job, num_unread: int = 0, expected: int | None = None) -> RowView:
    """The planner's view of a request before a step."""
    return RowView(
        job.row.request_id, job.row.method, job.row.choice.depth, job.row.depth_limit, num_unread,
        job.row.submission.always, job.row.heat, job.row.length, expected,
    )  # fmt: skip


def expects(job: Job) -> bool:
    """Whether the request's grammar may say what comes, and its method would guess that."""
    method = job.row.choice.method
    can_guess = (method.light or method).capabilities.expects
    return can_guess and getattr(job.row.params.logits_processor, "expected", None) is not None


def observation_of(
    jobs: Sequence[Job], plan: StepPlan, lights: Sequence[LightStep | None], event: StepEvent, seconds_loop: float = 0.0
) -> StepObservation:
    """The planner's view of a step that was made: jobs and their light steps, each in the order of its rows; without light
    steps nobody guessed. Of steps made in one call it is of each alike. seconds_loop: what the loop took around the step.
    Counts steps in ``Job.num_asked``."""
    rows = []
    for job, cap, light in zip(jobs, plan.caps, lights, strict=True) if lights else ():
        job.num_asked += cap > 0
        row, nodes = job.row, job.row.num_draft_tokens - job.num_draft_tokens
        kept = row.steps[-1] if row.error is None else (0, 0)
        known = None if light is None or row.error else (light.allowed, light.drafted, light.accepted)
        by_light = None if known is None or light is None else light.preferred
        rows.append(RowStep(row.request_id, row.method, cap, *kept, nodes, known, row.heat, by_light, row.length))
    share = 1 / event.num_passes
    return StepObservation(
        len(jobs), rows, event.seconds_draft * share, event.seconds_target * share,
        (event.seconds_rest + seconds_loop) * share,
        sum(job.row.length for job in jobs) / len(jobs), event.num_passes,
    )  # fmt: skip


def plain_reason(job: Job, planner: Planner | GuardedPlanner | None) -> str | None:
    """Why a request made no guess, where it might have made some."""
    note = None if job.row.num_draft_tokens else job.row.submission.note or None
    if note or job.row.num_draft_tokens or not job.row.choice.config.guesses:
        return note
    if job.row.submission.params.max_new_tokens == 1:
        return "one token takes one pass, guessed or not"
    method, most = job.row.method, job.row.choice.method.max_positions
    if most is not None and not job.row.trained_room:
        return f"{method} was made for texts of at most {most} tokens, and this one is longer"
    if job.num_asked or planner is None:
        return f"{method} found nothing to guess"
    return planner.why_not(method)
