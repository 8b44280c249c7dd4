"""The planners of an engine's own calls and of a service: how deep each row guesses before every step, or not at all."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic

from foretell.costs.measure import grid
from foretell.costs.table import CostTable
from foretell.draft.none import NoMethod, NoneConfig
from foretell.engine.calibrate import Calibration, InterruptedMeasuringError
from foretell.engine.config import speculative_config
from foretell.engine.speculation import Speculation
from foretell.model.target import CausalModel
from foretell.model.workers import release_workers
from foretell.planner.acceptance import Acceptance
from foretell.planner.planner import Planner

logger = logging.getLogger(__name__)
MIN_DEPTH = 16  # least number of depths the planner models, for requests with longer drafts than the first ones
COST_TIME_LIMIT_S = 20.0
MEASURE_AGAIN_S = 600.0  # between two measurements of costs by one service
BROKEN_OFF_S = 60.0  # the same after one that a request has broken off, so that not every request waits for a step
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
    """The planner of a service, and the costs it plans by: measured before the first request, and again while nothing is
    to be done where live steps contradict them."""

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
        must_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """guessing: methods that were loaded. weightless: those without, which a request may name. longest: of a
        text, in tokens (None: the context). mode: of ``ServiceOptions.speculation``; costs are measured in mode "auto"
        only, of what ``measured`` makes of each. Raises InterruptedMeasuringError where must_stop() is true meanwhile."""
        self.hopeless: dict[str, str] = {}  # methods too slow here at any acceptance, never tried; and why
        self._max_rows = max_rows
        self._calibration: Calibration | None = None
        self._next_measuring = 0.0  # by the monotonic clock: not before
        known = [*guessing, *weightless]
        told = {one.method.name: TOLD_RATE for one in known if one.method.capabilities.needs_prediction}
        acceptance = acceptance_of(known, told)
        if mode != "auto" or model.is_shared:
            mode = "off" if mode == "auto" else mode
            self.planner: Planner = Planner(CostTable({(1, 1): 1.0}, {}), acceptance, mode=mode)
            return
        self._calibration = Calibration(
            model, plain, list(map(measured, guessing)), list(map(measured, (*weightless, *light_choices(known)))),
            max_batch=max_rows, time_limit_s=time_limit_s, longest=longest, must_stop=must_stop,
        )  # fmt: skip
        self._parts = light_parts(known)
        self.planner = plan_with(self._calibration.table(), acceptance, self._parts)
        self._judge(self.planner.costs)

    def measure_again(self, *, must_stop: Callable[[], bool]) -> None:
        """Replace a cost table that live steps contradict, or that was measured on a busy machine; at most every
        ``MEASURE_AGAIN_S``, broken off where must_stop() is true and then not tried for ``BROKEN_OFF_S``."""
        if self._calibration is None or monotonic() < self._next_measuring:
            return
        steady = self.planner.costs.is_steady
        reason = self.planner.contradiction or ("" if steady else "the machine was busy when it was measured")
        if not reason:
            return
        logger.info("costs: measuring again while nothing is to be done: %s", reason)
        try:
            costs = self._calibration.measure(must_stop=must_stop)
        except InterruptedMeasuringError:
            self._next_measuring = monotonic() + BROKEN_OFF_S
            return
        except Exception:  # the table in use is worth more than none
            logger.exception("costs: measuring again has failed; the costs known so far stay in use")
            self._next_measuring = monotonic() + MEASURE_AGAIN_S
            return
        finally:
            release_workers()
        self._next_measuring = monotonic() + MEASURE_AGAIN_S
        self.planner.use(costs)
        self._judge(costs)

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


def depth_of(choices: Iterable[Speculation]) -> int:
    """The depths that a planner of these models."""
    return max([MIN_DEPTH, *(choice.depth for choice in choices)])


def acceptance_of(choices: Sequence[Speculation], priors: Mapping[str, float] | None = None) -> Acceptance:
    """What a planner of these knows at the start."""
    every = [*choices, *light_choices(choices)]
    weighed = {one.config.method for one in every if one.method.capabilities.weighs or one.config.weighs}
    return Acceptance(depth_of(choices), priors, weighed)


def plan_with(costs: CostTable, acceptance: Acceptance, parts: Mapping[str, str]) -> Planner:
    """The planner for mode "auto". parts: see ``Planner``."""
    return Planner(costs, acceptance, {one: part for one, part in parts.items() if {one, part} <= set(costs.methods)})


def cannot_pay(costs: CostTable, method: str, parts: Mapping[str, str], max_rows: int, longest: int = 0) -> bool:
    """Whether a method and its light part are slower than plain decoding at every batch, with the shortest texts and the
    longest, even if all guesses are kept."""
    cells = [(batch, length) for batch in grid(max_rows) for length in (0, longest)]
    names = {method, parts.get(method, method)}
    return all(costs.best_case(name, batch, length=length) <= 1.0 for name in names for batch, length in cells)
