"""The learner of a service: captures texts, hands them to a classroom, and lets what passed the gate serve.

Called on the engine's thread, but for ``enrol``, ``figures``, ``state`` and the results of a classroom in a process.
"""

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from foretell.core.errors import ConfigError, nearest
from foretell.draft.base import Method
from foretell.engine.engine import Engine
from foretell.engine.event import StepEvent
from foretell.engine.groups import Choice
from foretell.engine.learning import ACTIONS, DriftWatch, LearnFigures
from foretell.engine.state import Row
from foretell.engine.submission import Submission
from foretell.learn.capture import Capture, Mark
from foretell.learn.classroom import Classroom, Result
from foretell.learn.ends import Matrices, matrices_of
from foretell.learn.line import LearnedMethod
from foretell.learn.options import LearnOptions
from foretell.learn.route import Router
from foretell.learn.school import Event, Version
from foretell.learn.shelf import Shelf
from foretell.learn.student import RECIPES, Origin
from foretell.learn.texts import RawText
from foretell.learn.worker import WorkerRoom
from foretell.planner.account import Allowance

logger = logging.getLogger(__name__)
SWEEP_STEPS = 256
HISTORY = 4096
"""Requests whose acceptance is remembered, for the plot."""


P = ParamSpec("P")
R = TypeVar("R")


def harmless(method: Callable[Concatenate["Learner", P], R]) -> Callable[Concatenate["Learner", P], R | None]:
    """What learning does on the engine's thread must not end serving: an exception ends learning alone."""

    @functools.wraps(method)
    def run(self: "Learner", /, *args: P.args, **options: P.kwargs) -> R | None:
        if self.failure and method.__name__ != "between":
            return None
        try:
            return method(self, *args, **options)
        except Exception as error:
            logger.exception("learning has failed")
            self._result(("", {"event": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}))
            return None

    return run


@dataclass
class Line:
    """One adapter of one owner, as it serves."""

    pupil: str
    owner: str
    adapter: int
    method: LearnedMethod
    origin: Origin
    watch: DriftWatch = field(default_factory=DriftWatch)
    before_swap: float = 0.0  # live acceptance when the version was swapped in
    since_swap: int = -1  # steps since; -1: nothing to watch
    kept_since: int = 0


@dataclass
class Owner:
    """The lines of one API key, or of all requests."""

    lines: dict[tuple[int, int], Line]  # by (id of the base method, adapter)
    router: Router


@dataclass
class Seen:
    """One request that ended, for the plot."""

    number: int
    time: float
    pupil: str
    version: int
    guessed: int  # first guesses made
    kept: int


class Learner:
    """See the module's docstring."""

    def __init__(self, engine: Engine, choices: list[Choice], options: LearnOptions) -> None:
        """choices: the loaded methods. Raises ConfigError where none of them can learn."""
        if engine.model.is_shared:
            raise ConfigError("learning needs one process: it cannot swap weights in several at the same step")
        able = {id(choice.method): choice for choice in choices if choice.config.method in RECIPES}
        if not able:
            names = ", ".join(sorted({choice.config.method for choice in choices})) or "none"
            raise ConfigError(f"methods {names} cannot learn while serving: choose one of {', '.join(RECIPES)}")
        self.engine, self.options = engine, options
        self._able = able
        self._matrices: Matrices | None = None
        if any(choice.config.method != "draft_model" for choice in able.values()):
            self._matrices = matrices_of(engine.model)
        self._lock = threading.RLock()
        self._owners: dict[str, Owner] = {}  # the least recently used first
        self._lines: dict[str, Line] = {}
        self.allowance = Allowance(options.learn_share)
        half = int(options.learn_memory_mib * 2**20) // 2
        self.capture = Capture(self.allowance, max_length=options.max_length, max_bytes=half)
        self.shelf = None if options.learn_dir is None else Shelf(options.learn_dir)
        self.events: deque[Event] = deque(maxlen=500)
        self.history: deque[Seen] = deque(maxlen=HISTORY)
        self.paused, self.failure = False, ""
        self._counts = dict.fromkeys(("texts", "updates", "swaps", "refused", "reverts", "drifts", "failures"), 0)
        self._dropped = self._num_requests = 0
        self._ready: deque[tuple[str, Version, Method]] = deque()  # built, to be swapped in between steps
        self._inline: Classroom | None = None
        self._worker: WorkerRoom | None = None
        if options.where == "inline":
            self._inline = Classroom(options)
        else:
            self._worker = WorkerRoom(options, self._result)
        self.seconds_inline = 0.0
        self._steps = 0
        for choice in able.values():
            self._owner("", choice)  # so that a wrong drafter is found at the start

    # -- requests ----------------------------------------------------------------------------------------------------

    def enrol(self, choice: Choice, submission: Submission) -> tuple[Choice, object | None]:
        """See ``Learning``."""
        if id(choice.method) not in self._able:
            return choice, None
        with self._lock:
            tenant = submission.tenant or ""
            owner = self._owner(tenant, choice)
            kind = owner.router.kind(submission.prompt_ids)
            serving = owner.lines[id(choice.method), owner.router.adapter(kind)]
            pupil = owner.lines[id(choice.method), kind]
        mark = Mark(pupil.pupil, serving.pupil, serving.method.taps, kind, owner.router)
        if self.paused or self.failure or not submission.store:
            mark.begun = mark.dropped = True
            self.capture.num_skipped += not submission.store
        return replace(choice, method=serving.method), mark

    def _owner(self, tenant: str, choice: Choice) -> Owner:
        owner = self._owners.pop(tenant, None) or Owner({}, Router(self.options.learn_adapters))
        self._owners[tenant] = owner
        if (id(choice.method), 0) not in owner.lines:
            for adapter in range(self.options.learn_adapters):
                self._open(owner, tenant, choice, adapter)
        while len(self._owners) > self.options.max_owners + 1:  # "" is always there
            oldest = next(name for name in self._owners if name)
            for line in self._owners.pop(oldest).lines.values():
                self._lines.pop(line.pupil, None)
                self._room().close(line.pupil)
        return owner

    def _open(self, owner: Owner, tenant: str, choice: Choice, adapter: int) -> None:
        config: Any = choice.config
        name = config.method
        init = config.model or ("bundled/draft" if name == "draft_model" else f"bundled/{name}")
        base: Any = choice.method
        if name == "draft_model" and base.model.spec.name != init:
            raise ConfigError(
                f"the draft model {base.model.spec.name!r} is in memory: learning reads its weights again, so give its "
                "directory or hub id"
            )
        slots = min(config.num_speculative_tokens, choice.depth or config.num_speculative_tokens)
        held, weights = (None, None) if name == "draft_model" else (self._matrices, _floats(base.head.state_dict()))
        origin = Origin(name, init, self.engine.model.spec, held, slots, weights)
        pupil = f"{tenant}/{name}/{adapter}"
        method = LearnedMethod(choice.method)
        if self.shelf is not None and not tenant:
            found = self.shelf.load(pupil, origin)
            if found is not None:
                origin = replace(origin, weights=found)
                method = LearnedMethod(choice.method.rebuilt(found))
                self._log(pupil, {"event": "restored"})
        line = Line(pupil, tenant, adapter, method, origin)
        owner.lines[id(choice.method), adapter] = line
        self._lines[pupil] = line
        self._room().open(pupil, origin)

    def _room(self) -> Classroom | WorkerRoom:
        room = self._inline or self._worker
        assert room is not None
        return room

    # -- the engine's thread -----------------------------------------------------------------------------------------

    @harmless
    def prompt(self, row: Row, start: int, taps: Tensor) -> None:
        """See ``Learning``."""
        self.capture.prompt(row, start, taps)

    @harmless
    def observe(self, event: StepEvent) -> None:
        """See ``Learning``."""
        for row in event.rows:
            mark = row.teaches
            if isinstance(mark, Mark):
                self._count(row, mark)
        for row, text in self.capture.observe(event):
            mark = row.teaches
            assert isinstance(mark, Mark)
            self._teach(mark.pupil, text)
        self._steps += 1
        if self._steps % SWEEP_STEPS == 0:
            self.capture.sweep()

    def _count(self, row: Row, mark: Mark) -> None:
        line = self._lines.get(mark.method)
        if row.steps and row.error is None:
            drafted, accepted = row.steps[-1]
            if drafted and line is not None:
                made, kept = mark.counts
                mark.counts = (made + 1, kept + (accepted > 0))
                self._watch(line, kept=accepted > 0)
        if row.finish_reason is None or not mark.counts[0]:
            return
        made, kept = mark.counts
        version = 0 if line is None else line.method.serving[0]
        self.history.append(Seen(self._num_requests, time.time(), mark.method, version, made, kept))
        self._num_requests += 1
        if line is not None and mark.router is not None:
            with self._lock:
                mark.router.observe(mark.cluster, line.adapter, kept / made)

    def _watch(self, line: Line, *, kept: bool) -> None:
        """Live acceptance: a fall after a swap goes back, any fall is reported."""
        if line.watch.add(kept):
            self._counts["drifts"] += 1
            quick, steady = line.watch.quick, line.watch.steady
            self._log(line.pupil, {"event": "drift", "acceptance": quick, "before": steady})
            logger.warning("learn: acceptance of %s fell from %.2f to %.2f", line.pupil, steady, quick)
            self._room().act(line.pupil, "wake")
        if line.since_swap < 0:
            return
        line.since_swap += 1
        line.kept_since += kept
        if line.since_swap < self.options.fall_steps:
            return
        rate = line.kept_since / line.since_swap
        fell = rate < line.before_swap - self.options.fall
        line.since_swap = -1
        if fell:
            self._log(line.pupil, {"event": "fell", "acceptance": rate, "before": line.before_swap})
            self._room().act(line.pupil, "fell", line.method.serving[0])

    def _teach(self, pupil: str, text: RawText) -> None:
        if self.paused or self.failure:
            return
        taken = self._room().add(pupil, text)
        self._counts["texts"] += taken is not False
        self._dropped += taken is False

    @harmless
    def between(self) -> None:
        """See ``Learning``: swaps that are built, one at a time."""
        if self._inline is not None:
            self._drain()
        if not self._ready:
            return
        begun = perf_counter()
        pupil, version, method = self._ready.popleft()
        line = self._lines.get(pupil)
        if line is not None:
            line.before_swap = line.watch.quick if line.watch.quick is not None else 0.0
            line.since_swap, line.kept_since = (0 if line.watch.quick is not None else -1), 0
            line.method.serve(version.number, method)
            self._counts["swaps"] += 1
            about = {"version": version.number, "texts": version.num_texts, **asdict(version.verdict)}
            self._log(pupil, {"event": "swap", **about})
        self.capture.seconds += perf_counter() - begun
        self.allowance.charge(perf_counter() - begun)

    @harmless
    def rest(self) -> bool | None:
        """See ``Learning``."""
        room = self._inline
        if room is None or not room.has_work or self.paused or self.failure:
            return False
        begun = perf_counter()
        with torch.inference_mode(mode=False), torch.enable_grad():
            while room.piece() and perf_counter() - begun < self.options.quantum_s:
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
        """On the thread of the classroom."""
        pupil, found = result
        if isinstance(found, Version):
            line = self._lines.get(pupil)
            if line is not None:
                built = line.method.base.rebuilt(found.weights)  # here, not on the engine's thread
                if self.shelf is not None and not line.owner:
                    self.shelf.save(pupil, line.origin, found.weights)
                self._ready.append((pupil, found, built))
            return
        kind = found["event"]
        if kind == "failed":
            self.failure = found["reason"]
            self._counts["failures"] += 1
            logger.error("learn: %s; the drafter serves on as it is", self.failure)
        elif kind == "update":
            self._counts["updates"] += 1
        elif kind == "refused":
            self._counts["refused"] += 1
        elif kind == "chosen":
            line = self._lines.get(pupil)
            if line is not None and found["version"] != line.method.serving[0]:
                self._revert(line, found["version"])
        self._log(pupil, found)

    def _revert(self, line: Line, number: int) -> None:
        line.method.revert(number)
        line.since_swap = -1
        self._counts["reverts"] += 1
        self._log(line.pupil, {"event": "revert", "version": line.method.serving[0]})

    def _log(self, pupil: str, event: Event) -> None:
        entry = {"time": round(time.time(), 3), "pupil": pupil, "request": self._num_requests, **event}
        self.events.append(entry)
        shown = ", ".join(f"{key} {value}" for key, value in entry.items() if key != "time")
        logger.info("learn: %s", shown)
        if self.shelf is not None:
            self.shelf.log(entry)

    # -- for people --------------------------------------------------------------------------------------------------

    def figures(self) -> LearnFigures:
        """See ``Learning``."""
        lines = list(self._lines.values())
        rates = [line.watch.quick for line in lines if line.watch.quick is not None]
        worker, inline = self._worker, self._inline
        held = inline.num_bytes if inline is not None else worker.num_bytes if worker is not None else 0
        counts = self._counts
        return LearnFigures(
            is_learning=not self.paused and not self.failure,
            version=max((line.method.serving[0] for line in lines), default=0),
            acceptance=sum(rates) / len(rates) if rates else None,
            held_bytes=held + self.capture.held_bytes,
            num_adapters=len(lines),
            num_texts=counts["texts"],
            num_skipped=self.capture.num_skipped + self._dropped,
            num_updates=counts["updates"],
            num_swaps=counts["swaps"],
            num_refused=counts["refused"],
            num_reverts=counts["reverts"],
            num_drifts=counts["drifts"],
            num_failures=counts["failures"],
            seconds_learning=worker.seconds if worker is not None else self.seconds_inline,
            seconds_serving=self.capture.seconds,
        )

    def state(self, tenant: str | None = None) -> dict[str, Any]:
        """See ``Learning``. tenant: only what is this client's own."""
        lines = [line for line in self._lines.values() if tenant is None or line.owner == tenant]
        mine = {line.pupil for line in lines}
        return {
            "figures": asdict(self.figures()),
            "failure": self.failure,
            "paused": self.paused,
            "adapters": [
                {"name": line.pupil.partition("/")[2], "version": line.method.serving[0], "versions": line.method.versions,
                 "acceptance": line.watch.quick, "method": line.method.name}
                for line in lines
            ],
            "events": [event for event in list(self.events) if event["pupil"] in mine or not event["pupil"]],
            "history": [asdict(one) for one in list(self.history) if one.pupil in mine],
        }  # fmt: skip

    def act(self, action: str, tenant: str | None = None) -> dict[str, Any]:
        """See ``Learning``. On the engine's thread. revert: every adapter goes back by one version."""
        if action not in ACTIONS:
            raise ConfigError(f"action {action!r} must be one of {', '.join(ACTIONS)}{nearest(action, ACTIONS)}")
        lines = [line for line in self._lines.values() if tenant is None or line.owner == tenant]
        if action in ("pause", "resume"):
            self.paused = action == "pause"
        if action == "save" and self.shelf is None:
            raise ConfigError("there is no folder to save to: start with --learn-dir DIR")
        for line in lines:
            if action == "revert":
                self._revert(line, line.method.revert())
                self._room().act(line.pupil, "revert", line.method.serving[0])
            elif action == "save":
                assert self.shelf is not None
                if not line.owner:
                    self._room().act(line.pupil, "save", 0, str(self.shelf.folder(line.pupil) / "export"))
            else:
                self._room().act(line.pupil, action)
        self._log("", {"event": action})
        return self.state(tenant)

    def close(self) -> None:
        """See ``Learning``."""
        if self._worker is not None:
            self._worker.stop()


def _floats(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in float32 on the CPU; integers as they are."""
    return {
        name: value.detach().cpu().to(torch.float32 if value.is_floating_point() else value.dtype, copy=True)
        for name, value in weights.items()
    }
