"""A trainer pool in a process of its own, at idle priority and at the pace of ``Pace``.

The child holds what was captured, and the learner's weights and optimiser; nothing of it is needed to serve. Where it is
killed the drafter goes on as it is, and what is lost is the update that was being made.
"""

import contextlib
import ctypes
import logging
import multiprocessing
import pickle
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic, perf_counter, process_time
from typing import Any

import torch

from foretell.core.platform import lower_priority, num_cores
from foretell.engine.threads import Allowance
from foretell.learn.options import LearnOptions
from foretell.learn.training.pool import Result, TrainerPool
from foretell.learn.training.student import Origin
from foretell.learn.training.texts import RawText
from foretell.model.load import draw_no_bars

POLL_S = 0.05
"""How long a process that may not compute waits before it asks again."""
MOST_S = 0.1
"""Seconds of work that may be saved up."""


class Pace:
    """When the trainer process may compute: always while nothing is decoded, for a small share of the time while all cores
    are. Credit of processor time, earned while the service decodes. Not thread-safe.

    The scheduler's idle priority does not do. A core that decodes is idle for moments, between two passes and in the parts
    of a step that take one core; a process that takes them has the caches and the memory bus when the next pass begins,
    and costs those who are served about as much as it computes: with all of such moments a tenth (docs/learn.md).
    """

    def __init__(self, share: float, is_busy: Callable[[], bool], *, clock: Callable[[], float] = monotonic) -> None:
        """share: processor seconds in a second of decoding, of one core; 1 or more: no limit. is_busy: whether the service
        decodes, on every core that there is."""
        self._is_busy, self._clock = is_busy, clock
        self._allowance = None if share >= 1 else Allowance(share, most=MOST_S)
        self._asked = clock()

    def may_compute(self) -> bool:
        """Whether a piece of work may begin now."""
        if self._allowance is None:
            return True
        now = self._clock()
        passed, self._asked = now - self._asked, now
        if not self._is_busy():
            return True
        self._allowance.earn(passed)
        return self._allowance.covers(0.0)

    def computed(self, seconds: float) -> None:
        """A piece took so much of the processor: to be paid where the service decodes."""
        if self._allowance is not None and self._is_busy():
            self._allowance.charge(seconds)


def spare_cores(threads: int) -> int:
    """Cores of this process that ``threads`` threads leave free."""
    return num_cores() - threads


logger = logging.getLogger(__name__)
MOST_WAITING = 16
"""Texts that wait until the child has time for one; while so many do, or a quarter of the memory is full of them, none is
taken: what a busy machine has no time to learn from need not be captured."""
REPORT_S = 1.0
START_S = 60.0


class TrainerProcess:
    """The interface of ``TrainerPool`` to a child process. Methods may be called from any thread."""

    def __init__(self, options: LearnOptions, on_result: Callable[[Result], None], *, has_core: bool = False) -> None:
        """on_result is called on a thread of its own. has_core: decoding leaves one free."""
        self.options, self._on_result = options, on_result
        self.num_bytes, self.seconds, self.has_work = 0, 0.0, False
        self.failure = ""
        self._texts: deque[tuple[str, RawText]] = deque()
        self._texts_bytes, self._is_asked, self._has_ends = 0, False, False
        self._lock = threading.Lock()  # of the three
        self._is_up = threading.Event()
        self._outbox: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self._pipe, theirs = context.Pipe()
        # One byte that one side writes and the other reads: nothing to lock.
        self._busy = context.RawValue("b", 0)
        arguments = (theirs, options, self._busy, share_of(options, has_core=has_core))
        self._child = context.Process(target=run, args=arguments, name="foretell-learn", daemon=True)
        self._child.start()
        theirs.close()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._send, "foretell-learn-send"), (self._receive, "foretell-learn-receive"))
        ]
        for thread in self._threads:
            thread.start()
        # Importing PyTorch takes seconds of a core, which nobody should feel who is already served.
        if not self._is_up.wait(START_S):
            logger.warning("learn: the process that learns has not started within %.0f s; it may yet", START_S)

    @property
    def pid(self) -> int | None:
        """Of the child."""
        return self._child.pid

    def serves(self, busy: bool) -> None:
        """Whether the service decodes now."""
        self._busy.value = int(busy)

    def open(self, adapter: str, origin: Origin) -> None:
        """See ``TrainerPool``. The target's matrices are sent once, for all adapters."""
        with self._lock:
            if origin.matrices is not None and not self._has_ends:
                self._has_ends = True
                self._outbox.put(("ends", origin.matrices))
            self._outbox.put(("open", adapter, replace(origin, matrices=None)))

    def close(self, adapter: str) -> None:
        """See ``TrainerPool``. Its texts that wait are forgotten."""
        with self._lock:
            self._texts = deque(one for one in self._texts if one[0] != adapter)
            self._texts_bytes = sum(text.num_bytes for _, text in self._texts)
        self._outbox.put(("close", adapter))

    def add(self, adapter: str, text: RawText) -> bool:
        """See ``TrainerPool``; False where the text was dropped."""
        if self.failure or not self.has_room:
            return False
        with self._lock:
            self._texts.append((adapter, text))
            self._texts_bytes += text.num_bytes
        self._hand(asked=False)
        return True

    @property
    def has_room(self) -> bool:
        """Whether a text more would be taken."""
        most = self.options.learn_memory_mib * 2**20 / 4
        return len(self._texts) < MOST_WAITING and self._texts_bytes < most

    @property
    def waiting_bytes(self) -> int:
        """Of texts that wait for the child."""
        return self._texts_bytes

    def _hand(self, *, asked: bool) -> None:
        """A text for each time that the child has asked, which it does when it has time."""
        with self._lock:
            self._is_asked = self._is_asked or asked
            if self._is_asked and self._texts:
                adapter, text = self._texts.popleft()
                self._texts_bytes -= text.num_bytes
                self._is_asked = False
                self._outbox.put(("add", adapter, text))

    def act(self, adapter: str, action: str, number: int = 0, folder: str = "") -> None:
        """See ``TrainerPool``."""
        self._outbox.put(("act", adapter, action, number, folder))

    def stop(self) -> None:
        """End the child."""
        self.failure = self.failure or "it was stopped"  # what the receiver then finds is no failure
        self._outbox.put(None)
        self._threads[0].join(1.0)
        self._child.join(5.0)
        if self._child.is_alive():
            self._child.kill()
            self._child.join(2.0)
        with contextlib.suppress(OSError):
            self._pipe.close()

    def _send(self) -> None:
        while True:
            message = self._outbox.get()
            if message is not None and message[0] == "add":
                # A view would be sent with the whole block that it looks into.
                text: RawText = message[2]
                message = (*message[:2], replace(text, logits=[torch.cat(text.logits)]))
            try:
                # Tensors by value: sharing their memory would keep a file open for each.
                self._pipe.send_bytes(pickle.dumps(message, protocol=5))
            except (OSError, ValueError, TypeError):  # a closed pipe has no handle
                return  # the receiver says why
            if message is None:
                return

    def _receive(self) -> None:
        while True:
            try:
                kind, *rest = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError, TypeError):
                self._end("the process that learns has ended")
                return
            except Exception as error:  # no memory for what it sent
                self._end(
                    f"what the process that learns has sent cannot be read: {type(error).__name__}: {error}"[:300]
                )
                return
            if kind == "failed":
                self._end(rest[0])
                return
            if kind == "report":
                self.num_bytes, self.seconds, self.has_work = rest
                continue
            if kind == "up":
                self._is_up.set()
                continue
            if kind == "next":
                self._hand(asked=True)
                continue
            try:
                self._on_result(rest[0])
            except Exception:
                logger.exception("what was learned could not be taken over")

    def _end(self, reason: str) -> None:
        if not self.failure:
            self.failure = reason
            self.num_bytes, self.has_work = 0, False
            self._child.join(1.0)  # else it stays as a zombie until the service stops
            with self._lock:
                self._texts.clear()
                self._texts_bytes = 0
            with contextlib.suppress(Exception):
                self._on_result(("", {"event": "failed", "reason": reason}))
        self._is_up.set()  # last: who waits for the child knows then that it failed


def share_of(options: LearnOptions, *, has_core: bool) -> float:
    """Of one core, what the child may take while the service decodes. has_core: it leaves one free."""
    return 1.0 if has_core or options.learn_device is not None else options.learn_busy_share


def run(pipe: Connection, options: LearnOptions, busy: ctypes.c_byte, share: float) -> None:
    """The child: messages in, pieces of work, results out. It ends with its parent. busy: whether the service decodes."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when it is over
    # A bar on the service's terminal would tell nobody anything, and leaves a semaphore behind where the child is killed.
    draw_no_bars()
    lower_priority()
    if options.learn_device is None:
        torch.set_num_threads(1)
    pool = TrainerPool(options)
    seconds = reported = 0.0
    pace = Pace(share, lambda: bool(busy.value))
    wait: float | None = None
    asked = False  # for a text

    def tell(*message: Any) -> None:
        pipe.send_bytes(pickle.dumps(message, protocol=5))

    def paid(work: Callable[..., object], *given: Any) -> None:
        nonlocal seconds
        begun = process_time()
        work(*given)
        took = process_time() - begun
        seconds += took
        pace.computed(took)

    try:
        tell("up")
        while True:
            while pipe.poll(wait):
                message = pickle.loads(pipe.recv_bytes())
                if message is None:
                    return
                kind, *rest = message
                asked = asked and kind != "add"
                paid(getattr(pool, kind), *rest)  # a text is cut down to its likeliest tokens here
                _forward(pool, tell)
                tell("report", pool.num_bytes, seconds, pool.has_work)
                wait = 0.0
            if not pace.may_compute():
                wait = POLL_S
                continue
            if not asked:
                asked = True
                tell("next")
            if not pool.has_work:
                wait = None
                continue
            wait = 0.0
            paid(pool.piece)
            _forward(pool, tell)
            if perf_counter() - reported > REPORT_S or not pool.has_work:
                reported = perf_counter()
                tell("report", pool.num_bytes, seconds, pool.has_work)
    except (EOFError, OSError):
        return  # the parent has gone
    except Exception as error:
        with contextlib.suppress(OSError):
            tell("failed", f"{type(error).__name__}: {error}".splitlines()[0][:300])


def _forward(pool: TrainerPool, tell: Callable[..., None]) -> None:
    while pool.results:
        tell("result", pool.results.popleft())
