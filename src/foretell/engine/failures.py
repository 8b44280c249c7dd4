"""What stands around the target's passes may fail, and decoding goes on without it: how often each part has, and which
parts rest because they failed several times in a row.

A drafter that fails costs its requests their guesses (``guarded``). Were its method tried again for every request, each
would pay for opening a drafter, reading its prompt and failing; so after ``MOST_IN_A_ROW`` failures nobody opens one for
``FIRST_REST_S``, and for twice as long after each further failure that no request without one has interrupted. So it is
with the planner, of which each step would pay. Other parts (``run``) are tried each time.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from foretell.core.errors import DrafterError, ForetellError, ModelError
from foretell.engine.config import METHODS
from foretell.planner.observations import RowView, StepObservation
from foretell.planner.plan import StepPlan
from foretell.planner.planner import Planner

logger = logging.getLogger(__name__)
MOST_IN_A_ROW = 3
FIRST_REST_S = 10.0
LONGEST_REST_S = 640.0
PLANNER = "the planner"
"""Named as a method is; no method's name has a space."""
PASSES = ("step", "prompt", "score", "admission", "leaving")
"""What is done with rows of the pool: where one of these fails the pool is made anew."""
PLACES = (
    "planner", *PASSES, "recorder", "observer", "sink", "output", "learner", "prefixes", "keeper", "rest", "figures",
)  # fmt: skip
"""Where errors are counted, beside drafters."""
_T = TypeVar("_T")


@dataclass
class _Part:
    """The failures of one method's drafters, or of the planner."""

    total: int = 0
    in_a_row: int = 0  # since a request of it ended well; those of drafters that fail during a rest do not count
    rest_s: float = 0.0  # the last rest's length
    until: float = -float("inf")  # its end, by the clock
    error: str = ""  # the name of the last one


class Failures:
    """See the module's docstring. The engine's thread tells; any thread may ask."""

    def __init__(self, methods: Iterable[str] = (), *, clock: Callable[[], float] = monotonic) -> None:
        """methods: those that are reported before any failure, too."""
        self._parts = {name: _Part() for name in (*methods, PLANNER)}
        self._places = Counter(dict.fromkeys(PLACES, 0))
        self._told: set[tuple[str, type[Exception]]] = set()  # of the other places: what the log has
        self._clock = clock

    def failed(self, name: str, error: Exception) -> None:
        """A drafter of a method has failed, or ``PLANNER``. To be called where the error is handled: it goes to the log."""
        mine = self._parts.setdefault(name, _Part())
        mine.total += 1
        mine.error = type(error).__name__
        if self._left(mine):  # opened before the rest
            return
        mine.in_a_row += 1
        if name != PLANNER or (name, type(error)) not in self._told:  # which may fail at any step
            logger.warning(
                "%s failed (%s); its requests go on without guesses", _part(name), mine.error,
                exc_info=error if mine.in_a_row == 1 or name == PLANNER else None,
            )  # fmt: skip
        self._told.add((name, type(error)))
        if mine.in_a_row >= MOST_IN_A_ROW:
            mine.rest_s = min(2 * mine.rest_s, LONGEST_REST_S) if mine.rest_s else FIRST_REST_S
            mine.until = self._clock() + mine.rest_s
            logger.error(
                "%s rests for %.0f s after %d failures in a row, the last of them %s",
                _part(name), mine.rest_s, mine.in_a_row, mine.error,
            )  # fmt: skip

    def worked(self, name: str) -> None:
        """A request that was guessed for has ended, and its drafter has not failed; or the planner has learned from a step
        that it planned."""
        mine = self._parts.get(name)
        if mine is None or not mine.in_a_row or self._left(mine):
            return
        if mine.rest_s:
            logger.info("%s works again after %d failures in a row", _part(name), mine.in_a_row)
        mine.in_a_row, mine.rest_s = 0, 0.0

    def why_rests(self, name: str) -> str:
        """Why no drafter of a method is opened now, or nothing is planned; "" where it does not rest."""
        mine = self._parts.get(name)
        if mine is None or not self._left(mine):
            return ""
        return f"{name} rests after {mine.in_a_row} failures in a row ({mine.error})"

    def run(self, place: str, instead: _T, call: Callable[..., _T], *args: object) -> _T:
        """The result of a call that decoding does not depend on; ``instead`` where it fails."""
        try:
            return call(*args)
        except Exception as error:
            self.fault(place, error)
            return instead

    def fault(self, place: str, error: Exception, about: str = "decoding goes on") -> None:
        """An error at one of ``PLACES``. The log has the first of each kind with its traceback, and of passes all."""
        self._places[place] += 1
        kind = place, type(error)
        if kind not in self._told or place in PASSES:
            logger.error("internal error (%s): %s; %s", place, type(error).__name__, about, exc_info=error)
        self._told.add(kind)

    def by_place(self) -> dict[str, int]:
        """Errors so far, by place; those of drafters are ``totals``."""
        return {**self._places, PLACES[0]: self._parts[PLANNER].total}

    def totals(self) -> dict[str, int]:
        """Failures so far, by method."""
        return {name: mine.total for name, mine in list(self._parts.items()) if name != PLANNER}

    def rests(self) -> dict[str, float]:
        """Seconds for which each method still rests; 0 where it does not."""
        return {name: self._left(mine) for name, mine in list(self._parts.items()) if name != PLANNER}

    def _left(self, mine: _Part) -> float:
        return max(0.0, mine.until - self._clock())


def _part(name: str) -> str:
    return name if name == PLANNER else f"the drafter of method {name}"


class RaisedFailures(Failures):
    """For those who measure or check: a failure ends the call. Plain decoding must not pass for what they ask for."""

    def failed(self, name: str, error: Exception) -> None:
        """Raise DrafterError; an error that the caller can mend as it is."""
        if name == PLANNER or (isinstance(error, ForetellError) and not isinstance(error, ModelError)):
            raise error
        raise DrafterError(
            f"the drafter of {METHODS.called(name)} failed ({type(error).__name__}: {error}): choose another method, or "
            "drafter_errors = 'plain' to go on without guesses"
        ) from error

    def fault(self, place: str, error: Exception, about: str = "") -> None:
        """Raise it."""
        raise error


class GuardedPlanner:
    """Asks a planner while it works; a plan for other members than the step's is a failure of it. Where it has failed,
    nobody guesses in the next step, and after several failures in a row nobody does for a while (``Failures``)."""

    def __init__(
        self, inner: Planner, failures: Failures, unplanned: Callable[[int], str] = lambda num_rows: ""
    ) -> None:
        """unplanned: why a step with that number of rows cannot be planned yet, in words; "": it can. Meanwhile the planner
        is not asked, and only those rows guess that ask to guess always."""
        self.inner, self._failures, self._unplanned = inner, failures, unplanned
        self._held_back = ""  # why the last step was not planned
        self._members: tuple[str, ...] | None = None  # of the last plan; None: it was not the planner's
        self._has_failed = False

    def will_guess(self, rows: Sequence[RowView]) -> bool:
        """See ``Planner``."""
        if self._unplanned(len(rows)):
            return bool(rows) and all(row.always for row in rows)
        return self._ask(False, self.inner.will_guess, rows)

    def plan(self, rows: Sequence[RowView], arriving: int = 0) -> StepPlan:
        """See ``Planner``; no guesses where it fails."""
        members, self._held_back = tuple(row.request_id for row in rows), self._unplanned(len(rows))
        if self._held_back:
            self._members = None
            caps = [max(min(row.max_depth, row.depth_limit), 0) if row.always else 0 for row in rows]
            return StepPlan(caps, members=members)
        plan = self._checked(self._ask(None, self.inner.plan, rows, arriving), members)
        self._members = None if plan is None else members
        return plan or StepPlan([0] * len(members), members=members)

    def again(self, depth_limit: int, *, lagging: bool) -> StepPlan | None:
        """See ``Planner``."""
        if self._members is None:
            return None
        return self._checked(self._ask(None, self.inner.again, depth_limit, lagging=lagging), self._members)

    @property
    def is_held_back(self) -> bool:
        """Whether the last plan was not the planner's, as costs are not known yet."""
        return bool(self._held_back)

    def asks_expected(self, batch: int, length: float) -> bool:
        """See ``Planner``; also where costs are not known."""
        if self._held_back:
            return self.inner.expected.can_pay(batch, length, None)
        return self._members is not None and self._ask(False, self.inner.asks_expected, batch, length)

    def with_expected(self, plan: StepPlan, rows: Sequence[RowView]) -> StepPlan:
        """See ``Planner``; also where costs are not known."""
        if self._held_back:
            return self.inner.expected.unplanned(plan, rows)
        return plan if self._members is None else self._ask(plan, self.inner.with_expected, plan, rows)

    def observe(self, plan: StepPlan, step: StepObservation) -> None:
        """See ``Planner``; only of steps that it has planned."""
        if self._members is None:
            if plan.expected:
                self.inner.expected.learn(plan.expected, step.rows)
            return
        self._ask(None, self.inner.observe, plan, step)
        if self._has_failed and self._members is not None:
            self._has_failed = False
            self._failures.worked(PLANNER)

    def observe_reading(self, seconds: float) -> None:
        """See ``Planner``."""
        self._ask(None, self.inner.observe_reading, seconds)

    def forget(self, request_id: str) -> None:
        """See ``Planner``; also while it rests."""
        if self._members is not None and request_id in self._members:
            self._members = None
        try:
            self.inner.forget(request_id)
        except Exception as error:
            self._fail(error)

    def why_not(self, method: str) -> str:
        """See ``Planner``."""
        known = self._failures.why_rests(PLANNER) or self._held_back
        return known or self._ask("its planner failed", self.inner.why_not, method)

    def _ask(self, instead: _T, call: Callable[..., _T], *args: object, **options: object) -> _T:
        if self._has_failed and self._failures.why_rests(PLANNER):
            return instead
        try:
            return call(*args, **options)
        except Exception as error:
            self._fail(error)
            return instead

    def _checked(self, plan: StepPlan | None, members: tuple[str, ...]) -> StepPlan | None:
        if plan is None or plan.fits(members):
            return plan
        self._fail(RuntimeError(f"a plan of {plan.caps} for {plan.members} was made for {members}"))
        return None

    def _fail(self, error: Exception) -> None:
        self._has_failed, self._members = True, None
        self._failures.failed(PLANNER, error)
