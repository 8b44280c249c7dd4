"""Costs of real steps: what ``costs.measure`` times, on rows made up for it."""

import itertools
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import ParamSpec, TypeVar

import torch

from foretell.core.measured import TOO_SLOW
from foretell.core.noise import derive_seed
from foretell.core.params import SamplingParams
from foretell.core.platform import processor_seconds
from foretell.costs.files import Timed, discard, identity, keep_begun, load, load_begun, save
from foretell.costs.measure import PLAIN, StepSeconds, grid, measure, measure_texts
from foretell.costs.table import CostTable, TextCosts
from foretell.engine.batch import Batch
from foretell.engine.request.row import Row, Submission
from foretell.engine.request.text import TextStream
from foretell.engine.speculation import Speculation
from foretell.model.target import CausalModel

logger = logging.getLogger(__name__)
CHECK_STEPS = 6  # of each kind, before a table from an earlier start is used; the first does not count
PROMPT_TOKENS = 64  # of each row that steps are measured on
TEXT_TOKENS = 256  # a row is restarted when it reaches this length
LEAST_LONG, MOST_LONG = 512, 2048  # tokens of a long text: between them as many as the target reads ...
LONG_S = 0.5  # ... in so many seconds
KEPT = "what is measured of costs is kept, and the next start goes on there"
_MORE = 448  # tokens that steps of a long text may add, beside those of one step
LAG_SAMPLES = 5  # of each method's ``Bench.lag_seconds``
_Parameters = ParamSpec("_Parameters")
_T = TypeVar("_T")


class InterruptedMeasuringError(Exception):
    """There is other work to do: measuring goes on later, behind what was measured so far."""


@dataclass
class CostJournal:
    """What was timed so far, in order. A measuring that was broken off is begun again from its first line: what the journal
    has is read from it, at no cost, and only what comes behind that is timed. So ``costs.measure`` need not know of it.
    """

    bench: "Bench"
    done: list[Timed] = field(default_factory=list)
    place: int = 0  # in it
    seconds: float = 0.0  # of all up to there; the clock of what is measured
    ran: float = 0.0  # of them, in all threads (``processor_seconds``)
    waited: float = 0.0

    def rewind(self) -> None:
        """Begin again with the first entry."""
        self.place, self.seconds, self.ran, self.waited = 0, 0.0, 0.0, 0.0

    def __call__(self, timed: Callable[_Parameters, _T], *args: _Parameters.args, **options: _Parameters.kwargs) -> _T:
        """The result of a call of the bench. Raises InterruptedMeasuringError, and then has no entry of it."""
        if self.place == len(self.done):
            began, (ran, waited) = perf_counter(), processor_seconds()
            result: object = timed(*args, **options)
            now = processor_seconds()  # a thread that has ended counts no more
            self.done.append((result, perf_counter() - began, max(now[0] - ran, 0.0), max(now[1] - waited, 0.0)))
        found, seconds, ran, waited = self.done[self.place]
        self.place += 1
        self.seconds, self.ran, self.waited = self.seconds + seconds, self.ran + ran, self.waited + waited
        return found  # type: ignore[return-value]


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
        """must_stop: asked before every step and every prompt; where it is true InterruptedMeasuringError is raised, and
        the same call may be made again later: of many rows' prompts those that were read stay so."""
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
        share = 1 / report.num_passes  # of several plain passes in one call
        return StepSeconds(
            share * report.seconds_draft, share * report.seconds_target, share * report.seconds_rest, nodes
        )

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
        opened = self._open_alone(method, self._most(method, length), length, LEAST_LONG)
        self._long[method] = opened, length
        if not opened.num_unread()[0]:
            return 0.0
        self._go_on()
        return max(0.0, opened.step([1]).seconds_draft - opened.step([1]).seconds_draft)

    @torch.inference_mode()
    def lag_seconds(self, method: str) -> float:
        """Seconds per token to open the method's drafter for a row and read its text, without the cost of the guess
        itself, once; 0 for drafters that read no text."""
        batch = self._open_alone(method, PROMPT_TOKENS, None, PROMPT_TOKENS)
        num_unread = batch.num_unread()[0]
        if not num_unread:
            return 0.0
        seconds = []
        for _ in range(3):  # the first call reads all pending tokens
            begun = perf_counter()
            batch.step([1])
            seconds.append(perf_counter() - begun)
        return max(0.0, seconds[0] - min(seconds[1:])) / num_unread

    def _open_alone(self, method: str, most: int, length: int | None, chunk: int) -> Batch:
        """One row, after its first step, which did not guess; of at most ``most`` tokens. Its text is read in chunks."""
        choice = self.choices[method]
        opened = Batch(self.model, max_rows=1, capacity=most + choice.num_nodes + 64)
        opened.arrive(self._row(choice, length))
        while opened.arrivals:
            self._go_on()
            opened.read(chunk, catch_up=False)
        opened.step([0])
        return opened

    def _go_on(self) -> None:
        if self.must_stop():
            raise InterruptedMeasuringError

    def _open(self, method: str, batch: int) -> Batch:
        key = (method, batch)
        opened, choice = self._batches.get(key), self.choices[method]
        longest = min(self.model.spec.max_positions, TEXT_TOKENS) - choice.num_nodes - 1
        if opened is None or max((len(row.known) for row in opened.members), default=0) >= longest:
            if batch not in {size for _, size in self._batches}:
                self._batches.clear()  # sizes are measured one after the other: keep the memory of one only
            capacity = min(self.model.spec.max_positions, TEXT_TOKENS) + choice.num_nodes + 64
            self._batches[key] = opened = Batch(self.model, max_rows=batch, capacity=capacity)
            for _ in range(batch):
                opened.arrive(self._row(choice))
        while opened.arrivals:  # prompt by prompt: all of them may take seconds, in which a request would wait
            self._go_on()
            count, seconds = opened.read(PROMPT_TOKENS, catch_up=True)
            self._seconds_a_token = seconds / max(1, count)
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
    ) -> None:
        """choices: measured at many depths; weightless: methods that look their guesses up, measured at one; longest: of a
        text, in tokens (None: the target's context)."""
        spec = model.spec
        self.longest = min(longest or spec.max_positions, spec.max_positions)
        self.model, self.plain = model, plain
        self._begun: CostJournal | None = None  # of the measuring that was broken off
        self.choices = {
            choice.config.method: replace(choice, config=choice.config.measured(), method=choice.method.measured())
            for choice in (*choices, *weightless)
        }
        self.weightless = frozenset(choice.config.method for choice in weightless)
        self.max_batch, self.time_limit_s = max_batch, time_limit_s
        described = {**spec.described, "max_batch": max_batch, "longest": self.longest}
        self.key = identity(described, {name: choice.config.resolved() for name, choice in self.choices.items()})
        # What was begun is only gone on with in the same order.
        self._key_begun = {"begun": self.key, "order": list(self.choices), "time_limit_s": time_limit_s}

    def table(self) -> CostTable:
        """The table kept at an earlier start, if it is not too old and steps do not take less than it says; else a new
        one."""
        known = self.kept()
        if known is not None:
            wrong = self.contradiction(known)
            if wrong is None:
                logger.debug("costs: as measured at an earlier start")
                return known
            logger.debug("costs: those of an earlier start hold no more: %s", wrong)
        logger.info("costs: measuring what passes take here, up to %.0f s", self.time_limit_s)
        return self.measure()

    def kept(self) -> CostTable | None:
        """The table kept at an earlier start, as it is; None where there is none."""
        return load(self.key)

    def contradiction(self, table: CostTable, *, must_stop: Callable[[], bool] = lambda: False) -> str | None:
        """A part of a step that takes much less now than a table says; None where there is none. A busy machine makes steps
        slower, so that slower ones say nothing. Raises InterruptedMeasuringError."""
        bench = self._bench(must_stop)
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

    def measure(
        self,
        *,
        must_stop: Callable[[], bool] = lambda: False,
        on_part: Callable[[int, CostTable], None] = lambda max_batch, table: None,
        steps_alone: bool = False,
    ) -> CostTable:
        """A new table. Where the machine was busy, steps are timed a second time; what is not steady then is not kept for
        the next start. Raises InterruptedMeasuringError: the next call goes on where this one was broken off, and so does
        the next start after a Ctrl-C, and after ``keep``.

        on_part: told the largest batch that was measured and the table so far, once for each batch. steps_alone: break off
        before what may take a second at a time, which long texts do."""
        journal = self._begun or CostJournal(self._bench(lambda: False), load_begun(self._key_begun))
        self._begun, journal.bench.must_stop = journal, must_stop
        journal.rewind()
        try:
            table = self._measure(journal, on_part, steps_alone=steps_alone)
            if not table.is_steady:
                logger.info("costs: measuring once more: %s", _unsteady(table))
                table = table.least(self._measure(journal, lambda max_batch, table: None, steps_alone=steps_alone))
        except InterruptedMeasuringError:
            raise
        except BaseException as error:  # what is in the middle of a step cannot go on
            if isinstance(error, KeyboardInterrupt) and self.keep():
                error.add_note(KEPT)
            self._begun = None
            raise
        self._begun = None
        discard(self._key_begun)
        if table.is_steady:
            save(table, self.key)
        else:
            logger.warning(
                "costs: %s: the machine is busy. They are measured again when a service is idle, or at the next start; "
                "until then plans may be poor",
                _unsteady(table),
            )
            discard(self.key)
        return table

    def keep(self) -> bool:
        """Keep on the disk what was timed of a measuring that was broken off, but for long texts, whose rows a new process
        does not have; whether there was any, and it could be kept."""
        timed = self._begun.done if self._begun is not None else []
        end = next((place for place, (result, *_) in enumerate(timed) if isinstance(result, int)), len(timed))
        return bool(end) and keep_begun(timed[:end], self._key_begun)

    def _measure(
        self, journal: CostJournal, on_part: Callable[[int, CostTable], None], *, steps_alone: bool = False
    ) -> CostTable:
        bench, (ran, waited) = journal.bench, (journal.ran, journal.waited)
        depths = {name: choice.depth for name, choice in self.choices.items()}
        lags = {
            name: 0.0  # these read texts as they grow
            if name in self.weightless
            else statistics.median([journal(bench.lag_seconds, name) for _ in range(LAG_SAMPLES)])
            for name in depths
        }
        begun = journal.place, journal.seconds, journal.ran, journal.waited
        for max_batch in grid(self.max_batch):  # each goes on behind the ones before
            journal.place, journal.seconds, journal.ran, journal.waited = begun
            table = measure(
                lambda *step: journal(bench.step, *step), depths, max_batch, self.time_limit_s, lag_seconds=lags,
                weightless=self.weightless, clock=lambda: journal.seconds,
            )  # fmt: skip
            is_late = journal.seconds - begun[1] > self.time_limit_s
            on_part(self.max_batch if is_late else max_batch, table)
            if is_late:  # larger batches are estimated
                break
        if steps_alone:
            raise InterruptedMeasuringError
        texts, length = self._texts(journal, lags)
        # Where threads waited for processors that others used, even the fastest steps may have: equal ones look steady.
        busy = 1.0 + (journal.waited - waited) / max(journal.ran - ran, 1e-9)
        return replace(table, texts=texts, length=length, spread=max(table.spread, busy))

    def _texts(self, journal: CostJournal, lags: Mapping[str, float]) -> tuple[dict[str, TextCosts], float]:
        """What long texts add, and the length of short ones: by methods with weights, or else by one that looks up."""
        bench = journal.bench
        long = journal(bench.long_text, self.longest)
        # One that looks up is among them: how wide a pass is matters more the longer the text, and it has the widest.
        names = [name for name in self.choices if name not in self.weightless]
        names += [name for name in self.choices if name in self.weightless][:1]
        if not long or not names:
            return {}, 0.0
        rest = {name: journal(bench.open_long, name, long) - lags[name] * long for name in names}
        found = measure_texts(
            lambda *step: journal(bench.step_of_text, *step), {name: self.choices[name].depth for name in names},
            (PROMPT_TOKENS, long), clock=lambda: journal.seconds,
        )  # fmt: skip
        # A token that is read looks at a text as a guess does. What else the first long text takes (memory that is new,
        # weights that are not in the cache) comes once, and is not to be believed to grow with the square of the length.
        known = {
            name: text._replace(read=min(max(rest.get(name, 0.0), 0.0) / (long * long / 2), text.each or text.once))
            for name, text in found.items()
        }
        return {name: text for name, text in known.items() if name not in self.weightless}, float(PROMPT_TOKENS)

    def _bench(self, must_stop: Callable[[], bool]) -> Bench:
        return Bench(self.model, self.plain, list(self.choices.values()), must_stop=must_stop)


def _unsteady(table: CostTable) -> str:
    worst = max(table.spread, table.disorder)
    return f"steps took up to {worst:.1f} times as long as equal ones, as larger ones or as their work"
