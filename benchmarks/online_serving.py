"""What learning costs those who are served: ``python -m benchmarks.online --serving``.

Paired rounds of the same requests through two services in one process, one of which learns, in turn: tokens/s and the 99th
percentile of the time between two tokens. Before a round without learning the trainer process is paused and waited for,
so that its work is on the clock of its own service alone.
"""

import argparse
import json
import random
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import monotonic, perf_counter, sleep
from typing import Any

from benchmarks.domains import prompts
from benchmarks.figures import interval

from foretell import Engine, SamplingParams
from foretell.engine.options import ServiceOptions
from foretell.engine.service import Service
from foretell.engine.submission import Submission, Update
from foretell.learn.options import LearnOptions

WAIT_S = 60.0


@dataclass(frozen=True)
class Cost:
    """Of one concurrency."""

    concurrency: int
    ratios: list[float]  # tokens/s with learning over tokens/s without, of each pair of rounds
    p99_on_ms: float
    p99_off_ms: float
    seconds_learning: float
    seconds_serving: float  # of the engine's thread
    num_updates: int
    num_swaps: int
    num_rounds_beside_learning: int  # rounds without learning that the trainer process did not wait for

    @property
    def row(self) -> str:
        """Of the table."""
        low, high = interval(self.ratios)
        return (
            f"| {self.concurrency} | {statistics.mean(self.ratios):.3f} | {low:.3f} to {high:.3f} | "
            f"{self.p99_on_ms:.1f} : {self.p99_off_ms:.1f} | {self.p99_on_ms / self.p99_off_ms:.2f} | "
            f"{self.seconds_learning:.1f} | {self.num_updates} | {self.num_swaps} |"
        )


HEADER = (
    "| at once | tokens/s, learning : not | 95 % | p99 between tokens, ms | ratio | trainer's seconds | updates | swaps |\n"
    "|--|--|--|--|--|--|--|--|"
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
        found.append(_costs(args, load, given, concurrency))
        print(found[-1].row, flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


def _costs(
    args: argparse.Namespace, load: Callable[[], Engine], given: Sequence[Sequence[int]], concurrency: int
) -> Cost:
    services = {}
    for name, learn in (("off", None), ("on", LearnOptions())):
        limits = ServiceOptions(max_num_seqs=concurrency, speculation="on")
        services[name] = Service(load(), limits, learn=learn)
        services[name].start()
    ratios, gaps, beside = list[float](), {"off": list[float](), "on": list[float]()}, 0
    for number in range(args.rounds + 1):
        speeds = {}
        for name in ("off", "on") if number % 2 else ("on", "off"):
            services["on"].tell_learner("resume" if name == "on" else "pause")
            if name == "off" and number:
                beside += not _is_idle(services["on"])
            speeds[name], between = _round(services[name], given, concurrency, args, number)
            if number:  # the first warms up
                gaps[name] += between
        if number:
            ratios.append(speeds["on"] / speeds["off"])
    p99 = {name: 1000 * sorted(values)[int(0.99 * len(values))] for name, values in gaps.items()}
    figures = services["on"].snapshot().learn
    assert figures is not None
    for service in services.values():
        service.close()
    return Cost(
        concurrency, ratios, p99["on"], p99["off"], figures.seconds_learning, figures.seconds_serving,
        figures.num_updates, figures.num_swaps, beside,
    )  # fmt: skip


def _is_idle(service: Service) -> bool:
    """Wait until the trainer process, paused, has ended the update it was making; False where it takes too long."""
    learning: Any = service._learning
    end = monotonic() + WAIT_S
    sleep(0.2)
    while learning._process.has_work and monotonic() < end:
        sleep(0.05)
    return not learning._process.has_work


def _round(
    service: Service, given: Sequence[Sequence[int]], concurrency: int, args: argparse.Namespace, number: int
) -> tuple[float, list[float]]:
    """(tokens/s, seconds between the updates of each request)."""
    gaps, tokens = list[float](), 0
    room, lock = threading.Semaphore(concurrency), threading.Lock()

    def sink(last: list[float]) -> Callable[[Update], None]:
        def take(update: Update) -> None:
            nonlocal tokens
            now = perf_counter()
            if last and update.pieces:
                gaps.append(now - last[0])
            last[:] = [now]
            if update.is_last:
                with lock:
                    tokens += update.completion.num_tokens if update.completion else 0
                room.release()

        return take

    begun = perf_counter()
    for index, ids in enumerate(given):
        room.acquire()
        params = SamplingParams(temperature=args.temperature, max_new_tokens=args.tokens, seed=index)
        service.submit(Submission(f"{number}-{index}", list(ids), params), sink([]))
    for _ in range(concurrency):
        room.acquire()
    return tokens / (perf_counter() - begun), gaps
