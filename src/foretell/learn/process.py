"""A trainer pool in a process of its own, at idle priority: it runs where nothing else wants the core.

The child holds what was captured, and the learner's weights and optimiser; nothing of it is needed to serve. Where it is
killed the drafter goes on as it is, and what is lost is the update that was being made.
"""

import contextlib
import logging
import multiprocessing
import os
import pickle
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import torch

from foretell.learn.options import LearnOptions
from foretell.learn.pool import Result, TrainerPool
from foretell.learn.student import Origin
from foretell.learn.texts import RawText

logger = logging.getLogger(__name__)
MOST_WAITING = 64
"""Messages to the child that wait; a text beyond them is dropped: the machine has no time to learn."""
REPORT_S = 1.0


class TrainerProcess:
    """The interface of ``TrainerPool`` to a child process. Methods may be called from any thread."""

    def __init__(self, options: LearnOptions, on_result: Callable[[Result], None]) -> None:
        """on_result is called on a thread of its own."""
        self.options, self._on_result = options, on_result
        self.num_bytes, self.seconds, self.has_work = 0, 0.0, False
        self.failure = ""
        self._outbox: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=run, args=(theirs, options), name="foretell-learn", daemon=True)
        self._child.start()
        theirs.close()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._send, "foretell-learn-send"), (self._receive, "foretell-learn-receive"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int | None:
        """Of the child."""
        return self._child.pid

    def open(self, adapter: str, origin: Origin) -> None:
        """See ``TrainerPool``."""
        self._outbox.put(("open", adapter, origin))

    def close(self, adapter: str) -> None:
        """See ``TrainerPool``."""
        self._outbox.put(("close", adapter))

    def add(self, adapter: str, text: RawText) -> bool:
        """See ``TrainerPool``; False where the text was dropped."""
        if self.failure or self._outbox.qsize() >= MOST_WAITING:
            return False
        self._outbox.put(("add", adapter, text))
        return True

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
            if kind == "failed":
                self._end(rest[0])
                return
            if kind == "report":
                self.num_bytes, self.seconds, self.has_work = rest
                continue
            try:
                self._on_result(rest[0])
            except Exception:
                logger.exception("what was learned could not be taken over")

    def _end(self, reason: str) -> None:
        if not self.failure:
            self.failure = reason
            with contextlib.suppress(Exception):
                self._on_result(("", {"event": "failed", "reason": reason}))


def lower_priority() -> None:
    """Run this process where nothing else wants the core: SCHED_IDLE where there is one, else the lowest niceness."""
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if hasattr(os, "nice"):
        with contextlib.suppress(OSError):
            os.nice(19)


def run(pipe: Connection, options: LearnOptions) -> None:
    """The child: messages in, pieces of work, results out. It ends with its parent."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when it is over
    lower_priority()
    if options.learn_device is None:
        torch.set_num_threads(1)
    pool = TrainerPool(options)
    seconds = reported = 0.0

    def tell(*message: Any) -> None:
        pipe.send_bytes(pickle.dumps(message, protocol=5))

    try:
        while True:
            while pipe.poll(None if not pool.has_work else 0):
                message = pickle.loads(pipe.recv_bytes())
                if message is None:
                    return
                kind, *rest = message
                getattr(pool, kind)(*rest)
                _forward(pool, tell)
                tell("report", pool.num_bytes, seconds, pool.has_work)
            begun = perf_counter()
            pool.piece()
            seconds += perf_counter() - begun
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
