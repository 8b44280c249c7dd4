"""A planner whose failure costs guesses, not a step: rows are decoded plainly, and their text stays right."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from foretell.engine.failures import PLANNER, Failures
from foretell.planner.observations import RowView, StepObservation
from foretell.planner.plan import StepPlan
from foretell.planner.planner import Planner

_T = TypeVar("_T")


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
                self.inner.expected.learn(step.rows)
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
