"""The engine as a service: one thread owns the device and decodes; its methods may be called from any thread."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch

from foretell.core import builtin
from foretell.core.errors import ConfigError, EngineError, ServiceClosedError
from foretell.core.params import fresh_seed
from foretell.core.registry import load_reference
from foretell.draft.config import MethodConfig
from foretell.draft.none import NoMethod
from foretell.engine.engine import Engine
from foretell.engine.failures import Failures
from foretell.engine.loop import Limits, Loop
from foretell.engine.planning import ServicePlanning
from foretell.engine.prefix import PrefixStore
from foretell.engine.request.result import Sink, Update
from foretell.engine.request.row import Row, Submission
from foretell.engine.request.scoring import Scoring
from foretell.engine.speculation import Speculation
from foretell.engine.threads import release_workers
from foretell.service.choices import Choices
from foretell.service.drift import Drifts
from foretell.service.keeper import Keeper, Taken
from foretell.service.learning import Learning, LearnOptions
from foretell.service.memory import IDLE_S, HeapKeeper, check_submission, sizes_of
from foretell.service.options import ServiceOptions as ServiceOptions
from foretell.service.processors import GuardedProcessor, StepBudget
from foretell.service.snapshot import Snapshot, snapshot_of
from foretell.service.tenants import Tenants

logger = logging.getLogger(__name__)
LEARN_BEAT_S = 0.1  # between two looks for what was learned, while idle
HEARTBEAT_S = 60.0  # seconds between messages to the other processes of a shared model while idle
MOST_FAULTS = 3
"""Passes of one kind that fail with none between that goes well, after which the service ends, to be started anew."""
STATES = {
    "starting": "the server is starting",
    "ready": "the server takes requests",
    "recovering": "the server recovers from an error of its engine",
    "draining": "the server is stopping",
    "stopped": "the server has stopped",
    "failed": "the engine has failed, and the server ends so that it can be started anew",
}
_T = TypeVar("_T")


@dataclass(frozen=True)
class Command:
    """A command for the engine's thread, and its form as a message to the other processes that share the model."""

    run: Callable[[], None]
    wire: tuple[Any, ...]

    def __call__(self) -> None:
        """Do it."""
        self.run()


class Service:
    """Takes requests by ``submit`` and sends updates to their sinks, on the engine's thread. See ``ServiceOptions``."""

    def __init__(
        self,
        engine: Engine,
        options: ServiceOptions | None = None,
        *,
        also: Sequence[MethodConfig] = (),
        learn: LearnOptions | None = None,
        prefixes: PrefixStore | None = None,
    ) -> None:
        """engine: the target and the default method. also: further methods that requests may choose (methods without
        weights are always available). learn: drafters learn from the requests (``foretell.learn.LearnOptions``). prefixes:
        those of an earlier service of the same model and options, which was closed. Raises ConfigError, ModelError."""
        options = options or ServiceOptions()
        if engine.model.is_shared and options.speculation == "auto" and engine.speculative.method != NoMethod.name:
            raise ConfigError(
                "speculation = 'auto' measures what passes cost, each process by its own clock, so processes that share a "
                "model would decode different steps: give 'on' or 'off'"
            )
        self.engine, self.options = engine, options
        self._choices = Choices(engine, also, off=options.speculation == "off")
        self._keeper = Keeper(engine, options)
        self.prefixes = prefixes
        """What was read of prompts; None: nothing is kept, or nothing was started."""
        self._tenants = Tenants(options.shared_drafts, keeper=self._keeper)
        self._open_learner: Callable[[], Learning] | None = None
        if learn is not None:  # refuses, before costs are measured, what cannot learn so
            self._open_learner = load_reference(builtin.LEARNER)(engine, self._choices.guessing, learn)
        self._learning: Learning | None = None
        self._drifts = Drifts()
        self._failures = Failures(name for name in self._choices.names if name != NoMethod.name)
        self._loop: Loop | None = None
        self._costs: ServicePlanning | None = None
        self._inbox: deque[Command | Callable[[], None]] = deque()
        self._todo: deque[Command | Callable[[], None]] = deque()  # taken from there, and not begun
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._number = 0
        self._kept = 0, 0  # steps and tokens of prompts, when what is kept was last taken
        self._known: set[str] = set()  # request ids that have not ended
        self._prepared = ""  # the last of ``prepare``
        self._draining = self._closed = False
        self.failure = ""  # why the engine's thread has ended by itself
        self.on_failure: Callable[[], None] = lambda: None
        """Called on the engine's thread when that has ended by itself, and every request has been told."""
        self.kv_tokens = 0
        self._heap = HeapKeeper()
        self._step_budget = StepBudget()
        release_workers()  # of the thread that has loaded the engine: the engine's thread has its own

    # -- methods ---------------------------------------------------------------------------------------------------

    def method(self, given: Mapping[str, Any] | str | None) -> MethodConfig:
        """See ``Choices.method``."""
        return self._choices.method(given)

    @property
    def default(self) -> MethodConfig:
        """The method and verifier of requests that choose none."""
        return self._choices.default.config

    @property
    def methods(self) -> list[str]:
        """Names of the methods that a request may ask for."""
        return self._choices.names

    @property
    def resting(self) -> dict[str, float]:
        """Methods that are not tried now because their drafters failed several times in a row: for how many seconds."""
        return {name: left for name, left in self._failures.rests().items() if left}

    # -- start and stop --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Allocate KV and begin to serve. What passes cost is known from an earlier start, or measured on the engine's
        thread while it serves (``ServicePlanning``). Raises ConfigError.

        Where several processes share the model (torchrun), each starts a service; process 0 takes requests, and the others
        call ``follow``.
        """
        options, width = self.options, self.engine.width
        sizes = sizes_of(self.engine, self._choices.guessing, options)
        self.kv_tokens, self.max_model_len = sizes.kv_tokens, sizes.max_model_len
        if options.prefix_reuse:
            self.prefixes = self.prefixes or PrefixStore(sizes.prefix_bytes)
            self.prefixes.max_bytes, self.prefixes.further = sizes.prefix_bytes, self._keeper.prefixes
            self.prefixes.shrink(sizes.prefix_bytes)
        self._costs = ServicePlanning(
            self.engine.model, self._choices.plain, self._choices.guessing, self._choices.weightless,
            measured=self._tenants.measured, mode=options.speculation, max_rows=sizes.max_rows,
            time_limit_s=options.cost_time_limit_s, longest=sizes.max_model_len, has_learner=self._open_learner is not None,
        )  # fmt: skip
        limits = Limits(sizes.max_rows, options.max_queue, sizes.kv_tokens, sizes.capacity, options.stall_target_s)
        self._loop = Loop(
            self.engine.model, limits, self._costs.planner, prefixes=self.prefixes, width=width,
            describe=partial(_described, self.engine),  # and nothing that holds the loop: a circle is not freed at once
            unplanned=self._costs.unplanned,
            # Processes that share a model draft the same guesses: one of them cannot go on without.
            failures=None if self.engine.model.is_shared else self._failures,
        )  # fmt: skip
        run = self._failures.run
        self._loop.observers += [partial(run, "observer", None, one) for one in self.engine.observers]
        self._loop.observers_of_rows.append(partial(run, "observer", None, self._drifts))
        if self._open_learner is not None:
            self._learning = self._open_learner()
            self._loop.observers.append(partial(run, "learner", None, self._learning.observe))
            self._loop.batch.prompts.on_prompt = partial(run, "learner", None, self._learning.prompt)
        release_workers()  # of this thread
        if not self.engine.model.is_leader:
            return
        self._keeper.recall_rates(self._costs.planner, self._choices.settings)
        self._thread = threading.Thread(target=self._run, name="foretell-engine", daemon=True)
        self._thread.start()
        self._keeper.start(self._learned_since, self._failures)

    def _learned_since(self) -> Taken:
        """What is to be kept, where anything was read or written since the last call."""
        assert self._loop is not None
        done = self._loop.recorder.num_steps, self._loop.recorder.num_prompt_tokens
        if done == self._kept:
            return Taken()
        self._kept = done
        return self._call(self._learned)

    def _learned(self, *, whole: bool = False) -> Taken:
        """What is to be kept, as it stands between two steps. whole: all of it."""
        loop, costs = self._loop, self._costs
        assert loop is not None
        assert costs is not None
        stores = self._keeper.stores(self._tenants.learned(at_rest=not self._known, whole=whole))
        rates = self._keeper.rates(costs.planner, self._choices.settings)
        return Taken({**stores, **rates}, self._keeper.take_prefixes(loop.prefixes))

    def _measure_again(self) -> None:
        """While nothing is to be done: measure costs that are not known, or in doubt."""
        if self._costs is not None:
            self._costs.measure_again(must_stop=lambda: bool(self._inbox) or self._closed)

    def measure(self) -> None:
        """Wait until what passes cost is measured, where it is not known: for callers that time requests. Those that come
        meanwhile wait. Raises ServiceClosedError."""
        if self._costs is not None:
            self._call(self._costs.measure_now)

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.healthy and not self._draining

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread is running."""
        return self._thread is not None and self._thread.is_alive() and not self.failure and not self._closed

    @property
    def state(self) -> str:
        """One of ``STATES``: "starting" until ``start`` has returned, "recovering" while a pass has failed and none has
        gone well since though requests are there (others are taken, and wait)."""
        if self.failure:
            return "failed"
        if self._thread is None and not self._closed:
            return "starting"
        if not self.healthy:
            return "stopped"
        if self._draining:
            return "draining"
        return "recovering" if self._loop is not None and self._loop.is_recovering else "ready"

    @property
    def says(self) -> str:
        """What it does, for a client that is not served."""
        return STATES[self.state]

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait until all others have ended. False on a timeout."""
        self.cancel(self._prepared)
        with self._news:
            self._draining = True
            return self._news.wait_for(lambda: not self._known or not self.healthy, timeout_s)

    def close(self) -> None:
        """Stop. Running and waiting requests end with an error."""
        with self._news:
            self._draining = self._closed = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join()
        take = None if self._thread is None else partial(self._learned, whole=True)
        self._failures.run("keeper", None, self._keeper.finish, take)
        if self._costs is not None:
            self._failures.run("keeper", None, self._costs.keep)
        if self._learning is not None:
            self._failures.run("learner", None, self._learning.close)

    # -- learning --------------------------------------------------------------------------------------------------

    def learner(self, tenant: str | None = None) -> dict[str, Any]:
        """The learner's figures, adapters, events and history, of one tenant or (None) of all. Raises ConfigError where
        nothing learns."""
        return self._learner().state(tenant)

    def tell_learner(self, action: str, tenant: str | None = None) -> dict[str, Any]:
        """pause, resume, revert (to the version before) or save; returns ``learner``. Raises ConfigError."""
        learning = self._learner()
        return self._call(lambda: learning.act(action, tenant))

    def _learner(self) -> Learning:
        if self._learning is None and self._open_learner is not None:
            raise ServiceClosedError(self.says)
        if self._learning is None:
            raise ConfigError("nothing learns here: start the service with --learn, or Service(learn=LearnOptions())")
        return self._learning

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, sink: Sink) -> None:
        """Queue a request; its sink receives the updates. Raises QueueFullError, ServiceClosedError, PromptError and
        ConfigError at once; the sink is then never called."""
        if not self.ready or self._loop is None:
            raise ServiceClosedError(self.says)
        choice = self._choices.default if submission.speculative is None else self._choices.of(submission.speculative)
        reason = None if self._costs is None else self._costs.hopeless.get(choice.config.method)
        if reason is not None and not submission.always:
            submission = replace(submission, note=submission.note or f"guessing cannot pay here: {reason}")
            choice = self._choices.plain
        submission = replace(submission, lora=submission.lora or self.engine.lora)
        choice = self._tenants.choice(choice, *submission.owner, store=submission.store)
        capture: object | None = None
        if self._learning is not None and not submission.prepares:
            choice, capture = self._failures.run(
                "learner", (choice, capture), self._learning.assign, choice, submission
            )
        params = self.engine.formats.applied(
            submission.params, len(submission.prompt_ids), lambda made: GuardedProcessor(made, self._step_budget)
        )
        if params.seed is None:  # drawn here, in the process that takes the request
            params = replace(params, seed=fresh_seed())
        check_submission(submission, choice, self.engine, self.max_model_len)
        submission = replace(submission, params=params, speculative=choice.config)
        with self._news:
            if self._draining:  # since it was looked at above; who drains was told that nobody is left
                raise ServiceClosedError(self.says)
            self._number += 1
            number = self._number
            if submission.request_id in self._known:
                raise ConfigError(f"request id {submission.request_id!r} is in use: ids must be unique")
            row = self._row(number, submission, choice)
            row.capture = capture
            if len(self._known) - len(self._loop.running) >= self.options.max_queue:
                self._loop.refuse()
            self._known.add(submission.request_id)
            wire = ("submit", number, submission)
            self._inbox.append(Command(lambda: self._enter(row, sink), wire))
            self._news.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether no request has not ended."""
        return not self._known

    def prepare(self, submission: Submission) -> None:
        """Read a prompt that is expected into the prefix store while no other request is there; one that comes ends it, and
        goes on from what was read."""
        if self.is_idle and self.options.prefix_reuse:
            self._prepared = submission.request_id
            self.submit(replace(submission, prepares=True), _ignore)

    def _row(self, number: int, submission: Submission, choice: Speculation) -> Row:
        row = self.engine.row_of(number, submission, choice)
        row.max_tokens = min(row.max_tokens, self.max_model_len - len(row.prompt_ids)) if submission.write else 0
        return row

    def cancel(self, request_id: str) -> None:
        """End a request at the next step. An unknown or ended request is ignored."""
        with self._news:
            if request_id in self._known:
                self._inbox.append(Command(lambda: self._cancel(request_id), ("cancel", request_id)))
                self._news.notify_all()

    def _cancel(self, request_id: str) -> None:
        if self._loop is not None:
            self._loop.cancel(request_id)

    def snapshot(self) -> Snapshot:
        """The current counters and gauges."""
        if self._loop is None or self._costs is None:
            return Snapshot()
        return snapshot_of(
            self._loop, self._costs.planner, kv_tokens=self.kv_tokens, num_inbox=len(self._inbox), drifts=self._drifts,
            failures=self._failures, learning=self._learning, longest=self.max_model_len,
        )  # fmt: skip

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def _call(self, function: Callable[[], _T]) -> _T:
        """Run a function on the engine's thread, between steps, and return its result."""
        if not self.healthy:
            raise ServiceClosedError(self.says)
        done = threading.Event()
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append((function(), None))
            except Exception as error:
                outcome.append((None, error))
            done.set()

        with self._news:
            self._inbox.append(run)
            self._news.notify_all()
        while not done.wait(0.5):
            if not self.healthy:
                raise ServiceClosedError(self.says)
        value, error = outcome[0]
        if error is not None:
            raise error
        result: _T = value
        return result

    def _enter(self, row: Row, sink: Sink) -> None:
        assert self._loop is not None

        def deliver(update: Any) -> None:
            if update.is_last:
                with self._news:
                    self._known.discard(row.request_id)
                    self._news.notify_all()
            self._failures.run("sink", None, sink, update)

        if row.submission.prepares and self._loop.has_work:
            deliver(Update(row.request_id, error=EngineError("others came first")))
            return
        try:
            scoring = self._scoring(row.submission)
        except Exception as error:
            self._failures.fault("output", error)
            deliver(Update(row.request_id, error=EngineError("its prompt cannot be scored: send it without logprobs")))
            return
        self._loop.submit(row, deliver, scoring)

    def _scoring(self, submission: Submission) -> Scoring | None:
        count, engine = submission.num_prompt_logprobs, self.engine
        if count is None:
            return None
        return Scoring(engine.model, engine.tokenizer, submission.prompt_ids, count, lora=submission.lora)

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        try:
            while self._turn():
                pass
        except Exception as error:
            logger.exception("the engine failed for good")
            self.failure = f"the engine failed and cannot go on, last with {type(error).__name__}: its log says where"
        with self._news:
            self._closed = True  # refuse further requests
            self._todo.extend(self._inbox)  # a lost one would be waited for
            self._inbox.clear()
        for one in self._todo:
            try:
                with torch.inference_mode():
                    one()
            except Exception:
                logger.exception("a request was lost in a stopping engine")
        said = STATES["failed"] if self.failure else "the service stopped before the request ended"
        loop.fail_all(ServiceClosedError(said))
        with self._news:
            self._news.notify_all()
        if self.failure:
            self.on_failure()

    def _turn(self) -> bool:
        """Rest or learn while nothing is to be done, then commands, and one tick. False once the service is closed. Raises
        what decoding cannot go on after."""
        loop, model, todo = self._loop, self.engine.model, self._todo
        assert loop is not None
        learned = False
        if not (todo or self._inbox or loop.has_work):
            if self._learning is not None:
                learned = bool(self._failures.run("learner", None, self._learning.train_idle))
            if not learned:
                release_workers()
                self._failures.run("rest", None, self._rest)
        with self._news:
            while not (learned or todo or self._inbox or loop.has_work or self._closed):
                if self._learning is not None:
                    if not self._news.wait(LEARN_BEAT_S):
                        break
                elif not self._news.wait(HEARTBEAT_S) and model.is_shared:
                    break  # the other processes wait for a message, and their wait times out
            todo.extend(self._inbox)
            closed = self._closed
            self._inbox.clear()
        if model.is_shared:
            model.share([command.wire for command in todo if isinstance(command, Command)] + [closed])
        if closed:
            return False
        fault = None
        with torch.inference_mode():
            try:
                while todo:
                    todo.popleft()()
                if loop.has_work:
                    began = perf_counter()
                    self._step_budget.begin()
                    loop.tick()
                    self._heap.worked()
                    if self._costs is not None:
                        self._costs.measure_beside(perf_counter() - began)
            except Exception as error:
                if model.is_shared:  # the other processes have gone on
                    raise
                fault = error
            if fault is not None and loop.recover(fault) >= MOST_FAULTS:  # the memory of its frames can be freed here
                raise fault
            if self._learning is not None:
                self._failures.run("learner", None, self._learning.swap)
        return True

    def follow(self) -> None:
        """To be called in every process but process 0: decode the requests of process 0 until it closes."""
        loop, model = self._loop, self.engine.model
        if loop is None or model.is_leader:
            raise ConfigError(
                "follow() is for the processes beside process 0, after start(); process 0 takes the requests"
            )
        with torch.inference_mode():
            while True:
                message: list[Any] = model.share([])
                if message[-1]:  # closed
                    return
                for kind, *rest in message[:-1]:
                    if kind == "cancel":
                        self._cancel(rest[0])
                        continue
                    number, submission = rest
                    choice = self._tenants.choice(
                        self._choices.of(submission.speculative), *submission.owner, store=submission.store
                    )
                    row = self._row(number, submission, choice)
                    loop.submit(row, _ignore, self._scoring(submission))
                if loop.has_work:
                    loop.tick()

    def _rest(self) -> None:
        """Wait for work. After a while without any, return freed memory to the system."""
        with self._news:
            came = self._news.wait_for(lambda: bool(self._inbox) or self._closed, IDLE_S)
        if not came:
            self._heap.rested()
            self._measure_again()


def _described(engine: Engine, choice: Speculation) -> dict[str, Any]:
    return {**engine.resolved(), "speculative": choice.config.resolved(), "exact": choice.verifier.exact}


def _ignore(update: Update) -> None:
    """The sink in processes other than 0: it drops all updates."""
