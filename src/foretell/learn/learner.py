"""The learner of a service: captures texts, hands them to the trainers, and lets what passed the gate serve.

Called on the engine's thread, but for ``assign``, ``figures``, ``state`` and the results of a trainer process.
"""

import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from foretell.core.errors import ConfigError, nearest
from foretell.draft.base import Method
from foretell.engine.engine import Engine
from foretell.engine.event import StepEvent
from foretell.engine.request.row import Row, Submission
from foretell.engine.speculation import Speculation
from foretell.engine.threads import Allowance
from foretell.learn.adapters import Adapters, ServedAdapter, check_options
from foretell.learn.capture import Capture, CaptureState
from foretell.learn.options import LearnOptions
from foretell.learn.training.pool import Result, TrainerPool
from foretell.learn.training.process import TrainerProcess, spare_cores
from foretell.learn.training.texts import RawText
from foretell.learn.training.trainer import Event, Version
from foretell.service.drift import ends_piece
from foretell.service.learning import ACTIONS, LearnFigures

logger = logging.getLogger(__name__)
QUANTUM_S = 0.02  # of learning on the engine's thread
SWEEP_STEPS = 256
HISTORY = 4096
"""Requests whose acceptance is remembered, for the plot."""


P = ParamSpec("P")
R = TypeVar("R")


def harmless(method: Callable[Concatenate["Learner", P], R]) -> Callable[Concatenate["Learner", P], R | None]:
    """What learning does on the engine's thread must not end serving: an exception ends learning alone."""

    @functools.wraps(method)
    def run(self: "Learner", /, *args: P.args, **options: P.kwargs) -> R | None:
        if self.failure and method.__name__ != "swap":
            self.capture.clear()
            return None
        try:
            return method(self, *args, **options)
        except Exception as error:
            logger.exception("learning has failed")
            self._result(("", {"event": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}))
            return None

    return run


class Learner:
    """See the module's docstring."""

    def __init__(self, engine: Engine, choices: list[Speculation], options: LearnOptions) -> None:
        """choices: the loaded methods. Raises ConfigError where none of them can learn."""
        check_options(engine, choices, options)
        self.options = options
        self.allowance = Allowance(options.learn_share)
        self.events: deque[Event] = deque(maxlen=500)
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)  # requests that ended; guessed: first guesses
        self.paused, self.failure = False, ""
        self._paused: set[str] = set()  # tenants who have paused theirs
        self._counts = Counter[str]()  # by the end of their names in ``LearnFigures``
        self._dropped = self._num_requests = self._steps = 0
        self._ready: deque[tuple[str, Version, Method]] = deque()  # built, to be swapped in between steps
        self._lock = threading.Lock()  # of what serves: reverts come on the trainers' thread too
        self._inline = TrainerPool(options) if options.where == "inline" else None
        on_host = engine.model.spec.device.type == "cpu"
        has_core = spare_cores(torch.get_num_threads() if on_host else 1) > 0
        self._process = None if self._inline is not None else TrainerProcess(options, self._result, has_core=has_core)
        self.seconds_inline = 0.0
        trainers = self._inline or self._process
        assert trainers is not None
        self._trainers: TrainerPool | TrainerProcess = trainers
        half = int(options.learn_memory_mib * 2**20) // 2
        self.capture = Capture(
            self.allowance, max_length=options.max_length, max_bytes=half,
            wants=lambda: self._process is None or self._process.has_room,
        )  # fmt: skip
        restored: list[tuple[str, str]] = []
        try:
            self.adapters = Adapters(engine, choices, options, trainers, lambda *found: restored.append(found))
            self.adapters.open_all()
        except BaseException:
            self.close()
            raise
        self.adapters._on_restored = self._restored
        for name, reason in restored:
            self._restored(name, reason)

    def _restored(self, name: str, reason: str) -> None:
        if reason:
            logger.warning("learn: %s begins anew: %s", name, reason)
        self._log(
            name, {"event": "begun anew", "reason": "what was kept cannot be used"} if reason else {"event": "restored"}
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    def assign(self, choice: Speculation, submission: Submission) -> tuple[Speculation, object | None]:
        """See ``Learning``."""
        if self._process is not None:
            self._process.serves(busy=True)  # its prompt is read before the first step
        if id(choice.method.trained) not in self.adapters.able:
            return choice, None
        tenant = submission.tenant or ""
        one = self.adapters.find(tenant, choice)
        state = CaptureState(one.name, one.method.taps)
        # A drafter learns from the model's own texts: those of an adapter would be another target's.
        is_learned = submission.store and submission.lora is None
        if self._is_paused(tenant) or self.failure or not is_learned:
            state.begun = state.dropped = True
            self.capture.num_skipped += not is_learned
        return replace(choice, method=one.within(choice.method)), state

    def _is_paused(self, tenant: str) -> bool:
        return self.paused or tenant in self._paused

    # -- the engine's thread -----------------------------------------------------------------------------------------

    @harmless
    def prompt(self, row: Row, start: int, taps: Tensor) -> None:
        """See ``Learning``."""
        self.capture.prompt(row, start, taps)

    @harmless
    def observe(self, event: StepEvent) -> None:
        """See ``Learning``."""
        if self._process is not None:
            self._process.serves(busy=True)
        for index, row in enumerate(event.rows):
            state = row.capture
            if isinstance(state, CaptureState):
                light = event.light_steps[index] if event.light_steps else None
                self._count(row, state, by_weights=light is None or not light.proposed)
        for row, text in self.capture.observe(event):
            state = row.capture
            assert isinstance(state, CaptureState)
            self.add(state.adapter, text)
        self._steps += 1
        if self._steps % SWEEP_STEPS == 0:
            self.capture.sweep()

    def _count(self, row: Row, state: CaptureState, *, by_weights: bool) -> None:
        """by_weights: whether what learns made the step's guesses, and not the light part of its method."""
        one = self.adapters.by_name.get(state.adapter)
        if row.steps and row.error is None:
            drafted, accepted = row.steps[-1]
            if drafted and by_weights and one is not None:
                made, kept = state.counts
                state.counts = (made + 1, kept + (accepted > 0))
                self._revert_if_fell(one, kept=accepted > 0)
            if ends_piece(row):
                (made, kept), (before, then) = state.counts, state.told
                state.told = state.counts
                if one is not None and one.watch.add(made - before, kept - then):
                    self._tell_drift(one)
        if row.finish_reason is None or not state.counts[0]:
            return
        made, kept = state.counts
        version = 0 if one is None else one.method.serving[0]
        told = {"number": self._num_requests, "time": time.time(), "adapter": state.adapter, "version": version}
        self.history.append({**told, "guessed": made, "kept": kept})
        self._num_requests += 1

    def _tell_drift(self, one: ServedAdapter) -> None:
        self._counts["drifts"] += 1
        quick, steady = one.watch.quick, one.watch.steady
        self._log(one.name, {"event": "drift", "acceptance": quick, "before": steady})
        logger.warning("learn: acceptance of %s fell from %.2f to %.2f", one.name, steady, quick)
        self._trainers.act(one.name, "wake")

    def _revert_if_fell(self, one: ServedAdapter, *, kept: bool) -> None:
        """After a swap: where live acceptance is lower than before, the versions are compared."""
        rate = one.fell(kept=kept)
        if rate is not None:
            self._log(one.name, {"event": "fell", "acceptance": rate, "before": one.before_swap})
            self._trainers.act(one.name, "fell", one.method.serving[0])

    def add(self, adapter: str, text: RawText) -> None:
        """A served text, for an adapter to learn from."""
        one = self.adapters.by_name.get(adapter)
        if one is None or self._is_paused(one.tenant) or self.failure:
            return
        taken = self._trainers.add(adapter, text)
        self._counts["texts"] += taken is not False
        self._dropped += taken is False

    @harmless
    def swap(self) -> None:
        """See ``Learning``: versions that are built, one at a time."""
        if self._inline is not None:
            self._drain()
        if not self._ready:
            return
        begun = perf_counter()
        name, version, method = self._ready.popleft()
        one = self.adapters.by_name.get(name)
        with self._lock:
            is_wanted = one is not None and version.num_reverts == one.num_reverts
            if one is not None and is_wanted:
                one.swap(version.number, method)
        if is_wanted:
            if self.adapters.store is not None:
                self.adapters.store.serve(name, version.number)
            self._counts["swaps"] += 1
            about = {"version": version.number, "texts": version.num_texts, **asdict(version.verdict)}
            self._log(name, {"event": "swap", **about})
        self.capture.seconds += perf_counter() - begun
        self.allowance.charge(perf_counter() - begun)

    @harmless
    def train_idle(self) -> bool | None:
        """See ``Learning``."""
        pool = self._inline
        if self._process is not None:
            self._process.serves(busy=False)
        if pool is None or not pool.has_work or self.paused or self.failure:
            return False
        begun = perf_counter()
        with torch.inference_mode(mode=False), torch.enable_grad():
            while pool.piece() and perf_counter() - begun < QUANTUM_S:
                pass
        self.seconds_inline += perf_counter() - begun
        self._drain()
        return True

    def _drain(self) -> None:
        assert self._inline is not None
        while self._inline.results:
            self._result(self._inline.results.popleft())

    # -- what came of it ---------------------------------------------------------------------------------------------

    def _result(self, result: Result) -> None:
        """On the thread of the trainers."""
        name, found = result
        if isinstance(found, Version):
            one = self.adapters.by_name.get(name)
            if one is not None and found.num_reverts == one.num_reverts:
                self._take(one, found)
            return
        kind = found["event"]
        if counted := {"failed": "failures", "update": "updates", "refused": "refused"}.get(kind):
            self._counts[counted] += 1
        if kind == "failed":
            self.failure = found["reason"]
            logger.error("learn: %s; the drafter serves on as it is", self.failure)
        elif kind == "chosen":
            one = self.adapters.by_name.get(name)
            if one is not None and found["version"] < found["instead"]:
                self._revert(one, found["version"])
        self._log(name, found)

    def _take(self, one: ServedAdapter, version: Version) -> None:
        """Build and keep a version, here, not on the engine's thread. One that cannot be built is none for the trainer
        either, else the next would be compared with it; one that cannot be kept serves until the service ends."""
        try:
            built = one.method.base.rebuilt(version.weights)
        except Exception as error:
            logger.exception("version %d of %s cannot be built", version.number, one.name)
            with self._lock:
                one.num_reverts += 1
                serving = one.method.serving[0]
            self._trainers.act(one.name, "revert", serving)
            about = {"version": version.number, "reason": f"{type(error).__name__}: {error}"[:300]}
            self._log(one.name, {"event": "not built", **about})
            return
        if self.adapters.store is not None:
            try:
                self.adapters.store.save(one.name, one.origin, version.weights, version.number)
            except OSError as error:
                logger.warning("learn: version %d of %s is not kept: %s", version.number, one.name, error)
                self._log(one.name, {"event": "not kept", "version": version.number, "reason": str(error)})
        self._ready.append((one.name, version, built))

    def _revert(self, one: ServedAdapter, number: int | None = None) -> None:
        """Serve an earlier version, also after the next start. Versions that are on their way are not served: they were
        made of what is given up."""
        with self._lock:
            one.num_reverts += 1
            if number == one.method.serving[0]:
                return
            one.revert(number)
            serving = one.method.serving[0]
        if self.adapters.store is not None:
            self.adapters.store.serve(one.name, serving)
        self._counts["reverts"] += 1
        self._log(one.name, {"event": "revert", "version": serving})

    def _log(self, name: str, event: Event) -> None:
        entry = {"time": round(time.time(), 3), "adapter": name, "request": self._num_requests, **event}
        self.events.append(entry)
        shown = ", ".join(f"{key} {value}" for key, value in entry.items() if key != "time")
        logger.info("learn: %s", shown)
        if self.adapters.store is not None:
            self.adapters.store.log(entry)

    # -- for people --------------------------------------------------------------------------------------------------

    def figures(self) -> LearnFigures:
        """See ``Learning``."""
        served = self.adapters.of(None)
        rates = [one.watch.quick for one in served if one.watch.quick is not None]
        named = ("texts", "updates", "swaps", "refused", "reverts", "drifts", "failures")
        return LearnFigures(
            is_learning=not self.paused and not self.failure,
            version=max((one.method.serving[0] for one in served), default=0),
            acceptance=sum(rates) / len(rates) if rates else None,
            held_bytes=self._trainers.num_bytes
            + self.capture.held_bytes
            + (0 if self._process is None else self._process.waiting_bytes),
            num_adapters=len(served),
            num_skipped=self.capture.num_skipped + self._dropped,
            **{f"num_{name}": self._counts[name] for name in named},
            seconds_learning=self._process.seconds if self._process is not None else self.seconds_inline,
            seconds_serving=self.capture.seconds,
        )

    def state(self, tenant: str | None = None) -> dict[str, Any]:
        """See ``Learning``. tenant: only what is this client's own."""
        served = self.adapters.of(tenant)
        mine = {one.name for one in served}
        return {
            "figures": asdict(self.figures()),
            "failure": self.failure,
            "paused": self.paused if tenant is None else self._is_paused(tenant),
            "adapters": [
                {"name": one.name.partition("/")[2], "version": one.method.serving[0], "versions": one.method.versions,
                 "acceptance": one.watch.quick, "method": one.method.name}
                for one in served
            ],
            "events": [event for event in list(self.events) if event["adapter"] in mine or not event["adapter"]],
            "history": [one for one in list(self.history) if one["adapter"] in mine],
        }  # fmt: skip

    def act(self, action: str, tenant: str | None = None) -> dict[str, Any]:
        """See ``Learning``. On the engine's thread. revert: every adapter goes back by one version. A tenant tells its own
        adapters alone; what is paused for all is resumed for all."""
        if action not in ACTIONS:
            raise ConfigError(f"action {action!r} must be one of {', '.join(ACTIONS)}{nearest(action, ACTIONS)}")
        store = self.adapters.store
        if action in ("pause", "resume"):
            if tenant is None:
                self.paused = action == "pause"
                self._paused.clear()
            else:
                (self._paused.add if action == "pause" else self._paused.discard)(tenant)
        if action == "save" and store is None:
            raise ConfigError("there is no folder to save to: start with --learn-dir DIR")
        for one in self.adapters.of(tenant):
            if action == "revert":
                self._revert(one)
                self._trainers.act(one.name, "revert", one.method.serving[0])
            elif action == "save":
                assert store is not None
                self._trainers.act(one.name, "save", 0, str(store.folder(one.name) / "export"))
            else:
                self._trainers.act(one.name, "pause" if self._is_paused(one.tenant) else "resume")
            if tenant is not None:
                self._log(one.name, {"event": action})
        if tenant is None:
            self._log("", {"event": action})
        return self.state(tenant)

    def close(self) -> None:
        """See ``Learning``."""
        if self._process is not None:
            self._process.stop()
        adapters: Adapters | None = getattr(self, "adapters", None)  # none where it was not to be opened
        if adapters is not None and adapters.store is not None:
            adapters.store.close()


def opener(engine: Engine, choices: list[Speculation], options: LearnOptions) -> Callable[[], Learner]:
    """What opens the learner of a service. Raises ConfigError where none of the loaded methods can learn so: now, before
    costs are measured."""
    if not isinstance(options, LearnOptions):
        raise ConfigError(f"learn = {options!r}: expected foretell.LearnOptions(...), or None")
    check_options(engine, choices, options)
    return lambda: Learner(engine, choices, options)
