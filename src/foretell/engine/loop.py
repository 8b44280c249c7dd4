"""The decode loop: a queue, admission by KV budget, prefill between decode steps, preemption, and the end of requests.

``tick`` does one round: expire, score a piece of a prompt, admit, read a piece of a prompt, decode one step. It uses
neither threads nor sockets: ``Engine`` calls it on the caller's thread until all have ended, ``Service`` on its own.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from traceback import clear_frames
from typing import Any

from foretell.core.errors import EngineError, ForetellError, QueueFullError, UnreadableError
from foretell.draft.base import LightStep, Probe
from foretell.engine.batch import Batch
from foretell.engine.event import Observer, StepEvent
from foretell.engine.failures import Failures, GuardedPlanner, RaisedFailures
from foretell.engine.prefix import PrefixStore
from foretell.engine.recorder import Recorder
from foretell.engine.request.job import Job, Phase, deliver, expects, observation_of, plain_reason, view_of
from foretell.engine.request.result import Completion, Sink, Update
from foretell.engine.request.row import Row
from foretell.engine.request.scoring import Scoring
from foretell.engine.speculation import Speculation
from foretell.engine.threads import thread_limit
from foretell.model.prefill import PREFILL_CHUNK, round_up
from foretell.model.target import CausalModel
from foretell.planner.observations import RowView
from foretell.planner.plan import StepPlan
from foretell.planner.planner import Planner

HEADROOM = 16
"""Tokens beyond its text that a request must find free to be admitted, so that it is not preempted at its first steps."""
MIN_CHUNK = 16
"""Least tokens of a prefill pass, independent of the stall target: otherwise prompts might never be read."""
SPREAD = 1 / 16
"""Share of the time of plans that counts to each step: a plan stands for some 16 steps where rows guess."""
FIRST_CHUNK = 128
"""Tokens of a service's prefill pass while nothing is known of its speed."""
ALONE_S = 0.5
"""Seconds of a service's prefill pass beside which nothing decodes: that a client has left is seen after it. Passes over 64
tokens take as long a token as those over 512 (0.5B in 4 bits, after 0 and 3,072 tokens of text)."""


@dataclass(frozen=True)
class Limits:
    """Limits of a loop."""

    max_rows: int  # decoded or read together
    max_queue: int
    kv_tokens: int  # whose keys and values may be held at once
    capacity: int  # slots of a row
    stall_target_s: float | None  # None: latency does not matter, so prompts are read before the next step


@dataclass(frozen=True)
class LoopStep:
    """What one step is made of, and for whom."""

    jobs: list[Job]  # by row
    plan: StepPlan | None  # None: without a planner every row guesses as deep as it may
    began: float  # when it was planned, where the plan is a new one
    watched: list[int]  # the jobs that somebody watches
    alone: bool  # whether the step's only job is watched: others must not pay for the copies of the draft's logits
    probe: Probe | None  # None: nobody watches, and no observer is called


class Loop:
    """See the module's docstring. One thread at a time."""

    def __init__(
        self,
        model: CausalModel,
        limits: Limits,
        planner: Planner | None,
        *,
        prefixes: PrefixStore | None = None,
        width: int = 0,
        observers: Sequence[Observer] = (),
        draft_logits: bool = False,
        recorder: Recorder | None = None,
        failures: Failures | None = None,
        unplanned: Callable[[int], str] = lambda num_rows: "",
        single_use: bool = False,
        describe: Callable[[Speculation], dict[str, Any]] = lambda choice: choice.config.resolved(),
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """planner: None lets every row guess to the full depth of its own choice, without a clock, so that processes
        that share a model run the same steps; unplanned: see ``GuardedPlanner``. width: see ``Batch``. failures: given,
        what fails beside the target's passes (drafters, planner, recorder, prefix store) is counted there, and decoding
        goes on; else its error is the caller's. Errors of observers and sinks are the caller's in any case. draft_logits:
        events carry them. single_use: once all its requests have ended it gets no others. observers are called after every
        step; recorder sums the steps up. describe returns ``Completion.config``; clock returns seconds."""
        self._failures = RaisedFailures() if failures is None else failures
        self.planner = None if planner is None else GuardedPlanner(planner, self._failures, unplanned)
        self.limits, self.prefixes = limits, prefixes
        self.describe, self.clock, self.share = describe, clock, model.share
        self.observers, self._draft_logits = list(observers), draft_logits
        # They read rows alone: several plain steps of one call are one to them
        self.observers_of_rows: list[Observer] = []
        self._is_single_use = single_use and prefixes is None
        # Rounding in transformers' modules depends on the number of threads: there it stays as it is.
        of_modules = model.spec.implementation == "transformers"
        self._threads: Callable[[], AbstractContextManager[None]] = nullcontext if of_modules else thread_limit
        self.batch = Batch(
            model, max_rows=limits.max_rows, capacity=limits.capacity, slots=limits.kv_tokens, prefixes=prefixes,
            width=width, failures=failures,
        )  # fmt: skip
        self.jobs: dict[str, Job] = {}  # all that have not ended
        self._timed: dict[str, float] = {}  # deadlines of those that have one
        self.scoring: deque[Job] = deque()  # whose prompts' log probabilities come first; they hold no row
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}  # by id(row): those that have a row of the pool
        self.recorder = Recorder() if recorder is None else recorder
        self._doing = "step"  # of ``failures.PASSES``, what is done or was done last ...
        self.faults: Counter[str] = Counter()  # ... and how often each has failed since it went well
        self._seconds_per_token = 0.0  # of prefill, running mean
        self._planned: list[Row] = []  # of the last plan
        self._led = False  # whether light parts guessed in the last step that was planned, so that others may lag
        self._behind = 0.0  # seconds of the loop behind the last step, where the same requests go on
        self._owed = 0.0  # seconds of plans that count to no step yet

    def refuse(self) -> None:
        """Count and raise QueueFullError."""
        self.recorder.num_rejected += 1
        raise QueueFullError(
            f"{len(self.waiting)} requests are waiting, which is as many as the queue takes: try again later",
            retry_after_s=max(1.0, self.recorder.seconds_per_request),
        )

    def submit(self, row: Row, sink: Sink | None, scoring: Scoring | None = None) -> None:
        """Queue a request. scoring: of its prompt, which is done first. The caller must check the queue's length before."""
        self.stop_preparing()
        now, submission = self.clock(), row.submission
        self.jobs[submission.request_id] = job = Job(row, sink, now, now, scoring=scoring)
        if submission.timeout_s is not None:
            self._timed[submission.request_id] = now + submission.timeout_s
        self._move(job, "waiting" if scoring is None and submission.write else "scoring", now)
        self.recorder.num_submitted += not submission.prepares

    def stop_preparing(self) -> None:
        """End what is read ahead: it may be the beginning of a request that has come."""
        self._cut([job for job in self.jobs.values() if job.row.submission.prepares], "cancelled")

    def cancel(self, request_id: str) -> None:
        """End a request in any state. An ended request is ignored."""
        if request_id in self.jobs:
            self._cut([self.jobs[request_id]], "cancelled")

    @property
    def has_work(self) -> bool:
        """Whether ``tick`` would do anything."""
        return bool(self.jobs)

    @property
    def used_tokens(self) -> int:
        """KV slots that running requests may use in their next step, whole blocks where rows take such."""
        return sum(map(self._slots, list(self.running.values())))  # any thread may ask

    def _slots(self, job: Job) -> int:
        return round_up(job.row.num_slots, self.batch.pool.block)

    def _move(self, job: Job, phase: Phase, now: float) -> None:
        """The one place where a request's phase changes, and with it what holds the request."""
        queues = {"scoring": self.scoring, "waiting": self.waiting}
        if job.phase in queues:
            queues[job.phase].remove(job)
        if phase in queues:
            # A request that lost its row came before all others that wait.
            (queues[phase].appendleft if job.has_row else queues[phase].append)(job)
        job.phase, job.since = phase, now
        if not job.has_row:
            self.running.pop(id(job.row), None)
        else:
            self.running[id(job.row)] = job
        if phase == "ended":
            del self.jobs[job.row.request_id]
            self._timed.pop(job.row.request_id, None)

    def tick(self) -> list[Row]:
        """One round: see the module's docstring. Returns the rows that a step of it ended."""
        with self._threads():
            if self._timed:
                self._expire()
            if self.scoring:
                self._score()
            if self.waiting:
                self._admit()
            if self.batch.arrivals:
                self._read()
            if self.batch.members and len(self.running) > 1:
                self._make_room()
            if not self.batch.members:  # who lost its row may have been the only one that decoded
                return []
            return self._step()

    def _expire(self) -> None:
        now = self.clock()
        late = self.share([key for key, deadline in self._timed.items() if now >= deadline])
        if late:
            self._cut([self.jobs[key] for key in late], "timeout")

    def _score(self) -> None:
        """One pass of the first prompt that is to be scored; other requests decode a step between two of them."""
        job, now, self._doing = self.scoring[0], self.clock(), "score"
        if job.scoring is not None:
            try:
                done = job.scoring.read()
            except Exception as error:
                self._fail(job, error)
                return
            self.faults.pop("score", None)
            job.row.seconds_prefill += self.clock() - now
            if not done:
                return
            job.row.prompt_pieces, job.scoring = job.scoring.pieces, None
            if job.sink is not None:
                job.sink(Update(job.row.request_id, prompt_pieces=tuple(job.row.prompt_pieces)))
        if job.row.submission.write:
            self._move(job, "waiting", self.clock())
            return
        self.recorder.num_prompt_tokens += len(job.row.prompt_ids)
        job.row.finish_reason = "length"
        self._end(job)

    def _admit(self) -> None:
        others, self._doing = self.used_tokens, "admission"
        for job in list(self.waiting):
            if len(self.running) >= self.limits.max_rows:
                return
            if self.batch.waits(job.row):
                continue
            if others and others + self._slots(job) + HEADROOM > self.limits.kv_tokens:
                return
            now = self.clock()
            job.row.seconds_queue += now - job.since
            try:
                self.batch.arrive(job.row)
            except Exception as error:
                if job.sink is None:
                    raise
                self._fail(job, error)
                continue
            job.row.seconds_prefill += self.clock() - now
            self._move(job, "reading", now)
            others += self._slots(job)
            if job.row.num_preemptions == 0 and not job.row.submission.prepares:
                self.recorder.num_prompt_tokens += len(job.row.prompt_ids)
                self.recorder.num_cached_prompt_tokens += job.row.num_cached_tokens

    def _read(self) -> None:
        chunk, stall = PREFILL_CHUNK, self.limits.stall_target_s
        if stall is not None:
            stall = stall if self.batch.members else ALONE_S
            chunk = int(stall / self._seconds_per_token) if self._seconds_per_token else FIRST_CHUNK
        chunk = min(max(chunk, MIN_CHUNK), PREFILL_CHUNK)
        # At the start drafters read all prompts in one pass of their first step; later on that would hold up others.
        catch_up = bool(self.batch.members)
        if self.planner is not None:
            arriving = [view_of(self.running[id(arrival.row)]) for arrival in self.batch.arrivals]
            catch_up = self.planner.will_guess([*(self._views() if catch_up else ()), *arriving])
            chunk, catch_up = self.share((chunk, catch_up))
        self._doing = "prompt"
        count, seconds = self.batch.read(chunk, catch_up=catch_up, whole=stall is None)
        self.faults.pop("prompt", None)
        self.recorder.seconds_prefill += seconds
        if catch_up and self.planner is not None:
            self.planner.observe_reading(self.batch.prompts.seconds_drafting)
        if count >= MIN_CHUNK:
            new = seconds / count
            self._seconds_per_token = 0.8 * self._seconds_per_token + 0.2 * new if self._seconds_per_token else new
        now = self.clock()
        for job in self._members():
            if job.phase == "reading":
                self._move(job, "decoding", now)
        self._cut([job for job in self._members() if job.row.submission.prepares], "length")

    def _make_room(self) -> None:
        """Preempt the latest requests until the slots of all others fit. A single request always fits."""
        while len(self.running) > 1 and self.used_tokens > self.limits.kv_tokens:
            latest = max(self.running.values(), key=_age)
            self._doing = "leaving"
            self.batch.leave([latest.row], remember=True)
            self._put_back(latest)

    def _put_back(self, job: Job) -> None:
        """Its row is free: it waits, and its text is read again, its own tokens too."""
        job.row.num_preemptions += 1
        job.decoded_s = job.row.seconds_decode
        self.recorder.num_preemptions += 1
        self._move(job, "waiting", self.clock())

    def _step(self) -> list[Row]:
        step = self._schedule()
        return self._deliver(step, self._run(step))

    def _schedule(self) -> LoopStep:
        """Plan how deep each member guesses, and note who watches."""
        began, jobs = perf_counter(), self._members()
        plan, planned = self._plan(jobs, began)
        watched = [index for index, job in enumerate(jobs) if job.row.submission.watch is not None]
        alone = bool(watched) and len(jobs) == 1
        is_seen = bool(self.observers or watched or self.recorder.steps is not None)
        probe = Probe([] if alone or self._draft_logits else None) if is_seen else None
        self._owed += planned - began
        return LoopStep(jobs, plan, planned, watched, alone, probe)

    def _run(self, step: LoopStep) -> StepEvent:
        """Make the guesses and the pass that checks them."""
        plan, self._doing = step.plan, "step"
        caps, paid, least = (None, None, 0.0) if plan is None else (plan.caps, plan.paid, plan.least)
        event = self.batch.step(caps, paid, step.probe, least, can_run=plan is None or not plan.alone)
        self.faults.clear()
        return event

    def _deliver(self, step: LoopStep, event: StepEvent) -> list[Row]:
        """Tell watchers, observers, the planner, the recorder and the requests; end those that are done."""
        stepped = perf_counter()
        has_guessed = step.plan is None or any(step.plan.caps)
        lights = self.batch.grouped.light_steps if has_guessed else []
        if step.probe is not None:
            event.light_steps = lights if has_guessed else [None] * len(step.jobs)
            self._show(step, event, step.probe)
        self._learn(step, event, lights, stepped)
        self._failures.run("recorder", None, self.recorder.add, event, [job.num_draft_tokens for job in step.jobs])
        for observe in self.observers_of_rows:
            observe(event)
        ended = self._hand_over(step.jobs, event)
        if ended:
            self._leave(ended)
        self._behind = 0.0 if ended else perf_counter() - stepped
        return [job.row for job in ended]

    def _plan(self, jobs: Sequence[Job], began: float) -> tuple[StepPlan | None, float]:
        """How deep each member may guess, and when it was planned: now, or (began) with an earlier step."""
        if self.planner is None:
            return None, began
        plan, planned = self._standing_plan(self.planner, jobs, began)
        if any(plan.caps) or not any(map(expects, jobs)):
            return plan, planned
        if not self.planner.asks_expected(len(jobs), sum(job.row.length for job in jobs) / len(jobs)):
            return plan, planned
        asked = [expects(job) for job in jobs]
        counts = self.batch.num_expected(asked)
        if not any(counts) and not self.planner.is_held_back:
            return plan, planned
        known = [count if ask else None for count, ask in zip(counts, asked, strict=True)]
        views = [view_of(job, expected=count) for job, count in zip(jobs, known, strict=True)]
        return self.planner.with_expected(plan, views), planned

    def _standing_plan(self, planner: GuardedPlanner, jobs: Sequence[Job], began: float) -> tuple[StepPlan, float]:
        coming = min(len(self.waiting), self.limits.max_rows - len(self.running))
        # The batch's list of members is another one wherever they change.
        if self._planned is self.batch.members and not self.batch.arrivals and not coming:
            lagging = self._led and len(jobs) == 1 and self.batch.num_unread()[0] > 2
            plan = planner.again(jobs[0].row.depth_limit, lagging=lagging)
            if plan is not None:
                return plan, began
        self._planned = self.batch.members
        plan = planner.plan(self._views(), len(self.batch.arrivals) + coming)
        plan.caps = self.share(plan.caps)
        return plan, perf_counter()

    def _learn(self, step: LoopStep, event: StepEvent, lights: Sequence[LightStep | None], stepped: float) -> None:
        """Tell the planner what the step took and brought. stepped: when its pass was over."""
        # Planning steps, learning from them and handing them over take time, too, and more of it where rows guess. What a
        # new plan took is not the step's own: a step that is tried would seem dearer than those that a plan stands for.
        owed = SPREAD * self._owed
        self._owed -= owed
        # A step for one watcher alone is slower than those that are predicted.
        if self.planner is None or step.plan is None or step.alone:
            return
        seconds_loop = max(stepped - step.began - event.seconds, 0.0) + self._behind + owed
        self._led = any(one is not None and one.proposed for one in lights)
        self.planner.observe(step.plan, observation_of(step.jobs, step.plan, lights, event, seconds_loop))

    def _show(self, step: LoopStep, event: StepEvent, probe: Probe) -> None:
        """A step to observers and watchers."""
        if not (self.observers or step.watched):
            return
        event.parts, event.draft_logits = self.batch.parts(), probe.draft_logits or []
        event.tap_layers = self.batch.grouped.tapping.drafter
        for observe in self.observers:
            observe(event)
        for index in step.watched:
            try:
                step.jobs[index].row.submission.watch(event, index)  # type: ignore[misc]
            except Exception as error:
                self._spoil(step.jobs[index], error)

    def _hand_over(self, jobs: Sequence[Job], event: StepEvent) -> list[Job]:
        """The tokens of a step to their requests; those that ended with it."""
        now = self.clock()
        for index, job in enumerate(jobs):
            job.num_draft_tokens = job.row.num_draft_tokens
            job.row.seconds_decode = job.decoded_s + now - job.since
            if job.sink is not None or job.row.params.logprobs is not None:
                try:
                    deliver(job, index, event)
                except Exception as error:
                    self._spoil(job, error)
        return [job for job in jobs if job.row.finish_reason is not None]

    def _spoil(self, job: Job, error: Exception) -> None:
        """What fails for one request alone, after a step, ends that one."""
        self._failures.fault("output", error)
        job.row.error, job.row.finish_reason = _failed("output"), "error"

    def _leave(self, ended: Sequence[Job]) -> None:
        """Free the rows of requests that ended with a step, and tell them: they have ended even where that fails."""
        self._doing = "leaving"
        try:
            if self._is_single_use and len(ended) == len(self.jobs):  # the batch and its memory go with the loop
                self.batch.tell_worked([job.row for job in ended])
                return
            self.batch.leave([job.row for job in ended if job.row.error is None], remember=True)
            failed = [job.row for job in ended if job.row.error is not None]
            if failed:
                self.batch.leave(failed, remember=False)
        finally:
            for job in ended:
                self._end(job)

    def _views(self) -> list[RowView]:
        """The planner's input: one entry per decoding row, of which there is one at least."""
        return [view_of(*pair) for pair in zip(self._members(), self.batch.num_unread(), strict=True)]

    def _members(self) -> list[Job]:
        return [self.running[id(row)] for row in self.batch.members]

    def _cut(self, jobs: Sequence[Job], reason: str) -> None:
        """End requests that are in the middle of something."""
        if not jobs:
            return
        rows = [job.row for job in jobs if job.has_row]
        self._doing = "leaving"
        try:
            if rows:  # what was read is kept: who was cancelled or timed out is often sent again
                self.batch.leave(rows, remember=True)
        finally:
            for job in jobs:
                self._cut_off(job, reason)

    def _cut_off(self, job: Job, reason: str) -> None:
        if job.phase == "decoding":
            job.row.seconds_decode = job.decoded_s + self.clock() - job.since
        elif not job.has_row:
            job.row.seconds_queue += self.clock() - job.since
        job.row.finish_reason = reason
        job.row.text.finish()
        tail = job.row.text.take()
        if tail and job.row.pieces:  # text that was held back for a possible stop text
            last = job.row.pieces[-1]
            job.row.pieces[-1] = replace(last, text=last.text + tail)
            job.tail = tail
        self._end(job)

    def _fail(self, job: Job, error: Exception) -> None:
        """A request that failed alone, and holds no row. Raises what was not its own mistake."""
        if isinstance(error, ForetellError):
            self._end(job, error)
            return
        self._end(job, _failed(self._doing))
        raise error

    def _end(self, job: Job, error: ForetellError | None = None) -> None:
        """Its row is free; tell its sink. error: of this request; its sink then receives nothing else."""
        request_id, row, now = job.row.request_id, job.row, self.clock()
        if error is not None:
            row.finish_reason = "error"
        self._move(job, "ended", now)
        if self.planner is not None:
            self.planner.forget(request_id)
        if not row.submission.prepares:
            self._failures.run("recorder", None, self.recorder.finish, row, now - job.arrived)
        if job.sink is not None:
            instead = Update(request_id, error=_failed("output"))
            job.sink(self._failures.run("output", instead, self._last_update, job, error))

    def _last_update(self, job: Job, error: ForetellError | None) -> Update:
        row, (pieces, trace) = job.row, job.undelivered
        if error is not None:
            return Update(row.request_id, error=error)
        if row.error is not None:
            return Update(row.request_id, pieces, trace, error=row.error)
        completion = Completion.of(row, self.describe(row.choice), plain_reason(job, self.planner))
        return Update(row.request_id, pieces, trace, completion, tail=job.tail)

    def recover(self, error: Exception) -> int:
        """After an error of ``tick`` or ``cancel``: the requests of the pass that failed end with an error, others with
        rows wait to be read again, and the batch begins anew, empty. Returns how often this failed since it went well."""
        doing, passing = self._doing, {id(row) for row in self.batch.passing}
        self.faults[doing] += not isinstance(error, UnreadableError)  # of the file, and others may find all they need
        rest = sorted((job for job in self.running.values() if id(job.row) not in passing), key=_age, reverse=True)
        failed = [job for job in self.running.values() if id(job.row) in passing]
        ids = ", ".join(job.row.request_id for job in failed) or "none"
        self._failures.fault(
            doing, error, f"its requests ({ids}) end with an error, and {len(rest)} that run begin again"
        )
        clear_frames(error.__traceback__)  # they hold the memory of the pass
        for job in rest:
            self._put_back(job)
        self.batch.begin_anew()
        self._planned = []
        for job in failed:
            self._end(job, error if isinstance(error, UnreadableError) else _failed(doing))
        return self.faults[doing]

    @property
    def is_recovering(self) -> bool:
        """Whether a pass has failed, and none has gone well since though there is work."""
        return bool(self.faults) and self.has_work

    def fail_all(self, error: ForetellError) -> None:
        """End every request with an error: the engine cannot go on."""
        for job in list(self.jobs.values()):
            self._end(job, error)


def _age(job: Job) -> tuple[float, int]:
    return job.arrived, job.row.index


def _failed(doing: str) -> EngineError:
    return EngineError(f"the engine failed while it worked on this request ({doing}), and goes on: send it again")
