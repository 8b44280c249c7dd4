"""Costs of real steps: what ``costs.measure`` times, on rows made up for it."""

import itertools
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import torch

from foretell.core.measured import TOO_SLOW
from foretell.core.noise import derive_seed
from foretell.core.params import SamplingParams
from foretell.costs.files import discard, identity, load, save
from foretell.costs.measure import PLAIN, StepSeconds, measure, measure_texts
from foretell.costs.table import CostTable, TextCosts
from foretell.engine.batch import Batch
from foretell.engine.request.row import Row
from foretell.engine.request.submission import Submission
from foretell.engine.request.text import TextStream
from foretell.engine.speculation import Speculation
from foretell.model.target import CausalModel

logger = logging.getLogger(__name__)
CHECK_STEPS = 6  # of each kind, before a table from an earlier start is used; the first does not count
PROMPT_TOKENS = 64  # of each row that steps are measured on
TEXT_TOKENS = 256  # a row is restarted when it reaches this length
LEAST_LONG, MOST_LONG = 512, 2048  # tokens of a long text: between them as many as the target reads ...
LONG_S = 0.5  # ... in so many seconds
_MORE = 448  # tokens that steps of a long text may add, beside those of one step


class InterruptedMeasuringError(Exception):
    """There is other work to do: what was measured so far is dropped."""


class Bench:
    """Runs single steps of any batch, method and depth. Rows hold random tokens: a step's cost does not depend on them, but
    for mixtures, whose nodes then read experts of their own, as many as a text makes them read, or more. Methods that look
    guesses up are given repetitive text, so that they find some."""

    def __init__(
        self,
        model: CausalModel,
        plain: Speculation,
        choices: Sequence[Speculation],
        *,
        must_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """must_stop: asked before every step and every prompt; where it is true InterruptedMeasuringError is raised."""
        self.model, self.must_stop = model, must_stop
        # A prediction in which every token of an output is found again.
        self.prediction = list(range(model.spec.vocab_size))
        self.choices = {PLAIN: plain, **{choice.config.method: choice for choice in choices}}
        self._batches: dict[tuple[str, int], Batch] = {}
        self._long: dict[str, tuple[Batch, int]] = {}  # and the tokens that it began with
        self._seconds_a_token = 0.0  # of reading a prompt
        self._numbers = itertools.count()

    @torch.inference_mode()
    def step(self, method: str, batch: int, depth: int) -> StepSeconds:
        """One step of batch rows that each guess depth deep."""
        self._go_on()
        return self._step(self._open(method, batch), [depth] * batch)

    @torch.inference_mode()
    def step_of_text(self, method: str, depth: int, is_long: bool) -> StepSeconds:
        """One step of one row with a short text, or with one that ``open_long`` opened: anew where it is full."""
        self._go_on()
        if not is_long:
            return self._step(self._open(method, 1), [depth])
        opened, length = self._long[method]
        if len(opened.members[0].known) + self.choices[method].num_nodes >= self._most(method, length):
            self.open_long(method, length)
        return self._step(self._long[method][0], [depth])

    def _most(self, method: str, length: int) -> int:
        """Tokens of a text that began with so many, before it is full."""
        return min(length + self.choices[method].num_nodes + _MORE, self.model.spec.max_positions)

    def _step(self, opened: Batch, caps: list[int]) -> StepSeconds:
        report = opened.step(caps)
        nodes = int((report.commit.tree.parent >= 0).sum()) + len(caps)
        return StepSeconds(report.seconds_draft, report.seconds_target, report.seconds_rest, nodes)

    def long_text(self, longest: int) -> int:
        """Tokens of a long text, where texts have at most ``longest``; 0 where none is long enough to tell. A short one was
        read before."""
        tokens = int(LONG_S / self._seconds_a_token) if self._seconds_a_token else LEAST_LONG
        room = max(choice.num_nodes for choice in self.choices.values()) + 64
        most = min(max(LEAST_LONG, min(tokens, MOST_LONG)), min(longest, self.model.spec.max_positions) - room)
        return most if most >= LEAST_LONG // 2 else 0

    @torch.inference_mode()
    def open_long(self, method: str, length: int) -> float:
        """Open a row with a text of ``length`` tokens; seconds that its drafter took to read it."""
        choice, most = self.choices[method], self._most(method, length)
        opened = Batch(self.model, max_rows=1, capacity=most + choice.num_nodes + 64)
        self._long[method] = opened, length
        opened.arrive(self._row(choice, length))
        while opened.arrivals:
            self._go_on()
            opened.read(LEAST_LONG, catch_up=False)
        opened.step([0])
        if not opened.num_unread()[0]:
            return 0.0
        self._go_on()
        return max(0.0, opened.step([1]).seconds_draft - opened.step([1]).seconds_draft)

    @torch.inference_mode()
    def lag_seconds(self, method: str) -> float:
        """Seconds per token to open the method's drafter for a row and read its text, without the cost of the guess
        itself; 0 for drafters that read no text."""
        choice, found = self.choices[method], []
        for _ in range(5):
            batch = Batch(self.model, max_rows=1, capacity=PROMPT_TOKENS + choice.num_nodes + 64)
            batch.arrive(self._row(choice))
            while batch.arrivals:
                self._go_on()
                batch.read(PROMPT_TOKENS, catch_up=False)
            batch.step([0])
            num_unread = batch.num_unread()[0]
            if not num_unread:
                return 0.0
            seconds = []
            for _ in range(3):  # the first call reads all pending tokens
                begun = perf_counter()
                batch.step([1])
                seconds.append(perf_counter() - begun)
            found.append(max(0.0, seconds[0] - min(seconds[1:])) / num_unread)
        return statistics.median(found)

    def _go_on(self) -> None:
        if self.must_stop():
            raise InterruptedMeasuringError

    def _open(self, method: str, batch: int) -> Batch:
        key = (method, batch)
        opened, choice = self._batches.get(key), self.choices[method]
        longest = min(self.model.spec.max_positions, TEXT_TOKENS) - choice.num_nodes - 1
        if opened is not None and max(len(row.known) for row in opened.members) < longest:
            return opened
        if batch not in {size for _, size in self._batches}:
            self._batches.clear()  # sizes are measured one after the other: keep the memory of one only
        capacity = min(self.model.spec.max_positions, TEXT_TOKENS) + choice.num_nodes + 64
        opened = Batch(self.model, max_rows=batch, capacity=capacity)
        for _ in range(batch):
            opened.arrive(self._row(choice))
        while opened.arrivals:  # prompt by prompt: all of them may take seconds, in which a request would wait
            self._go_on()
            count, seconds = opened.read(PROMPT_TOKENS, catch_up=True)
            self._seconds_a_token = seconds / max(1, count)
        self._batches[key] = opened
        return opened

    def _row(self, choice: Speculation, length: int | None = None) -> Row:
        number = next(self._numbers)
        spec = self.model.spec
        length = max(2, min(PROMPT_TOKENS, spec.max_positions // 4)) if length is None else length
        generator = torch.Generator().manual_seed(number)
        half = torch.randint(0, spec.vocab_size, (length // 2,), generator=generator).tolist()
        params = replace(SamplingParams(seed=number, ignore_eos=True), max_new_tokens=1 << 20)
        room = spec.max_positions - 2 * len(half)
        submission = Submission(str(number), half + half, params, self.prediction)
        return Row(
            number, submission, choice, half + half, params, derive_seed(number), frozenset(), room, TextStream(None),
            self.prediction,
        )  # fmt: skip


class Calibration:
    """The cost table of one machine, model and set of methods: kept on disk, checked, and measured again."""

    def __init__(
        self,
        model: CausalModel,
        plain: Speculation,
        choices: Sequence[Speculation],
        weightless: Sequence[Speculation],
        *,
        max_batch: int,
        time_limit_s: float,
        longest: int | None = None,
        must_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """choices: measured at many depths; weightless: methods that look their guesses up, measured at one; longest: of a
        text, in tokens (None: the target's context); must_stop: see ``Bench``, of ``table``."""
        spec = model.spec
        self.longest = min(longest or spec.max_positions, spec.max_positions)
        self.model, self.plain, self.must_stop = model, plain, must_stop
        self.choices = {
            choice.config.method: replace(choice, config=choice.config.measured(), method=choice.method.measured())
            for choice in (*choices, *weightless)
        }
        self.weightless = frozenset(choice.config.method for choice in weightless)
        self.max_batch, self.time_limit_s = max_batch, time_limit_s
        described = {**spec.described, "max_batch": max_batch, "longest": self.longest}
        self.key = identity(described, {name: choice.config.resolved() for name, choice in self.choices.items()})

    def table(self) -> CostTable:
        """The table kept at an earlier start, if it is not too old and steps do not take less than it says; else a new
        one. Raises InterruptedMeasuringError."""
        known = load(self.key)
        if known is not None:
            wrong = self.contradiction(known)
            if wrong is None:
                logger.debug("costs: as measured at an earlier start")
                return known
            logger.debug("costs: those of an earlier start hold no more: %s", wrong)
        logger.info("costs: measuring what passes take here, up to %.0f s", self.time_limit_s)
        return self.measure(must_stop=self.must_stop)

    def contradiction(self, table: CostTable) -> str | None:
        """A part of a step that takes much less now than a table says; None where there is none. A busy machine makes steps
        slower, so that slower ones say nothing."""
        bench = self._bench(lambda: False)
        for name, depth in ((PLAIN, 0), *((name, max(1, choice.depth)) for name, choice in self.choices.items())):
            found = [bench.step(name, 1, depth) for _ in range(CHECK_STEPS)][1:]
            least = min(one.target + one.rest + (0.0 if depth else one.draft) for one in found)
            rows = statistics.median_low([one.rows or 1 for one in found])
            told = {f"a pass over {rows} tokens": (table.verify(1, rows), least)}
            if depth and name in table.methods:
                told[f"a guess of {name}"] = (table.draft(name, 1, depth), min(one.draft for one in found))
            for what, (said, now) in told.items():
                if said > TOO_SLOW * now + 1e-4:
                    return f"{what} was measured at {said * 1000:.2f} ms and takes {now * 1000:.2f} ms now"
        return None

    def measure(self, *, must_stop: Callable[[], bool] = lambda: False) -> CostTable:
        """A new table. Where the machine was busy, steps are timed a second time; what is not steady then is not kept for
        the next start. Raises InterruptedMeasuringError."""
        table = self._measure(must_stop)
        if not table.is_steady:
            logger.info("costs: measuring once more: %s", _unsteady(table))
            table = table.least(self._measure(must_stop))
        if table.is_steady:
            save(table, self.key)
        else:
            logger.warning(
                "costs: %s: the machine is busy. They are measured again when the service is idle; until then plans may be "
                "poor",
                _unsteady(table),
            )
            discard(self.key)
        return table

    def _measure(self, must_stop: Callable[[], bool]) -> CostTable:
        bench = self._bench(must_stop)
        depths = {name: choice.depth for name, choice in self.choices.items()}
        lags = {name: bench.lag_seconds(name) for name in depths if name not in self.weightless}
        lags |= dict.fromkeys(self.weightless, 0.0)  # these read texts as they grow
        table = measure(
            bench.step, depths, self.max_batch, self.time_limit_s, lag_seconds=lags, weightless=self.weightless
        )
        texts, length = self._texts(bench, lags)
        return replace(table, texts=texts, length=length)

    def _texts(self, bench: Bench, lags: Mapping[str, float]) -> tuple[dict[str, TextCosts], float]:
        """What long texts add, and the length of short ones: by methods with weights, or else by one that looks up."""
        long = bench.long_text(self.longest)
        # One that looks up is among them: how wide a pass is matters more the longer the text, and it has the widest.
        names = [name for name in self.choices if name not in self.weightless]
        names += [name for name in self.choices if name in self.weightless][:1]
        if not long or not names:
            return {}, 0.0
        read = {}
        for name in names:
            rest = bench.open_long(name, long) - lags[name] * long
            read[name] = max(0.0, rest) / (long * long / 2)
        found = measure_texts(
            bench.step_of_text, {name: self.choices[name].depth for name in names}, (PROMPT_TOKENS, long)
        )
        known = {name: text._replace(read=read.get(name, 0.0)) for name, text in found.items()}
        return {name: text for name, text in known.items() if name not in self.weightless}, float(PROMPT_TOKENS)

    def _bench(self, must_stop: Callable[[], bool]) -> Bench:
        return Bench(self.model, self.plain, list(self.choices.values()), must_stop=must_stop)


def _unsteady(table: CostTable) -> str:
    worst = max(table.spread, table.disorder)
    return f"equal steps, or smaller and larger ones, differed by a factor of {worst:.1f}"
