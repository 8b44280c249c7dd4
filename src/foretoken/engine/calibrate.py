"""Costs of real steps: what ``planner.measure`` times, on rows made up for it."""

import itertools
import logging
import statistics
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from foretoken.core.params import SamplingParams
from foretoken.engine.batch import Batch
from foretoken.engine.state import Row
from foretoken.engine.team import Choice
from foretoken.engine.text import TextStream
from foretoken.model.prefill import PREFILL_CHUNK
from foretoken.model.target import CausalModel
from foretoken.noise import derive_seed
from foretoken.planner.costs import CostTable
from foretoken.planner.files import identity, load, save
from foretoken.planner.measure import PLAIN, StepSeconds, measure

logger = logging.getLogger(__name__)
PROMPT_TOKENS = 64  # of each row that steps are measured on
TEXT_TOKENS = 256  # a row is restarted when it reaches this length


class Bench:
    """Runs single steps of any batch, method and depth. Rows hold random tokens: a step's cost does not depend on them.
    Methods that look guesses up are given repetitive text, so that they find some."""

    def __init__(self, model: CausalModel, plain: Choice, choices: Sequence[Choice]) -> None:
        self.model = model
        self.choices = {PLAIN: plain, **{choice.config.method: choice for choice in choices}}
        self._batches: dict[tuple[str, int], Batch] = {}
        self._numbers = itertools.count()

    @torch.inference_mode()
    def step(self, method: str, batch: int, depth: int) -> StepSeconds:
        """One step of batch rows that each guess depth deep."""
        opened = self._open(method, batch)
        report = opened.step([depth] * batch)
        tree = report.commit.tree
        nodes = int((tree.parent >= 0).sum()) + batch
        return StepSeconds(report.seconds_draft, report.seconds_target, report.seconds_rest, nodes)

    @torch.inference_mode()
    def lag_seconds(self, method: str) -> float:
        """Seconds per token to open the method's drafter for a row and read its text, without the cost of the guess
        itself; 0 for drafters that read no text."""
        choice, found = self.choices[method], []
        for _ in range(5):
            batch = Batch(self.model, max_rows=1, capacity=PROMPT_TOKENS + choice.num_nodes + 64)
            batch.arrive(self._row(), choice)
            while batch.arrivals:
                batch.read(PROMPT_TOKENS, warm=False)
            batch.step([0])
            lag = batch.lags()[0]
            if not lag:
                return 0.0
            seconds = []
            for _ in range(3):  # the first call reads all pending tokens
                begun = perf_counter()
                batch.step([1])
                seconds.append(perf_counter() - begun)
            found.append(max(0.0, seconds[0] - min(seconds[1:])) / lag)
        return statistics.median(found)

    def _open(self, method: str, batch: int) -> Batch:
        key = (method, batch)
        opened, choice = self._batches.get(key), self.choices[method]
        longest = min(self.model.spec.max_positions, TEXT_TOKENS) - choice.num_nodes - 1
        if opened is not None and max(len(member.row.known) for member in opened.members) < longest:
            return opened
        if batch not in {size for _, size in self._batches}:
            self._batches.clear()  # sizes are measured one after the other: keep the memory of one only
        capacity = min(self.model.spec.max_positions, TEXT_TOKENS) + choice.num_nodes + 64
        opened = Batch(self.model, max_rows=batch, capacity=capacity)
        for _ in range(batch):
            opened.arrive(self._row(), choice)
        while opened.arrivals:
            opened.read(PREFILL_CHUNK, warm=True)
        self._batches[key] = opened
        return opened

    def _row(self) -> Row:
        number = next(self._numbers)
        spec = self.model.spec
        length = max(2, min(PROMPT_TOKENS, spec.max_positions // 4))
        generator = torch.Generator().manual_seed(number)
        half = torch.randint(0, spec.vocab_size, (length // 2,), generator=generator).tolist()
        params = replace(SamplingParams(seed=number, ignore_eos=True), max_new_tokens=1 << 20)
        room = spec.max_positions - 2 * len(half)
        return Row(number, half + half, params, derive_seed(number), frozenset(), room, TextStream(None))


def measured_costs(
    model: CausalModel, plain: Choice, choices: Sequence[Choice], *, max_batch: int, time_limit_s: float
) -> CostTable:
    """The cost table of this machine, model and methods: read from the cache of an earlier start, or measured now."""
    spec = model.spec
    described: dict[str, Any] = {
        "name": spec.name,
        "architecture": spec.architecture,
        "implementation": spec.implementation,
        "dtype": str(spec.dtype),
        "device": str(spec.device),
        "weight_bytes": spec.weight_bytes,
        "num_layers": spec.num_layers,
        "vocab_size": spec.vocab_size,
    }
    methods = {choice.config.method: choice for choice in choices}
    key = identity(
        {**described, "max_batch": max_batch}, {name: choice.config.resolved() for name, choice in methods.items()}
    )
    known = load(key)
    if known is not None:
        logger.info("costs: as measured at an earlier start")
        return known
    bench = Bench(model, plain, list(methods.values()))
    depths = {name: choice.depth for name, choice in methods.items()}
    lags = {name: bench.lag_seconds(name) for name in methods}
    table = measure(bench.step, depths, max_batch, time_limit_s, lag_seconds=lags)
    save(table, key)
    return table
