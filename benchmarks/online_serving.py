"""What learning costs those who are served: ``python -m benchmarks.online --serving``.

Rounds of the same requests through two services in one process: one without a learner (off), and one with it, the
learner paused or at work (on). Each in turn, in an order that changes: tokens/s and the 99th percentile of the time
between two tokens. Two services of the same model differ by some per cent on their own, by where their memory lies, and
that difference lasts: so what learning costs is on : paused, one service with itself, and paused : off shows the rest.
Before a round without learning the trainer process is paused and waited for, so that its work is on the clock of its own
rounds alone.
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
ARMS = ("on", "paused", "off")


@dataclass(frozen=True)
class Cost:
    """Of one concurrency."""

    concurrency: int
    ratios: list[float]  # tokens/s, learner at work over paused, of each group of rounds
    ratios_paused: list[float]  # learner paused over no learner
    p99_ms: dict[str, float]
    seconds_learning: float
    seconds_serving: float  # of the engine's thread
    num_updates: int
    num_swaps: int
    num_rounds_beside_learning: int  # rounds without learning that the trainer process did not wait for

    @property
    def row(self) -> str:
        """Of the table."""
        parts = []
        for ratios in (self.ratios, self.ratios_paused):
            low, high = interval(ratios)
            parts.append(f"{statistics.mean(ratios):.3f} [{low:.3f}, {high:.3f}]")
        on, paused, off = (self.p99_ms[name] for name in ARMS)
        return (
            f"| {self.concurrency} | {parts[0]} | {parts[1]} | {on:.1f} : {paused:.1f} : {off:.1f} | {on / paused:.2f} | "
            f"{self.seconds_learning:.1f} | {self.num_updates} | {self.num_swaps} |"
        )


HEADER = (
    "| at once | tokens/s, on : paused | paused : off | p99 between tokens, ms, on : paused : off | on : paused | "
    "trainer's seconds | updates | swaps |\n|--|--|--|--|--|--|--|--|"
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
    ratios, paused, beside = list[float](), list[float](), 0
    gaps = {arm: list[float]() for arm in ARMS}
    for number in range(args.rounds + 1):
        speeds = {}
        for place in range(len(ARMS)):
            arm = ARMS[(place + number) % len(ARMS)] if number % 2 else ARMS[(number - place) % len(ARMS)]
            services["on"].tell_learner("resume" if arm == "on" else "pause")
            if arm != "on" and number:
                beside += not _is_idle(services["on"])
            speeds[arm], between = _round(services["off" if arm == "off" else "on"], given, concurrency, args, number)
            if number:  # the first warms up
                gaps[arm] += between
        if number:
            ratios.append(speeds["on"] / speeds["paused"])
            paused.append(speeds["paused"] / speeds["off"])
    p99 = {arm: 1000 * sorted(values)[int(0.99 * len(values))] for arm, values in gaps.items()}
    figures = services["on"].snapshot().learn
    assert figures is not None
    for service in services.values():
        service.close()
    return Cost(
        concurrency, ratios, paused, p99, figures.seconds_learning, figures.seconds_serving,
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
