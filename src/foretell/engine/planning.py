"""The planners of an engine's own calls and of a service: how deep each row guesses before every step, or not at all."""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic, perf_counter

from foretell.costs.measure import grid
from foretell.costs.table import CostTable
from foretell.draft.none import NoMethod, NoneConfig
from foretell.engine.calibrate import KEPT, Calibration, InterruptedMeasuringError
from foretell.engine.config import speculative_config
from foretell.engine.speculation import Speculation
from foretell.engine.threads import Allowance, release_workers
from foretell.model.target import CausalModel
from foretell.planner.acceptance import Acceptance
from foretell.planner.budget import BUDGET, PROMISE
from foretell.planner.planner import Planner

logger = logging.getLogger(__name__)
MIN_DEPTH = 16  # least number of depths the planner models, for requests with longer drafts than the first ones
COST_TIME_LIMIT_S = 20.0
MEASURE_AGAIN_S = 600.0  # between two measurements of costs by one service
BROKEN_OFF_S = 60.0  # the same after one that a request has broken off, so that not every request waits for a step
SLICE_S = 0.1  # seconds of measuring between two steps of requests, saved up for
UNKNOWN_GUESS_S = 1e3  # of guesses while costs are not known: such a table is not planned by
TOLD_RATE = 0.9  # of a caller's own prediction: tokens that are kept, before anything is known of its kind


class Planning:
    """The planner of an engine's own calls, and what it knows: made anew when a request brings a method or a batch that was
    not measured yet."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._plain = Speculation(NoneConfig(), NoMethod(), NoneConfig().load_verifier(model))
        self._choices: dict[str, Speculation] = {}
        self._max_batch = 0
        self._planner: Planner | None = None
        self._hopeless: set[str] = set()

    def planner(self, choices: Sequence[Speculation], num_rows: int) -> Planner | None:
        """The planner for these choices, with costs measured (seconds, remembered on disk); None where none guesses."""
        guessing: Mapping[str, Speculation] = {one.config.method: one for one in choices if one.config.guesses}
        if not guessing:
            return None
        if self._planner is None or num_rows > self._max_batch or not guessing.keys() <= self._choices.keys():
            self._choices = {**self._choices, **guessing}
            self._max_batch = max(num_rows, self._max_batch)
            known = list(self._choices.values())
            costs = Calibration(
                self._model, self._plain, known, light_choices(known), max_batch=self._max_batch,
                time_limit_s=COST_TIME_LIMIT_S,
            ).table()  # fmt: skip
            parts = light_parts(known)
            longest = self._model.spec.max_positions
            self._hopeless = {
                name for name in self._choices if cannot_pay(costs, name, parts, self._max_batch, longest)
            }
            self._planner = plan_with(costs, acceptance_of(known), parts)
        return self._planner

    def used(self, choice: Speculation) -> Speculation:
        """The choice itself, or plain decoding for a method that cannot win here at any acceptance."""
        return self._plain if choice.config.method in self._hopeless else choice


class ServicePlanning:
    """The planner of a service, and the costs it plans by: those kept at an earlier start, else measured beside the service
    from the smallest batch on, and again while nothing is to be done where live steps contradict them.

    Until a batch was measured nobody guesses in its steps (``unplanned``), but those that ask to guess always.
    Measuring takes place while nothing is to be done, broken off where a request comes; and between steps of requests, in
    slices that take ``PROMISE`` of the time at most, beside a learner's share.
    """

    def __init__(
        self,
        model: CausalModel,
        plain: Speculation,
        guessing: Sequence[Speculation],
        weightless: Sequence[Speculation],
        *,
        measured: Callable[[Speculation], Speculation],
        mode: str,
        max_rows: int,
        time_limit_s: float,
        longest: int | None = None,
        has_learner: bool = False,
    ) -> None:
        """guessing: methods that were loaded. weightless: those without, which a request may name. longest: of a
        text, in tokens (None: the context). mode: of ``ServiceOptions.speculation``; costs are measured in mode "auto"
        only, of what ``measured`` makes of each. has_learner: whether a learner has its share of the time."""
        self.hopeless: dict[str, str] = {}  # methods too slow here at any acceptance, never tried; and why
        self._max_rows = max_rows
        self._calibration: Calibration | None = None
        self._next_measuring = 0.0  # by the monotonic clock: not before
        self._known_rows = sys.maxsize  # of the largest batch whose costs are known
        self._allowance = Allowance(BUDGET if has_learner else PROMISE)  # of trials, which there are none of meanwhile
        self._is_checked = False  # whether the table in use was compared with steps, or made here
        known = [*guessing, *weightless]
        told = {one.method.name: TOLD_RATE for one in known if one.method.capabilities.needs_prediction}
        acceptance = acceptance_of(known, told)
        if mode != "auto" or model.is_shared:
            mode = "off" if mode == "auto" else mode
            self.planner: Planner = Planner(CostTable({(1, 1): 1.0}, {}), acceptance, mode=mode)
            return
        self._calibration = Calibration(
            model, plain, list(map(measured, guessing)), list(map(measured, (*weightless, *light_choices(known)))),
            max_batch=max_rows, time_limit_s=time_limit_s, longest=longest,
        )  # fmt: skip
        self._parts = light_parts(known)
        costs = self._calibration.kept()
        if costs is not None:
            self.planner = plan_with(costs, acceptance, self._parts)
            self._judge(costs)
            return
        guesses = {name: {(1, 1): UNKNOWN_GUESS_S} for name in self._calibration.choices}
        self.planner = plan_with(CostTable({(1, 1): 1.0}, guesses), acceptance, self._parts)
        self._known_rows, self._is_checked = 0, True
        logger.info(
            "costs: what passes take here is measured while nothing is to be done, and in %.3g %% of the time while "
            "requests are decoded; until it is known they are decoded plainly, but those that ask to guess always",
            self._allowance.share * 100,
        )

    def unplanned(self, num_rows: int) -> str:
        """Why steps with this number of rows are not planned yet, in words for a client; "": they are."""
        if num_rows <= self._known_rows:
            return ""
        together = f" for {num_rows} requests together" if self._known_rows else ""
        return f"what passes take here{together} is still being measured, and requests are decoded plainly meanwhile"

    @property
    def is_measured(self) -> bool:
        """Whether costs are known for all batches."""
        return self._known_rows == sys.maxsize

    def keep(self) -> None:
        """Keep what was measured of costs that are not known yet, for the next start."""
        if self._calibration is not None and self._calibration.keep():
            logger.info("costs: %s", KEPT)

    def measure_now(self) -> None:
        """Measure costs that are not known, however long it takes: for who wants every request planned."""
        if not self.is_measured:
            self._measure(must_stop=lambda: False)

    def measure_again(self, *, must_stop: Callable[[], bool]) -> None:
        """To be called while nothing is to be done. Measures costs that are not known yet. Replaces a cost table that live
        steps contradict, that a few steps contradict though it was kept at an earlier start, or that was measured on a busy
        machine; at most every ``MEASURE_AGAIN_S``. Broken off where must_stop() is true: costs that are known are then not
        measured for ``BROKEN_OFF_S``. What was measured until then is not lost."""
        if self._calibration is None or monotonic() < self._next_measuring:
            return
        if not self.is_measured:
            self._measure(must_stop=must_stop)
            return
        reason = self.planner.contradiction
        if not (reason or self._is_checked):
            try:
                reason = self._calibration.contradiction(self.planner.costs, must_stop=must_stop)
            except InterruptedMeasuringError:
                return
            self._is_checked = True
        if not reason and self.planner.costs.is_steady:
            return
        logger.info(
            "costs: measuring again while nothing is to be done: %s",
            reason or "the machine was busy when it was measured",
        )
        # A busy machine makes steps slower, never faster: of both measurements the lesser figures are nearer the truth.
        self._measure(must_stop=must_stop, beside=None if reason else self.planner.costs)

    def measure_beside(self, seconds: float) -> None:
        """To be called between two steps of requests, with the seconds that the last one took: a slice of measuring, where
        costs are not known yet and the time that may be taken for it covers one."""
        if self._calibration is None or self._known_rows >= self._max_rows:
            return
        self._allowance.earn(seconds)
        if monotonic() < self._next_measuring or not self._allowance.covers(SLICE_S):
            return
        began = perf_counter()
        self._measure(must_stop=lambda: perf_counter() - began > SLICE_S, steps_alone=True)
        self._allowance.charge(perf_counter() - began)

    def _measure(
        self, *, must_stop: Callable[[], bool], beside: CostTable | None = None, steps_alone: bool = False
    ) -> None:
        """beside: an earlier table, of which the lesser figures are kept. steps_alone: see ``Calibration.measure``."""
        assert self._calibration is not None
        was_known = self.is_measured
        try:
            costs = self._calibration.measure(must_stop=must_stop, on_part=self._use_part, steps_alone=steps_alone)
        except InterruptedMeasuringError:
            if was_known:
                self._next_measuring = monotonic() + BROKEN_OFF_S
            return
        except Exception:  # the table in use is worth more than none
            logger.exception("costs: measuring has failed; what is known so far stays in use")
            self._next_measuring = monotonic() + MEASURE_AGAIN_S
            return
        finally:
            if not steps_alone:
                release_workers()
        self._next_measuring = monotonic() + MEASURE_AGAIN_S
        self._known_rows, self._is_checked = sys.maxsize, True
        costs = costs if beside is None else beside.least(costs)
        self.planner.use(costs)
        self._judge(costs)

    def _use_part(self, max_batch: int, costs: CostTable) -> None:
        """Plan by what is known so far, for batches of up to ``max_batch`` rows."""
        if max_batch > self._known_rows:
            self._known_rows = max_batch
            self.planner.use(costs)

    def _judge(self, costs: CostTable) -> None:
        """Tell the log what the costs permit, and leave out methods that cannot pay."""
        for name in costs.methods:
            logger.info("costs of %s", costs.verdict(name))
        assert self._calibration is not None
        self.hopeless = {
            name: costs.verdict(name)
            for name in costs.methods
            if cannot_pay(costs, name, self._parts, self._max_rows, self._calibration.longest)
        }


def light_choice(choice: Speculation) -> Speculation | None:
    """The light part of a method that declares one (``Method.light``): with the options that its configuration names
    (``MethodConfig.light``), else with that method's own. None for others."""
    method = choice.method.light
    if method is None:
        return None
    config = choice.config.light
    if config is None:
        config = speculative_config({
            "method": method.name, "verify": choice.config.verify,
            "num_speculative_tokens": choice.config.num_speculative_tokens,
        })  # fmt: skip
    return Speculation(config, method, choice.verifier)


def light_parts(choices: Iterable[Speculation]) -> dict[str, str]:
    """Of each method that has one, the name of its light part."""
    pairs = [(one.config.method, light_choice(one)) for one in choices]
    return {method: part.config.method for method, part in pairs if part is not None}


def light_choices(choices: Sequence[Speculation]) -> list[Speculation]:
    """The light parts that are not among these choices themselves, once each."""
    found = {one.config.method for one in choices}
    parts = [part for one in choices if (part := light_choice(one)) is not None]
    return list({part.config.method: part for part in reversed(parts) if part.config.method not in found}.values())


def acceptance_of(choices: Sequence[Speculation], priors: Mapping[str, float] | None = None) -> Acceptance:
    """What a planner of these knows at the start."""
    every = [*choices, *light_choices(choices)]
    weighed = {one.config.method for one in every if one.method.capabilities.weighs or one.config.weighs}
    return Acceptance(max([MIN_DEPTH, *(choice.depth for choice in choices)]), priors, weighed)


def plan_with(costs: CostTable, acceptance: Acceptance, parts: Mapping[str, str]) -> Planner:
    """The planner for mode "auto". parts: see ``Planner``."""
    return Planner(costs, acceptance, {one: part for one, part in parts.items() if {one, part} <= set(costs.methods)})


def cannot_pay(costs: CostTable, method: str, parts: Mapping[str, str], max_rows: int, longest: int = 0) -> bool:
    """Whether a method and its light part are slower than plain decoding at every batch, with the shortest texts and the
    longest, even if all guesses are kept."""
    cells = [(batch, length) for batch in grid(max_rows) for length in (0, longest)]
    names = {method, parts.get(method, method)}
    return all(costs.best_case(name, batch, length=length) <= 1.0 for name in names for batch, length in cells)
