"""A service in which anything may fail at any call: every request ends, with plain decoding's text or one error of its own.

    python -m tests.stress.faults [--ticks 10000] [--seed 0]

Its turns are made on the caller's thread, so that a seed says what happens.
"""

import argparse
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any
from unittest import mock

import torch

from foretell import Engine, SamplingParams, Service, ServiceOptions, Submission, Update, speculative_config
from foretell.core.errors import EngineError, ModelError
from foretell.core.shelf import Shelf
from foretell.costs.table import CostTable
from foretell.draft.ngram import NgramDrafter
from foretell.draft.shapes import parse_shape
from foretell.draft.suffix import Suffix, SuffixDrafter
from foretell.engine.failures import PASSES, GuardedPlanner
from foretell.engine.prefix import PrefixStore
from foretell.engine.prefix_files import PrefixFiles
from foretell.engine.recorder import Recorder
from foretell.methods.draft_model.drafter import DraftModel, ModelDrafter
from foretell.methods.hybrid.drafter import Hybrid, HybridDrafter
from foretell.model.blocks import BlockCache
from foretell.planner.acceptance import Acceptance
from foretell.planner.planner import Planner
from tests.engine.harness import EOS, ToyTokenizer, restless, table
from tests.engine.integrity import check_loop
from tests.engine.test_traffic import BlockTable

HYBRID = {"method": "hybrid", "second": "draft_model", "second_tokens": 3}
WAYS = (HYBRID, HYBRID, {"method": "ngram"}, {"method": "suffix"}, {"method": "none"})
RATE = 0.02
PASS_RATE = 0.002


class InjectedError(Exception):
    """What is planted. No part of foretell knows it."""


class Learner:
    """Something that learns, as far as a service sees: it fails at times."""

    def __init__(self, spoil: Callable[[], None]) -> None:
        self.swap = self.close = lambda: spoil()
        self.train_idle = lambda: bool(spoil())
        self.assign = lambda choice, submission: (spoil(), (choice, None))[1]
        self.prompt = lambda row, start, taps: spoil()
        self.observe = lambda event: spoil()
        self.figures = lambda: None


@dataclass
class Told:
    """What one request asked and heard."""

    prompt: list[int]
    params: SamplingParams
    has_faulty_processor: bool
    ids: list[int] = field(default_factory=list)
    last: Update | None = None


class Faulty:
    """Requests at random on a service over tables, and errors at random in all that a turn of it calls."""

    def __init__(self, seed: int, directory: str) -> None:
        self.rng = random.Random(seed)
        self.count: Counter[str] = Counter()
        self.armed, self.now = False, 0.0
        self.told: dict[str, Told] = {}
        self.cancelled: set[str] = set()
        target = BlockTable(len(ToyTokenizer().pieces), seed=1, eos_token_ids=(EOS,), num_layers=2, dtype=torch.float64)
        method = Hybrid(Suffix(), DraftModel(table(2, blur=0.3)), shape=parse_shape("chain", 3), discount=0.85)
        engine = Engine(target, ToyTokenizer(), speculative=HYBRID, method=method)
        engine.observers.append(lambda event: self.spoil("observer"))
        self.plain = Engine(target, ToyTokenizer(), speculative="none")
        options = ServiceOptions(
            max_num_seqs=5, max_model_len=120, speculation="on", shared_drafts="all", state_dir=f"{directory}/state",
            prefix_dir=f"{directory}/prefixes", kv_memory_gib=700 * target.new_cache(0, 1).bytes_per_slot / 2**30,
        )  # fmt: skip
        self.service = service = Service(engine, options)
        service._open_learner = lambda: Learner(lambda: self.spoil("learner"))  # type: ignore[assignment, return-value]
        self.stop = Event()
        with mock.patch.object(Service, "_run", autospec=True, side_effect=lambda _: self.stop.wait()):
            service.start()
        service._failures._clock = lambda: self.now
        assert service._loop is not None
        self.loop = service._loop
        names = ("hybrid", "suffix", "ngram")
        draws = {name: {(1, depth): 0.001 for depth in (1, 2, 4)} for name in names}
        costs = CostTable({(1, 1): 1.0, (1, 5): 1.02}, draws, dict.fromkeys(names, 0.0))
        planner = Planner(costs, Acceptance(16), {"hybrid": "suffix"})
        self.loop.planner = GuardedPlanner(planner, service._failures)

    # -- errors ----------------------------------------------------------------------------------------------------

    def spoil(self, place: str, rate: float = RATE) -> None:
        """Raise, at times."""
        if self.armed and self.rng.random() < rate:
            self.count[place] += 1
            raise InjectedError(place)

    def spoilt(self, place: str, original: Callable[..., Any], rate: float, *, before: bool) -> Callable[..., Any]:
        """A call that fails at times, before it is made or after."""

        def call(*args: Any, **options: Any) -> Any:
            if before and self.rng.random() < 0.5:
                self.spoil(place, rate)
            found = original(*args, **options)
            self.spoil(place, rate)
            return found

        return call

    @contextmanager
    def injected(self) -> Iterator[None]:
        """All of them, while this lasts. after: where the books of a test need the call itself."""
        drafters = (NgramDrafter, SuffixDrafter, ModelDrafter, HybridDrafter)
        calls = ("propose", "observe", "observe_all", "join", "keep", "catch_up", "num_unread")
        places: list[tuple[Any, str, float]] = [
            *((Planner, name, RATE) for name in ("plan", "again", "observe", "_learn", "forget", "will_guess")),
            *((Planner, name, RATE / 4) for name in ("plan", "again", "_learn")),
            *((kind, name, RATE / 2) for kind in drafters for name in calls if name in vars(kind)),
            *((PrefixStore, name, RATE) for name in ("find", "add")),
            *((PrefixFiles, name, RATE) for name in ("find", "put")),
            *((Shelf, name, RATE) for name in ("get", "put")),
            (type(self.service.engine.model), "forward", PASS_RATE),
            *((BlockCache, name, PASS_RATE) for name in ("keep", "open_rows", "fit", "restore")),
        ]
        with ExitStack() as stack:
            for kind, name, rate in places:
                made = self.spoilt(f"{kind.__name__}.{name}", getattr(kind, name), rate, before=True)
                stack.enter_context(mock.patch.object(kind, name, made))
            for name in ("add", "finish"):  # counted all the same, or the books would not balance
                made = self.spoilt(f"Recorder.{name}", getattr(Recorder, name), RATE, before=False)
                stack.enter_context(mock.patch.object(Recorder, name, made))
            self.armed = True
            try:
                yield
            finally:
                self.armed = False

    # -- requests --------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """One more request."""
        rng, number = self.rng, len(self.told)
        prompt = [1, 2, 3] * rng.choice((1, 6)) + [rng.randrange(EOS) for _ in range(rng.choice((1, 5, 30)))]
        is_faulty = rng.random() < 0.05
        shared = {"seed": number, "max_new_tokens": rng.choice((1, 8, 20, 45)), "ignore_eos": rng.random() < 0.5}
        shared["temperature"] = rng.choice((0.0, 0.7, 1.0))
        processor = self.processor if is_faulty else restless if rng.random() < 0.1 else None
        params = SamplingParams(**shared, logits_processor=processor)  # type: ignore[arg-type]
        name = f"r{number}"
        self.told[name] = told = Told(prompt, params, is_faulty)
        watch = (lambda event, index: self.spoil("watch")) if rng.random() < 0.05 else None
        submission = Submission(
            name, prompt, params, speculative=speculative_config(rng.choice(WAYS)), watch=watch,
            num_prompt_logprobs=1 if rng.random() < 0.05 else None, always=rng.random() < 0.2,
        )  # fmt: skip
        self.service.submit(submission, lambda update: self.hear(told, update))

    def processor(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """A user's, which changes nothing."""
        self.spoil("processor")
        return logits

    def hear(self, told: Told, update: Update) -> None:
        """A sink, which fails after it has heard."""
        assert told.last is None, "nothing is told after the end"
        told.ids += [piece.token_id for piece in update.pieces]
        if update.is_last:
            told.last = update
        self.spoil("sink")

    # -- turns -----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """One turn of the service, and what clients do before it."""
        rng, service, loop = self.rng, self.service, self.loop
        self.now += 20.0  # rests are short, so that all is tried again
        while len(loop.jobs) < 8 and rng.random() < 0.3:
            self.arrive()
        if loop.jobs and rng.random() < 0.02:
            name = rng.choice(list(loop.jobs))
            self.cancelled.add(name)
            service.cancel(name)
        if rng.random() < 0.01:  # the keeper's thread
            service._failures.run("keeper", None, lambda: service._keeper.write(service._learned()))
        if loop.has_work or service._inbox:
            assert service._turn()
        check_loop(loop)
        service.snapshot()

    def run(self, ticks: int) -> None:
        """So many turns with errors, then without until all have ended."""
        with self.injected():
            for _ in range(ticks):
                self.turn()
        while self.loop.has_work or self.service._inbox:
            assert self.service._turn()
            check_loop(self.loop)

    def check(self) -> Counter[str]:
        """How requests ended, once all have. Raises AssertionError where a text is another, or something is left."""
        ends: Counter[str] = Counter()
        for name, told in self.told.items():
            assert told.last is not None, f"{name} has not ended"
            alone = self.plain.generate(told.prompt, told.params)
            error, done = told.last.error, told.last.completion
            if error is not None:
                is_own = isinstance(error, ModelError) and told.has_faulty_processor
                assert isinstance(error, EngineError) or is_own, (name, error)
                assert alone.token_ids[: len(told.ids)] == told.ids, name
                ends["error"] += 1
                continue
            assert done is not None
            assert done.token_ids == told.ids, name
            if done.finish_reason == "cancelled":
                assert name in self.cancelled
                assert alone.token_ids[: len(told.ids)] == told.ids, name
            else:
                assert (alone.token_ids, alone.text) == (told.ids, done.text), name
            ends[done.finish_reason or ""] += 1
        failed = self.service._failures.by_place()
        injected = sum(count for place, count in self.count.items() if place.startswith("Block"))
        assert sum(failed[place] for place in PASSES) <= injected, "nothing else costs a pass"
        pool = self.loop.batch.pool
        assert pool.num_rows == 0
        assert len(pool._free) == pool.num_blocks
        assert not self.loop.jobs
        assert not self.service._known
        assert self.service.state == "ready"
        return ends

    def close(self) -> None:
        """End the service."""
        self.stop.set()
        self.service.close()


@contextmanager
def faulty(seed: int) -> Iterator[Faulty]:
    """One of them, closed at the end, with nothing in the log."""
    logging.disable(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory() as directory:
            made = Faulty(seed, directory)
            try:
                yield made
            finally:
                made.close()
    finally:
        logging.disable(logging.NOTSET)


def main(arguments: list[str] | None = None) -> int:
    """Run, and print what failed and how requests ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ticks", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with faulty(options.seed) as made:
        made.run(options.ticks)
        ends = made.check()
        print(f"{options.ticks} turns, {made.count.total()} errors: {dict(sorted(made.count.items()))}")
        print(f"{len(made.told)} requests ended: {dict(ends)}; {made.service._failures.by_place()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
