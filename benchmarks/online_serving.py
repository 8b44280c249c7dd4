"""What learning costs those who are served: ``python -m benchmarks.online --serving``.

One service with a learner and as many requests as are asked for at all times. The clock is cut into windows of a few
seconds; in every other one the trainer process is stopped by a signal (*stopped*; in the others it is *on*), in an order
that is drawn for each pair of windows. So both halves of a pair are one service with the same memory, at nearly the same
moment: two services of one model differ by some per cent for as long as they live, and a busy machine drifts by more.

A window's figure is the mean time between two updates of a request, which is a step's. Tokens a step do not depend on
who else computes, so the ratio of the means, stopped : on, is that of tokens/s. What is left, capturing and swapping on
the engine's own thread, is in both halves; it is counted there and shown as its share of the time.

While it is stopped the trainer's work waits, so it learns for a larger share of an on window than it would of an hour.
"""

import argparse
import json
import os
import random
import signal
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from time import perf_counter, sleep
from typing import Any

import psutil
from benchmarks.domains import prompts
from benchmarks.figures import interval

from foretell import Engine, SamplingParams
from foretell.engine.request.result import Update
from foretell.engine.request.row import Submission
from foretell.learn.options import LearnOptions
from foretell.service.options import ServiceOptions
from foretell.service.service import Service

START_S = 10.0
"""Until costs are known, and the first texts have come."""
SETTLE_S = 0.1
"""After the signal: gaps that begin earlier belong to neither half."""


@dataclass(frozen=True)
class Cost:
    """Of one concurrency."""

    concurrency: int
    ratios: list[float]  # mean time between updates, stopped over on, of each pair of windows
    p99_ms: dict[str, float]
    median_ms: dict[str, float]
    share_learning: float  # of a core, in the on windows, that the trainer computed
    share_serving: float  # of the time that the engine's thread captured and swapped
    num_updates: int
    num_swaps: int

    @property
    def row(self) -> str:
        """Of the table."""
        low, high = interval(self.ratios)
        on, stopped = self.p99_ms["on"], self.p99_ms["stopped"]
        tokens = f"{statistics.mean(self.ratios):.3f} [{low:.3f}, {high:.3f}]"
        median = f"{self.median_ms['on']:.1f} : {self.median_ms['stopped']:.1f}"
        return (
            f"| {self.concurrency} | {tokens} | {100 * self.share_serving:.2f} % | {median} | {on:.1f} : {stopped:.1f} | "
            f"{on / stopped:.2f} | {100 * self.share_learning:.1f} % | {self.num_updates} | {self.num_swaps} |"
        )


HEADER = (
    "| at once | tokens/s, on : stopped | capturing, swapping | median between updates, ms, on : stopped | p99 | "
    "p99, on : stopped | trainer, of a core | updates | swaps |\n|--|--|--|--|--|--|--|--|--|"
)


def measure(args: argparse.Namespace, load: Callable[[], Engine]) -> None:
    """Print the table as it grows, and write the figures."""
    engine = load()
    share = -(-args.requests // len(args.domains))
    given = [ids for domain in args.domains for ids in prompts(engine, domain, share, 1)][: args.requests]
    random.Random(0).shuffle(given)
    print(HEADER, flush=True)
    found = []
    for concurrency in args.concurrency:
        found.append(_cost(args, load(), given, concurrency))
        print(found[-1].row, flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


def _cost(args: argparse.Namespace, engine: Engine, given: Sequence[Sequence[int]], concurrency: int) -> Cost:
    limits = ServiceOptions(max_num_seqs=concurrency, speculation="on")
    service = Service(engine, limits, learn=LearnOptions())
    service.start()
    service.measure()
    traffic = Traffic(service, given, args)
    traffic.begin(concurrency)
    learning: Any = service._learning
    pid, found = learning._process.pid, dict[str, list[list[float]]](on=[], stopped=[])
    try:
        sleep(START_S)
        began, before, on_s = perf_counter(), service.snapshot().learn, 0.0
        cpu = _cpu_seconds(pid)
        for number in range(args.rounds):
            for arm in random.Random(number).sample(("on", "stopped"), 2):
                os.kill(pid, signal.SIGCONT if arm == "on" else signal.SIGSTOP)
                sleep(SETTLE_S)
                start = perf_counter()
                sleep(args.seconds)
                end = perf_counter()
                on_s += (end - start + SETTLE_S) if arm == "on" else 0.0
                found[arm].append(traffic.between(start, end))
        seconds, cpu = perf_counter() - began, _cpu_seconds(pid) - cpu
        after = service.snapshot().learn
        assert before is not None
        assert after is not None
        if learning._process.failure:
            raise SystemExit(f"the trainer ended: {learning._process.failure}")
    finally:
        os.kill(pid, signal.SIGCONT)
        traffic.end()
        service.close()
    ratios = [
        statistics.mean(two) / statistics.mean(one) for one, two in zip(found["on"], found["stopped"], strict=True)
    ]
    gaps = {arm: sorted(gap for window in windows for gap in window) for arm, windows in found.items()}
    return Cost(
        concurrency, ratios,
        {arm: 1000 * values[int(0.99 * len(values))] for arm, values in gaps.items()},
        {arm: 1000 * statistics.median(values) for arm, values in gaps.items()},
        cpu / on_s, (after.seconds_serving - before.seconds_serving) / seconds,
        after.num_updates, after.num_swaps,
    )  # fmt: skip


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


class Traffic:
    """The same prompts again and again with new seeds, a fixed number of requests at all times."""

    def __init__(self, service: Service, given: Sequence[Sequence[int]], args: argparse.Namespace) -> None:
        self._service, self._args = service, args
        self._gaps, self._lock = list[tuple[float, float]](), threading.Lock()
        self._wanted, self._ended = True, threading.Semaphore(0)
        self._next: Iterator[tuple[int, Sequence[int]]] = ((n, given[n % len(given)]) for n in count())
        self._concurrency = 0

    def begin(self, concurrency: int) -> None:
        """Submit the first ones."""
        self._concurrency = concurrency
        for _ in range(concurrency):
            self._submit()

    def end(self) -> None:
        """Wait for the last ones."""
        self._wanted = False
        for _ in range(self._concurrency):
            self._ended.acquire()

    def between(self, start: float, end: float) -> list[float]:
        """Seconds between two updates of a request, of those that lie between two times of ``perf_counter``."""
        with self._lock:
            return [to - since for since, to in self._gaps if since >= start and to <= end]

    def _submit(self) -> None:
        with self._lock:
            number, ids = next(self._next)
        params = SamplingParams(temperature=self._args.temperature, max_new_tokens=self._args.tokens, seed=number)
        last = list[float]()

        def take(update: Update) -> None:
            now = perf_counter()
            if update.is_last:
                if self._wanted:
                    threading.Thread(target=self._submit).start()  # this one is the engine's
                else:
                    self._ended.release()
            elif update.pieces:
                if last:
                    with self._lock:
                        self._gaps.append((last[0], now))
                last[:] = [now]

        self._service.submit(Submission(f"{number}", list(ids), params), take)
