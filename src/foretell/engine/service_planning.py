"""The planner of a service: how deep each row guesses before every step, or not at all."""

import logging
from collections.abc import Callable
from time import monotonic

from foretell.engine.calibrate import Calibration, InterruptedMeasuringError
from foretell.engine.choices import Choices
from foretell.engine.planning import MIN_DEPTH, cannot_pay, light_choices, light_parts, plan_with
from foretell.engine.tenants import Tenants
from foretell.model.target import CausalModel
from foretell.model.workers import release_workers
from foretell.planner.acceptance import Acceptance
from foretell.planner.costs import CostTable
from foretell.planner.planner import Planner

logger = logging.getLogger(__name__)
MEASURE_AGAIN_S = 600.0  # between two measurements of costs by one service
BROKEN_OFF_S = 60.0  # the same after one that a request has broken off, so that not every request waits for a step
TOLD_RATE = 0.9  # of a caller's own prediction: tokens that are kept, before anything is known of its kind


class ServicePlanning:
    """The planner of a service, and the costs it plans by: measured before the first request, and again while nothing is
    to be done where live steps contradict them."""

    def __init__(
        self, model: CausalModel, choices: Choices, tenants: Tenants, *, mode: str, max_rows: int, time_limit_s: float,
        must_stop: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """mode: of ``ServiceOptions.speculation``. Costs are measured in mode "auto" only: those of the methods that were
        loaded, and those of the ones without weights, which a request may name. Raises InterruptedMeasuringError where
        must_stop() is true meanwhile."""
        self.hopeless: dict[str, str] = {}  # methods too slow here at any acceptance, never tried; and why
        self._max_rows = max_rows
        self._calibration: Calibration | None = None
        self._next_measuring = 0.0  # by the monotonic clock: not before
        known = [*choices.guessing, *choices.light]
        told = {one.method.name: TOLD_RATE for one in known if one.method.capabilities.needs_prediction}
        depth = max([MIN_DEPTH, *(choice.depth for choice in known)])
        acceptance = Acceptance(depth, told)
        if mode != "auto" or model.is_shared:
            self.planner = Planner(CostTable({(1, 1): 1.0}, {}), acceptance, mode="off" if mode == "auto" else mode)
            return
        self._calibration = Calibration(
            model,
            choices.plain,
            [tenants.measured(choice) for choice in choices.guessing],
            [tenants.measured(choice) for choice in (*choices.light, *light_choices(known))],
            max_batch=max_rows,
            time_limit_s=time_limit_s,
            must_stop=must_stop,
        )
        self._parts = light_parts(known)
        self.planner = plan_with(self._calibration.table(), acceptance, self._parts, depth)
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
        self.hopeless = {
            name: costs.verdict(name)
            for name in costs.methods
            if all(cannot_pay(costs, one, self._max_rows) for one in (name, self._parts.get(name, name)))
        }
